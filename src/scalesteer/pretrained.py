"""Networks as folders: what they are in config.json, their weights in model.safetensors, and a card, README.md.

Nothing in such a folder can run code, and what it claims is checked before memory is taken for it.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalesteer import _checks, files
from scalesteer._text import in_markdown, printable
from scalesteer.channels import ScaleChannels
from scalesteer.group import ScaleGroupConv2d
from scalesteer.models import count_parameters, create_model, list_models, network_of
from scalesteer.models.network import FITS, GROUNDS, LONGEST_NAME, Network, Task
from scalesteer.models.registered import BUILDERS
from scalesteer.models.scaled import ScaledNetwork, arguments_of

FORMAT = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
SHIPPED = Path(__file__).with_name("weights")
# What a folder or a run may ask for. Its network is built to be compared with its weights: it must not take all memory.
LARGEST_CONFIG = 1 << 20
MOST_VALUES = 32
LARGEST = {
    "kernel_size": 31, "scales": 16, "channels": 16, "border": 256, "widths": 2048, "blocks": 64,
}  # fmt: skip
LARGEST_NUMBER = 1 << 20
LARGEST_BASIS = 1 << 20  # functions times pixels of their windows
MOST_MEMORY = 8 << 30  # bytes for one image, as :func:`check_memory` estimates them
HOW_TO_NAME_IT = (
    "call register_model(name, builder) first, with the builder that made it; on the command line give --network, if"
    " you trust its code."
)


class PretrainedError(ValueError):
    """A folder that holds no network, or not the one that it claims."""


def save_pretrained(
    model: nn.Module, folder: str | Path, *, card: str = "", half: bool = False, run: Mapping[str, Any] | None = None
) -> Path:
    """Write a network of :func:`scalesteer.create_model` to a folder, which :func:`from_pretrained` reads.

    A network of your own is one of them when its builder is known (:func:`scalesteer.register_model`).

    Args:
        model: The network, also one inside `ScaleChannels`, in float32.
        folder: Made if it is not there; an earlier network in it is replaced.
        card: What a reader should know, as Markdown: data, command, commit, errors. It becomes part of README.md.
        half: Keep weights in half precision: half the bytes, about three digits. Vectors (biases, statistics) stay as
            they are.
        run: The configuration of the training, to be kept in config.json.

    Returns:
        The folder.

    Raises:
        TypeError: If the model is not one of `create_model`, or not as it made it, as after `fold`.
        ValueError: If weights are not finite, or the folder holds files of something else.

    Example:
        >>> import tempfile
        >>> model = create_model("pooled-cnn", channels=(0.5, 1.0)).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     other = from_pretrained(save_pretrained(model, folder))
        >>> x = torch.rand(2, 1, 28, 28)
        >>> torch.equal(other(x), model(x))
        True
    """
    check_folder(folder)
    arguments, tensors = _describe(model), model.state_dict()
    if half:
        # Variances may lie beyond half precision, and all vectors together are small.
        tensors = {name: t.half() if t.ndim > 1 and t.is_floating_point() else t for name, t in tensors.items()}
    if wrong := ", ".join(name for name, t in tensors.items() if not bool(t.isfinite().all())):
        raise ValueError(f"`model` has weights that are not finite{' in half precision' if half else ''}: {wrong}.")
    task, parameters = network_of(model).task, count_parameters(model)
    return write_network(Path(folder), arguments, task, tensors, parameters, card=card, run=run)


def check_folder(folder: str | Path) -> None:
    """Raise a ValueError if a network cannot be written to a folder, since something else is there."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`folder` {folder} is a file: choose another name.")
    if os.path.lexists(folder / CONFIG) and not is_pretrained(folder):
        raise ValueError(f"`folder` {folder} holds the {CONFIG} of something else: choose another one.")


