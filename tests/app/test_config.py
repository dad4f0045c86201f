import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from scalesteer import LogRadialBasis, create_model
from scalesteer.app import cli
from scalesteer.app.config import EARLIER_CHANNELS, PLAIN, USUAL, Run, make_run, model_options
from scalesteer.models import DATASETS
from tests.runs import changed


def options_of(run):
    return model_options(run.network, DATASETS["mnist-scale"])


STIR = {"model": "steered-cnn", "dataset": "stir-mnist"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "ss-cn"}, "Did you mean 'ss-cnn'?"),
        ({"dataset": "mnist-scal"}, "Did you mean 'mnist-scale'?"),
        ({"schedule": "one-cycl"}, "Did you mean 'one-cycle'?"),
        ({"precision": "float23"}, "Did you mean 'float32'?"),
        ({"basis": "pape"}, "Did you mean 'paper'?"),
        ({"basis": "area", "model": "plain-cnn"}, "applies to .*ss-cnn, steered-cnn.* only"),
        ({"m": 1.0, "model": "plain-cnn"}, r"`m` \(got 1.0\) applies to .*ss-cnn.* only \(got model='plain-cnn'\)"),
        ({"scales": (1.0, 0.5)}, "`scales` must be positive and strictly ascending"),
        ({"orders": ()}, "`orders` must not be empty"),
        ({"m": 2.0, "basis": "area"}, "`m` must be below 2 with sampling='area'"),
        ({"support": "dics"}, "Did you mean 'disc'?"),
        ({"epochs": 0}, r"`epochs` must be at least 1 \(got 0\)"),
        ({"batch_size": 1}, "`batch_size` must be at least 2"),
        ({"batch_size": 10_001}, r"`batch_size` must be at most 10000, the training images \(got 10001\)"),
        ({"batch_size": 11, "train_images": 10}, "`batch_size` must be at most 10"),
        ({"lr": float("nan")}, r"`lr` must be finite \(got nan\)"),
        ({"lr": 0}, r"`lr` must be positive and at most 1e30 \(got 0.0\)"),
        ({"weight_decay": -1}, "`weight_decay` must not be negative"),
        ({"label_smoothing": 1}, "`label_smoothing` must be from 0 to below 1"),
        ({"upsample": 3}, r"`upsample` must be 1 or 2 \(got 3\)"),
        ({"train_images": 10_001}, "`train_images` must be at most 10000"),
        ({"train_images": 0}, "`train_images` must be at least 1"),
        ({"sizes": (10, 0, 10), "batch_size": 5}, "`sizes` must leave images for validation and test"),
        ({"split": -1}, "`split` must be at least 0"),
        ({"seed": -1}, "`seed` must be at least 0"),
        ({"seed": 2**63}, r"`seed` must be below 2\*\*63"),
        ({"lr": 1e31}, r"`lr` must be positive and at most 1e30 \(got 1e\+31\)"),
        ({"weight_decay": 1e7}, "`weight_decay` must not be negative and at most 1e6"),
        ({"scales": (1.0, 17.0)}, r"`scales` must be at most 32 numbers up to 16 \(got 2, the largest 17\)"),
        ({"scales": tuple(1 + i / 99 for i in range(33))}, "`scales` must be at most 32 numbers"),
        ({"orders": tuple(range(33))}, "`orders` must be at most 32 numbers"),
        ({"scale_range": (0.9, 0.3)}, "`scale_range` must be"),
        ({"train_sizes": (17, 32)}, r"`train_sizes` \(got \(17, 32\)\) does not apply to dataset='mnist-scale'"),
        ({**STIR, "train_sizes": (32, 17)}, r"`train_sizes` must be \(low, high\)"),
        ({**STIR, "scale_range": (0.5, 1)}, "`scale_range` .* does not apply to dataset='stir-mnist'"),
        ({**STIR, "resampler": "antialias"}, "`resampler` .* does not apply to dataset='stir-mnist'"),
        ({**STIR, "train_sizes": (70, 80)}, "`train_sizes` must be"),
        ({**STIR, "test_sizes": (16,)}, "`test_sizes` must be"),
        ({**STIR, "sizes": (3, 3, 3), "train_sizes": (20, 21)}, "`batch_size` must be at most 6, the training images"),
        ({**STIR, "readout": "maxx"}, "Did you mean 'max'?"),
        ({"readout": "max"}, "`readout` .* applies to .*pooled-cnn, .* only"),
        ({**STIR, "test_sizes": (32, 17)}, "`test_sizes` must be positive and strictly ascending"),
        ({"resize": (2.0, 0.5)}, r"`resize` must be \(low, high\)"),
        ({"resize_resampler": "bilinear"}, "`resize_resampler` must come with `resize`"),
        ({"beyond": "mirror"}, "`beyond` must come with `resize`, `shift` or `rotate`"),
        ({"shift": 1, "beyond": "wrap"}, "`beyond` must be one of 'border', 'mirror', 'black'"),
        ({"rotate": 181.0}, "`rotate` must be from 0 to 180 degrees"),
        ({"colour": -0.1}, "`colour` must be from 0 to 1"),
        ({"blur": 33}, "`blur` must be from 0 to 32 pixels"),
        ({"resize": (0.5, 2.0), "resize_resampler": "nearest"}, "`resize_resampler` must be one of 'antialias'"),
        ({"resize": (0.01, 2.0)}, "`resize` must be factors from 1/16 to 16"),
        ({"shift": -1}, "`shift` must be at least 0"),
        ({"channels": (0.5, 1)}, "`channels` .* applies to .*pooled-cnn, .* only"),
        ({**STIR, "channels": (1, 1)}, "`channels` must be positive and strictly ascending"),
        ({**STIR, "channels": (1, 17)}, "`channels` must be at most 32 numbers up to 16"),
        ({**STIR, "test_channels": (1, 17)}, "`test_channels` must be at most 32 numbers up to 16"),
        ({**STIR, "join": "maen", "channels": (1, 2)}, "Did you mean 'mean'?"),
        ({**STIR, "join": "mean"}, "`join` must be 'logsumexp' without `channels`"),
        ({**STIR, "drop": 0.5}, r"`drop` \(got 0.5\) needs `channels`"),
        ({**STIR, "drop": 1.0, "channels": (1, 2)}, "`drop` must be from 0 to below 1"),
        ({**STIR, "one_size_epochs": 1}, "`one_size_epochs` .* needs `channels`"),
        ({**STIR, "one_size_epochs": 60, "channels": (1, 2)}, "`one_size_epochs` must be fewer than `epochs`"),
        ({**STIR, "border": 4}, "`border` .* needs `channels`"),
        ({**STIR, "border": 257, "channels": (1, 2)}, "`border` must be at most 256"),
        ({**STIR, "upsample": 2}, "`upsample` .* applies to .*ss-cnn.* only"),
        ({**STIR, "kernel_size": 4}, "`kernel_size` must be odd"),
        ({**STIR, "kernel_size": 33}, "`kernel_size` must be 1 to 32 integers up to 31"),
        ({**STIR, "kernel_size": (7, 4)}, "`kernel_size` must be odd"),
        ({**STIR, "kernel_size": ()}, "`kernel_size` must be 1 to 32 integers"),
        ({**STIR, "widths": (0, 1)}, r"`widths\[0\]` must be at least 1"),
        ({**STIR, "widths": (4096,)}, "`widths` must be 1 to 32 integers up to 2048"),
        ({"dropout": 1.0}, "`dropout` must be from 0 to below 1"),
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        make_run(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"upsample": True},
        {"epochs": 1.5},
        {"lr": "0.1"},
        {"train_images": 2.0},
        {"tuning": 1},
        {"flip": 1},
        {"epochs": None},
    ],
)
def test_wrong_type_is_an_error(options):
    with pytest.raises(TypeError, match=next(iter(options))):
        make_run(**options)


