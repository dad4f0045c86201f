"""A network applied to images of several sizes side by side, so that batch normalisation sees them as one batch.

Only what surrounds batch normalisation is taken apart. A module without it is called as it is, for one image after the
other. A module with it is traced (:mod:`scalesteer.tracing`), with all modules in it as leaves: what it does between
them is then done for all images before the next module is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments and keywords, for one image


def at_sizes(module: nn.Module, images: Sequence[Tensor]) -> list[Any]:
    """Apply a module to images of several sizes side by side; batch normalisation sees all of them as one batch.

    An `nn.Sequential` is applied layer by layer. A module of another kind is traced by `torch.fx`, unless it says with
    a method `at_sizes(images)` how its parts are applied, which calls this function for each. Whatever holds no batch
    normalisation is applied to one image after the other.

    Args:
        module: Any module.
        images: Batches `(B, C, H, W)` with the same C, or features of such, `(B, C)` or `(B, C, N)`.

    Note:
        A module that cannot be traced is applied to one image after the other, so that batch normalisation in it sees
        each by itself. A warning names the first such layer, once for each `module`.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        >>> [y.shape[-1] for y in at_sizes(net, [torch.rand(4, 1, 8, 8), torch.rand(4, 1, 5, 5)])]
        [6, 3]
    """
    return _apply(module, [((x,), {}) for x in images], _Where(module, ""))


class _Where(NamedTuple):
    """A module's place: the outermost module, and the name of this one in it with a dot behind."""

    outermost: nn.Module
    name: str

    def within(self, name: str) -> _Where:
        return self._replace(name=f"{self.name}{name}.")


def _apply(module: nn.Module, calls: list[Call], where: _Where) -> list[Any]:
    """What `module(*args, **kwargs)` gives for each call, with all calls as one batch for batch normalisation."""
    if len(calls) == 1 or find_batch_layer(module) is None:
        return [module(*args, **kwargs) for args, kwargs in calls]
    images = [args[0] for args, kwargs in calls if len(args) == 1 and not kwargs and isinstance(args[0], Tensor)]
    plain = len(images) == len(calls)
    if plain and hasattr(module, "at_sizes"):
        return list(module.at_sizes(images))  # type: ignore[operator]
    if plain and isinstance(module, _BatchNorm):
        return _normalise(module, images)
    if module._backward_hooks or module._backward_pre_hooks:
        return _apart(module, module, calls, where, "it has hooks for the backward pass")
    run = _layer_by_layer if plain and is_sequential(module) else _part_by_part
    return _with_hooks(module, calls, lambda calls: run(module, calls, where))


def find_batch_layer(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The first layer whose result for an image depends on the others of its batch, and its name."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            found = layer.training or layer.running_mean is None
        else:  # running statistics are of batches, but for those of instance normalisation
            running = any(key.startswith("running_") for key in layer._buffers)
            running = running and not isinstance(layer, _InstanceNorm)
            found = layer.training and (running or hasattr(layer, "at_sizes"))
        if found:
            return name, layer
    return None


def is_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module only applies its parts one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _layer_by_layer(module: nn.Module, calls: list[Call], where: _Where) -> list[Any]:
    for name, layer in module._modules.items():  # not named_children(), which leaves out one that comes twice
        if layer is not None:
            calls = [((y,), {}) for y in _apply(layer, calls, where.within(name))]
    return [args[0] for args, _ in calls]


def _part_by_part(module: nn.Module, calls: list[Call], where: _Where) -> list[Any]:
    """The forward pass of a module that is no `nn.Sequential`."""
    from scalesteer import tracing  # which takes a second

    try:
        if find_batch_layer(module) == ("", module):
            raise tracing.NotTracedError("what it does with a batch is not known")
        trace = tracing.find_trace(module, calls)
    except tracing.NotTracedError as error:
        return _apart(module, module.forward, calls, where, str(error))

    def apply(part: nn.Module, calls: list[Call], name: str) -> list[Any]:
        return _apply(part, calls, where.within(name))

    return trace.run(module, calls, apply)


def _normalise(module: nn.Module, images: list[Tensor]) -> list[Tensor]:
    """Batch normalisation of all pixels of all images, which have any number of axes."""
    first = images[0]
    if (first.ndim == 4 and first.is_cuda) or len({len(x) for x in images}) > 1:
        return _normalise_rows(module, images)
    pixels = [x.flatten(2) if x.ndim > 2 else x[..., None] for x in images]  # (B, C, H W) each
    joined = torch.cat(pixels, dim=2)
    joined = module(joined.view(*joined.shape, *(1,) * (first.ndim - 3))).flatten(2)
    # Copies: the next layer may work in place, which views of one tensor do not allow.
    parts = joined.split([x.shape[2] for x in pixels], dim=2)
    return [part.reshape(x.shape).clone() for part, x in zip(parts, images, strict=True)]


def _normalise_rows(module: nn.Module, images: list[Tensor]) -> list[Tensor]:
    """The same for pixels as rows of channels, of any number of images; the result is laid out so (channels_last).

    A GPU sums rows of pixels with all its processors, but each plane of a channel with only one of them.
    """
    pixels = [x.movedim(1, -1) for x in images]  # (B, H, W, C) each
    joined = torch.cat([x.flatten(0, -2) for x in pixels])
    axes = max(images[0].ndim, 3) - 2
    joined = module(joined.view(1, -1, *(1,) * (axes - 1), joined.shape[1]).movedim(-1, 1))  # (1, C, all pixels, 1)
    rows = joined.movedim(1, -1).flatten(0, -2).split([x.shape[:-1].numel() for x in pixels])
    return [part.unflatten(0, x.shape[:-1]).movedim(-1, 1).clone() for part, x in zip(rows, pixels, strict=True)]


def _with_hooks(module: nn.Module, calls: list[Call], run: Callable[[list[Call]], list[Any]]) -> list[Any]:
    """Run a module that is taken apart, between its own hooks, which are called for each image."""
    for key, before in module._forward_pre_hooks.items():
        for i, (args, kwargs) in enumerate(calls):
            if key in module._forward_pre_hooks_with_kwargs:
                changed: Any = before(module, args, kwargs)
                calls[i] = (args, kwargs) if changed is None else changed
            elif (changed := before(module, args)) is not None:
                calls[i] = (changed if isinstance(changed, tuple) else (changed,)), kwargs
    results = run(calls)
    for key, after in module._forward_hooks.items():
        for i, (args, kwargs) in enumerate(calls):
            inputs = (args, kwargs) if key in module._forward_hooks_with_kwargs else (args,)
            changed = after(module, *inputs, results[i])
            results[i] = results[i] if changed is None else changed
    return results


_warned: WeakSet[nn.Module] = WeakSet()


def _apart(module: nn.Module, function: Callable[..., Any], calls: list[Call], where: _Where, reason: str) -> list[Any]:
    """One call after the other, and a warning of it."""
    results = [function(*args, **kwargs) for args, kwargs in calls]
    if where.outermost in _warned:
        return results
    _warned.add(where.outermost)
    name, layer = find_batch_layer(module) or ("", module)
    warnings.warn(
        f"{(where.name + name).rstrip('.') or 'the network'} ({type(layer).__name__}) sees each channel of"
        f" `ScaleChannels` as a batch of its own in training, because {type(module).__name__} cannot be applied to all"
        f" of them side by side: {reason}. The network gets worse at sizes that training does not show. Give"
        f" {type(module).__name__} a method `at_sizes(images)` (docs/guide/any-size.md), or normalise without the batch"
        " (nn.GroupNorm).",
        stacklevel=2,
    )
    return results
