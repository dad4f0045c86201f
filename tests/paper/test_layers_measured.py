"""Numbers of first layers are what they say they are."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paper import layers
from scalesteer.baselines import LocallyScaleInvariantConv2d
from scalesteer.datasets import ImageSet
from scalesteer.testing import two_blobs


def test_scale_tracking_reports_what_won_for_each_image(needed):
    images, scales = torch.zeros(2, 28, 28, dtype=torch.uint8), torch.tensor([[0.4, 0.6], [1.0, 0.8]])
    images[:, 12:16, 10:18] = 255
    images[1, 8:20, 4:24] = 255
    sizes, means = layers.scale_tracking(needed["ss"], ImageSet(images, torch.zeros(2, dtype=torch.int64), scales))
    assert sizes == pytest.approx([0.5, 0.9])
    with pytest.raises(ValueError, match="the first layer of `model` must have scales"):
        layers.scale_tracking(needed["plain"], ImageSet(images, torch.zeros(2, dtype=torch.int64), scales))
    for i, mean in enumerate(means):
        response, winner = layers.winning_scales(needed["ss"], images[i, None, None].float() / 255)
        won = torch.tensor(needed["ss"].first.scales)[winner[response > 0.25 * response.max()]]
        assert mean == pytest.approx(float(won.log().mean().exp()), rel=1e-5)


def test_centrality_of_filters_whose_mass_is_known():
    corner, centre, even = np.zeros((7, 7)), np.zeros((7, 7)), np.ones((7, 7))
    corner[0, 0], centre[3, 3] = -2.0, 5.0
    offset, share = layers.centrality(np.stack([corner, centre, even]))
    assert offset == pytest.approx([math.hypot(3, 3) / 3.5, 0, 0])
    assert share == pytest.approx([0, 1, 9 / 49])  # radius 1.75: the middle 3 x 3


def test_steered_filters_are_central_and_others_need_not_be(needed):
    offset, share = layers.centrality(layers.unit_filters(needed["ss"].first))
    assert offset == pytest.approx(0, abs=1e-6)
    other, _ = layers.centrality(layers.unit_filters(needed["lsi"].first))
    assert (other > 1e-3).all()
    assert ((share >= 0) & (share <= 1)).all()


def test_entanglement_is_the_move_that_an_enlarged_filter_makes():
    layer = nn.Conv2d(1, 2, 7, bias=False)
    ticks = torch.arange(7.0) - 3
    blob = [torch.exp(-((ticks[None] - x) ** 2 + ticks[:, None] ** 2)) for x in (0, 2)]
    with torch.no_grad():
        layer.weight.copy_(torch.stack(blob)[:, None])
    move, gain = layers.entanglement(layer, 2.0)
    assert move == pytest.approx([0, 2 / 3.5])  # a blob at 2 is at 4 when enlarged by 2
    assert gain[0] == pytest.approx(0, abs=1e-9)
    assert gain[1] > 0.1


def test_entanglement_agrees_with_a_loop_over_moves(needed):
    layer, scale = needed["lsi"].first, 1.6
    move, gain = layers.entanglement(layer, scale)
    first, second = (layers.enlarged(layer, s).numpy() for s in (1.0, scale))
    reach, half = second.shape[-1] // 2, first.shape[-1] // 2
    for channel in range(len(first)):
        wide = np.pad(second[channel], 2 * half + reach)
        centre = len(wide) // 2
        cosine = {}
        for down in range(-reach, reach + 1):
            for right in range(-reach, reach + 1):
                rows = slice(centre + down - half, centre + down + half + 1)
                columns = slice(centre + right - half, centre + right + half + 1)
                norm = np.linalg.norm(first[channel]) * np.linalg.norm(second[channel])
                cosine[down, right] = (first[channel] * wide[rows, columns]).sum() / norm
        best = max(cosine, key=cosine.get)
        assert move[channel] == pytest.approx(math.hypot(*best) / (first.shape[-1] / 2))
        assert gain[channel] == pytest.approx(cosine[best] - cosine[0, 0])


def test_nothing_is_lost_without_scaling_and_something_with_it():
    for layer in layers.resizing_layers(4).values():
        assert layers.resizing_error(layer, 1.0) < 1e-12
        assert layers.resizing_error(layer, 1.5) > 1e-2


def test_the_reference_of_the_resizing_error_is_the_filter_on_the_original_image():
    # A constant image has no scale: both methods give the sum of the filter's taps times the area they stand for.
    layer = LocallyScaleInvariantConv2d(1, 3, scales=(1.0,), dtype=torch.float64)
    assert layers.resizing_error(layer, 1.7, image=lambda x, y: torch.ones_like(x * y)) < 1e-12
    # Resized by 1/2, an odd grid loses its centre: a linear ramp survives bilinear resizing, two blobs do not.
    assert layers.resizing_error(layer, 2.0, image=two_blobs) > 0.01


def test_area_sampling_steers_better_than_resizing_the_input_twice():
    compared = layers.resizing_layers()
    for scale in (0.7, 1.4, 2.2):
        errors = {name: layers.resizing_error(layer, scale) for name, layer in compared.items()}
        assert errors["steered, area sampling"] < errors["input resized, same filters"]


def test_the_winning_scale_is_that_of_the_largest_response_of_all(needed):
    layer, x = needed["ss"].first, needed["images"]
    response, winner = layers.winning_scales(needed["ss"], x)
    with torch.no_grad():
        every = torch.stack([F.conv2d(x, f, layer.bias, padding=f.shape[-1] // 2) for f in layer.filters()], 2)
    largest, index = every.flatten(1, 2).max(1)  # over channels and scales, scales last
    assert response == pytest.approx(largest, abs=1e-5)
    assert (winner == index % 3).float().mean() > 0.99  # near ties may fall either way


def test_the_mean_winning_scale_leaves_out_weak_responses():
    response = torch.tensor([[[1.0, 0.9], [0.1, 0.5]], [[8.0, 0.0], [0.0, 0.0]]])
    winner = torch.tensor([[[0, 1], [2, 1]], [[0, 2], [2, 2]]])
    assert layers.mean_winning_scale(response, winner, (1.0, 4.0, 9.0)) == pytest.approx(2.0)  # of 1, 4, 4 and 1


def test_filters_at_scale_one_are_those_of_the_layer_and_its_first_input_channel(needed):
    steered, resizing, plain = needed["ss"].first, needed["lsi"].first, nn.Conv2d(2, 3, 7)
    expected = {steered: steered.filters()[steered.scales.index(1.0)], resizing: resizing.weight, plain: plain.weight}
    for layer, weight in expected.items():
        assert layers.unit_filters(layer) == pytest.approx(weight[:, 0].detach().numpy(), abs=1e-7)


def test_what_is_kept_of_first_layers_are_means_over_their_filters(needed):
    networks = {"SS-CNN": needed["ss"], "LocScaleInv-CNN": needed["lsi"]}
    kept = layers.measure(networks)
    for name, network in networks.items():
        offset, share = layers.centrality(layers.unit_filters(network.first))
        move, gain = layers.entanglement(network.first, 17 / 7)
        assert kept["centrality"][name] == pytest.approx({"offset": offset.mean(), "share": share.mean()}, abs=0.005)
        assert kept["entanglement"][name] == pytest.approx({"move": move.mean(), "gain": gain.mean()}, abs=0.005)
    assert kept["centrality"]["SS-CNN"]["offset"] == 0
