"""A module's own lines as a graph, with the modules in it as leaves: `torch.fx`, where that is known to be safe.

A trace is a program without branches. A module is refused whose forward pass decides by its input, draws numbers,
changes its own attributes, or uses modes such as `torch.no_grad` in its own lines. It is traced anew when its
attributes have changed.

To import this loads torch's compiler, which takes a second: :mod:`scalesteer.joint` does it when it has to trace.
"""

from __future__ import annotations

import builtins
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments and keywords
MOST_TRACES = 8  # of a module, that are kept
Apply = Callable[[nn.Module, list[Call], str], list[Any]]  # a module, what it is called with, and its name
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class NotTracedError(Exception):
    """Why a module cannot be taken apart."""


Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """A function that torch's compiler leaves alone, with all that it calls."""
    reason = (
        "a network with batch normalisation is taken apart by torch.fx: compile it without `fullgraph`, or give it a"
        " method `at_sizes(images)` (docs/guide/any-size.md)"
    )
    return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return]


_CHECKPOINT = "_checkpoint_without_reentrant_generator"  # stops once for the forward pass


class _Value(fx.Proxy):
    """What stands for a value while a module is traced."""

    tracer: _Tracer

    def __getattr__(self, k: str) -> Any:
        """Where a value lies is known while it is traced, unless the module is spread over devices."""
        if k in ("device", "is_cuda", "get_device") and (sample := self.tracer.sample) is not None:
            return getattr(sample, k)
        return super().__getattr__(k)


@contextmanager
def _values_for_tensors() -> Iterator[None]:
    """While a module is traced, values pass for tensors where networks ask in Python; torch must not take them for it.

    What a network would compute again in the backward pass (`torch.utils.checkpoint`) is traced as if it would not.
    """
    tensor, ask = torch.empty(0), builtins.isinstance

    def isinstance(value: Any, kinds: Any, /) -> bool:
        return ask(value, kinds) or (type(value) is _Value and ask(tensor, kinds))

    def without_saving(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    saving = getattr(torch.utils.checkpoint, _CHECKPOINT)
    builtins.isinstance = isinstance
    setattr(torch.utils.checkpoint, _CHECKPOINT, without_saving)
    try:
        yield
    finally:
        builtins.isinstance = ask
        setattr(torch.utils.checkpoint, _CHECKPOINT, saving)


class _Root(nn.Module):
    """The forward pass of a module as a function of one list: the arguments that are tensors or differ."""

    def __init__(self, module: nn.Module, rebuild: Callable[[Any], Call]) -> None:
        super().__init__()
        self.module, self.rebuild = module, rebuild

    def forward(self, values: Any) -> Any:
        args, kwargs = self.rebuild(values)
        return self.module.forward(*args, **kwargs)


class _Tracer(fx.Tracer):
    """Records a module's own lines; the modules in it are leaves."""

    proxy_buffer_attributes = True

    def __init__(self, sample: Tensor | None) -> None:
        super().__init__()
        self.modes, self.thread, self.sample = _modes(), threading.get_ident(), sample

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    # Tracing replaces functions of `nn.Module` for all threads. The others are to notice nothing.
    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise NotTracedError(
                "its forward pass uses torch.no_grad, autocast or a function with a gradient of its own"
            )
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Tensor):
            raise NotTracedError(
                "its forward pass uses a tensor that is no parameter, no buffer and not made of its input"
            )
        return super().create_arg(a)


class Trace:
    """A module's own lines, as a graph."""

    def __init__(self, graph: fx.Graph, variable: Sequence[int]) -> None:
        self.nodes, self.variable = list(graph.nodes), variable
        last = {used: node for node in self.nodes for used in node.all_input_nodes}
        self.dead: dict[fx.Node, list[fx.Node]] = {}  # values that are not needed after a node
        for used, node in last.items():
            self.dead.setdefault(node, []).append(used)

    @not_compiled
    def run(self, module: nn.Module, calls: list[Call], apply: Apply) -> list[Any]:
        """The results for all calls; `module` is the one that was traced, and `apply` is for the modules in it."""
        count, values = len(calls), dict[fx.Node, list[Any]]()
        for node in self.nodes:
            if node.op == "placeholder":
                leaves = [pytree.tree_leaves(call) for call in calls]
                values[node] = [[own[k] for k in self.variable] for own in leaves]
                continue
            each = [_fill((node.args, node.kwargs), values, i) for i in range(count)]
            if node.op == "output":
                return [args[0] for args, _ in each]
            if node.op == "get_attr":
                values[node] = [_attribute(module, str(node.target))] * count
            elif node.op == "call_module":
                name = str(node.target).removeprefix("module.")
                values[node] = apply(module.get_submodule(name), each, name)
            elif callable(node.target):
                values[node] = [node.target(*args, **kwargs) for args, kwargs in each]
            else:
                values[node] = [getattr(args[0], node.target)(*args[1:], **kwargs) for args, kwargs in each]
            for dead in self.dead.get(node, ()):
                del values[dead]
        raise NotTracedError("its trace has no end")


