"""The first filters of a trained network as numbers that a page can steer: coefficients, families, and a table."""

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from scalesteer import harmonics
from scalesteer.app.demo import samples
from scalesteer.averages import angular_series
from scalesteer.basis import LogRadialBasis
from scalesteer.nn import ScaleSteerableConv2d

NAMES = ("paper", "area", "smooth")  # of the families
TABLE_SIDE = 25  # pixels of the table of area averages: the window of a filter of 7 at a scale of 3.5
FINENESS = 4  # fits are made on a grid so many times as fine as the pixels
DIGITS = 8  # significant ones of the largest coefficient


def is_steered(model: nn.Module) -> bool:
    """Whether a network's first layer is one whose filters can be steered."""
    return isinstance(getattr(model, "first", None), ScaleSteerableConv2d)


def filters(model: Any, name: str) -> dict[str, Any]:
    """All that steers the filters of a network's first layer, JSON-ready.

    The coefficients of the family that the network was trained with are its own, and those of the others are fitted
    (:func:`fit`). The `table` has the averages over pixels of the functions of ``"area"``, before they are steered:
    those of a larger filter are among them.

    Args:
        model: A network of :func:`scalesteer.create_model` with such a layer.
        name: What the page calls it.
    """
    layer = model.first
    size, own = layer.geometry.kernel_size, layer.basis
    learned = layer.coefficients.detach().double().sum(1).cpu().numpy()  # of grey pictures: all channels are the same
    families = {key: LogRadialBasis.preset(key) for key in NAMES}
    # Both have the same functions, once at points and once averaged: one set of coefficients is both.
    exact = own in (families["paper"], families["area"])
    area = learned if exact else fit(learned, own, families["area"], size)
    smooth = learned if own == families["smooth"] else fit(area, families["area"], families["smooth"], size)
    table = harmonics.sample(families["area"], TABLE_SIDE)
    digits = samples.pixels("digits")
    return {
        "network": name,
        "kernel_size": size,
        "scales": list(layer.scales),
        "presets": {key: _describe(basis) for key, basis in families.items()},
        "coefficients": {"paper": _to_lists(area), "smooth": _to_lists(smooth)},
        "table": {"side": TABLE_SIDE, "values": _to_base64(np.stack([table.real, table.imag], -1).astype("<f4"))},
        "digits": [
            {"label": label, "side": one.shape[0], "pixels": _to_base64(one)} for label, one in enumerate(digits)
        ],
        "strongest": strongest(area, families["area"], size, digits),
    }


def fit(
    coefficients: NDArray[np.float64], source: LogRadialBasis, target: LogRadialBasis, kernel_size: int
) -> NDArray[np.float64]:
    """The coefficients of another family whose filters are nearest to those of the first at scale 1.

    Least squares of the continuous filters, `(O, K, J, 2)` -> `(O, K', J', 2)`: both are compared on a grid `FINENESS`
    times as fine as the pixels, on which a filter at scale 1 is the one at scale `FINENESS` on pixels (Eq. 3).
    """
    given, wanted = (_columns(basis, kernel_size) for basis in (source, target))
    side = max(given.shape[-1], wanted.shape[-1])
    given, wanted = (_pad(values, side).reshape(len(values), -1) for values in (given, wanted))
    drawn = coefficients.reshape(len(coefficients), -1) @ given  # (O, P)
    found = np.linalg.lstsq(wanted.T, drawn.T, rcond=None)[0]
    return np.asarray(found.T.reshape(-1, *target.shape, 2))


def _columns(basis: LogRadialBasis, kernel_size: int) -> NDArray[np.float64]:
    """The real functions of a family on the fine grid, `(2 K J, n, n)`."""
    # The values of a family at points are those of its averages, but where it is singular.
    smooth = basis if basis.sampling == "area" else replace(basis, sampling="area", centre="one")
    values = harmonics.steered_basis(smooth, kernel_size, float(FINENESS))
    return values.reshape(-1, *values.shape[-2:])


def _pad(values: NDArray[np.float64], side: int) -> NDArray[np.float64]:
    border = (side - values.shape[-1]) // 2
    return np.pad(values, ((0, 0), (border, border), (border, border)))


def strongest(
    coefficients: NDArray[np.float64], basis: LogRadialBasis, kernel_size: int, digits: NDArray[np.uint8]
) -> list[int]:
    """The numbers of all filters, from the one that answers to these digits most to the one that does least.

    The answer is the root mean square over all pixels, of the filter at scale 1 with unit energy.
    """
    functions = harmonics.steered_basis(basis, kernel_size, 1.0)
    windows = coefficients.reshape(len(coefficients), -1) @ functions.reshape(-1, functions.shape[-1] ** 2)
    windows /= np.linalg.norm(windows, axis=1, keepdims=True).clip(1e-12)
    images = torch.from_numpy(digits).double()[:, None]
    weights = torch.from_numpy(windows).view(len(windows), 1, *functions.shape[-2:])
    energy = nn.functional.conv2d(images, weights, padding=kernel_size // 2).square().mean((0, 2, 3))
    return [int(number) for number in energy.argsort(descending=True, stable=True)]


def _describe(basis: LogRadialBasis) -> dict[str, Any]:
    """All that defines a family, with what is computed of it: frequencies and, with a core, the angular series."""
    told = {
        key: getattr(basis, key) for key in ("sigma", "beta", "m", "lobes", "core", "sampling", "support", "centre")
    }
    series = angular_series(basis.sigma, basis.lobes).tolist() if basis.core > 0 else None
    return {
        "orders": basis.frequencies.tolist(),
        "orientations": list(basis.orientations),
        **told,
        "series": series,
    }


def _to_lists(coefficients: NDArray[np.float64]) -> Any:
    digits = DIGITS - int(np.floor(np.log10(np.abs(coefficients).max() + 1e-300)))
    return np.round(coefficients, digits).tolist()


def _to_base64(values: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
