"""Every experiment as a grid of runs, and the numbers of the paper. Data only.

One protocol holds for all methods: the defaults of `Record` and `PROTOCOL`. Learning rate, weight decay and input
size of each method are chosen on validation data from one small search (the experiment "tuning") and stand in `CHOSEN`.

A new experiment is an entry of `EXPERIMENTS`; `python -m paper run NAME` makes its runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from paper import forms
from paper.record import Record
from scalesteer.datasets import ELASTIC_ALPHAS
from scalesteer.datasets.scale import SPLITS
from scalesteer.harmonics import PAPER_SCALES

Options = dict[str, Any]  # of `Record`

METHODS = {
    "Spatial Transformer": "spatial-transformer",
    "SS-CNN": "ss-cnn",
    "LocScaleEq-CNN": "vector-field-cnn",
    "LocScaleInv-CNN": "locally-scale-invariant-cnn",
    "Plain CNN": "plain-cnn",  # the control; not in the paper
}
PUBLISHED_FORMS = {
    "Spatial Transformer, six numbers": ("Spatial Transformer", forms.SIX_NUMBERS),
    "LocScaleEq-CNN, released code's rotation": ("LocScaleEq-CNN", forms.RELEASED_ROTATION),
}
"""Rivals as they were published, where `METHODS` has another form: whose settings they use, and the network."""
OTHERS = ("Spatial Transformer", "LocScaleEq-CNN", "LocScaleInv-CNN")  # of the paper, beside SS-CNN
DATASETS = {"mnist-scale": "MNIST-Scale", "fmnist-scale": "FMNIST-Scale"}
PROTOCOL = {"precision": "tf32"}
"""What all runs share beside the defaults of `Record`."""


class Settings(NamedTuple):
    """What may differ between methods; `upsample` 1 shows them 28 x 28 pixels, 2 shows them 56 x 56."""

    lr: float
    weight_decay: float
    upsample: int

    def __str__(self) -> str:
        return f"lr {self.lr:g}, weight decay {self.weight_decay:g}, {28 * self.upsample} px"


SEARCH = tuple(itertools.starmap(Settings, itertools.product((0.002, 0.005), (0.01, 0.1), (1, 2))))
TUNING_EPOCHS = 10
CHOSEN = dict.fromkeys(itertools.product(METHODS, DATASETS), Settings(0.005, 0.1, 2))
CHOSEN["Spatial Transformer", "mnist-scale"] = Settings(0.005, 0.01, 2)
"""What tuning chose; a test compares it with the results. MNIST-scale-local-2 is made of the same digits as MNIST-Scale
and uses its settings."""

STRENGTHS = tuple(f"α = {alpha:g}" for alpha in ELASTIC_ALPHAS)
MOVED = {0.5: "moved 0.5 px", 1.0: "moved 1 px"}
"""Pixels that images are moved by where networks are tested under distortion: with blur, and without."""

PAPER: dict[str, dict[str, dict[str, str]]] = {
    "1": {
        "Spatial Transformer": {"MNIST-Scale": "1.97 ± 0.09", "FMNIST-Scale": "13.11 ± 0.25"},
        "SS-CNN": {"MNIST-Scale": "1.91 ± 0.04", "FMNIST-Scale": "14.24 ± 0.31"},
        "LocScaleEq-CNN": {"MNIST-Scale": "2.44 ± 0.07", "FMNIST-Scale": "15.72 ± 0.32"},
        "LocScaleInv-CNN": {"MNIST-Scale": "2.75 ± 0.09", "FMNIST-Scale": "15.91 ± 0.41"},
    },
    # The paper's "ScaleInv Net" is taken to be its LocScaleInv-CNN: it names no other network that could be meant.
    "2": {
        "LocScaleInv-CNN": dict(zip(STRENGTHS, ("3.2", "5.92", "9.6", "16.2", "27"), strict=True)),
        "Spatial Transformer": dict(zip(STRENGTHS, ("1.87", "3.4", "5.12", "9.2", "16.2"), strict=True)),
        "SS-CNN": dict(zip(STRENGTHS, ("1.87", "3.7", "5.6", "9.82", "16.83"), strict=True)),
    },
    "3": {
        "Spatial Transformer": {"1 % data": "4.76 ± 0.38", "10 % data": "0.73 ± 0.05", "100 % data": "0.23 ± 0.02"},
        "SS-CNN": {"1 % data": "4.27 ± 1.14", "10 % data": "0.40 ± 0.02", "100 % data": "0.09 ± 0.01"},
    },
}
"""Errors in % by table, line and column, with their standard deviation where the paper has one."""
PAR = 1.1  # the paper calls SS-CNN on par with the transformer at up to 1.09 times its errors

FEW_IMAGES: dict[str, Options] = {
    "1 % data": {"train_images": 100, "batch_size": 25, "epochs": 300},
    "10 % data": {"train_images": 1000, "epochs": 300},
    "100 % data": {"train_images": 10_000},
}
"""Fewer images need smaller batches and more passes, up to the 300 that the paper allows."""

ABLATIONS: dict[str, Options] = {
    "SS-CNN, as in Table 1": {},
    "basis area": {"basis": "area"},
    "basis released-code": {"basis": "released-code"},
    "support crop": {"support": "crop"},
    "one scale: 7": {"scales": PAPER_SCALES[:1]},
    "one scale: 17": {"scales": PAPER_SCALES[-1:]},
    "two scales: 7, 17": {"scales": (PAPER_SCALES[0], PAPER_SCALES[-1])},
    "three scales: 7, 11, 17": {"scales": (PAPER_SCALES[0], PAPER_SCALES[2], PAPER_SCALES[-1])},
    "eleven scales: 7, 8, …, 17": {"scales": tuple(size / 7 for size in range(7, 18))},
    "m = 0": {"m": 0.0},
    "m = 0.5": {"m": 0.5},
    "m = 2": {"m": 2.0},
    "order 1": {"orders": (1.0,)},
    "orders 0.5, 1": {"orders": (0.5, 1.0)},
    "orders 0.5, 1, 2, 4": {"orders": (0.5, 1.0, 2.0, 4.0)},
}
"""For each variant of SS-CNN, what differs from its run in Table 1."""
FEW_SPLITS = (0, 1, 2)  # of ablations and their like

CHOICES: tuple[dict[str, Options], ...] = (
    {"points": {}, "areas": ABLATIONS["basis area"]},
    {"m = 1": {}, "m = 0.5": ABLATIONS["m = 0.5"]},
    {"disc": {}, "crop": ABLATIONS["support crop"]},
    {"six scales": {}, "three scales": ABLATIONS["three scales: 7, 11, 17"]},
)
"""Changes to the filters that may be combined; the first of each is what SS-CNN has in the tables."""
COMBINED = {
    levels: {k: v for level, options in zip(levels, CHOICES, strict=True) for k, v in options[level].items()}
    for levels in itertools.product(*CHOICES)
}

DISTORTED = ("LocScaleInv-CNN", "Spatial Transformer", "SS-CNN", "Plain CNN")
"""The methods of Table 2."""
SMOOTHER: dict[str, Options] = {
    "SS-CNN, basis area": ABLATIONS["basis area"],
    "SS-CNN, basis area, m = 0.5": ABLATIONS["basis area"] | ABLATIONS["m = 0.5"],
}
"""Variants of SS-CNN in Table 2, whose filters are smoother than the paper's."""
EPOCHS = (60, 120, 300)
"""Epochs that the methods of Table 2 are trained for: those of that table, and more, up to the paper's 300."""