def test_sizes_to_look_at_may_come_in_any_order():
    run = make_run(**STIR, channels=(1, 0.5, 2), test_channels=(2, 1))
    assert (run.network.channels, run.network.test_channels) == ((0.5, 1.0, 2.0), (1.0, 2.0))
    assert run == make_run(**STIR, channels=(0.5, 1, 2), test_channels=(1, 2))


def test_plain_values_and_back():
    config = make_run(model="plain-cnn", sizes=(50, 20, 20), batch_size=10, scale_range=(0.5, 0.75), lr=0.1)
    assert Run.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("values", [{"modell": "ss-cnn"}, ["ss-cnn"], None])
def test_unknown_setting_is_an_error(values):
    with pytest.raises(ValueError, match="configuration"):
        Run.from_dict(values)


def test_identity_is_that_of_the_values_whatever_their_spelling():
    plain = make_run(lr=1.0, sizes=(50, 20, 20), batch_size=10, split=2, train_images=40)
    numpy = make_run(
        lr=np.float64(1), sizes=list(np.array([50, 20, 20])), batch_size=np.int64(10), split=np.int8(2), train_images=40
    )
    assert numpy == plain
    assert numpy.identity == plain.identity
    assert hash(numpy) == hash(plain)


@pytest.mark.parametrize(
    ("data", "mode"),
    [({"dataset": "stir-mnist"}, "zeros"), ({"dataset": "rescaled-cifar10"}, "reflect"), ({"images": "x"}, "reflect")],
)
def test_a_border_is_black_around_digits_and_mirrored_around_photographs(data, mode):
    run = make_run(model="pooled-cnn", channels=(0.5, 1), border=4, **data)
    task = DATASETS[data["dataset"]] if "dataset" in data else DATASETS["rescaled-cifar10"]
    assert {"border": 4, "border_mode": mode}.items() <= model_options(run.network, task).items()


