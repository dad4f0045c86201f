"""Slow, independent ways to get what the baselines compute, from the publications. Nothing here imports scalesteer."""

import math

import numpy as np


def resize(image, size, antialias=False):
    """A 2-D array resized to `size` (rows, columns), pixel by pixel: bilinear, or a triangle as wide as the step."""
    out = np.zeros(size)
    for i in range(size[0]):
        for j in range(size[1]):
            rows = taps((i + 0.5) * image.shape[0] / size[0] - 0.5, image.shape[0], size[0], antialias)
            columns = taps((j + 0.5) * image.shape[1] / size[1] - 0.5, image.shape[1], size[1], antialias)
            out[i, j] = sum(image[a, b] * p * q for a, p in rows for b, q in columns)
    return out


def taps(position, length, new_length, antialias):
    """Which samples a new sample is made of, and with which weights."""
    step = length / new_length
    if antialias and step > 1:
        weights = {k: 1 - abs(k - position) / step for k in range(length) if abs(k - position) < step}
        return [(k, w / sum(weights.values())) for k, w in weights.items()]
    position = min(max(position, 0), length - 1)
    low = min(math.floor(position), length - 2) if length > 1 else 0
    if length == 1:
        return [(0, 1.0)]
    return [(low, low + 1 - position), (low + 1, position - low)]


def pixel(image, i, j, mode):
    """A pixel of a 2-D array that may lie outside."""
    height, width = image.shape
    if 0 <= i < height and 0 <= j < width:
        return image[i, j]
    if mode == "zeros":
        return 0.0
    if mode == "replicate":
        return image[min(max(i, 0), height - 1), min(max(j, 0), width - 1)]
    if mode == "circular":
        return image[i % height, j % width]
    i, j = abs(i), abs(j)  # reflect, at most once a side
    return image[height - 1 - abs(height - 1 - i), width - 1 - abs(width - 1 - j)]


def correlate(images, weight, i, j, dilation, mode):
    """The response of one filter (C, k, k) with its centre on pixel (i, j) of C images, which may lie outside."""
    half = weight.shape[-1] // 2
    return sum(
        weight[c, a, b] * pixel(images[c], i + dilation * (a - half), j + dilation * (b - half), mode)
        for c in range(weight.shape[0])
        for a in range(weight.shape[1])
        for b in range(weight.shape[2])
    )


def responses(x, weight, scales, antialias=False):
    """Resize each image by 1 / s, correlate with "same" zero padding, resize back: (S, B, O, H, W).

    `weight` is (O, C, k, k), or a list of such, one a scale.
    """
    height, width = x.shape[-2:]
    weights = weight if isinstance(weight, list) else [weight] * len(scales)
    out = np.zeros((len(scales), x.shape[0], weights[0].shape[0], height, width))
    for s, (scale, filters) in enumerate(zip(scales, weights, strict=True)):
        size = (round(height / scale), round(width / scale))
        for n in range(x.shape[0]):
            images = [resize(image, size, antialias) for image in x[n]]
            for o in range(filters.shape[0]):
                response = np.zeros(size)
                for i in range(size[0]):
                    for j in range(size[1]):
                        response[i, j] = correlate(images, filters[o], i, j, 1, "zeros")
                out[s, n, o] = resize(response, (height, width), antialias)
    return out


def responses_at_centres(x, weight, scales, stride, padding, dilation, groups, mode):
    """The same for any geometry: the response at scale s is read at the centre of each window of a convolution."""
    size = weight.shape[-1]
    height, width = x.shape[-2:]
    counts = [(n + 2 * padding - dilation * (size - 1) - 1) // stride + 1 for n in (height, width)]
    first = dilation * (size // 2) - padding
    per_in, per_out = x.shape[1] // groups, weight.shape[0] // groups
    out = np.zeros((len(scales), x.shape[0], weight.shape[0], *counts))
    for s, scale in enumerate(scales):
        small = [max(1, round(n / scale)) for n in (height, width)]
        for n in range(x.shape[0]):
            images = [resize(image, small) for image in x[n]]
            for o in range(weight.shape[0]):
                mine = images[(o // per_out) * per_in : (o // per_out + 1) * per_in]
                for p in range(counts[0]):
                    for q in range(counts[1]):
                        centre = [
                            (first + k * stride + 0.5) * m / length - 0.5
                            for k, m, length in zip((p, q), small, (height, width), strict=True)
                        ]
                        if first >= 0:  # no window has its centre outside: the border is clamped, as in resizing
                            centre = [min(max(c, 0), m - 1) for c, m in zip(centre, small, strict=True)]
                        low = [math.floor(c) for c in centre]
                        part = [c - f for c, f in zip(centre, low, strict=True)]
                        out[s, n, o, p, q] = sum(
                            wa * wb * correlate(mine, weight[o], low[0] + a, low[1] + b, dilation, mode)
                            for a, wa in ((0, 1 - part[0]), (1, part[0]))
                            for b, wb in ((0, 1 - part[1]), (1, part[1]))
                            if wa * wb > 0
                        )
    return out


def pool_vectors(field, window, padding):
    """Max-pooling by length of (B, C, 2, H, W), by loops."""
    count = [(n + 2 * padding - window) // window + 1 for n in field.shape[-2:]]
    out = np.zeros((*field.shape[:3], *count))
    for n, c, p, q in np.ndindex(field.shape[0], field.shape[1], *count):
        rows = range(max(0, p * window - padding), min(field.shape[3], (p + 1) * window - padding))
        columns = range(max(0, q * window - padding), min(field.shape[4], (q + 1) * window - padding))
        out[n, c, :, p, q] = max((field[n, c, :, i, j] for i in rows for j in columns), key=lambda v: math.hypot(*v))
    return out


def sample(image, theta):
    """Eq. 1 and 5 of the spatial transformer on a 2-D array: a sum over all pixels for each output pixel."""
    height, width = image.shape
    out = np.zeros_like(image)
    for i, j in np.ndindex(height, width):
        target = np.array([(2 * j + 1) / width - 1, (2 * i + 1) / height - 1, 1])
        x, y = theta @ target
        column, row = ((x + 1) * width - 1) / 2, ((y + 1) * height - 1) / 2
        for n, m in np.ndindex(height, width):
            out[i, j] += image[n, m] * max(0, 1 - abs(column - m)) * max(0, 1 - abs(row - n))
    return out