class Row(NamedTuple):
    """One run of an experiment, and the cell of its table that the run counts for."""

    line: str
    column: str
    config: Record


class Cell(NamedTuple):
    """The runs of one cell of an experiment, and which of their numbers is meant."""

    experiment: str
    line: str
    column: str
    measure: str = "test error"


class Experiment(NamedTuple):
    """A grid of runs; with `distorted` their networks are also tested under distortion."""

    title: str
    rows: tuple[Row, ...]
    distorted: bool = False

    @property
    def runs(self) -> tuple[Record, ...]:
        """Each run once; the first split and seed of all methods first, so that a table fills evenly."""
        return tuple(sorted(dict.fromkeys(row.config for row in self.rows), key=lambda c: (c.split, c.seed)))


def configuration(method: str, dataset: str = "mnist-scale", **changes: Any) -> Record:
    """A run of a method with the settings chosen for it, and with changes."""
    chosen = CHOSEN[method, dataset if dataset in DATASETS else "mnist-scale"]
    return Record(**{"model": METHODS[method], "dataset": dataset, **PROTOCOL, **chosen._asdict(), **changes})


def _grid(lines: dict[str, Options], columns: dict[str, Options], splits: Iterable[int] = SPLITS) -> tuple[Row, ...]:
    """One run for each line, column and split; a line and a column say what is particular to their runs."""
    return tuple(
        Row(line, column, configuration(**own, **more, split=split))
        for (line, own), (column, more), split in itertools.product(lines.items(), columns.items(), splits)
    )