def test_every_field_changes_the_identity():
    paper = {
        "dataset": "fmnist-scale", "split": 1, "seed": 1, "epochs": 1, "batch_size": 64, "lr": 0.1, "weight_decay": 0.1,
        "label_smoothing": 0.2, "schedule": "cosine", "precision": "tf32", "upsample": 1, "basis": "area",
        "train_images": 999, "scale_range": (0.5, 1.0), "sizes": (200, 9, 9), "resampler": "antialias",
        "scales": (1.0, 2.0), "orders": (1.0,), "m": 0.5, "support": "crop", "resize": (0.5, 2.0), "flip": True,
        "shift": 2, "widths": (2, 2, 2), "dropout": 0.1, "tuning": True, "model": "plain-cnn", "rotate": 9.0,
        "colour": 0.4, "blur": 1.5,
    }  # fmt: skip
    any_size = {
        "train_sizes": (17, 32), "test_sizes": (64,), "kernel_size": 5, "readout": "max", "channels": (1.0, 2.0),
        "join": "mean", "drop": 0.5, "border": 4, "one_size_epochs": 1, "test_channels": (2.0,), "fit_join": "yes",
        "multiple": 8, "weights": "w.safetensors", "patience": 3, "accumulate": 2, "clip": 1.0,
    }  # fmt: skip
    own = {
        "images": "others",
        "image_size": (32, 32),
        "fit": "crop",
        "grey": True,
        "class_weights": True,
        "value_range": (0, 4095),
        "percentiles": (1, 99),
        "planes": (0, 2),
        "pixel_size": 0.325,
    }
    resized = {"resize_resampler": "bilinear", "beyond": "mirror"}
    assert {*paper, *any_size, *own, *resized} | {"pretrained", "channels_lr"} == set(USUAL)
    changed = {make_run(**{name: value}).identity for name, value in paper.items()}
    base = {"model": "steered-cnn", "dataset": "stir-mnist", "channels": (1.0,)}
    changed |= {make_run(**base | {name: value}).identity for name, value in any_size.items()}
    changed |= {make_run(**{"images": "photos", name: value}).identity for name, value in own.items()}
    changed |= {make_run(**{"resize": (0.5, 2.0), name: value}).identity for name, value in resized.items()}
    changed |= {make_run().identity, make_run(**base).identity, make_run(images="photos").identity}
    changed |= {make_run(**base, one_size_epochs=1, channels_lr=0.1).identity}
    assert len(changed) == len(paper) + len(any_size) + len(own) + len(resized) + 4


def test_names_are_found_whatever_their_case_and_dashes():
    plain = make_run(model="ss-cnn", dataset="mnist-scale-local-2", basis="released-code")
    assert make_run(model="SS_CNN", dataset="MNIST-scale local_2", basis="Released_Code") == plain
    assert make_run(model="Steered-CNN", dataset="STIR_mnist").data.dataset == "stir-mnist"


def test_identities_stay():
    assert make_run().name == "mnist-scale-ss-cnn-s0-d26749bf6294"
    before = {"channels": [0.5, 0.71, 1.0, 1.41], "model": "pooled-resnet", "readout": "logsumexp", "images": "photos"}
    assert Run.from_dict(before).name == "photos-pooled-resnet-e18b7fa1f294"