def write_network(
    folder: Path,
    arguments: Mapping[str, Any],
    task: Task,
    tensors: Mapping[str, Tensor],
    parameters: int,
    *,
    card: str = "",
    run: Mapping[str, Any] | None = None,
) -> Path:
    """Write a network by its parts: arguments of `create_model`, task, state dict, and how many numbers are learned."""
    weights = files.encode(tensors, {})
    digests = {name: files.tensor_digest(tensor.detach().cpu()) for name, tensor in tensors.items()}
    config = {"format": FORMAT, "arguments": dict(arguments), "task": task._asdict()}
    config |= {"weights": files.combined_digest(digests)} | ({} if run is None else {"run": dict(run)})
    text = json.dumps(config, indent=1, allow_nan=False) + "\n"
    written = json.loads(text)
    _check_config(written)  # what is written can be read
    read_task(written["task"])
    folder.mkdir(parents=True, exist_ok=True)
    about = _card(arguments, task, parameters, folder, card)
    for name, content in ((WEIGHTS, weights), (CONFIG, text.encode()), (CARD, about.encode())):
        files.write_atomically(folder / name, content)
    return folder


def from_pretrained(source: str | Path, **hub: Any) -> Network | ScaledNetwork:
    """Read a network, in evaluation mode on the CPU.

    Args:
        source: A folder that :func:`save_pretrained` wrote; or the name of a network that comes with this package
            (:func:`list_pretrained`); or, with the extra `hub`, the name of one on the Hugging Face Hub, "user/name".
        hub: For the Hub: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

    Raises:
        PretrainedError: If there is no network, or the files are damaged, of a newer version, or do not fit each
            other: missing or unknown tensors, other shapes, numbers that are not finite.
    """
    folder = _find(source)
    if folder is None:
        return _from_hub(os.fspath(source), hub)
    if hub:
        raise TypeError(f"{', '.join(hub)} are for networks on the Hub ({source} is a folder).")
    config = read_config(folder)
    path, arguments = folder / WEIGHTS, config["arguments"]
    if arguments["name"] not in list_models():
        raise PretrainedError(
            f"{folder / CONFIG} names a network {arguments['name']!r:.100} that is not known here: {HOW_TO_NAME_IT}"
        )
    try:
        model = _shapes_of(arguments)
        check_memory(model)
    except (TypeError, ValueError) as error:
        raise PretrainedError(f"{folder / CONFIG} names a network that cannot be: {error}") from error
    expected = model.state_dict()
    try:
        if path.stat().st_size > files.LARGEST_HEADER + sum(t.nbytes for t in expected.values()):
            raise PretrainedError(f"{path} is larger than the network that {CONFIG} describes.")
        tensors, meta = files.read(path)
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read: {error.strerror}.") from error
    except files.DataError as error:
        raise PretrainedError(str(error)) from error
    if meta["digest"] != config["weights"]:
        raise PretrainedError(f"{path} holds other weights than {CONFIG} describes: copy both files again.")
    tensors = {
        name: t.float() if t.dtype == torch.float16 and name in expected and expected[name].ndim > 1 else t
        for name, t in tensors.items()
    }
    if wrong := misfits(expected, tensors):
        raise PretrainedError(f"{path} does not fit the network: {'; '.join(wrong)}.")
    task = _check_task(config, network_of(model).task, folder / CONFIG)
    model = _create(arguments)
    model.load_state_dict(tensors)
    network_of(model).task = task
    return model.eval()