def _each(methods: Iterable[str]) -> dict[str, Options]:
    return {method: {"method": method} for method in methods}


def _variants(changes: dict[str, Options]) -> dict[str, Options]:
    return {name: {"method": "SS-CNN", **own} for name, own in changes.items()}


def _published_forms() -> dict[str, Options]:
    return {line: {"method": method, "model": model} for line, (method, model) in PUBLISHED_FORMS.items()}


EXPERIMENTS: dict[str, Experiment] = {
    "tuning": Experiment(
        f"Error on the validation data of split 0 after at most {TUNING_EPOCHS} epochs; ✓ is chosen",
        _grid(
            _each(METHODS),
            {
                f"{title}, {own}": {"dataset": data, **own._asdict(), "epochs": TUNING_EPOCHS, "tuning": True}
                for (data, title), own in itertools.product(DATASETS.items(), SEARCH)
            },
            splits=(0,),
        ),
    ),
    "1": Experiment(
        "Error rates on MNIST-Scale and FMNIST-Scale",
        _grid(_each(METHODS), {title: {"dataset": data} for data, title in DATASETS.items()}),
    ),
    "2": Experiment(
        "Test-time elastic distortions on MNIST-Scale, the network of each method that is best on validation data",
        _grid(_each(DISTORTED) | _variants(SMOOTHER), {"60 epochs": {}}),
        distorted=True,
    ),
    "3": Experiment(
        "MNIST-scale-local-2 with less and less training data",
        _grid(
            _each(("Spatial Transformer", "SS-CNN", "Plain CNN")),
            {column: {"dataset": "mnist-scale-local-2", **own} for column, own in FEW_IMAGES.items()},
        ),
    ),
    "sizes": Experiment(
        "MNIST-Scale, splits 0 to 2, with the input as it is and enlarged",
        _grid(_each(METHODS), {"28 px": {"upsample": 1}, "56 px": {"upsample": 2}}, FEW_SPLITS),
    ),
    "published-forms": Experiment(
        "Rivals in their published form; Table 1 has the form that we find better",
        _grid(_published_forms(), {title: {"dataset": data} for data, title in DATASETS.items()}),
    ),
    "ablations": Experiment(
        "MNIST-Scale, splits 0 to 2; differences are to the runs of the first line, or to their mean",
        _grid(_variants(ABLATIONS), {"SS-CNN": {}}, FEW_SPLITS),
    ),
    "longer": Experiment(
        "Table 2's methods after more epochs, means over splits",
        _grid(_each(DISTORTED), {f"{epochs} epochs": {"epochs": epochs} for epochs in EPOCHS}),
        distorted=True,
    ),
}
_TESTED = {row.config for name in ("2", "ablations") for row in EXPERIMENTS[name].rows}
EXPERIMENTS["choices"] = Experiment(
    "SS-CNN with all combinations of four changes to its filters; validation data of splits 0 to 2",
    tuple(  # what has not been run for another table does without the test set
        row if row.config in _TESTED else row._replace(config=replace(row.config, tuning=True))
        for row in _grid(_variants({", ".join(levels): own for levels, own in COMBINED.items()}), {"": {}}, FEW_SPLITS)
    ),
)


# Any size: networks that are tested at sizes which were not trained. Repeats differ in the seed, not in the images.


def half_octaves(low: int, high: int) -> tuple[float, ...]:
    """Factors from 2^(low/2) to 2^(high/2)."""
    return tuple(2 ** (step / 2) for step in range(low, high + 1))


STEERED, PLAIN = "Scale channels, steered filters", "Scale channels, plain filters"
TWIN, RESIZED, SEVERAL = "Plain twin", "Plain twin, random resizing", "Plain twin, several sizes at test"
LONGER = "Plain twin, random resizing, as long as ours"
PAPERS = "SS-CNN, as in the paper"
OURS = (STEERED, PLAIN)
RIVALS = (LONGER, TWIN, RESIZED, SEVERAL, PAPERS)
AUGMENTED = ", random resizing"  # what is added to the name of a line of ours
LEADING = {"stir": PLAIN, "large-scale": PLAIN, "rescaled-cifar10": PLAIN + AUGMENTED, "new-networks": PLAIN}
"""The line of ours that targets are about, chosen on validation images or on objects that are in none of the tables;
of photographs, where the strongest rival resizes at random, the one that does so too."""