def _attribute(module: nn.Module, name: str) -> Any:
    owner, _, last = name.removeprefix("module.").rpartition(".")
    return getattr(module.get_submodule(owner), last)


def _fill(argument: Any, values: dict[fx.Node, list[Any]], i: int) -> Any:
    """An argument of a node with the values of image i in it, and containers that a function may change."""
    if isinstance(argument, fx.Node):
        return values[argument][i]
    if isinstance(argument, tuple):
        parts = [_fill(part, values, i) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    if isinstance(argument, list):
        return [_fill(part, values, i) for part in argument]
    if isinstance(argument, dict):
        return {key: _fill(part, values, i) for key, part in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_fill(part, values, i) for part in (argument.start, argument.stop, argument.step)))
    return argument


_traces: WeakKeyDictionary[nn.Module, dict[Any, Trace | NotTracedError]] = WeakKeyDictionary()
_tracing = threading.RLock()


@not_compiled
def find_trace(module: nn.Module, calls: list[Call]) -> Trace:
    """The trace of a module for such calls, as its attributes are now; made once."""
    flat = [pytree.tree_flatten(call) for call in calls]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise NotTracedError("it is called with arguments of another kind for each size")
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    variable = [k for k, column in enumerate(columns) if not all(_same(column[0], other) for other in column)]
    fixed = [(k, type(column[0]), column[0]) for k, column in enumerate(columns) if k not in variable]
    key = (_state(module), _modes(), structure, *fixed)
    with _tracing:
        known = _traces.setdefault(module, {})
        found = known.get(key)
        if found is None:
            try:
                found = _make_trace(module, structure, flat[0][0], variable)
            except NotTracedError as error:
                found = error
            known[key] = found
            if len(known) > MOST_TRACES:
                del known[next(iter(known))]
    if isinstance(found, NotTracedError):
        raise found
    return found


def _same(first: Any, other: Any) -> bool:
    """Whether an argument is the same plain value in two calls, so that it can be part of a trace."""
    return isinstance(first, PLAIN) and type(first) is type(other) and bool(first == other)


def _make_trace(module: nn.Module, structure: Any, leaves: list[Any], variable: list[int]) -> Trace:
    if "parallel" in type(module).__module__:
        raise NotTracedError("it is a wrapper for training on several devices: wrap `ScaleChannels` in it instead")

    def rebuild(values: Any) -> Any:
        filled = [values[variable.index(k)] if k in variable else leaf for k, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(filled, structure)

    before, numbers = _state(module), _random_state()
    tensors = [leaf for leaf in (*leaves, *module.parameters(), *module.buffers()) if isinstance(leaf, Tensor)]
    places = {tensor.device for tensor in tensors}
    tracer = _Tracer(torch.empty(0, device=places.pop()) if len(places) == 1 else None)
    try:
        with _values_for_tensors():
            graph = tracer.trace(_Root(module, rebuild))
    except NotTracedError:
        raise
    except Exception as error:  # whatever a network does with what is no tensor
        raise NotTracedError(f"torch.fx cannot trace it ({' '.join(str(error).split())[:200]})") from error
    finally:
        drawn = _random_state() != numbers
        if drawn:
            _set_random_state(numbers)
    if drawn or _state(module) != before:
        raise NotTracedError("its forward pass draws numbers or changes its attributes")
    return Trace(graph, variable)


def _modes() -> tuple[Any, ...]:
    """Modes of torch that change what an operation does."""
    devices = "cpu", torch.accelerator.current_accelerator(check_available=False) or torch.device("cpu")
    kinds = [str(device).partition(":")[0] for device in devices]
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casts


def _state(module: nn.Module) -> tuple[Any, ...]:
    """What a trace depends on beside its input, as far as one can see: plain attributes, and the modules within."""
    own = []
    for name, value in vars(module).items():
        count = len(value) if isinstance(value, (list, dict, set)) else 0
        own.append((name, value if isinstance(value, PLAIN) else (id(value), count)))
    return (*own, *map(id, module.modules()))


def _random_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), state[0], state[1].tobytes(), *state[2:]


def _set_random_state(state: tuple[Any, ...]) -> None:
    ours, python, kind, keys, *rest = state
    torch.set_rng_state(torch.frombuffer(bytearray(ours), dtype=torch.uint8))
    random.setstate(python)
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002
