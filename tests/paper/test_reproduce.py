"""With no results the page has gaps; with results it has their numbers, and nothing else is ever written."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paper import figures, reproduce
from paper.results import Results, collect, publish
from paper.tables import DATASETS, GAP, distorted_after, get_table, tuning_runs
from scalesteer.data import ELASTIC_ALPHAS
from scalesteer.training import SCALE_BINS
from scalesteer.training.config import RunConfig

ROOT = Path(__file__).parents[2]
EMPTY = Results({}, {})
ERRORS = {"spatial-transformer": 0.02, "ss-cnn": 0.018, "vector-field-cnn": 0.023, "plain-cnn": 0.022}


def invented(config, error):
    """A result that nobody measured, for a temporary folder."""
    scales = [{"from": a, "to": b, "images": 9, "error": error * (i + 1)} for i, (a, b) in enumerate(SCALE_BINS)]
    history = [{"loss": 1.0, "val_loss": 0.5, "val_error": error, "seconds": 30.0 * (i + 1)} for i in range(2)]
    return {
        "status": "finished",
        "config": config.to_dict(),
        "val_error": error,
        "val_loss": 0.1,
        "test_error": error,
        "test_error_by_scale": scales,
        "parameters": 1000,
        "seconds": 60.0,
        "history": history,
        "environment": {"device": "a device"},
    }


def first_table(models=ERRORS):
    """Results of Table 1: on MNIST-Scale a tenth of a per cent more a split, on FMNIST-Scale ten times the error."""
    found = {}
    for config in get_table("1").runs:
        if config.model in models:
            factor = 10 if config.dataset == "fmnist-scale" else 1
            found[config] = invented(config, factor * ERRORS[config.model] + 0.001 * config.split)
    return Results(found, {})


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The two documents, and no results."""
    monkeypatch.setattr(reproduce, "UNTRAINED", ())
    for path in (reproduce.README, reproduce.PAGE):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def test_without_results_there_are_gaps_only(checkout):
    assert reproduce.reproduce(checkout, runs=checkout / "runs") == []
    shown = (checkout / "README.md").read_text()
    assert f"| SS-CNN | {GAP} | 1.91 ± 0.04 | {GAP} | 14.24 ± 0.31 |" in shown
    page = (checkout / "docs" / "reproduction.md").read_text()
    assert "Not drawn yet" in page
    for name in ("pairs", "scales", "costs", "claims", "checks", "distorted", "repeats", "effects"):
        (generated,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end -->", page, re.S)
        assert not re.search(r"\d\.\d\d|yes|no\*", generated)


def test_numbers_come_from_the_results(checkout):
    for result in first_table().runs.values():
        publish(result, checkout / "results")
    reproduce.reproduce(checkout, runs=checkout / "runs")
    assert "| SS-CNN | 2.05 ± 0.19 | 1.91 ± 0.04 | 18.25 ± 0.19 |" in (checkout / "README.md").read_text()
    page = (checkout / "docs" / "reproduction.md").read_text()
    assert "| Plain CNN, MNIST-Scale | -0.40 ± 0.00 | **-0.40 to -0.40** | 6 of 6 |" in page
    assert "| SS-CNN | 1,000 | 60 | 1,000 | 60 | 12.0 (12 runs) |" in page
    assert "Time of training on a device." in page
    assert "| SS-CNN | 2.05 | 4.10 | 6.15 | 8.20 | 10.25 | 12.30 | 14.35 |" in page
    assert "- Table 1, SS-CNN: MNIST-Scale **no** (2.05, paper 1.91 ± 0.04); FMNIST-Scale **no**" in page
    assert f"- Table 1, LocScaleInv-CNN: MNIST-Scale {GAP}; FMNIST-Scale {GAP}" in page
    assert f"| SS-CNN has the lowest error on MNIST-Scale | {GAP} |" in page  # one method is missing
    drawn = {path.stem for path in (checkout / "results" / "figures").iterdir()}
    assert drawn == {f"{kind}-{dataset}" for kind in ("validation", "scales") for dataset in DATASETS}
    assert all(f"../results/figures/{name}.png)" in page for name in drawn)
    texts = [(checkout / path).read_text() for path in (reproduce.README, reproduce.PAGE)]
    reproduce.reproduce(checkout, runs=checkout / "runs")  # once more changes nothing
    assert [(checkout / path).read_text() for path in (reproduce.README, reproduce.PAGE)] == texts


def test_claims_compare_complete_rows_only(monkeypatch):
    monkeypatch.setitem(ERRORS, "locally-scale-invariant-cnn", 0.025)
    whole = first_table()
    assert "| SS-CNN has the lowest error on MNIST-Scale | yes |" in reproduce.claims(whole)
    assert "| Spatial Transformer has the lowest error on FMNIST-Scale | **no** |" in reproduce.claims(whole)
    runs = dict(whole.runs)
    del runs[get_table("1").rows["SS-CNN"][0].runs[5]]
    assert f"| SS-CNN has the lowest error on MNIST-Scale | {GAP} |" in reproduce.claims(Results(runs, {}))


def test_par_with_the_transformer_allows_a_tenth_more():
    rows, runs = get_table("2").rows, first_table(["ss-cnn", "spatial-transformer"]).runs
    for ratio, said in ((1.09, "yes"), (1.11, r"\*\*no\*\*")):
        elastic = {}
        for method, error in (("SS-CNN", 0.1 * ratio), ("Spatial Transformer", 0.1)):
            elastic[rows[method][0].runs[0]] = {"errors": dict.fromkeys(("0", "10", "20", "30", "40"), error)}
        assert re.search(rf"\| SS-CNN is on par .* \| {said} \|", reproduce.claims(Results(runs, elastic)))


def test_an_interval_is_students():
    for values, point in reproduce.STUDENT.items():
        degrees = values - 1
        t = np.linspace(-point, point, 100_001)
        scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / math.sqrt(degrees * math.pi)
        inside = np.trapezoid(scale * (1 + t**2 / degrees) ** (-(degrees + 1) / 2), t)
        assert inside == pytest.approx(0.95, abs=1e-4)
    reach = 4.303 * 0.2 / math.sqrt(3)
    shown = f"{0.1 - reach:+.2f} to {0.1 + reach:+.2f}"
    assert reproduce._compared([-0.1, 0.1, 0.3]) == ("+0.10 ± 0.20", shown, "1 of 3")
    reach = 4.303 * 0.01 / math.sqrt(3)
    assert reproduce._compared([0.015, 0.025, 0.035])[1] == f"**{0.025 - reach:+.3f} to {0.025 + reach:+.2f}**"
    assert reproduce._compared([0.2]) == ("+0.20", GAP, "0 of 1")
    assert reproduce._compared([]) == (GAP, GAP, GAP)


def test_the_papers_input_sizes_are_compared_on_the_same_splits():
    rows = get_table("ablations").rows
    errors = {"SS-CNN, 56 px": 0.02, "Spatial Transformer, 28 px": 0.03, "SS-CNN, 28 px": 0.5}
    found = {run: invented(run, error) for row, error in errors.items() for run in rows[row][0].runs}
    del found[rows["Spatial Transformer, 28 px"][0].runs[1]]
    shown = reproduce.sizes(Results(found, {}))
    compared = "-1.00 ± 0.00 | **-1.00 to -1.00** | 2 of 2"
    assert f"| Spatial Transformer, 28 px | 3.00 ± 0.00 (2 of 3) | 1.97 ± 0.09 | {compared} |" in shown
    assert f"| SS-CNN, 56 px | 2.00 ± 0.00 | 1.91 ± 0.04 | {GAP} | {GAP} | {GAP} |" in shown
    assert f"| LocScaleEq-CNN, 28 px | {GAP} | 2.44 ± 0.07 | {GAP} | {GAP} | {GAP} |" in shown


def test_ratios_are_ours_beside_the_papers():
    rows, whole = get_table("2").rows, first_table(["ss-cnn", "spatial-transformer"])
    elastic = {
        rows[method][0].runs[0]: {"errors": {"0": error, "40": 4 * error}}
        for method, error in (("SS-CNN", 0.015), ("Spatial Transformer", 0.02))
    }
    shown = reproduce.ratios(Results(whole.runs, elastic))
    assert (
        f"| SS-CNN / Spatial Transformer | 0.75 | 1.00 | {GAP} | 1.09 | {GAP} | 1.09 | {GAP} | 1.07 | 0.75 | 1.04 |"
        in shown
    )
    assert f"| SS-CNN / LocScaleInv-CNN | {GAP} | 0.58 |" in shown


def distorted_networks(error):
    """Every network of Table 2 with invented errors under distortion: `error(row, split)`, four times that if moved."""
    rows = get_table("2").rows
    return {
        config: {
            "errors": dict.fromkeys(("0", "10", "20", "30", "40"), error(name, config.split)),
            "moved": dict.fromkeys(("0.5", "1"), 4 * error(name, config.split)),
        }
        for name, row in rows.items()
        for config in row[0].runs
    }


def test_distorted_images_are_the_same_for_all():
    rows = get_table("2").rows
    apart = distorted_networks(lambda name, split: 0.02 + 0.01 * split + 0.001 * split * (name == "Plain CNN"))
    for split, name in ((1, "SS-CNN"), (2, "Plain CNN"), (3, "SS-CNN, basis area"), (4, "LocScaleInv-CNN")):
        del apart[rows[name][0].runs[split]]  # in these splits one network is missing
    shown = reproduce.distorted(Results({}, apart))
    assert "| error in %, splits 0, 5 | α = 0 |" in shown
    assert "| SS-CNN | 4.50 ± 3.54 |" in shown
    assert "| 4.50 ± 3.54 | 18.00 ± 14.14 | 18.00 ± 14.14 |\n" in shown  # moved
    assert "| LocScaleInv-CNN | +0.000 to +0.000 |" in shown
    reach = 12.706 * 0.5 / 2  # of 0 and -0.5
    assert f"| Plain CNN | {-0.25 - reach:+.2f} to {-0.25 + reach:+.2f} |" in shown
    assert f"| Plain CNN | {GAP} |" in reproduce.distorted(EMPTY)


def test_ratios_of_means_are_over_the_same_splits():
    twice = distorted_networks(lambda name, split: 0.01 * (1 + split) * (1 + (name == "SS-CNN")))
    runs = get_table("2").rows["Spatial Transformer"][0].runs
    del twice[runs[5]], twice[runs[4]]["moved"]  # as of a version that did not move images
    shown = reproduce.ratios(Results({}, twice))
    for other in ("LocScaleInv-CNN", "Spatial Transformer"):
        assert f"| SS-CNN / {other}, means over splits | 2.00 |" in shown
    assert f"| SS-CNN / Spatial Transformer | {GAP} | 1.00 |" in shown  # no run tells which network is the best


def longer_training(tested, validated):
    """Invented networks after 60, 120 and 300 epochs: test and validation errors by method, one for each; splits differ
    by 0.1 %, and errors grow with the strength."""
    known, elastic = {}, {}
    for i, epochs in enumerate((60, 120, 300)):
        for method in tested:
            for config in distorted_after(epochs)[method][0].runs:
                error = tested[method][i] + 0.001 * config.split
                known[config] = invented(config, error) | {"val_error": validated[method][i]}
                strengths = {f"{alpha:g}": error * (1 + alpha / 10 * (method == "SS-CNN")) for alpha in ELASTIC_ALPHAS}
                elastic[config] = {"errors": strengths, "moved": {"0.5": error, "1": error}}
    return known, elastic


FEWER_OR_MORE = {
    "SS-CNN": (0.02, 0.03, 0.05),
    "Spatial Transformer": (0.01, 0.02, 0.025),
    "LocScaleInv-CNN": (0.04, 0.04, 0.04),
    "Plain CNN": (0.03, 0.05, 0.01),
}


def test_longer_training_is_compared_in_both_ways():
    validated = {
        "SS-CNN": (0.03, 0.02, 0.03),
        "Spatial Transformer": (0.01, 0.02, 0.02),
        "LocScaleInv-CNN": (0.03, 0.02, 0.01),
        "Plain CNN": (0.02, 0.01, 0.02),
    }
    known, elastic = longer_training(FEWER_OR_MORE, validated)
    shown = reproduce.longer(Results(known, elastic))
    assert shown.startswith("| minus its error after 60 epochs | validation |")
    assert "| SS-CNN, 120 epochs | **-1.00 to -1.00** | **+1.00 to +1.00** |" in shown  # in validation and on test data
    assert "| SS-CNN, 300 epochs | +0.000 to +0.000 | **+3.00 to +3.00** |" in shown
    assert "| Spatial Transformer, 120 epochs | **+1.00 to +1.00** | **+4" in shown
    assert "| Spatial Transformer, 300 epochs | **+2.50 to +2.50** |" in shown
    assert "| Spatial Transformer, as validation chose | **+2.00 to +2.00** |" in shown  # 120 and 60 epochs
    assert "| LocScaleInv-CNN, as validation chose | **-1.00 to -1.00** |" in shown  # 120 and 300 epochs
    assert "| Plain CNN, 300 epochs | +0.000 to +0.000 | **-2.00 to -2.00** |" in shown  # the control's change
    assert "| Plain CNN, 300 epochs | **+4.00 to +4.00** |" in shown  # SS-CNN against it
    assert "| Plain CNN, as validation chose | **-2.00 to -2.00** |" in shown  # 120 epochs for both
    compared = [line.split(" | ")[0] for line in shown.split("\n\n")[1].splitlines()[2:]]
    ways = ("120 epochs", "300 epochs", "as validation chose")
    others = ("LocScaleInv-CNN", "Spatial Transformer", "Plain CNN")
    assert compared[:9] == [f"| {other}, {way}" for other in others for way in ways]
    assert "SS-CNN / Plain CNN" not in shown  # the paper has no such ratio
    for label, best, means in (
        ("120 epochs", 3 / 2, 3.25 / 2.25),
        ("300 epochs", 5 / 2.5, 5.25 / 2.75),
        ("as validation chose", 3 / 1, 3.25 / 1.25),
    ):
        name = f"| SS-CNN / Spatial Transformer, {label}"
        assert f"{name} | {best:.2f} | 1.00 | {2 * best:.2f} | 1.09 |" in shown
        assert f"{name}, means over splits | {means:.2f} | 1.00 | {2 * means:.2f} | 1.09 |" in shown


def test_epochs_are_chosen_from_runs_that_are_finished():
    known, elastic = longer_training(FEWER_OR_MORE, FEWER_OR_MORE)
    others = ("Spatial Transformer 60", "SS-CNN 60", "Plain CNN 300")
    chosen = "Epochs that validation chose: {}" + "; ".join(f"{other} (of 60, 120, 300)" for other in others) + "."
    shown = reproduce.longer(Results(known, elastic))
    assert chosen.format("LocScaleInv-CNN 60 (of 60, 120, 300); ") in shown
    known[distorted_after(120)["LocScaleInv-CNN"][0].runs[4]]["status"] = "failed"
    del elastic[distorted_after(120)["LocScaleInv-CNN"][0].runs[4]]
    shown = reproduce.longer(Results(known, elastic))
    assert chosen.format("LocScaleInv-CNN 60 (of 60, 300); ") in shown
    ratios = "| SS-CNN / LocScaleInv-CNN"
    assert f"{ratios}, 120 epochs, means over splits | {3.22 / 4.22:.2f} |" in shown  # of five splits
    assert f"{ratios}, 300 epochs, means over splits | {5.25 / 4.25:.2f} |" in shown  # of six
    assert f"{ratios}, as validation chose | {2 / 4:.2f} |" in shown
    assert f"{ratios}, as validation chose, means over splits | {2.25 / 4.25:.2f} |" in shown
    del known[distorted_after(300)["LocScaleInv-CNN"][0].runs[0]]
    shown = reproduce.longer(Results(known, elastic))
    assert chosen.format("") in shown
    assert f"{ratios}, 300 epochs | {GAP} | 0.58 |" in shown
    assert f"{ratios}, as validation chose | {GAP} | 0.58 |" in shown  # nothing to choose from
    assert f"{ratios}, as validation chose, means over splits | {GAP} | 0.58 |" in shown
    assert f"| LocScaleInv-CNN, as validation chose | {' | '.join([GAP] * 7)} |" in shown
    empty = reproduce.longer(EMPTY)
    assert empty.count(GAP) == 8 * 8 + 9 * 7 + 12 * 5
    assert "chose:" not in empty


def test_epochs_are_chosen_by_the_mean_of_all_runs():
    validated = dict.fromkeys(FEWER_OR_MORE, (0.03, 0.02, 0.04))
    known, elastic = longer_training(FEWER_OR_MORE, validated)
    chosen = "LocScaleInv-CNN 120 (of 60, 120, 300); Spatial Transformer 120 (of 60, 120, 300); SS-CNN 120 (of"
    assert chosen in reproduce.longer(Results(known, elastic))
    runs = distorted_after(300)["SS-CNN"][0].runs
    known[runs[0]]["val_error"] = 0.001  # the best of all in one split, not in the mean
    repeats = {runs[1]: [dict(known[runs[1]], val_error=0.0)] * 9}  # one split of six however often it was run
    assert chosen in reproduce.longer(Results(known, elastic, repeats))
    repeats = {config: [dict(known[config], val_error=0.0)] * 9 for config in runs}
    assert "SS-CNN 300 (of" in reproduce.longer(Results(known, elastic, repeats))


def test_means_are_over_splits_tested_in_all_ways():
    known, elastic = longer_training(FEWER_OR_MORE, FEWER_OR_MORE)
    ratio = "| SS-CNN / LocScaleInv-CNN, 120 epochs, means over splits | {:.2f} |"
    ours, theirs = (distorted_after(120)[method][0].runs for method in ("SS-CNN", "LocScaleInv-CNN"))
    assert ratio.format(3.25 / 4.25) in reproduce.longer(Results(known, elastic))
    del elastic[ours[0]]["errors"]["30"]
    assert ratio.format(3.3 / 4.3) in reproduce.longer(Results(known, elastic))
    for i in (1, 2, 3):
        del elastic[theirs[i]]["moved"]
    assert ratio.format(3.45 / 4.45) in reproduce.longer(Results(known, elastic))


def test_ratios_are_drawn_beside_the_papers(tmp_path):
    known, elastic = longer_training(FEWER_OR_MORE, FEWER_OR_MORE)
    for config in distorted_after(120)["LocScaleInv-CNN"][0].runs:
        del elastic[config]
    panels = reproduce.ratio_lines(Results(known, elastic))
    assert list(panels) == ["SS-CNN / LocScaleInv-CNN", "SS-CNN / Spatial Transformer"]
    names = [f"here, {epochs} epochs" for epochs in (60, 120, 300)]
    assert list(panels["SS-CNN / LocScaleInv-CNN"]) == ["paper", names[0], names[2]]  # the rest is not tested yet
    lines = panels["SS-CNN / Spatial Transformer"]
    assert list(lines) == ["paper", *names]
    assert lines["paper"] == ([pytest.approx(r, abs=0.005) for r in (1.0, 1.09, 1.09, 1.07, 1.04)], [])
    means, splits = lines["here, 120 epochs"]
    assert means == pytest.approx([3.25 / 2.25 * n for n in (1, 2, 3, 4, 5)])
    assert len(splits) == 6
    assert splits[1] == pytest.approx([3.1 / 2.1 * n for n in (1, 2, 3, 4, 5)])
    reproduce.draw(Results({}, elastic), tmp_path, tmp_path)
    assert (tmp_path / "distortion.png").exists()
    reproduce.draw(EMPTY, tmp_path / "empty", tmp_path)
    assert not (tmp_path / "empty" / "distortion.png").exists()


def test_claims_tell_longer_training_apart():
    invariant = "SS-CNN has a lower error than LocScaleInv-CNN at every strength of distortion (the best networks)"
    par = "SS-CNN is on par with Spatial Transformer at every strength (at most 1.1 times its error, as in the paper)"
    same, on_par = ([f"{words} after {n} epochs" for n in (120, 300)] for words in ("the same", "on par"))

    def said(tested):
        shown = reproduce.claims(Results(*longer_training(tested, tested)))
        lines = [line.strip("| ").split(" | ") for line in shown.splitlines()]
        answers = dict(line for line in lines if len(line) == 2)
        return " ".join(answers[claim].strip("*") for claim in (invariant, *same, par, *on_par))

    # SS-CNN's errors grow to five times theirs under the strongest distortion
    ahead = {
        "SS-CNN": (0.02, 0.01, 0.005),
        "Spatial Transformer": (0.095, 0.046, 0.023),
        "LocScaleInv-CNN": (0.101, 0.2, 0.026),
    }
    assert said(ahead) == "yes yes yes yes yes yes"
    assert said(ahead | {"LocScaleInv-CNN": (0.01, 0.2, 0.026)}) == "no yes yes yes yes yes"
    assert said(ahead | {"LocScaleInv-CNN": (0.101, 0.01, 0.026)}) == "yes no yes yes yes yes"
    assert said(ahead | {"LocScaleInv-CNN": (0.101, 0.2, 0.024)}) == "yes yes no yes yes yes"
    assert said(ahead | {"Spatial Transformer": (0.08, 0.046, 0.023)}) == "yes yes yes no yes yes"
    assert said(ahead | {"Spatial Transformer": (0.095, 0.044, 0.023)}) == "yes yes yes yes no yes"
    assert said(ahead | {"Spatial Transformer": (0.095, 0.046, 0.022)}) == "yes yes yes yes yes no"


def test_network_of_another_run_is_named():
    config = get_table("2").rows["Plain CNN"][0].runs[3]
    networks = distorted_networks(lambda name, split: 0.02)
    for published, told in ((0.02, False), (0.0201, False), (0.021, True)):
        shown = reproduce.distorted(Results({config: invented(config, published)}, networks))
        assert ("Plain CNN: in split 3 networks of another run than in Table 1." in shown) == told


def test_repeats_stand_beside_the_run_in_the_tables():
    first, second = get_table("1").rows["SS-CNN"][0].runs[:2]
    known = {config: invented(config, 0.02) for config in (first, second)}
    again = {first: [invented(first, 0.024), invented(first, 0.022)], second: [invented(second, 0.018)]}
    again[second].append({"status": "failed", "config": second.to_dict()})
    untested = get_table("tuning").runs[0]
    known[untested] = {key: value for key, value in invented(untested, 0.02).items() if key != "test_error"}
    again[untested] = [known[untested]]
    shown = reproduce.repeats(Results(known, {}, again))
    name, gaps = "SS-CNN, MNIST-Scale, 56 px", " | ".join([GAP] * 4)
    assert f"| {name}, in the tables | 2.00 | 2.00 | {gaps} | 2.00 |" in shown
    assert f"| {name}, another run (1) | 2.40 | 1.80 | {gaps} | 2.10 |" in shown
    assert f"| {name}, another run (2) | 2.20 | {GAP} | {gaps} | {GAP} |" in shown  # a mean of other splits
    assert f"configuration: {math.sqrt((2 * 0.2**2 + 2 * 0.1**2) / 3):.2f}." in shown


def test_run_that_was_made_again_is_compared_by_its_mean():
    ours, theirs = (get_table("1").rows[m][0].runs[0] for m in ("SS-CNN", "Plain CNN"))
    known = {ours: invented(ours, 0.02), theirs: invented(theirs, 0.03)}
    failed = {"status": "failed", "config": theirs.to_dict()}
    found = Results(known, {}, {ours: [invented(ours, 0.01), invented(ours, 0.03)], theirs: [failed]})
    assert found.differences([ours], [theirs]) == [pytest.approx(-1.0)]
    more = Results(known, {}, {theirs: [invented(theirs, 0.05)]})
    assert more.differences([ours], [theirs]) == [pytest.approx(-2.0)]
    assert more.differences([ours], [theirs], "val_loss") == [pytest.approx(0.0)]


def test_repeats_are_collected_beside_the_runs(tmp_path):
    config = RunConfig("plain-cnn")
    publish(invented(config, 0.02), tmp_path)
    for number, error in ((1, 0.03), (2, 0.01)):
        publish(invented(config, error), tmp_path, "repeats").rename(tmp_path / "repeats" / f"{number}.json")
    found = collect(tmp_path)
    assert found.test_errors([config]) == [0.02]
    assert [result["test_error"] for result in found.repeats[config]] == [0.03, 0.01]


def test_an_effect_is_between_runs_that_are_alike_in_all_else():
    cells = {name: row[0] for name, row in get_table("choices").rows.items()}
    known = {
        config: invented(config, 0.01 + 0.002 * ("areas" in name) + 0.004 * ("crop" in name) + 0.001 * config.split)
        for name, cell in cells.items()
        for config in cell.runs
    }
    shown = reproduce.effects(Results(known, {}))
    assert "| points: areas | +0.20 ± 0.00 | **+0.20 to +0.20** | 0 of 24 |" in shown
    assert "| disc: crop | +0.40 ± 0.00 | **+0.40 to +0.40** | 0 of 24 |" in shown
    assert "| m = 1: m = 0.5 | +0.00 ± 0.00 | +0.000 to +0.000 | 0 of 24 |" in shown
    del known[cells["points, m = 1, disc, six scales"].runs[0]]
    assert f"| points: areas | +0.20 ± 0.00 | {GAP} | 0 of 23 |" in reproduce.effects(Results(known, {}))


def test_recipes_say_what_validation_chose():
    assert reproduce.recipes(EMPTY).count("(not tuned yet)") == 10
    runs = tuning_runs("SS-CNN", "mnist-scale")
    best = next(iter(runs))
    found = {config: invented(config, 0.01 if recipe == best else 0.02) for recipe, config in runs.items()}
    assert f"(validation chose {best})" in reproduce.recipes(Results(found, {}))


def test_forecast_is_from_runs_that_cost_the_same():
    one = RunConfig("plain-cnn")
    measured = {
        replace(one, split=i, lr=0.1): invented(one, 0.02) | {"seconds": s} for i, s in ((0, 1000.0), (1, 3000.0))
    }
    away = invented(one, 0.02) | {"seconds": 90_000.0, "environment": {"device": "a slow one"}}
    results = Results(measured | {replace(one, split=2): away}, {})
    alike, longer = [replace(one, split=i) for i in range(6)], replace(one, epochs=61)
    assert reproduce.forecast(alike, results) == (
        "6 runs to make; 6 of them take about 3.3 hours of training on a device."
    )
    assert reproduce.forecast([alike[0], longer], results) == (
        "2 runs to make; 1 of them take about 33 minutes of training on a device; "
        "no result tells how long 1 of them take."
    )
    assert reproduce.forecast([longer], EMPTY) == "1 runs to make; no result tells how long 1 of them take."


def test_fresh_makes_the_runs_and_tunes_first(checkout, monkeypatch, capsys):
    made = []

    def run(table, **options):
        assert options["fresh"]
        made.append(table.name)
        config = get_table("1").runs[0]
        publish(invented(config, 0.02), options["results"])
        return [f"{table.name} was not finished"]

    monkeypatch.setattr(reproduce, "run_table", run)
    problems = reproduce.reproduce(checkout, fresh=True, only=("1", "tuning"), runs=checkout / "runs")
    assert made == ["tuning", "1"]
    assert problems == ["tuning was not finished", "1 was not finished"]
    assert capsys.readouterr().out == "140 runs to make; no result tells how long 140 of them take.\n"
    assert "2.00 (1 of 6)" in (checkout / "README.md").read_text()
    assert len(collect(checkout / "results").runs) == 1


def test_every_figure_of_the_page_can_be_drawn():
    assert {*reproduce.TRAINED, *reproduce.UNTRAINED} < set(figures.FIGURES)


def test_elsewhere_than_in_a_checkout_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="reproduce in a checkout"):
        reproduce.reproduce(tmp_path)
    with pytest.raises(ValueError, match="exactly one place for 'x' \\(found 0\\)"):
        reproduce.fill("text", {"x": "y"})
