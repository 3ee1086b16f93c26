"""Weights layer by layer: pairs of one shape, task vectors, with and without matching."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from permuted_nets import mlp, seeded, vgg_like
from test_matching_weights import shuffled
from torch import nn
from torch.nn.utils import prune

from sosie import compare_weights
from sosie.measures import MEASURES
from sosie.stats import TensorPair
from sosie.weights import task_vector, tensor_sites, tensor_values

ALL = [name for name, measure in MEASURES.items() if measure.reads is TensorPair]


def moved(model: nn.Module, seed: int, by: float = 0.1) -> nn.Module:
    random = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += by * torch.randn(parameter.shape, generator=random)
    return other


def test_every_pair_of_layers_of_one_shape() -> None:
    a, b = (
        seeded(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), s)
        for s in (0, 1)
    )
    side_a, side_b, values = tensor_values(a, b, ALL)
    assert side_a.sites == side_b.sites == ("0", "2", "4", "all")
    assert side_a.shapes == ((6, 6), (6, 6), (2, 6), (98,))
    for name in ALL:
        found = values[name]
        defined = np.isfinite(found.value)
        assert defined[:2, :2].all()
        assert not defined[:2, 2:].any()
        assert any("differ in shape" in caveat.text for caveat in found.caveats)
        for i, x in enumerate((a[0], a[2])):
            for j, y in enumerate((b[0], b[2])):
                pair = TensorPair(x.weight.detach().double(), y.weight.detach().double())
                assert found.value[i, j] == pytest.approx(float(MEASURES[name](pair)), abs=1e-12)


def test_all_is_every_parameter_as_one_vector() -> None:
    a, b = seeded(vgg_like(), 0), seeded(vgg_like(), 1)
    _, _, values = tensor_values(a, b, ALL, sites_a="all", sites_b="all")
    x, y = (torch.cat([p.detach().double().flatten() for p in model.parameters()]) for model in (a, b))
    assert values["weight_cosine"].value[0, 0] == pytest.approx(float(x @ y / (x.norm() * y.norm())), abs=1e-12)
    assert np.isnan(values["spectrum_distance"].value[0, 0])
    assert "one vector" in values["spectrum_distance"].caveats[0].text


def test_matching_is_reported_beside_the_weights_as_they_are() -> None:
    model = seeded(vgg_like())
    _, _, values = tensor_values(model, shuffled(model), ["weight_cosine", "spectrum_distance"], match="weights")
    assert list(values) == [
        *("weight_cosine", "spectrum_distance"),
        *("weight_cosine after matching", "spectrum_distance after matching"),
    ]
    assert np.diag(values["weight_cosine"].value).max() < 0.9
    assert np.diag(values["weight_cosine after matching"].value) == pytest.approx(1, abs=1e-12)
    # Reordering the neurons of a layer, or its inputs too, does not change the spectrum.
    assert np.nanmax(np.diag(values["spectrum_distance"].value)) < 1e-6


def test_task_vectors_are_differences_to_the_base() -> None:
    base = seeded(mlp())
    a, b = moved(base, 1), moved(base, 2)
    _, _, values = tensor_values(a, b, base=base)
    x, y = task_vector(a, base)["2.weight"], task_vector(b, base)["2.weight"]
    assert torch.equal(x, a[2].weight.detach().double() - base[2].weight.detach().double())
    cosine = float((x * y).sum() / (x.norm() * y.norm()))
    assert values["weight_cosine"].value[1, 1] == pytest.approx(cosine, abs=1e-12)
    assert "common base" in values["weight_cosine"].statistic
    _, _, plain = tensor_values(a, b)
    assert plain["weight_cosine"].value[1, 1] > 0.8 > abs(cosine)


def test_task_vectors_of_permuted_models_need_both_matched_to_the_base() -> None:
    base = seeded(mlp())
    a, b = moved(base, 1, 0.02), moved(base, 2, 0.02)
    _, _, truth = tensor_values(a, b, base=base)
    _, _, found = tensor_values(shuffled(a, 5), shuffled(b, 6), base=base, match="weights")
    after = found["weight_cosine after matching"].value
    assert np.diag(after) == pytest.approx(np.diag(truth["weight_cosine"].value), abs=1e-12)
    assert np.abs(np.diag(found["weight_cosine"].value) - np.diag(after)).max() > 0.1


def test_a_layer_that_did_not_move_has_no_direction() -> None:
    base = seeded(mlp())
    a, b = moved(base, 1), moved(base, 2)
    with torch.no_grad():
        a[2].weight.copy_(base[2].weight)
    _, _, values = tensor_values(a, b, base=base)
    assert np.isnan(values["weight_cosine"].value[1]).all()
    assert any(c.site_a == "2" and "those of the base" in c.text for c in values["weight_cosine"].caveats)


def test_state_dicts_serve_as_well() -> None:
    a, b = seeded(vgg_like(), 0), seeded(vgg_like(), 1)
    _, _, by_model = tensor_values(a, b)
    _, _, by_state = tensor_values(a.state_dict(), b.state_dict())
    for name in by_model:
        assert np.array_equal(by_model[name].value, by_state[name].value, equal_nan=True)


def test_sites_by_name_glob_and_type() -> None:
    model = vgg_like()
    assert tensor_sites(model) == ["0", "4", "9", "12", "all"]
    assert tensor_sites(model, nn.Linear) == ["9", "12"]
    assert tensor_sites(model, ["1.weight", "9"]) == ["1.weight", "9"]
    assert tensor_sites(model, "1*.bias") == ["1.bias", "12.bias"]
    with pytest.raises(ValueError, match=r"no layer and no parameter is called '9\.wieght'; did you mean '9\.weight'"):
        tensor_sites(model, "9.wieght")


def test_sites_without_weights_are_nan_and_say_so() -> None:
    _, _, values = tensor_values(mlp(), mlp(), sites_a=["0", "1", "output"])
    assert np.isnan(values["weight_cosine"].value[1:]).all()
    assert {c.site_a for c in values["weight_cosine"].caveats if "no matrix" in c.text} == {"1", "output"}


def test_neurons_of_a_transposed_convolution_come_first() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 5, 2))
    side, _, _ = tensor_values(model, model)
    assert side.shapes[0] == (5, 3, 2, 2)


def test_bad_input_is_an_error_in_words() -> None:
    a, b = seeded(mlp(), 0), seeded(mlp(), 1)
    with pytest.raises(ValueError, match=r"linear_cka do not compare pairs of tensors; weight_cosine"):
        tensor_values(a, b, ["linear_cka"])
    with pytest.raises(ValueError, match=r"match must be .*'neurons'"):
        tensor_values(a, b, match="neurons")
    with pytest.raises(TypeError, match="give models, not state dicts"):
        tensor_values(a.state_dict(), b, match="weights")
    less = {name: tensor for name, tensor in a.state_dict().items() if name != "2.bias"}
    with pytest.raises(ValueError, match=r"A and the base differ in architecture: only A has 2\.bias"):
        tensor_values(a, b, base=less)
    with pytest.raises(ValueError, match=r"only the base has 7\.weight"):
        tensor_values(a, b, base={**a.state_dict(), "7.weight": torch.ones(2, 2)})
    with torch.no_grad():
        b[0].bias[2] = torch.inf
    with pytest.raises(ValueError, match=r"0\.bias of B has 1 of 16 values that are NaN or infinite"):
        tensor_values(a, b)


def test_unlike_architectures_have_no_value_for_all() -> None:
    _, _, values = tensor_values(mlp(), vgg_like())
    assert np.isnan(values["weight_cosine"].value).all()
    assert any("differ from those of A" in caveat.text for caveat in values["weight_cosine"].caveats)


def test_weights_that_a_layer_computes_are_compared_as_it_computes_them():
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2))

    model, plain = net().train(), net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    nn.utils.spectral_norm(model[1])
    nn.utils.parametrizations.orthogonal(model[3])
    nn.utils.parametrizations.spectral_norm(model[4])
    with warnings.catch_warnings(action="ignore"):
        nn.utils.weight_norm(model[2])
    with torch.no_grad():
        model[2].weight_g.mul_(3)
        model(torch.randn(2, 6))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()(torch.randn(2, 6))
    effective = [layer.weight.detach().double() for layer in model]
    model.train()
    found = compare_weights(model, plain, measures=["weight_distance", "weight_cosine"])
    assert list(found.sites_a) == list(found.sites_b) == ["0", "1", "2", "3", "4", "all"]
    for k, weight in enumerate(effective):
        other = plain[k].weight.detach().double()
        cosine = float((weight * other).sum() / (weight.norm() * other.norm()))
        assert found.matrix("weight_cosine")[k, k] == pytest.approx(cosine, abs=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    biases = torch.cat([layer.bias.detach().double() for layer in plain])
    flat, other = (
        torch.cat([*map(torch.flatten, weights), biases])
        for weights in (effective, [layer.weight.detach().double() for layer in plain])
    )
    cosine = float(flat @ other / (flat.norm() * other.norm()))
    assert found.matrix("weight_cosine")[5, 5] == pytest.approx(cosine, abs=1e-6)
    pruned = net()
    prune.l1_unstructured(pruned[0], "weight", 0.5)
    found = [
        tensor_values(each, plain, ["weight_cosine"])[2]["weight_cosine"].value
        for each in (pruned, pruned.state_dict())
    ]
    assert found[0][0, 0] < 0.99
    np.testing.assert_allclose(found[0], found[1])


def test_all_parameters_are_paired_by_name_whatever_their_order():
    class Other(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(4, 4, bias=False))

    a, b = Other("first", "last"), Other("last", "first")
    b.load_state_dict(a.state_dict())
    assert compare_weights(a, b, measures="weight_cosine", sites="all").matrix()[0, 0] == pytest.approx(1)
