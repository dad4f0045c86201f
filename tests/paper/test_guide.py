"""Figures that need no trained network hold the measured curves."""

import numpy as np
import pytest

from paper import guide, measures
from scalesteer import LogRadialBasis, ScaleSteerableConv2d


def test_the_pages_plots_have_the_measured_curves():
    plots = guide.plots()
    assert {path.split("/")[0] for path in plots} == {"guide", "figures"}
    (axis,) = plots["guide/theorem.png"].axes
    assert [line.get_label() for line in axis.get_lines()][-1] == "no $s^{m-2}$"
    left, right = plots["guide/sampling.png"].axes
    assert all(plot.get_suptitle() or plot.axes[0].get_title() for plot in plots.values())  # each says what is seen
    numbers = measures.guide_numbers()
    assert list(left.get_lines()[1].get_ydata())[-1] == 100 * numbers["steering"]["area"]["7 -> 17"]
    assert list(right.get_lines()[3].get_ydata()) == [100 * error for error in numbers["footnote"]["4.0"]]


def test_the_sensitivity_figure_holds_the_measured_curves():
    left, right = guide.plot_sensitivity((1.0, 2.0)).axes
    curves = {line.get_label(): line for line in left.get_lines()}
    x, y = curves["order 2"].get_data()
    assert y == pytest.approx(np.cos(2 * np.log(x)), abs=1e-2)
    measured = next(line for line in right.get_lines() if line.get_label() == "measured")
    assert list(measured.get_xdata()) == [1.0, 2.0]
    assert measured.get_ydata() == pytest.approx(np.exp(2 * np.pi / np.array([1.0, 2.0])), rel=1e-3)


def test_the_basis_figure_shows_every_order():
    assert {"Re, k=0.5, 45°", "Im, k=2, 180°"} <= {axis.get_title() for axis in guide.plot_basis().axes}


def test_a_steered_filter_is_shown_at_each_of_its_scales():
    layer = ScaleSteerableConv2d(1, 2, scales=(1.0, 1.5), basis=LogRadialBasis.preset("area"))
    titles = [axis.get_title() for axis in guide.plot_steered(layer, channel=1).axes]
    assert titles[:2] == ["s = 1.00, 7 x 7", "s = 1.50, 11 x 11"]