def list_pretrained() -> list[str]:
    """The names of the networks that come with this package, in the order of the alphabet."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


def push_to_hub(model: nn.Module, name: str, *, card: str = "", half: bool = False, **hub: Any) -> str:
    """Put what :func:`save_pretrained` writes on the Hugging Face Hub, as "user/name"; needs the extra `hub`.

    Args:
        model: As in :func:`save_pretrained`, like `card` and `half`.
        name: "user/name"; the repository is made if it is not there.
        hub: `private`, `token`, `commit_message`, `branch`, `create_pr`.

    Returns:
        The address of the commit.
    """
    _describe(model)  # told before a repository is made
    private, branch = hub.pop("private", None), hub.pop("branch", None)
    api = files.require("huggingface_hub").HfApi(token=hub.pop("token", None))
    repository = api.create_repo(name, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as place:
        folder = save_pretrained(model, Path(place) / Path(name).name, card=card, half=half)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, revision=branch, **hub))


def is_pretrained(source: str | Path) -> bool:
    """Whether this names a network of this package or is a folder with one, rather than a run's."""
    folder = Path(source)
    if not folder.is_dir():
        return str(source) in list_pretrained()
    try:
        return "arguments" in _read_json(folder / CONFIG)
    except (OSError, PretrainedError):
        return False


def read_config(source: str | Path) -> dict[str, Any]:
    """The content of a network's config.json, checked."""
    folder = _find(source)
    if folder is None:
        raise PretrainedError(f"{source} is not a folder.")
    path = folder / CONFIG
    try:
        config = _read_json(path)
        if "arguments" not in config and config.keys() & {"network", "model"}:
            raise PretrainedError(f"{folder} is the directory of a run: its network is in {folder / 'model'}.")
        _check_config(config)
    except OSError as error:
        raise PretrainedError(f"{folder} holds no network: {CONFIG} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise error if isinstance(error, PretrainedError) else PretrainedError(f"{path}: {error}") from error
    return config


def check_memory(model: nn.Module) -> None:
    """Raise a ValueError if one image of a network's task would take more than `MOST_MEMORY`.

    The estimate is the maps of the widest layer in all channels of scale, or four copies of the image if they are more.
    Measured were 0.8 to 2.5 times as many bytes.
    """
    network: Any = network_of(model)
    if not isinstance(network, Network):  # the builder that was registered knows what it makes
        return
    size, told = network.task.image_size, network.arguments
    if size is None:
        return
    pixels = model.pixels(*size) if isinstance(model, ScaleChannels) else math.prod(size)
    # Behind the features there are fewer places: one of `stride` by `stride` pixels, or one in all.
    scores = max(network.task.num_classes, told["hidden"]) / getattr(network, "stride", math.inf) ** 2
    maps = len(told["scales"]) if isinstance(network.first, ScaleGroupConv2d) else 1  # of each channel
    floats = max(*(maps * width for width in told["widths"]), scores, 4 * network.in_chans)
    bytes_needed = 4 * pixels * told.get("upsample", 1) ** 2 * floats
    if bytes_needed > MOST_MEMORY:
        shown = f"{size[0]:,} x {size[1]:,} pixels"
        raise ValueError(
            f"`image_size`, `channels` and `widths` must be smaller: for one image of {shown} it would take about "
            f"{bytes_needed / 2**30:,.0f} GiB of memory, and the limit is {MOST_MEMORY >> 30} GiB."
        )


def misfits(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """What is missing, unexpected, of another shape or type than expected, or not finite."""
    wrong = [f"missing {name}" for name in expected if name not in tensors]
    wrong += [f"unexpected {name}" for name in tensors if name not in expected]
    for name in expected.keys() & tensors.keys():
        own, other = expected[name], tensors[name]
        if own.shape != other.shape:
            wrong.append(f"{name} is {tuple(other.shape)}, not {tuple(own.shape)}")
        elif own.dtype != other.dtype:
            wrong.append(f"{name} is {other.dtype}, not {own.dtype}")
        elif other.is_floating_point() and not bool(torch.isfinite(other).all()):
            wrong.append(f"{name} has values that are not finite")
    return sorted(wrong)


def _find(source: str | Path) -> Path | None:
    """The folder that is meant; None if it is on the Hub."""
    name, folder = os.fspath(source), Path(source)
    if folder.is_dir():
        return folder
    if name in list_pretrained():
        return SHIPPED / name
    if isinstance(source, str) and name.count("/") == 1 and not name.startswith((".", "/", "~")) and name[-1] != "/":
        return None
    known = ", ".join(list_pretrained()) or "none"
    raise PretrainedError(
        f"no network is found at {name}: give a folder, 'user/name' on the Hub, or a name of this package ({known})."
    )


def _from_hub(name: str, options: dict[str, Any]) -> Network | ScaledNetwork:
    library = files.require("huggingface_hub")
    try:
        return from_pretrained(Path(library.snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS], **options)))
    except PretrainedError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise PretrainedError(f"{name} is no folder, and cannot be read from the Hub: {error}") from error


