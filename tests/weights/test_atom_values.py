"""Models compared by their atoms: shared coefficients, the base they started from, all pairs at once, bad input."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

import sosie
from sosie.benchmark import SCALES
from sosie.benchmark.candidates import open_candidates
from sosie.models import (
    atom_layers,
    load_atoms,
    recompose,
    share_coefficients,
    small_cnn,
    with_atoms,
)
from sosie.stats import Atoms, AtomTable

LAYERS = ["conv1", "conv2", "conv3", "conv4"]


def family(count: int, atoms: int = 6, by: float = 0.3) -> list[nn.Module]:
    """A model in atom form, then others with its coefficients and different atoms."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = small_cnn(width=4, atoms=atoms).eval()
        found = [first]
        for _ in range(count - 1):
            moved = {
                name: layer.atoms + by * torch.randn_like(layer.atoms) for name, layer in atom_layers(first).items()
            }
            found.append(load_atoms(copy.deepcopy(first), moved))
    return found


def by_hand(name: str, a: nn.Module, b: nn.Module, base: nn.Module | None = None) -> list[float]:
    pairs = []
    for layer in atom_layers(a):
        x, y = (atom_layers(model)[layer].atoms.detach().double() for model in (a, b))
        start = 0 if base is None else atom_layers(base)[layer].atoms.detach().double()
        pairs.append(sosie.measure(name, x - start, y - start))
    return pairs


def test_layer_by_layer_and_their_mean() -> None:
    _, a, b = family(3)
    found = sosie.compare_weights(a, b, measures=["atom_cosine", "weight_cosine"])
    assert found.sites_a == found.sites_b == [*LAYERS, "all"]
    assert found.measures == ["atom_cosine", "weight_cosine"]
    value = found.matrix("atom_cosine")
    assert np.diag(value)[:4] == pytest.approx(by_hand("atom_cosine", a, b), abs=1e-12)
    assert value[4, 4] == pytest.approx(np.diag(value)[:4].mean(), abs=1e-12)
    assert np.isnan(value[~np.eye(5, dtype=bool)]).all()
    texts = [caveat.text for caveat in found["atom_cosine"].caveats]
    assert sum("pairs of different layers" in text for text in texts) == 1
    assert sum("started from the same atoms" in text for text in texts) == 1
    assert any("mean over 4 layers" in text for text in texts)
    for k, name in enumerate(LAYERS):
        whole = [getattr(model, name).weight.detach().double() for model in (a, b)]
        assert found.matrix("weight_cosine")[k, k] == pytest.approx(sosie.measure("weight_cosine", *whole), abs=1e-6)
    x, y = (nn.utils.parameters_to_vector(_plain(model)).double() for model in (a, b))
    assert found.matrix("weight_cosine")[4, 4] == pytest.approx(float(torch.cosine_similarity(x, y, dim=0)), abs=1e-6)


def _plain(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in recompose(model).parameters()]


def test_measures_of_tensors_read_the_whole_weight() -> None:
    _, a, b = family(3)
    found = sosie.compare_weights(a, b, measures=["weight_cosine"])
    assert found.sites_a == [*LAYERS, "fc", "all"]
    again = sosie.compare_weights(a, b, measures=["weight_distance"], base=family(1)[0])
    assert np.isfinite(np.diag(again.matrix())[:4]).all()


def test_spans_do_not_depend_on_coefficients() -> None:
    _, a, b = family(3)
    with torch.no_grad():
        b.conv2.coefficients.normal_(generator=torch.Generator().manual_seed(1))
    found = sosie.compare_weights(a, b, measures="atom_grassmann")
    value = found.matrix()
    assert np.diag(value)[1:4] == pytest.approx(by_hand("atom_grassmann", a, b)[1:], abs=1e-10)
    x, y = a.conv2.atoms.detach().double(), b.conv4.atoms.detach().double()
    assert value[1, 3] == pytest.approx(sosie.measure("atom_grassmann", x, y), abs=1e-10)
    # The first layer has four kernels, so four atoms.
    assert np.isnan(value[0, 1:]).all()
    assert any("number or size of atoms" in caveat.text for caveat in found["atom_grassmann"].caveats)


def test_as_many_atoms_as_entries_have_no_grassmann() -> None:
    found = sosie.compare_weights(*family(2, atoms=9), measures=["atom_grassmann", "atom_cosine"])
    assert np.isnan(found.matrix("atom_grassmann")[1, 1])
    assert any("whatever the models" in c.text and c.site_a == "conv2" for c in found["atom_grassmann"].caveats)
    assert np.isnan(found.matrix("atom_grassmann")[4, 4])
    assert np.isfinite(found.matrix("atom_cosine")[4, 4])


def test_the_cosine_of_how_far_they_moved() -> None:
    base, a, b = family(3)
    found = sosie.compare_weights(a, b, measures="atom_cosine", base=base)
    assert np.diag(found.matrix())[:4] == pytest.approx(by_hand("atom_cosine", a, b, base), abs=1e-12)
    assert "base" in found["atom_cosine"].statistic
    assert not any("started from" in caveat.text for caveat in found["atom_cosine"].caveats)
    with torch.no_grad():
        a.conv3.atoms.copy_(base.conv3.atoms)
    still = sosie.compare_weights(a, b, measures="atom_cosine", base=base)
    assert np.isnan(still.matrix()[2, 2])
    assert np.isnan(still.matrix()[4, 4])
    assert any("has the atoms of the base at conv3: " in caveat.text for caveat in still["atom_cosine"].caveats)
    assert not any("the base at" in caveat.text for caveat in found["atom_cosine"].caveats)


