"""Results that nobody measured, for the tests of what is made of results."""

import statistics

from paper.cells import columns
from paper.grids import EXPERIMENTS
from scalesteer.app.evaluation import SCALE_BINS
from scalesteer.datasets import SIZED_DATASETS

ENVIRONMENT = {
    "command": "scalesteer train",
    "commit": None,
    **dict.fromkeys(("scalesteer", "python", "torch", "numpy", "device"), "1"),
    "data": {"digest": "d", "source": {}},
}


def outcome(config, error=0.02, epochs=2):
    """What `train` returns, with invented numbers."""
    history = [
        {"epoch": i, "loss": 1.23456789 / (i + 1), "val_loss": 0.5, "val_error": 0.0125, "seconds": 12.34567 * i}
        for i in range(epochs)
    ]
    result = {"status": "finished", "val_error": error, "val_loss": 0.1, "best_epoch": 0, "identity": config.identity}
    result |= {"config": config.to_dict(), "parameters": 10, "seconds": 6.0, "history": history}
    if not config.tuning:
        bins = [{"from": 0.3, "to": 0.4, "images": 9, "error": error}]
        result |= {"test_error": error, "test_error_by_scale": bins}
    return result | {"environment": ENVIRONMENT}


def replaced(config, error, form=None):
    """A result whose place another one took; of another form, if one is given."""
    about = ENVIRONMENT | {"device": "a GPU", "replaced": "something better came"} | ({"form": form} if form else {})
    return result(config, error, environment=about)


def distorted(config):
    errors = {"0": 0.02, "10": 0.03}
    return {"config": config.to_dict(), "sigma": 4.0, "errors": errors, "moved": errors, "environment": ENVIRONMENT}


def failed(config):
    lost = ("val_error", "val_loss", "best_epoch", "test_error", "test_error_by_scale")
    result = {key: value for key, value in outcome(config).items() if key not in lost}
    return result | {"status": "failed", "reason": "the loss became nan"}


def result(config, error=0.02, device="a GPU", **changes):
    """What is published of a run; on the paper's data, errors grow with the bin of scales."""
    made = outcome(config, error) | {"environment": ENVIRONMENT | {"device": device}}
    if not config.tuning:
        made["test_error_by_scale"] = [
            {"from": a, "to": b, "images": 9, "error": min(1, error * (i + 1))} for i, (a, b) in enumerate(SCALE_BINS)
        ]
    names = ("loss", "val_loss", "val_error", "seconds")
    return made | {"history": {name: [epoch[name] for epoch in made["history"]] for name in names}} | changes


def result_by_size(config, inside=0.05, outside=0.1, correlation=0.95):
    """The same of an experiment on sizes: one error at all sizes of training, and another at the others."""
    made = result(config, inside)
    if config.dataset not in SIZED_DATASETS:
        return made
    low, high = config.run.data.train_sizes
    trained = {float(f"{size:.6g}"): low <= size <= high for size in SIZED_DATASETS[config.dataset].sizes}
    made["test_error_by_scale"] = [
        {"from": size, "to": size, "images": 9, "error": inside if seen else outside} for size, seen in trained.items()
    ]
    made["test_error"] = statistics.fmean(row["error"] for row in made["test_error_by_scale"])
    if not all(trained.values()):
        made |= {"test_error_inside": inside, "test_error_outside": outside}
    return made | ({"size_correlation": correlation} if config.channels else {})


def results_by_size(name, error_of, **options):
    """Results of an experiment with `error_of(line)` outside, a little more with every seed or split."""
    for row in EXPERIMENTS[name].rows:
        repeat = row.config.seed + row.config.split
        yield result_by_size(row.config, outside=error_of(row.line) + 0.001 * repeat, **options)


def under_distortion(config, error, strength=1.0):
    """A network whose error grows with the strength: by `strength` times itself for each 10."""
    errors = {f"{10 * i}": error * (1 + strength * i) for i in range(5)}
    return distorted(config) | {"errors": errors, "moved": {"0.5": error, "1": error}}


def of_cell(name, line, column):
    return [row.config for row in EXPERIMENTS[name].rows if (row.line, row.column) == (line, column)]


def longer(tested, validated=None):
    """Networks after 60, 120 and 300 epochs: one test and one validation error for each; 0.1 % more in each split."""
    runs, networks = [], []
    for method, errors in tested.items():
        for column, error, seen in zip(columns("longer"), errors, (validated or tested)[method], strict=True):
            for config in of_cell("longer", method, column):
                own = error * (1 + 0.1 * config.split)
                runs.append(result(config, own, val_error=seen))
                networks.append(under_distortion(config, own))
    return runs, networks


def table_1(errors, wobble=0.0):
    """Results of Table 1 on MNIST-Scale, by method; odd splits differ by `wobble` for SS-CNN."""
    for method, error in errors.items():
        for config in of_cell("1", method, "MNIST-Scale"):
            yield result(config, error + 0.001 * config.split + wobble * (method == "SS-CNN") * (config.split % 2))


LONGER = {
    "SS-CNN": (0.02, 0.03, 0.05),
    "Spatial Transformer": (0.01, 0.02, 0.025),
    "LocScaleInv-CNN": (0.04, 0.04, 0.04),
    "Plain CNN": (0.03, 0.05, 0.01),
}