def _describe(model: nn.Module) -> dict[str, Any]:
    """The arguments that make this network again, after a check that they do."""
    network, arguments = network_of(model), arguments_of(model)
    same = network_of(_shapes_of(arguments))
    expected, own = same.state_dict(), network.state_dict()
    shapes = {name: (t.shape, t.dtype) for name, t in own.items()}
    if str(network) != str(same) or shapes != {name: (t.shape, t.dtype) for name, t in expected.items()}:
        raise TypeError(
            "`model` is not as create_model made it, in float32, so that its arguments do not make it again: save it"
            " before it is folded, converted or otherwise changed."
        )
    return arguments


def _shapes_of(arguments: Mapping[str, Any]) -> Network | ScaledNetwork:
    """The network of these arguments, without memory for its weights: no memory may hold it."""
    try:
        with torch.device("meta"):
            return _create(arguments)
    except Exception:  # a builder of one's own may compute with what it makes
        if arguments["name"] not in BUILDERS:
            raise
        with torch.random.fork_rng(devices=[]):
            return _create(arguments)


def _create(arguments: Mapping[str, Any]) -> Network | ScaledNetwork:
    return create_model(**arguments)  # type: ignore[no-any-return]


def _read_json(path: Path) -> dict[str, Any]:
    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    try:
        config = json.loads(files.read_small(path, LARGEST_CONFIG), parse_constant=refuse)
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError) as error:
        raise PretrainedError(f"{path} is damaged: {str(error).rstrip('.')}.") from error
    return config


def _check_config(config: dict[str, Any]) -> None:
    """Raise a ValueError unless config.json says what it must, within limits."""
    version = config.get("format")
    if type(version) is not int or version < 1:
        raise ValueError(f"`format` must be {FORMAT} (got {version!r}).")
    if version > FORMAT:
        raise ValueError(
            f"it has format {version}, of a newer version of scalesteer, and this one reads {FORMAT}: upgrade."
        )
    kinds = {"format": int, "arguments": dict, "task": dict, "weights": str, "run": dict}
    if unknown := config.keys() - kinds:
        raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}.")
    for key, kind in kinds.items():
        if not isinstance(config.get(key, {} if key == "run" else None), kind):
            raise ValueError(f"`{key}` must be there, as {kind.__name__} (got {config.get(key)!r:.100}).")
    arguments = config["arguments"]
    if not isinstance(arguments.get("name"), str) or "dataset" in arguments:
        raise ValueError("`arguments` must have the `name` of the network, and no `dataset`.")
    basis, calibration = (found if isinstance(found := arguments.get(key), dict) else {}
                          for key in ("basis", "calibration"))  # fmt: skip
    for key, value in {**arguments, "basis": "", "calibration": "", **basis, **calibration}.items():
        parts, limit = value if isinstance(value, list) else [value], LARGEST.get(key, LARGEST_NUMBER)
        if len(parts) > MOST_VALUES or not all(isinstance(part, (str, int, float)) for part in parts):
            raise ValueError(f"`{key}` must be a word, a number or up to {MOST_VALUES} of them (got {value!r:.100}).")
        if not all(abs(number) <= limit for number in _numbers(value)):
            raise ValueError(f"`{key}` must be at most {limit:,} (got {value!r:.100}).")
    orders, orientations = basis.get("orders", [1] * 3), basis.get("orientations", [1] * 8)
    functions = len(_numbers(orders)) * len(_numbers(orientations))
    side = max(_numbers(arguments.get("kernel_size", 7)), default=7)
    if functions * sum((side * scale) ** 2 for scale in _numbers(arguments.get("scales", 1))) > LARGEST_BASIS:
        raise ValueError(
            "`basis` and `scales` must be of fewer functions and smaller windows: memory would not suffice."
        )