PROTOCOLS = {"Small2Large": (17, 32), "Mid2Rest": (33, 48), "Large2Small": (49, 64), "All2All": (17, 64)}
"""Sizes of STIR's training objects in pixels; the others of 17 to 64 are tested only. All2All is a check."""
SOME_SIZES = tuple(protocol for protocol in PROTOCOLS if protocol != "All2All")
STIR = {"MNIST": "stir-mnist", "Emoji": "stir-emoji"}
ANY_SIZE: Options = {**PROTOCOL, "lr": 0.01, "weight_decay": 0.01, "batch_size": 100, "epochs": 15, "drop": 0.4}
OF_SS_CNN: Options = CHOSEN["SS-CNN", "mnist-scale"]._asdict() | {"upsample": 1}
CHANNELS_STIR = half_octaves(-4, 1)
CHANNELS_LARGE = half_octaves(-6, 1)
CHANNELS_CIFAR = half_octaves(-2, 2)
CHANNELS_SCALE = half_octaves(-1, 2)
TEST_CHANNELS = half_octaves(-2, 2)  # of a network that was trained without
EMOJI_EPOCHS = 100  # 36 icons: a fourteenth of STIR's 500 digits
LARGE_SIZES = (0.5, 1, 2, 4, 8)  # those with published numbers
CIFAR: Options = {"epochs": 20, "batch_size": 128, "precision": "bf16"}
CIFAR |= {"lr": 0.005, "weight_decay": 0.05, "flip": True, "shift": 4}
LARGE: Options = {"epochs": 10, "widths": (32, 64, 64), "precision": "bf16"}
LONGER_EPOCHS = {"stir-mnist": 105, "stir-emoji": 700, "mnist-large-scale": 25, "rescaled-cifar10": 54}
"""Epochs of random resizing that take as long as ours. STIR: an epoch of ours takes 6.7 times as long on two CPU
threads (results/bench/stir-epoch.json). The others: the area of all channels, for the epochs that have them."""
WITH_CHANNELS = ("drop", "border", "one_size_epochs")  # what lines without channels do not have


def _any_size(
    kind: str,
    channels: tuple[float, ...],
    resize: tuple[float, float],
    shared: Options,
    tested: tuple[float, ...] = (),
    ours_resize: tuple[float, float] | None = None,
) -> dict[str, Options]:
    """Ours and their rivals: all lines of an experiment, under one protocol but for SS-CNN's tuned settings.

    Args:
        kind: Of network, as in the names "steered-cnn" and "pooled-cnn".
        channels: The sizes at which ours look at the image.
        resize: Factors of random resizing.
        shared: What all lines have in common.
        tested: The sizes at which the twin looks at test images, by default `channels`.
        ours_resize: Factors of random resizing for ours, by default `resize`.
    """
    shared = ANY_SIZE | shared
    alone = {key: value for key, value in shared.items() if key not in WITH_CHANNELS}
    twin = {**alone, "model": f"pooled-{kind}"}
    lines: dict[str, Options] = {}
    for line, model in zip(OURS, ("steered", "pooled"), strict=True):
        lines[line] = {**shared, "model": f"{model}-{kind}", "channels": channels}
    lines[PLAIN + AUGMENTED] = {**lines[PLAIN], "resize": ours_resize or resize}
    resized = {**twin, "resize": resize}
    lines |= {LONGER: resized, TWIN: twin, RESIZED: resized}
    lines[SEVERAL] = {**twin, "test_channels": tested or channels, "join": "mean"}
    return lines | {PAPERS: {**alone, "model": "ss-cnn", "widths": None, **OF_SS_CNN}}


def _seeded(
    lines: dict[str, Options], columns: dict[str, Options], seeds: Callable[[str, str], int]
) -> tuple[Row, ...]:
    """One run for each line, column and seed, of which a line has so many in a column."""
    return tuple(
        Row(line, column, Record(**{**own, **more, **_epochs(line, more), "seed": seed}))
        for (line, own), (column, more) in itertools.product(lines.items(), columns.items())
        for seed in range(seeds(line, column))
    )


def _epochs(line: str, column: Options) -> Options:
    return {"epochs": LONGER_EPOCHS[column["dataset"]]} if line == LONGER else {}


def _stir_seeds(line: str, column: str) -> int:
    return 1 if "All2All" in column else 10 if line == LEADING["stir"] else 3


