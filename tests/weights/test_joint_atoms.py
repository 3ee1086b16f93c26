"""Models that share nothing: one set of coefficients for all, or each layer's own basis."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from permuted_nets import seeded, vgg_like
from test_matching_weights import shuffled
from torch import nn

import sosie
from sosie.models import atom_layers, decompose, recompose, small_cnn
from sosie.weights import decompose_together
from sosie.weights.atoms import common_atoms, polar_atoms
from sosie.weights.maps import shuffled as shuffled_weights


def models(count: int = 3, **options: int) -> list[nn.Module]:
    return [seeded(small_cnn(width=6, **options), seed) for seed in range(count)]


def test_coefficients_are_common_and_orthonormal() -> None:
    plain = models()
    joint = decompose_together(plain, 5, match=False)
    layers = [atom_layers(model) for model in joint.models]
    for name, layer in layers[0].items():
        assert all(other[name].coefficients is layer.coefficients for other in layers[1:])
        alpha = layer.coefficients.detach().flatten(0, 1)
        torch.testing.assert_close(alpha.T @ alpha, torch.eye(5), atol=1e-5, rtol=0)
        for model, other, error in zip(plain, layers, joint.errors[name], strict=True):
            weight = getattr(model, name).weight.detach()
            atoms = alpha.T @ weight.flatten(2).flatten(0, 1)  # D = αᵀW, the best atoms for these coefficients
            torch.testing.assert_close(atoms, other[name].atoms.detach().flatten(1), atol=1e-5, rtol=1e-4)
            gone = (weight - other[name].weight.detach()).norm() / weight.norm()
            assert error == pytest.approx(float(gone), rel=1e-4)
    assert joint.left == {"fc": "is a Linear, not a convolution of images"}
    assert joint.atoms == {"conv1": 5, "conv2": 5, "conv3": 5, "conv4": 5}


def test_the_error_is_that_of_the_singular_values_of_all_models() -> None:
    plain = models()
    stack = torch.stack([model.conv2.weight.detach().double().flatten(2).flatten(0, 1) for model in plain])
    s = np.linalg.svd(np.concatenate(list(stack.numpy()), axis=1), compute_uv=False)
    for count in (1, 5, 26, 27, 40):
        alpha, own = common_atoms(stack, count)
        assert alpha.shape[1] == own.shape[1] == min(count, 27)
        assert float((stack - alpha @ own).norm()) == pytest.approx(np.linalg.norm(s[count:]), abs=1e-10)


@pytest.mark.parametrize("match", [None, "weights"])
def test_when_exact_it_is_the_cosine_of_the_weights(match: str | None) -> None:
    a, b = models(2)
    found = sosie.compare_weights(a, b, measures=["atom_cosine", "weight_cosine"], joint=18, match=match)
    beside = found["weight_cosine" + (" after matching" if match else "")].value
    assert np.diag(found.matrix("atom_cosine"))[:4] == pytest.approx(np.diag(beside)[:4], abs=1e-10)
    fewer = sosie.compare_weights(a, b, measures="atom_cosine", joint=9, match=match)
    assert np.abs(np.diag(fewer.matrix())[:4] - np.diag(beside)[:4]).max() > 0.01
    assert "2 models into 9 atoms" in fewer["atom_cosine"].statistic
    assert any("of the norm of a layer" in caveat.text for caveat in fewer["atom_cosine"].caveats)
    assert any("not matched" in caveat.text for caveat in fewer["atom_cosine"].caveats) == (match is None)


def test_neurons_in_another_order_are_found() -> None:
    model = seeded(vgg_like())
    other = shuffled(model)
    aligned, apart = (decompose_together([model, other], 9, match=match) for match in (True, False))
    assert float(aligned.table().cosines()[0, 1]) == pytest.approx(1, abs=1e-5)
    assert float(apart.table().cosines()[0, 1]) < 0.95
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    exact = decompose_together([model, other], 18).models[1].eval()
    torch.testing.assert_close(exact(x), other.eval()(x), atol=1e-4, rtol=1e-4)


def test_models_of_atoms_that_share_nothing_are_taken_together() -> None:
    a, b = models(2, atoms=4)
    with pytest.raises(ValueError, match="joint=9"):
        sosie.compare_weights(a, b, measures="atom_cosine")
    found = sosie.compare_weights(a, b, measures="atom_cosine", joint=18).matrix()
    plain = sosie.compare_weights(recompose(a), recompose(b), measures="weight_cosine").matrix()
    assert np.diag(found)[:4] == pytest.approx(np.diag(plain)[:4], abs=1e-6)


def test_a_base_is_decomposed_with_the_models() -> None:
    base = models(1)[0]
    a, b = (copy.deepcopy(base) for _ in range(2))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in [*a.parameters(), *b.parameters()]:
            parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    found = sosie.compare_weights(a, b, measures=["atom_cosine", "weight_cosine"], joint=27, base=base)
    exact = np.diag(found.matrix("weight_cosine"))[:4]
    assert np.diag(found.matrix("atom_cosine"))[:4] == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("of_base", [False, True])
def test_one_draw_of_chance_is_the_value_of_that_shuffled_copy(of_base: bool) -> None:
    a, b, base = models(3)
    options = {"measures": "atom_cosine", "joint": 9, "base": base if of_base else None}
    drawn = sosie.compare_weights(a, b, null="weights", draws=1, **options)["atom_cosine"]
    copied = sosie.compare_weights(a, shuffled_weights(b, 0, 0), **options)
    assert np.diag(drawn.null) == pytest.approx(np.diag(copied.matrix()), abs=1e-9)


def test_chance_is_what_shuffled_weights_give() -> None:
    a, b = models(2)
    exact = sosie.compare_weights(a, b, measures="atom_cosine", joint=18, null="weights", draws=19)["atom_cosine"]
    assert exact.null is not None
    assert exact.p is not None
    assert np.abs(np.diag(exact.null)[1:4]).max() < 0.1
    without = sosie.compare_weights(a, b, measures="atom_cosine", joint=18)["atom_cosine"]
    told = [any("null='weights' measures it" in c.text for c in found.caveats) for found in (exact, without)]
    assert told == [False, True]
    itself = sosie.compare_weights(a, copy.deepcopy(a), measures="atom_cosine", joint=18, null="weights", draws=3)
    assert np.diag(itself.matrix()) == pytest.approx(1, abs=1e-12)
    assert np.abs(np.diag(itself["atom_cosine"].null)).max() < 0.5
    # Matching makes any weights similar, and a few common directions hold just that similarity.
    levels = []
    for atoms in (18, 3):
        found = sosie.compare_weights(
            a, b, measures="atom_cosine", joint=atoms, match="weights", null="weights", draws=3
        )
        null = found["atom_cosine"].null
        assert null is not None
        levels.append(np.diag(null)[1:4])
    assert levels[0].min() > 0.1
    assert (levels[1] > levels[0] + 0.1).all()


def test_all_pairs_of_a_joint_decomposition_at_once() -> None:
    plain = models(4)
    found = sosie.compare_weights(plain, measures="atom_cosine", joint=9)
    table = decompose_together(plain, 9, match=False).table().cosines().numpy()
    assert found.matrix("atom_cosine") == pytest.approx(table, abs=1e-5)
    assert found[1, 3].matrix()[4, 4] == pytest.approx(table[1, 3], abs=1e-5)


def test_the_models_and_the_random_state_are_left_alone() -> None:
    plain = models(2)
    before = copy.deepcopy([model.state_dict() for model in plain])
    state = torch.random.get_rng_state()
    decompose_together(plain, 4)
    assert torch.equal(state, torch.random.get_rng_state())
    for model, kept in zip(plain, before, strict=True):
        assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())


# Layers of any number of channels.


def test_polar_factors_are_those_of_scipy() -> None:
    kernels = np.random.default_rng(0).standard_normal((40, 9))
    assert polar_atoms(torch.from_numpy(kernels)).numpy() == pytest.approx(scipy.linalg.polar(kernels)[1], abs=1e-10)


def test_polar_factors_do_not_see_the_order_or_the_number_of_kernels() -> None:
    kernels = torch.randn(40, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(40, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    once = polar_atoms(kernels)
    torch.testing.assert_close(polar_atoms(turn @ kernels), once)
    torch.testing.assert_close(polar_atoms(torch.cat([kernels, kernels])), 2**0.5 * once)
    torch.testing.assert_close(polar_atoms(kernels[:4]) @ polar_atoms(kernels[:4]), kernels[:4].T @ kernels[:4])


def test_layers_of_other_widths_have_a_value_and_its_chance() -> None:
    a, b = seeded(small_cnn(width=6), 0), seeded(small_cnn(width=9), 1)
    found = sosie.compare_weights(a, b, measures="atom_cosine", joint="polar", draws=5)
    value, null = found.matrix()[:4, :4], found["atom_cosine"].null
    assert null is not None
    assert np.isfinite(value).all()
    assert found.sites_a == ["conv1", "conv2", "conv3", "conv4", "all"]
    x, y = (
        torch.from_numpy(scipy.linalg.polar(layer.weight.detach().double().flatten(2).flatten(0, 1).numpy())[1])
        for layer in (a.conv2, b.conv3)
    )
    assert value[1, 2] == pytest.approx(sosie.measure("atom_cosine", x, y), abs=1e-10)
    assert null[1:4, 1:4].min() > 0.8, "random kernels are alike in this sense"
    assert any("never negative" in caveat.text for caveat in found["atom_cosine"].caveats)
    order = sosie.compare_weights(a, shuffled(a), measures="atom_cosine", joint="polar", draws=1)
    assert np.diag(order.matrix()) == pytest.approx(1, abs=1e-6)


def test_kernels_of_other_sizes_have_none() -> None:
    a = nn.Sequential(nn.Conv2d(3, 20, 5), nn.Conv2d(20, 20, 3))
    b = nn.Sequential(nn.Conv2d(3, 20, 3), nn.Conv2d(20, 20, 3))
    found = sosie.compare_weights(a, b, measures="atom_cosine", joint="polar", draws=1)
    assert np.isnan(found.matrix()[0]).all()
    assert np.isfinite(found.matrix()[1, :2]).all()
    assert np.isnan(found.matrix()[2, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"joint": 0}, "got 0: a number of atoms, or 'polar'"),
        ({"joint": True}, "got True"),
        ({"joint": "qr"}, "got 'qr'"),
        ({"joint": 4, "measures": "weight_cosine"}, "joint= is for atom_cosine"),
        ({"joint": "polar", "measures": "atom_grassmann"}, "always 1"),
        ({"joint": "polar", "match": "weights"}, "order of neurons"),
        ({"joint": "polar", "base": small_cnn(width=6)}, "base="),
    ],
)
def test_options_that_do_not_go_together(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sosie.compare_weights(*models(2), **{"measures": "atom_cosine", **options})


def test_bad_models_are_errors_in_words() -> None:
    a, b = models(2)
    with pytest.raises(ValueError, match=r"conv1: 6 kernels of 9 entries .*, 4 kernels of 9 .* joint='polar'"):
        decompose_together([a, small_cnn(width=4)], 4, match=False)
    with pytest.raises(ValueError, match=r"conv1: .*no such layer in model 1"):
        decompose_together([a, nn.Sequential(nn.Conv2d(3, 4, 3))], 4, match=False)
    with pytest.raises(ValueError, match="at least two models"):
        decompose_together([a], 4)
    with pytest.raises(ValueError, match="no convolution"):
        decompose_together([nn.Linear(3, 3), nn.Linear(3, 3)], 4, match=False)
    with pytest.raises(ValueError, match="at least one atom"):
        decompose_together([a, b], 0)
    with torch.no_grad():
        b.conv2.weight[0] = torch.inf
    with pytest.raises(ValueError, match=r"conv2\.weight has 54 of"):
        decompose_together([a, b], 4, match=False)


def test_from_the_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from sosie.cli.main import app

    pair = ["weights", "small_cnn(seed=0, width=4)", "small_cnn(seed=1, width=4)", "--measures", "atom_cosine"]
    out = tmp_path / "w.json"
    done = CliRunner().invoke(app, [*pair, "--joint", "9", "--match", "weights", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert np.isfinite(np.diag(sosie.load(out).matrix())).all()
    assert CliRunner().invoke(app, [*pair, "--joint", "polar"]).exit_code == 0
    for options, words in (
        (["--joint", "many"], "a number of atoms, or polar"),
        (["--joint", "polar", "--match", "weights"], "does not depend on the order of neurons"),
    ):
        refused = CliRunner().invoke(app, [*pair, *options])
        assert refused.exit_code != 0
        assert words in refused.output + str(refused.exception)
    assert decompose(small_cnn(width=4), 3).atoms["conv2"] == 3


def test_what_is_asked_beside_polar_factors_is_matched(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from sosie.cli.main import app

    pair, both = ["weights", "small_cnn(seed=0, width=4)", "small_cnn(seed=1, width=4)"], "atom_cosine,weight_cosine"
    out = tmp_path / "w.json"
    options = ["--measures", both, "--joint", "polar", "--draws", "2", "--out", str(out)]
    found = []
    for more in ([], ["--match", "weights"]):
        done = CliRunner().invoke(app, [*pair, *options, *more])
        assert done.exit_code == 0, done.output + str(done.exception)
        found.append(sosie.load(out))
    alone, matched = found
    assert matched.measures == [*alone.measures, "weight_cosine after matching"]
    assert np.array_equal(alone.matrix("atom_cosine"), matched.matrix("atom_cosine"), equal_nan=True)
    after, before = (matched.matrix(name).diagonal()[:4].mean() for name in (matched.measures[-1], "weight_cosine"))
    assert after > before + 0.05


def test_a_model_of_zeros_has_no_atoms_rather_than_those_of_rounding() -> None:
    a, b = models(2)
    for parameter in b.parameters():
        nn.init.zeros_(parameter)
    found = sosie.compare_weights(a, b, measures="atom_cosine", joint=4)
    assert np.isnan(found.matrix("atom_cosine")).all()
    assert any("all atoms are 0" in caveat.text for caveat in found["atom_cosine"].caveats)
    both = sosie.compare_weights(b, copy.deepcopy(b), measures="atom_cosine", joint=4)
    assert np.isnan(both.matrix("atom_cosine")).all()