def test_own_pictures_are_learnt_at_one_size_and_tested_at_several_unless_a_run_says_otherwise():
    usual = make_run(images="photos")
    assert (usual.network.model, usual.network.channels, usual.network.test_channels) == (
        "pooled-deep", (), (0.5, 0.71, 1.0, 1.41, 2.0)
    )  # fmt: skip
    assert (usual.training.resize, usual.training.one_size_epochs) == ((0.5, 2.0), 0)
    trained = make_run(images="photos", channels=(0.5, 1.0), epochs=60)
    assert (trained.network.test_channels, trained.network.drop, trained.training.one_size_epochs) == ((), 0.4, 50)
    assert trained.training.channels_lr == pytest.approx(0.2 * trained.training.lr)
    plain = make_run(images="photos", **PLAIN)
    assert not plain.network.test_channels
    for run in (usual, trained, plain, make_run(images="photos", channels=(0.5, 1.0), one_size_epochs=0)):
        assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == make_run(**run.settings) == run
        assert cli.app.parse(run.command.split()[1:]).made == run
    assert len({usual.identity, trained.identity, plain.identity}) == 3
    dataset = make_run(model="pooled-cnn", dataset="stir-mnist", channels=(0.5, 1.0))
    assert (dataset.training.resize, dataset.training.one_size_epochs, dataset.network.drop) == (None, 0, 0.0)


def test_runs_of_earlier_versions_are_understood():
    own = {"model": "pooled-cnn", "dataset": "mnist-scale", "images": "photos", "image_size": [64, 64]}
    expected = make_run(images="photos", model="pooled-cnn", channels=EARLIER_CHANNELS, **PLAIN)
    assert Run.from_dict({**own, "channels": [0.5, 0.71, 1.0, 1.41], "batch_size": 0}) == expected
    assert Run.from_dict({**own, "batch_size": 0}) == expected  # written before there were channels
    assert Run.from_dict({**own, "channels": None, "batch_size": 0}) == changed(expected, channels=())
    assert Run.from_dict({"model": "ss-cnn", "split": 3, "scales": None, "channels": None}) == make_run(split=3)


@pytest.mark.parametrize(
    "config",
    [
        make_run(model="pooled-cnn", kernel_size=(7, 5)),
        make_run(
            model="plain-cnn", dataset="fmnist-scale", split=3, lr=0.125, sizes=(200, 9, 9), scale_range=(0.5, 0.75)
        ),
        make_run(basis="area", scales=(1, 9 / 7), orders=(1,), m=0.5, support="crop", tuning=True),
        make_run(
            model="steered-cnn",
            dataset="stir-mnist",
            train_sizes=(17, 32),
            test_sizes=(17, 64),
            resize=(0.5, 2),
            resize_resampler="bilinear",
            beyond="mirror",
            rotate=20.0,
            colour=0.25,
            blur=1.0,
            flip=True,
            shift=1,
            widths=(4, 8),
            kernel_size=5,
            readout="mean",
            dropout=0.1,
            channels=(0.5, 1),
            join="max",
            drop=0.25,
            test_channels=(0.25, 1),
            scales=(1, 1.4),
        ),
    ],
)
def test_command_gives_the_configuration_back(config):
    parsed = cli.app.parse(config.command.split()[1:])
    assert parsed.made == config


def test_filters_are_the_presets_but_for_what_is_set():
    network = make_run(basis="area", orders=[1, 2], scales=np.array([1, 1.5]), m=0).network
    assert network.filters.orders == (1.0, 2.0)
    layer = create_model("ss-cnn", **model_options(network, DATASETS["mnist-scale"])).first
    assert layer.scales == network.filters.scales == (1.0, 1.5)
    assert layer.basis == LogRadialBasis(sampling="area", orders=(1.0, 2.0), m=0.0)
    assert create_model("ss-cnn", **options_of(make_run())).first.basis == LogRadialBasis()


def test_networks_are_made_as_a_run_says():
    config = make_run(
        model="steered-cnn", dataset="rescaled-cifar10", widths=(4, 6), kernel_size=5, readout="mean", dropout=0.25,
        scales=(1, 1.4), basis="paper", m=0.5, channels=(0.5, 1), join="mean", drop=0.5,
    )  # fmt: skip
    model = create_model("steered-cnn", "rescaled-cifar10", **options_of(config))
    assert (model.scales, model.join, model.drop) == ((0.5, 1.0), "mean", 0.5)
    layer = model.net.first
    assert (layer.scales, layer.kernel_size, layer.basis) == ((1.0, 1.4), (5, 5), LogRadialBasis(m=0.5))
    assert model.net.readout == "mean"
    assert model(torch.rand(1, 3, 64, 64)).shape == (1, 10)
    assert "channels" not in options_of(make_run(model="steered-cnn"))


def test_filters_of_a_steered_network_are_its_own_but_for_what_is_set():
    own = create_model("steered-cnn").first.basis
    assert options_of(make_run(model="steered-cnn", m=0.5))["basis"] == replace(own, m=0.5)
    assert "basis" not in options_of(make_run(model="steered-cnn"))