_STIR_COLUMNS: dict[str, Options] = {
    f"{title} {protocol}": {
        "dataset": data,
        "train_sizes": sizes,
        **({"epochs": EMOJI_EPOCHS} if data == "stir-emoji" else {}),
    }
    for (title, data), (protocol, sizes) in itertools.product(STIR.items(), PROTOCOLS.items())
}
_SCALE_LINES = _any_size(
    "cnn-large", CHANNELS_SCALE, (0.5, 2.0), {"epochs": 60, "batch_size": 128, "lr": 0.005, "precision": "bf16"}
)

EXPERIMENTS |= {
    "stir": Experiment(
        "Accuracy at sizes that training did not show, in brackets at those that it did",
        _seeded(_any_size("cnn", CHANNELS_STIR, (0.5, 2.0), {}, TEST_CHANNELS), _STIR_COLUMNS, _stir_seeds),
    ),
    "large-scale": Experiment(
        "MNIST digits, trained at size 1, accuracy at others",
        _seeded(
            _any_size("cnn", CHANNELS_LARGE, (0.5, 8.0), {**LARGE, "border": 8, "one_size_epochs": 5}),
            {"": {"dataset": "mnist-large-scale", "test_sizes": LARGE_SIZES}},
            lambda line, _: 2 if line in (LEADING["large-scale"], LONGER) else 1,
        ),
    ),
    "rescaled-cifar10": Experiment(
        "Trained at size 1, error at others",
        _seeded(
            # Channels already show what is smaller and larger; resizing fills in what lies between and beyond them.
            _any_size(
                "resnet",
                CHANNELS_CIFAR,
                (0.5, 2.0),
                {**CIFAR, "border": 8, "one_size_epochs": 15},
                ours_resize=(2**-0.5, 2**0.5),
            ),
            {"": {"dataset": "rescaled-cifar10"}},
            lambda line, _: 1 if line in OURS else 2,
        ),
    ),
    "new-networks": Experiment(
        "The paper's datasets with networks that read out by pooling",
        tuple(
            Row(line, title, Record(**{**_SCALE_LINES[line], "dataset": data, "split": split}))
            for line, (data, title) in itertools.product(_SCALE_LINES, DATASETS.items())
            for split in (SPLITS if line.startswith(PLAIN) else FEW_SPLITS)
            if line not in (PAPERS, LONGER)  # Table 1 has the first; nobody trained the second
        ),
    ),
}

# Group convolutions: SS-CNN's protocol on its data, and that of "stir" on STIR.

GROUP, GROUP_CHANNELS = "Group CNN", "Group CNN in scale channels"
_GROUP_MODELS = {
    GROUP: "group-cnn",
    f"{GROUP}, Hermite basis": forms.GROUP_HERMITE,
    f"{GROUP}, fitted basis": forms.GROUP_FITTED,
}


def _group_lines(enlarge: int) -> dict[str, Options]:
    """Lines of images that are enlarged by this factor, 1 or 2."""
    larger: Options = {"channels": (2.0,)} if enlarge == 2 else {}
    lines: dict[str, Options] = {line: {"model": model, **larger} for line, model in _GROUP_MODELS.items()}
    return lines | {"SS-CNN": {"model": "ss-cnn", "upsample": enlarge}}


_OF_SCALE: Options = PROTOCOL | {name: OF_SS_CNN[name] for name in ("lr", "weight_decay")}
_OF_STIR: Options = {name: value for name, value in ANY_SIZE.items() if name not in WITH_CHANNELS}
EXPERIMENTS |= {
    "group": Experiment(
        "Networks that keep the axis of scales on MNIST-Scale, splits 0 to 2, beside other bases and SS-CNN",
        tuple(
            row
            for split, enlarge in itertools.product(FEW_SPLITS, (1, 2))
            for row in _seeded(
                _group_lines(enlarge), {f"{28 * enlarge} px": {**_OF_SCALE, "split": split}}, lambda *_: 1
            )
        ),
    ),
    "group-stir": Experiment(
        "Networks that keep the axis of scales on STIR's digits, beside scale channels alone",
        _seeded(
            {
                GROUP: {"model": "group-cnn", **_OF_STIR},
                GROUP_CHANNELS: {"model": "group-cnn", **_OF_STIR, "channels": half_octaves(-4, 0)[::2]},
                PLAIN: {"model": "pooled-cnn", **ANY_SIZE, "channels": CHANNELS_STIR},
            },
            {"Mid2Rest": {"dataset": "stir-mnist", "train_sizes": PROTOCOLS["Mid2Rest"]}},
            lambda *_: 3,
        ),
    ),
}