def _numbers(value: Any) -> list[float]:
    return [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, (int, float))]


def read_task(told: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> Task:
    """The task that a file tells of; a TypeError or ValueError if there is no such task."""
    task = Task(**told)
    size = None if task.image_size is None else _checks.pair("image_size", task.image_size, minimum=1)
    ends = None if task.value_range is None else _checks.interval("value_range", task.value_range)
    shares = None if task.percentiles is None else _checks.interval("percentiles", task.percentiles)
    planes = None if task.planes is None else _checks.planes("planes", task.planes)
    task = task._replace(image_size=size, classes=tuple(task.classes), value_range=ends, percentiles=shares)
    objects = None if task.object_sizes is None else _checks.reals("object_sizes", task.object_sizes)
    if objects is not None and not (len(objects) == 2 and 0 < objects[0] <= objects[1]):
        raise ValueError(f"`object_sizes` must be two positive numbers, the smaller one first (got {objects})")
    task = task._replace(planes=planes, object_sizes=objects)
    for name in ("scale", "object_size", "pixel_size"):
        if getattr(task, name) is not None and not _checks.real(name, getattr(task, name)) > 0:
            raise ValueError(f"`{name}` must be positive (got {getattr(task, name)})")
    names = {name for name in task.classes if isinstance(name, str) and 0 < len(name) <= LONGEST_NAME}
    if len(names) not in (0, task.num_classes) or len(names) != len(task.classes):
        raise ValueError(f"`classes` must be {task.num_classes} different names, or none")
    _checks.choice("fit", task.fit, FITS)
    _checks.choice("ground", task.ground, GROUNDS)
    if "ground" not in told:  # earlier files leave it to be guessed
        own = task.classes and (run is None or run.get("images") is not None)
        if own or size is None:
            return task._replace(ground="surroundings")
        return task._replace(ground="surroundings", fit="resize") if task.in_chans > 1 else task
    return task


def _check_task(config: dict[str, Any], own: Task, path: Path) -> Task:
    """The task that config.json tells of, if it is one for this network."""
    try:
        task = read_task(config["task"], config.get("run"))
        if task[:3] != own[:3]:
            raise ValueError(f"its channels, classes and image size are {task[:3]}, those of the network {own[:3]}")
    except (TypeError, ValueError) as error:
        raise PretrainedError(f"{path}: `task` does not fit: {error}.") from error
    return task


def _card(arguments: Mapping[str, Any], task: Task, parameters: int, folder: Path, text: str) -> str:
    pixels = "any size" if task.image_size is None else f"{task.image_size[0]} x {task.image_size[1]} pixels"
    classes = f" ({', '.join(map(in_markdown, task.classes))})" if task.classes else ""
    kind = "one channel" if task.in_chans == 1 else f"{task.in_chans} channels"
    sizes = ", ".join(f"{scale:g}" for scale in arguments.get("channels", ()))
    name = json.dumps(printable(folder.name), ensure_ascii=False)
    looks = f" It looks at each image at {len(arguments['channels'])} sizes ({sizes})." if sizes else ""
    return (
        f"""---
library_name: scalesteer
pipeline_tag: image-classification
---

# {in_markdown(folder.name)}

A network of scalesteer, `{arguments["name"]}`, for images of {pixels} with {kind}; {task.num_classes} classes{classes};
{parameters:,} parameters.{looks}

```python
import scalesteer

model = scalesteer.from_pretrained({name})  # or the path of this folder
logits = model(images)  # (B, {task.in_chans}, H, W), from 0 to 1
```

{text.strip()}
""".rstrip()
        + "\n"
    )
