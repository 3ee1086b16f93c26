"""Weights compared without data: changes that keep the value, changes that do not, and blind spots."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from weight_nets import conv, dense, intertwined, invertible, permutation, scaled_permutation

import sosie
from sosie.results import Comparison, Comparisons, summarise

BOTH = ["wcka", "wcka_uncentred"]
DEEP = [20, 12, 9, 14, 8, 11, 13, 10, 9, 12, 5]  # ten layers


def whole(found: Comparison | Comparisons, measure: str = "wcka") -> float:
    """The value from end to end."""
    assert isinstance(found, Comparison)
    return float(found.matrix(measure)[-1, -1])


def same_function(a: nn.Module, b: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(a(x), b(x), rtol=1e-3, atol=1e-4 * float(a(x).abs().max()))


class Wrapped(nn.Module):
    """A network that does not look like a chain."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


# Changes that keep the value


@pytest.mark.parametrize(
    ("act", "group"),
    [
        (nn.Identity, invertible),
        (nn.ReLU, scaled_permutation),
        (nn.LeakyReLU, scaled_permutation),
        (nn.Sigmoid, permutation),
        (nn.Tanh, permutation),
    ],
    ids=["identity", "relu", "leaky", "sigmoid", "tanh"],
)
@pytest.mark.parametrize("measure", BOTH)
def test_copies_that_compute_the_same_are_the_same(
    act: Callable[[], nn.Module], group: Callable[[int, int], Tensor], measure: str
) -> None:
    a = dense(DEEP, act)
    b = intertwined(a, group)
    assert same_function(a, b, torch.randn(64, 20, generator=torch.Generator().manual_seed(1)))
    assert not torch.allclose(a[0].weight, b[0].weight)
    assert whole(sosie.compare_weights(a, b, measures=measure), measure) == pytest.approx(1, abs=1e-6)


def test_permuted_neurons_are_the_same_at_every_depth() -> None:
    a = dense(DEEP)
    found = sosie.compare_weights(a, intertwined(a, permutation)).matrix()
    np.testing.assert_allclose(found.diagonal(), 1, atol=1e-6)


def test_rescaled_neurons_show_at_the_layer_where_they_are_but_not_behind_it() -> None:
    a = dense(DEEP)
    found = sosie.compare_weights(a, intertwined(a, scaled_permutation)).matrix().diagonal()
    assert (found[:9] < 0.99).all()
    np.testing.assert_allclose(found[9:], 1, atol=1e-6)


def test_folding_batch_norm_into_the_convolution_changes_nothing() -> None:
    a = conv()
    b = copy.deepcopy(a)
    norm = b[1]
    factor = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach()
    b[0].weight.data *= factor[:, None, None, None]
    b[1] = nn.Identity()
    found = sosie.compare_weights(a, b, input_shape=(2, 8, 8))
    assert whole(found) == pytest.approx(1, abs=1e-6)
    assert found.matrix()[0, 0] < 0.999  # the map of the convolution alone differs


# Changes that do not


@pytest.mark.parametrize("group", [invertible, scaled_permutation])
def test_a_change_that_the_next_layer_does_not_undo_is_seen(group: Callable[[int, int], Tensor]) -> None:
    a = dense([20, 12, 9, 5])
    b = copy.deepcopy(a)
    b[2].weight.data = b[2].weight.data @ group(12, 0)
    assert whole(sosie.compare_weights(a, b)) < 0.97


def test_other_entries_of_the_input_are_seen() -> None:
    a = dense([20, 12, 9, 5])
    b = copy.deepcopy(a)
    b[0].weight.data = b[0].weight.data.roll(1, dims=1)
    assert whole(sosie.compare_weights(a, b)) < 0.6


def test_more_noise_is_less_alike() -> None:
    a = dense([20, 12, 9, 5])
    values = []
    for size in (0.0, 0.1, 0.3, 1.0):
        b = copy.deepcopy(a)
        for k, weights in enumerate(p for p in b.parameters() if p.dim() > 1):
            noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(k))
            weights.data += size * noise * weights.std()
        values.append(whole(sosie.compare_weights(a, b)))
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(1, abs=1e-12)
    assert values[-1] < 0.8


# Where it is blind, or sensitive to irrelevant changes


