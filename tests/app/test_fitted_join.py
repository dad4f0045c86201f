"""A training with scale channels fits their join on validation pictures, and says what that changed."""

import json

import pytest
import torch

from scalesteer.app import evaluate, load, load_model, make_run, train, with_channels
from scalesteer.app import evaluation as measuring
from scalesteer.app.cli import main
from scalesteer.app.evaluation import answer
from scalesteer.app.loop import fits_join
from scalesteer.fitting import calibration_error, fit_join
from scalesteer.joining import Calibration
from tests.app.test_own_images import configure, pictures  # noqa: F401  # a fixture


@pytest.fixture(scope="module")
def trained(pictures, tmp_path_factory):  # noqa: F811
    directory = tmp_path_factory.mktemp("fitted") / "run"
    run = configure(pictures, epochs=4, lr=0.02, test_channels=(0.71, 1.0, 1.41))
    return directory, run, train(run, directory, device="cpu")


def test_the_network_is_tested_and_kept_with_the_join_that_validation_pictures_gave(trained):
    directory, run, result = trained
    found, images = result["join"], load(run, "val")
    model = load_model(directory)
    told = found["calibration"]
    assert model.calibration == (None if told is None else Calibration(**told))
    assert evaluate(model, load(run, "test"))["error"] == result["test_error"]
    assert found["pictures"] == len(images)
    again = with_channels(model, model.scales, model.join)
    assert again.calibration is None  # as `evaluate --join logsumexp` does
    own = fit_join(again, *images.take(slice(None)))
    assert json.loads(json.dumps(told)) == (
        None if own.calibration is None else json.loads(json.dumps(vars(own.calibration)))
    )
    assert found["error"] == list(own.error)
    said = answer(model, load(run, "test"))
    assert result["test_ece"] == pytest.approx(calibration_error(said.confidences, said.labels == said.true))


def test_the_report_says_what_the_fit_changed(trained):
    directory, _, result = trained
    page, found = (directory / "report.html").read_text(encoding="utf-8"), result["join"]
    assert found["about"] in page
    assert "<dt>calibration error</dt>" in page
    for old, new in (found["error"], found["ece"], found["known_error"]):
        assert f"{100 * old:.1f} % to {100 * new:.1f} %" in page
    assert f"the network without scale channels has {100 * found['alone_error']:.1f} % there" in page


def test_it_is_usual_for_own_pictures_with_channels_and_can_be_asked_for_or_left_off(pictures, tmp_path, capsys):  # noqa: F811
    assert fits_join(configure(pictures))
    assert not fits_join(configure(pictures, fit_join="no"))
    built_in = {"model": "pooled-cnn", "channels": (0.7, 1.0)}
    assert not fits_join(make_run(**built_in))
    assert fits_join(make_run(**built_in, fit_join="yes"))
    assert "join" not in train(configure(pictures, fit_join="no", epochs=1), tmp_path / "off", device="cpu")
    assert "join" not in train(configure(pictures, channels=(), epochs=1), tmp_path / "plain", device="cpu")
    # A setting that is not given changes no run's name.
    assert "fit_join" not in configure(pictures).settings
    assert " --fit-join no " in configure(pictures, fit_join="no").command
    with pytest.raises(ValueError, match="`fit_join` must come with `channels` or `test_channels`"):
        configure(pictures, channels=(), fit_join="yes")


def test_of_many_validation_pictures_some_are_taken_evenly(trained, monkeypatch):
    directory, run, _ = trained
    model, images, asked = load_model(directory), load(run, "val"), []
    monkeypatch.setattr(measuring, "fit_join", lambda model, x, labels: asked.append(labels) or "found")
    monkeypatch.setattr(measuring, "MOST_FITTED", 9)
    assert measuring.fit_channels(model, images) == "found"
    rows = torch.tensor([round(i * (len(images) - 1) / 8) for i in range(9)])
    assert torch.equal(asked[0], images.labels[rows])


def test_evaluate_shows_the_calibration_error_and_undoes_the_fit(trained, capsys):
    directory, _, result = trained
    assert main(["evaluate", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert f"calibration error {100 * result['test_ece']:.2f} %" in shown
    assert main(["evaluate", str(directory), "--join", "logsumexp"]) == 0
    undone = capsys.readouterr().out
    assert result["join"]["calibration"] is None or undone != shown
