"""Slow, independent ways to get the numbers that the tests compare with. Nothing here imports scalesteer."""

import cmath
import itertools
import math

import numpy as np


def between(angle, other):
    """The angle between two directions, from the turn between their unit vectors."""
    return abs(math.atan2(math.sin(angle - other), math.cos(angle - other)))


TWO_LOBES = (0, math.pi)


def harmonic(x, y, k, phi_j, sigma, beta, m, lobes_at=TWO_LOBES):
    """Eq. 1 at one point, in plain Python; `lobes_at` says at which turns from phi_j lobes are."""
    r = math.sqrt(x * x + y * y)
    if r == 0:
        return 1 + 0j
    phi = math.atan2(y, x)
    lobes = sum(math.exp(-(between(phi, phi_j + turn) ** 2) / (2 * sigma**2)) for turn in lobes_at)
    return lobes * cmath.exp(1j * (k * math.log(r) + beta)) / r**m


def harmonics(x, y, orders, orientations, sigma, beta, m, lobes_at=TWO_LOBES, core=0.0):
    """Eq. 1 on arrays of points away from the origin, or anywhere with a core: (K, J, ...).

    Within the core the angular factor is its harmonic extension into the unit disc, taken at (x, y) / q by Poisson's
    integral: no series is involved.
    """
    q = np.sqrt(x**2 + y**2 + core**2)
    point = (x + 1j * y) / q
    lobes = []
    for phi_j in orientations:
        if core == 0:
            d = np.abs(np.angle(point * np.exp(-1j * phi_j)))
            lobes.append(sum(np.exp(-((d - turn) ** 2) / (2 * sigma**2)) for turn in lobes_at))
            continue
        at = np.arange(2048) * 2 * math.pi / 2048
        edge = sum(
            np.exp(-(np.abs(np.angle(np.exp(1j * (at - phi_j - turn)))) ** 2) / (2 * sigma**2)) for turn in lobes_at
        )
        inside = sum(
            f * (1 - abs(point) ** 2) / abs(np.exp(1j * a) - point) ** 2 for a, f in zip(at, edge, strict=True)
        )
        lobes.append(inside / 2048)
    radial = [q ** (-m + 1j * k) * np.exp(1j * beta) for k in orders]
    return np.stack([[lobe * part for lobe in lobes] for part in radial])


def cell_average(function, x, y, m):
    """The average of function(x, y) -> (..., points) over the unit square around (x, y).

    Away from the origin: Gauss-Legendre in x and y on a subdivided square. At the origin: Gauss-Legendre in the angle
    over each octant and in t = -log(r / R), which turns r^-m into a decaying exponential.
    """
    if (x, y) != (0, 0):
        cells = 6 if math.hypot(x, y) < 3 else 2
        nodes, weights = np.polynomial.legendre.leggauss(20)
        u = np.concatenate([(i + (nodes + 1) / 2) / cells - 0.5 for i in range(cells)])
        w = np.tile(weights / 2 / cells, cells)
        px, py = np.meshgrid(x + u, y + u)
        return (function(px.ravel(), py.ravel()) * np.outer(w, w).ravel()).sum(-1)
    nodes, weights = np.polynomial.legendre.leggauss(24)
    phi = np.concatenate([(i + (nodes + 1) / 2) * math.pi / 8 for i in range(16)])
    w_phi = np.tile(weights * math.pi / 16, 16)
    edge = 0.5 / np.maximum(np.abs(np.cos(phi)), np.abs(np.sin(phi)))
    pieces, depth = 24, 36 / (2 - m)
    t = np.concatenate([(i + (nodes + 1) / 2) * depth / pieces for i in range(pieces)])
    w_t = np.tile(weights * depth / pieces / 2, pieces)
    r = edge[:, None] * np.exp(-t)
    values = function((r * np.cos(phi)[:, None]).ravel(), (r * np.sin(phi)[:, None]).ravel())
    return (values * (w_phi[:, None] * w_t * r**2).ravel()).sum(-1)  # dx dy = r^2 dt dphi


def truncated_average(function, x, y, radius):
    """The average over the unit square around (x, y) of function(x, y) -> (..., points), zero beyond `radius`.

    Gauss-Legendre along columns, between the square's or the circle's edge; then across, between the places where those
    change over, in t of x = a + (b - a) sin(t)^2, which removes the square root where a column touches the circle.
    """
    nodes, weights = np.polynomial.legendre.leggauss(40)
    bounds = {x - 0.5, x + 0.5, *(c for c in (-radius, radius) if abs(c - x) < 0.5)}
    for line in (y - 0.5, y + 0.5):
        half = math.sqrt(max(radius**2 - line**2, 0))
        bounds |= {c for c in (-half, half) if abs(c - x) < 0.5}
    bounds, total = sorted(bounds), 0
    for low, high in itertools.pairwise(bounds):
        t = (nodes + 1) * math.pi / 4
        px, wx = low + (high - low) * np.sin(t) ** 2, weights * math.pi / 4 * (high - low) * np.sin(2 * t)
        reach = np.sqrt(np.maximum(radius**2 - px**2, 0))
        bottom = np.minimum(np.maximum(y - 0.5, -reach), y + 0.5)
        length = np.maximum(np.minimum(y + 0.5, reach) - bottom, 0)
        py = bottom[:, None] + length[:, None] * (nodes + 1) / 2
        area = wx[:, None] * length[:, None] * weights / 2
        total = total + (function(np.repeat(px, 40), py.ravel()) * area.ravel()).sum(-1)
    return total


def convolve(x, filters, stride, padding, dilation, groups, mode, kernel_size):
    """Cross-correlation of (B, C, H, W) with each filter, by loops over output pixels: a list of (B, O, H', W')."""
    modes = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    out = []
    rows = (x.shape[2] + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1
    columns = (x.shape[3] + 2 * padding - dilation * (kernel_size - 1) - 1) // stride + 1
    for w in filters:
        margin = 40 if mode in ("zeros", "replicate") else padding + dilation * max(0, (w.shape[-1] - kernel_size) // 2)
        padded = np.pad(x, ((0, 0), (0, 0), (margin, margin), (margin, margin)), mode=modes[mode])
        result = np.zeros((x.shape[0], w.shape[0], rows, columns))
        per_in, per_out = x.shape[1] // groups, w.shape[0] // groups
        for i in range(rows):
            for j in range(columns):
                for o in range(w.shape[0]):
                    first = (o // per_out) * per_in
                    for a in range(w.shape[2]):
                        for b in range(w.shape[3]):
                            # The centre of window (i, j), then the tap's offset from the centre.
                            row = margin + i * stride - padding + dilation * (kernel_size // 2)
                            column = margin + j * stride - padding + dilation * (kernel_size // 2)
                            row += dilation * (a - w.shape[2] // 2)
                            column += dilation * (b - w.shape[3] // 2)
                            patch = padded[:, first : first + per_in, row, column]
                            result[:, o, i, j] += patch @ w[o, :, a, b]
        out.append(result)
    return out