def agreement(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((a(x).argmax(1) == b(x).argmax(1)).double().mean())


def test_blind_to_rotated_outputs_and_to_biases() -> None:
    a = dense([20, 16, 10])
    x = torch.randn(500, 20, generator=torch.Generator().manual_seed(0))
    rolled, biased = copy.deepcopy(a), copy.deepcopy(a)
    rolled[-1].weight.data = rolled[-1].weight.data.roll(1, 0)
    rolled[-1].bias.data = rolled[-1].bias.data.roll(1, 0)
    biased[-1].bias.data += 3 * torch.randn(10, generator=torch.Generator().manual_seed(1))
    assert agreement(a, rolled, x) == 0
    assert agreement(a, biased, x) < 0.5
    for other in (rolled, biased):
        for measure in BOTH:
            assert whole(sosie.compare_weights(a, other, measures=measure), measure) == pytest.approx(1, abs=1e-6)


def test_sees_weights_on_entries_that_are_never_lit() -> None:
    a = dense([20, 16, 10])
    b = copy.deepcopy(a)
    b[0].weight.data[:, 15:] += 2 * torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    x = torch.randn(500, 20, generator=torch.Generator().manual_seed(0))
    x[:, 15:] = 0
    assert agreement(a, b, x) == 1
    assert whole(sosie.compare_weights(a, b)) < 0.4


# The same value by all methods


@pytest.mark.parametrize("sizes", [([20, 12, 9, 5], [20, 30, 7]), ([6, 12, 4], [6, 12, 8, 4])], ids=str)
def test_chains_and_any_network_agree_with_one_map_at_a_time(sizes: tuple[list[int], list[int]]) -> None:
    a, b = (dense(each, seed=k) for k, each in enumerate(sizes))
    chains = sosie.compare_weights(a, b, measures=BOTH)
    others = sosie.compare_weights(Wrapped(a), b, measures=BOTH)
    factors = [[m.weight.detach().T for m in model if isinstance(m, nn.Linear)] for model in (a, b)]
    for measure in BOTH:
        expected = [
            [sosie.measure(measure, factors[0][: i + 1], factors[1][: j + 1]) for j in range(len(factors[1]))]
            for i in range(len(factors[0]))
        ]
        np.testing.assert_allclose(chains.matrix(measure)[:-1, :-1], expected, atol=1e-12)
        np.testing.assert_allclose(others.matrix(measure), chains.matrix(measure), atol=1e-12)
        assert chains.matrix(measure)[-1, -1] == chains.matrix(measure)[-2, -2]
    np.testing.assert_allclose(others["wcka"].null, chains["wcka"].null, atol=1e-12)
    np.testing.assert_allclose(others["wcka"].null_spread, chains["wcka"].null_spread, atol=1e-12)


@pytest.mark.parametrize("measure", BOTH)
def test_probes_estimate_what_every_entry_gives(measure: str) -> None:
    a, b = conv(0), conv(1, width=4)
    exact = sosie.compare_weights(a, b, measures=measure, input_shape=(2, 8, 8))[measure]
    found = sosie.compare_weights(a, b, measures=measure, input_shape=(2, 8, 8), probes=4096)[measure]
    assert exact.low is None
    assert found.low is not None
    assert found.high is not None
    assert abs(found.value - exact.value).max() < 0.02
    inside = (found.low <= exact.value) & (exact.value <= found.high)
    assert inside.mean() > 0.8
    assert any("estimated from 4096 Gaussian inputs" in caveat.text for caveat in found.caveats)
    same = sosie.compare_weights(a, a, measures=measure, input_shape=(2, 8, 8), probes=256)
    np.testing.assert_allclose(same.matrix().diagonal(), 1, atol=1e-12)


def test_probes_are_centred_where_the_constant_input_decides() -> None:
    a, b = dense([40, 6], seed=0), dense([40, 5], seed=1)
    for model in (a, b):
        model[0].weight.data += 0.5  # a common answer to the constant input, larger than all others
    values = sosie.compare_weights(a, b, measures=BOTH, probes=4096)
    exact = sosie.compare_weights(a, b, measures=BOTH)
    assert exact.matrix("wcka_uncentred")[-1, -1] > 0.95
    assert exact.matrix("wcka")[-1, -1] < 0.4
    for measure in BOTH:
        np.testing.assert_allclose(values.matrix(measure), exact.matrix(measure), atol=0.02)


def test_probes_are_taken_where_memory_is_short() -> None:
    found = sosie.compare_weights(conv(0), conv(1), input_shape=(2, 8, 8), memory="100KiB")
    assert "Gaussian" in found["wcka"].statistic
    again = sosie.compare_weights(conv(0), conv(1), input_shape=(2, 8, 8), memory="100KiB")
    np.testing.assert_array_equal(found.matrix(), again.matrix())


def test_all_pairs_are_the_pairs() -> None:
    models = [dense([20, 12, 9, 5], seed=k) for k in range(3)]
    models += [dense([20, 7, 5], seed=7), dense([20, 12, 9, 5], seed=8), Wrapped(dense([20, 6, 3]))]
    found = sosie.compare_weights(models, measures=BOTH)
    assert isinstance(found, Comparisons)
    assert len(found) == 15
    for i, j in itertools.combinations(range(6), 2):
        alone = sosie.compare_weights(models[i], models[j], measures=BOTH)
        for measure in BOTH:
            np.testing.assert_allclose(found[i, j].matrix(measure), alone.matrix(measure), atol=1e-12)
    assert found.matrix("wcka").shape == (6, 6)
    named = sosie.compare_weights({"first": models[0], "second": models[1], "third": models[2]})
    assert named["first", "third"].matrix().shape == (4, 4)


def test_a_sparse_choice_of_sites() -> None:
    a, b = dense([20, 12, 9, 5]), dense([20, 8, 5], seed=1)
    every = sosie.compare_weights(a, b).matrix()
    found = sosie.compare_weights(a, b, sites_a=["output", "2"], sites_b="output")
    assert (found.sites_a, found.sites_b) == (["2", "output"], ["output"])
    np.testing.assert_allclose(found.matrix(), every[[1, 3]][:, [2]], atol=1e-12)
    after = sosie.compare_weights(a, b, sites_a=["1"], sites_b=["0"])  # an activation: not a site of a chain
    np.testing.assert_allclose(after.matrix(), every[:1, :1], atol=1e-12)


# Chance


def test_chance_is_that_of_shuffled_entries() -> None:
    a, b = dense([30, 8, 6], seed=0), dense([30, 10, 4], seed=1)
    values = sosie.compare_weights(a, b)["wcka"]
    random, drawn = torch.Generator().manual_seed(0), []
    for _ in range(400):
        other = copy.deepcopy(b)
        other[0].weight.data = other[0].weight.data[:, torch.randperm(30, generator=random)]
        drawn.append(sosie.compare_weights(a, other).matrix())
    assert values.null is not None
    assert values.null_spread is not None
    np.testing.assert_allclose(np.mean(drawn, 0), values.null, rtol=0.05)
    np.testing.assert_allclose(np.std(drawn, 0), values.null_spread, rtol=0.15)


def test_unrelated_networks_are_at_chance_and_copies_are_not() -> None:
    a, b = conv(0), conv(1)
    apart = sosie.compare_weights(a, b, input_shape=(2, 8, 8), null="weights")["wcka"]
    same = sosie.compare_weights(a, a, input_shape=(2, 8, 8), null="weights")["wcka"]
    assert apart.p is not None
    assert same.p is not None
    assert apart.p.diagonal().min() > 0.05
    assert same.p.diagonal().max() < 0.05
    assert apart.null is not None
    assert apart.null[0, 0] > 0.2  # two convolutions are similar whatever their weights
    plain = sosie.compare_weights(a, b, input_shape=(2, 8, 8))["wcka"]
    assert plain.null is None
    assert any("convolutions alone" in caveat.text for caveat in plain.caveats)


# Like any result


def test_a_result_like_any_other(tmp_path: object) -> None:
    found = sosie.compare_weights(conv(0), conv(1), input_shape=(2, 8, 8))
    assert found.sites_a == ["0", "4", "7", "output"]
    assert any("max pooling counts as mean pooling" in text for text in found.rows()[0]["caveats"])
    path = found.save(f"{tmp_path}/c.json")
    np.testing.assert_array_equal(sosie.load(path).matrix("wcka"), found.matrix())
    assert sosie.write_report(found, f"{tmp_path}/c.html").stat().st_size > 1000
    many = sosie.compare_weights([dense([9, 4, 3], seed=k) for k in range(4)])
    np.testing.assert_array_equal(sosie.load(many.save(f"{tmp_path}/m.json"))[1, 3].matrix("wcka"), many[1, 3].matrix())


@pytest.mark.parametrize("measure", ["wcka", "wcka_uncentred"])
def test_the_matrix_of_models_is_that_of_their_pairs(measure: str) -> None:
    """Chains of two shapes and a network that is not a chain, interleaved: tables are made by group."""
    norm = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).eval()
    sizes = [[6, 4, 2], [6, 5, 3, 2], [6, 4, 2], [6, 5, 3, 2]]
    models = [dense(each, seed=seed) for seed, each in enumerate(sizes)]
    models.insert(2, norm)
    for probes in (None, 256):
        found = sosie.compare_weights(models, measures=measure, probes=probes)
        matrix = found.matrix(measure)
        assert found.pairs.value((1, 3), measure).shape == (4, 3)  # no comparison was made for it
        for (i, j), pair in found.pairs.items():
            assert found.pairs.value((i, j), measure) == pytest.approx(pair.matrix(measure), abs=1e-12)
            assert matrix[i, j] == matrix[j, i] == pytest.approx(summarise(pair, measure).diagonal_mean, abs=1e-12)
        assert (matrix.diagonal() == 1).all()
        assert (3, 1) not in found.pairs


def test_matching_is_no_matter_to_wcka_and_that_is_said() -> None:
    a, b = (dense([6, 5, 4], seed=seed) for seed in (0, 1))
    plain, matched = sosie.compare_weights(a, b), sosie.compare_weights(a, b, match="weights")
    assert isinstance(plain, Comparison)
    assert isinstance(matched, Comparison)
    assert np.array_equal(plain.matrix(), matched.matrix())
    assert any("order of neurons" in caveat.text for caveat in matched["wcka"].caveats)
    assert not any("order of neurons" in caveat.text for caveat in plain["wcka"].caveats)
