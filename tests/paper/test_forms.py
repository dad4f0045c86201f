"""Rivals in their published form: what they compute, against the definition."""

import pytest
import torch

from paper import forms
from scalesteer import ScaleGroupConv2d, baselines, create_model
from scalesteer.baselines import FittedBasis, HermiteBasis
from scalesteer.models import count_parameters


def test_the_transformer_reads_where_its_six_numbers_say():
    torch.manual_seed(0)
    layer = forms.SixNumbersTransformer2d(1, 28, dtype=torch.float64)
    x = torch.rand(3, 1, 28, 28, dtype=torch.float64)
    assert torch.equal(layer.theta(x), torch.eye(2, 3, dtype=torch.float64).expand(3, 2, 3))
    with torch.no_grad():
        layer.regression.weight.normal_()
        layer.regression.bias.copy_(torch.arange(6.0))
    regressed = layer.regression(layer.localisation(x))
    for image, numbers in zip(layer.theta(x), regressed, strict=True):
        for entry in range(6):
            row, column = divmod(entry, 3)
            assert torch.isclose(image[row, column], (row == column) + 0.1 * numbers[entry])


def test_filters_turn_against_the_vectors():
    torch.manual_seed(0)
    options = {"vector_input": True, "dtype": torch.float64}
    usual, released = (kind(3, 5, 7, **options) for kind in (baselines.VectorFieldConv2d, forms.ReleasedRotationConv2d))
    released.load_state_dict(usual.state_dict())
    for angle, one, other in zip(usual.angles, usual.filters(), released.filters(), strict=True):
        vectors, turned = (filters.view(5, 3, 2, 7, 7) for filters in (one, other))
        # Turning by -angle and then by twice the angle is turning by the angle.
        cos, sin = torch.cos(torch.tensor(2 * angle)), torch.sin(torch.tensor(2 * angle))
        back = torch.stack(
            [cos * turned[:, :, 0] - sin * turned[:, :, 1], sin * turned[:, :, 0] + cos * turned[:, :, 1]], 2
        )
        torch.testing.assert_close(back, vectors, rtol=0, atol=1e-6)
    assert torch.equal(usual.directions, released.directions)


def test_networks_have_as_many_weights_as_the_forms_of_the_package():
    for name, usual in ((forms.SIX_NUMBERS, "spatial-transformer"), (forms.RELEASED_ROTATION, "vector-field-cnn")):
        model = create_model(name)
        assert count_parameters(model) == count_parameters(create_model(usual))
        assert model(torch.rand(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("name", [forms.GROUP_HERMITE, forms.GROUP_FITTED])
def test_group_networks_of_compared_bases_are_group_cnn_but_for_the_basis(name):
    other, ours = create_model(name), create_model("group-cnn")
    bases = {type(layer.basis) for layer in other.modules() if isinstance(layer, ScaleGroupConv2d)}
    assert bases == {{forms.GROUP_HERMITE: HermiteBasis, forms.GROUP_FITTED: FittedBasis}[name]}
    assert count_parameters(other) == pytest.approx(count_parameters(ours), rel=0.04)
    assert [type(layer) for layer in other.modules()] == [type(layer) for layer in ours.modules()]
    assert str(create_model(**other.arguments)) == str(other)
