"""Icons from the outlines of SVG files, drawn in whole numbers: the same bytes everywhere."""

import re
from functools import cache

import numpy as np
from numpy.typing import NDArray

from scalesteer.datasets.sources import Images
from scalesteer.files import DataError

_SAMPLES = 16  # of a pixel, in each direction
_PIECES = 32  # straight lines in place of a curve
_FINE = 256  # steps in a unit of the outline's coordinates
_ARGUMENTS = {"m": 2, "l": 2, "h": 1, "v": 1, "c": 6, "s": 4, "z": 0}


def draw_icon(svg: str, side: int) -> Images:
    """An SVG file with one path, white on black, as large as fits into a square, and centred there.

    A pixel is as bright as the share of its 16 x 16 sample points that the outline winds around (the rule "nonzero").

    Shape:
        (side, side)

    >>> draw_icon('<svg viewBox="0 0 4 4"><path d="M1 1h2v2h-2z"/></svg>', 4).tolist()[1]
    [0, 255, 255, 0]
    """
    edges, extent = _outline(svg)
    # Distances are multiplied by 2 * 16 * side, so that sample points, too, lie at whole numbers: (2 k + 1) * extent.
    x0, y0, x1, y1 = edges.T * (2 * _SAMPLES * side)
    down = np.where(y1 > y0, 1, -1)
    top, bottom = np.minimum(y0, y1), np.maximum(y0, y1)
    count = _SAMPLES * side
    first, last = (-(-(y - extent) // (2 * extent)) for y in (top, bottom))  # sample rows top <= row < bottom
    first, last = np.clip(first, 0, count), np.clip(last, 0, count)
    crossings = last - first
    edge = np.repeat(np.arange(len(edges)), crossings)
    row = np.arange(len(edge)) - np.repeat(np.cumsum(crossings) - crossings, crossings) + first[edge]
    # Where the edge meets the row, to whole numbers: at most 1 / (2 * 16 * 256 * side) of a unit off.
    away = (2 * row + 1) * extent - y0[edge]
    meets = x0[edge] + away * ((x1 - x0) // (2 * _SAMPLES * side))[edge] // ((y1 - y0) // (2 * _SAMPLES * side))[edge]
    column = np.clip(-(-(meets - extent) // (2 * extent)), 0, count)  # the first sample point to the right
    winding = np.zeros((count, count + 1), np.int32)
    np.add.at(winding, (row, column), down[edge])
    inside = np.cumsum(winding[:, :-1], 1) != 0
    covered = inside.reshape(side, _SAMPLES, side, _SAMPLES).sum((1, 3))
    icon: Images = ((covered * 255 + _SAMPLES**2 // 2) // _SAMPLES**2).astype(np.uint8)
    return icon


@cache
def _outline(svg: str) -> tuple[NDArray[np.int64], int]:
    """Edges (n, 4), x0 y0 x1 y1, in a square of the side that comes back; both in 1/256 of the outline's units."""
    view, path = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg), re.findall(r'<path d="([^"]+)"', svg)
    if view is None or len(path) != 1:
        raise DataError("an icon must be an SVG file with a viewBox from 0 0 and one path.")
    width, height = map(int, view.groups())
    extent = max(width, height) * _FINE
    shift = [(extent - width * _FINE) // 2, (extent - height * _FINE) // 2] * 2
    edges = np.array([edge for edge in _edges(path[0]) if edge[1] != edge[3]], np.int64)
    return edges + shift, extent


def _edges(path: str) -> list[list[int]]:
    """The straight lines of a path, closed; coordinates are decimals of three places at most."""
    tokens = re.findall(r"[A-Za-z]|-?(?:\d+\.?\d*|\.\d+)", path)
    edges: list[list[int]] = []
    here = start = control = (0, 0)  # in thousandths

    def line(point: tuple[int, int]) -> None:
        nonlocal here
        edges.append([_round(value, 1000) for value in (*here, *point)])
        here = point

    command, at = "", 0
    while at < len(tokens):
        if tokens[at].isalpha():
            command, at = tokens[at], at + 1
        kind = command.lower()
        if kind not in _ARGUMENTS:
            raise DataError(f"an icon's path has the command {command!r}; known are {' '.join(_ARGUMENTS)}.")
        values = [round(float(token) * 1000) for token in tokens[at : at + _ARGUMENTS[kind]]]
        at += _ARGUMENTS[kind]
        x, y = here if command.islower() else (0, 0)
        if kind == "z":
            line(start)
        elif kind == "h":
            line((x + values[0], here[1]))
        elif kind == "v":
            line((here[0], y + values[0]))
        else:
            points = [(x + values[i], y + values[i + 1]) for i in range(0, len(values), 2)]
            if kind == "m":
                line(start)  # a figure that is left open is filled as if it were closed
                here = start = points[0]
                command = "l" if command == "m" else "L"
            elif kind == "l":
                line(points[0])
            else:
                mirrored = (2 * here[0] - control[0], 2 * here[1] - control[1])
                corners = [here, *points] if kind == "c" else [here, mirrored, *points]
                control = corners[2]
                _curve(edges, corners)
                here = corners[3]
        if kind not in "cs":
            control = here
    line(start)
    return edges


def _curve(edges: list[list[int]], corners: list[tuple[int, int]]) -> None:
    """Add a cubic Bézier curve as straight lines."""
    last = None
    for t in range(_PIECES + 1):
        u = _PIECES - t
        weights = (u * u * u, 3 * u * u * t, 3 * u * t * t, t * t * t)
        sums = (sum(w * corner[axis] for w, corner in zip(weights, corners, strict=True)) for axis in (0, 1))
        point = [_round(value, 1000 * _PIECES**3) for value in sums]
        if last is not None:
            edges.append([*last, *point])
        last = point


def _round(value: int, unit: int) -> int:
    """A coordinate in 1/256, halves up."""
    return (2 * value * _FINE + unit) // (2 * unit)
