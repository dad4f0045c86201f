import json

import numpy as np
import pytest

from scalesteer import LogRadialBasis, cli, create_model
from scalesteer.training.config import RunConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "ss-cn"}, "Did you mean 'ss-cnn'?"),
        ({"dataset": "mnist-scal"}, "Did you mean 'mnist-scale'?"),
        ({"schedule": "one-cycl"}, "Did you mean 'one-cycle'?"),
        ({"precision": "float23"}, "Did you mean 'float32'?"),
        ({"basis": "pape"}, "Did you mean 'paper'?"),
        ({"basis": "area", "model": "plain-cnn"}, "applies to model='ss-cnn' only"),
        ({"m": 1.0, "model": "plain-cnn"}, r"`m` \(got 1.0\) applies to model='ss-cnn' only"),
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
    ],
)
def test_wrong_value_is_named_with_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**options)


@pytest.mark.parametrize(
    "options",
    [{"upsample": True}, {"epochs": 1.5}, {"lr": "0.1"}, {"train_images": 2.0}, {"tuning": 1}, {"epochs": None}],
)
def test_wrong_type_is_an_error(options):
    with pytest.raises(TypeError, match=next(iter(options))):
        RunConfig(**options)


def test_plain_values_and_back():
    config = RunConfig("plain-cnn", sizes=(50, 20, 20), batch_size=10, scale_range=(0.5, 0.75), lr=0.1)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("values", [{"modell": "ss-cnn"}, ["ss-cnn"], None])
def test_unknown_setting_is_an_error(values):
    with pytest.raises(ValueError, match="configuration"):
        RunConfig.from_dict(values)


def test_identity_is_that_of_the_values_whatever_their_spelling():
    plain = RunConfig(lr=1.0, sizes=(50, 20, 20), batch_size=10, split=2, train_images=40)
    numpy = RunConfig(
        lr=np.float64(1), sizes=list(np.array([50, 20, 20])), batch_size=np.int64(10), split=np.int8(2), train_images=40
    )
    assert numpy == plain
    assert numpy.identity == plain.identity
    assert hash(numpy) == hash(plain)


def test_every_field_changes_the_identity():
    other = RunConfig(
        "ss-cnn", "fmnist-scale", 1, 1, 1, 64, 0.1, 0.1, 0.2, "cosine", "tf32", 1, "area", 99, (0.5, 1.0), (99, 9, 9),
        "antialias", (1.0, 2.0), (1.0,), 0.5, "crop", True,
    )  # fmt: skip
    names = [name for name, value in other.to_dict().items() if value != RunConfig().to_dict()[name]]
    assert len(names) == len(other.to_dict()) - 1  # all but the model
    changed = {
        RunConfig(**{name: getattr(other, name), "batch_size": 64}).identity for name in names if name != "sizes"
    }
    assert len(changed) == len(names) - 1
    assert RunConfig(model="plain-cnn").identity != RunConfig().identity
    assert RunConfig(sizes=(200, 9, 9)).identity != RunConfig().identity


@pytest.mark.parametrize(
    "config",
    [
        RunConfig("plain-cnn", "fmnist-scale", split=3, lr=0.125, sizes=(200, 9, 9), scale_range=(0.5, 0.75)),
        RunConfig(basis="area", scales=(1, 9 / 7), orders=(1,), m=0.5, support="crop", tuning=True),
    ],
)
def test_command_gives_the_configuration_back(config):
    parsed = cli.app.cli(args=config.command.split()[1:])
    assert parsed.config == config


def test_filters_are_the_presets_but_for_what_is_set():
    config = RunConfig(basis="area", orders=[1, 2], scales=np.array([1, 1.5]), m=0)
    assert config.orders == (1.0, 2.0)
    layer = create_model("ss-cnn", **config.model_options).first
    assert layer.scales == config.scales == (1.0, 1.5)
    assert layer.basis == LogRadialBasis(sampling="area", orders=(1.0, 2.0), m=0.0)
    assert create_model("ss-cnn", **RunConfig().model_options).first.basis == LogRadialBasis()