@pytest.mark.parametrize("name", ["atom_cosine", "atom_grassmann"])
def test_all_pairs_come_from_one_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = family(6)
    found = sosie.compare_weights({f"m{k}": model for k, model in enumerate(models)}, measures=[name])
    slow = np.eye(6)
    for i, j in itertools.combinations(range(6), 2):
        slow[i, j] = slow[j, i] = found[i, j].matrix(name)[4, 4]
        assert slow[i, j] == pytest.approx(np.mean(by_hand(name, models[i], models[j])), abs=1e-10)
    assert found.matrix(name) == pytest.approx(slow, abs=1e-12)
    calls = []
    init = Atoms.__post_init__
    monkeypatch.setattr(Atoms, "__post_init__", lambda view: (calls.append(1), init(view)))
    sosie.compare_weights(models, measures=[name]).matrix(name)
    assert len(calls) <= len(LAYERS), "a view for each pair would be a loop over pairs"
    some = sosie.compare_weights(models, measures=[name], sites_a=["conv2", "conv3"])
    assert some.matrix(name)[1, 2] == pytest.approx(np.nanmean(np.diag(some[1, 2].matrix(name))), abs=1e-12)
    mixed = sosie.compare_weights(models, measures=[name], sites_a=["conv2", "all"])
    assert mixed.matrix(name)[1, 2] == pytest.approx(mixed[1, 2].matrix(name)[0, 0], abs=1e-12)  # "all" is not a layer


def test_a_pair_without_value_does_not_cost_the_others() -> None:
    models = family(4)
    with torch.no_grad():
        models[3].conv2.atoms.zero_()
    found = sosie.compare_weights(models, measures="atom_cosine").matrix("atom_cosine")
    whole = AtomTable.of([{n: layer.atoms for n, layer in atom_layers(m).items()} for m in models[:3]]).cosines()
    assert found[:3, :3] == pytest.approx(whole.numpy(), abs=1e-6)
    assert np.isfinite(found[0, 3])


def test_sites_without_atoms_say_so() -> None:
    found = sosie.compare_weights(*family(2), measures="atom_cosine", sites_a=["conv1", "fc"], sites_b=["conv1"])
    assert np.isnan(found.matrix()[1, 0])
    assert any(c.site_a == "fc" and "not made of atoms" in c.text for c in found["atom_cosine"].caveats)


def test_coefficients_that_are_not_shared_are_refused() -> None:
    a, b = family(2)
    with torch.no_grad():
        b.conv3.coefficients += 1e-9 * b.conv3.coefficients
        sosie.compare_weights(a, b, measures="atom_cosine")  # the rounding of a copy
        b.conv3.coefficients *= 1.5
    with pytest.raises(
        ValueError, match=r"conv3: .* do not share their coefficients, which differ by 0\.5 of .*joint=9"
    ):
        sosie.compare_weights(a, b, measures="atom_cosine")
    share_coefficients(a, [b])
    assert sosie.compare_weights(a, b, measures="atom_cosine").matrix()[2, 2] < 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: small_cnn(width=4, atoms=5), r"conv2: .* atoms of 6 × 3 × 3 and .* of 5 × 3 × 3"),
        (lambda: small_cnn(width=6, atoms=6), r"conv1: .* atoms of 4 × 3 × 3 and .* of 6 × 3 × 3"),
        (lambda: small_cnn(width=4), r"has no layer of atoms: joint=m decomposes .*decompose\(model, m\)"),
        (lambda: with_atoms(nn.Sequential(nn.Conv2d(3, 4, 3)), 6), r"no layer of atoms in common"),
    ],
)
def test_models_that_cannot_share_are_refused(other: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sosie.compare_weights(family(1)[0], other(), measures="atom_cosine")  # type: ignore[operator]


def test_other_channels_point_to_polar_factors() -> None:
    a, b = (with_atoms(nn.Sequential(nn.Conv2d(3, width, 3)), 4) for width in (8, 16))
    with pytest.raises(ValueError, match=r"0: coefficients of \(8, 3, 4\).*joint='polar'"):
        sosie.compare_weights(a, b, measures="atom_cosine")


def test_options_that_do_not_go_together() -> None:
    a, b = family(2)
    with pytest.raises(ValueError, match="match= with atom_cosine is for joint=m"):
        sosie.compare_weights(a, b, measures="atom_cosine", match="weights")
    with pytest.raises(ValueError, match="null= is for wcka"):
        sosie.compare_weights(a, b, measures="atom_cosine", null="weights")
    with pytest.raises(ValueError, match="atom_cosine compare single tensors, wcka networks"):
        sosie.compare_weights(a, b, measures=["atom_cosine", "wcka"])
    with pytest.raises(ValueError, match="linear_cka: of layers"):
        sosie.compare_weights(a, b, measures=["atom_cosine", "linear_cka"])
    with torch.no_grad():
        b.conv1.atoms[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"conv1\.atoms of .* has 1 of"):
        sosie.compare_weights(a, b, measures="atom_cosine")


def test_models_of_atoms_are_read_by_other_measures() -> None:
    a, b = family(2)
    value = sosie.compare_weights(a, b, measures="wcka").matrix()
    assert value == pytest.approx(sosie.compare_weights(recompose(a), recompose(b), measures="wcka").matrix(), abs=1e-4)
    data = [torch.rand(8, 1, 28, 28, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    sites = sosie.compare(a, b, data, sites_a="conv*", sites_b="conv*", measures=["linear_cka"], rows="mean")
    assert sites.sites_a == LAYERS


def test_the_benchmark_leaves_them_out_and_says_why() -> None:
    assert not [candidate for candidate in open_candidates(None, SCALES["smoke"]) if "atom" in candidate.name]
    with pytest.raises(ValueError, match="atom_cosine compares convolutions that share coefficients"):
        open_candidates(["atom_cosine"], SCALES["smoke"])
