"""Every measure of atoms keeps the laws it declares, and breaks those it does not; values from outside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
from changed_neurons import check_invariance, pair_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sosie
from sosie.measures import MEASURES, Measure
from sosie.measures.define import TRANSFORMATIONS
from sosie.stats import Atoms, AtomTable

OF_ATOMS = [measure for measure in MEASURES.values() if measure.reads is Atoms]
measures = pytest.mark.parametrize("measure", OF_ATOMS, ids=lambda m: m.name)


def atoms(shape: tuple[int, ...] = (5, 3, 3), seed: int = 0, common: float = 1.0) -> tuple[Tensor, Tensor]:
    return pair_of(shape, seed, common)


def value_of(measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    return measure.of(x, y)


def test_there_are_measures_of_atoms() -> None:
    assert {measure.name for measure in OF_ATOMS} == {"atom_cosine", "atom_grassmann"}


@measures
@pytest.mark.parametrize("how", TRANSFORMATIONS)
def test_invariant_exactly_where_declared(measure: Measure, how: str) -> None:
    check_invariance(measure, *atoms(), how, value_of)


@measures
def test_atoms_with_themselves_and_swapped(measure: Measure) -> None:
    x, y = atoms()
    assert float(value_of(measure, x, x.clone())) == pytest.approx(measure.same, abs=1e-12)
    gap = float((value_of(measure, x, y) - value_of(measure, y, x)).abs())
    assert (gap < 1e-12) == measure.symmetric


@measures
def test_atoms_need_pairing_exactly_where_declared(measure: Measure) -> None:
    x, y = atoms()
    moved = float((value_of(measure, x, y.flip(0)) - value_of(measure, x, y)).abs())
    assert (moved > 1e-4) == measure.paired


@measures
@given(count=st.integers(1, 8), seed=st.integers(0, 99), common=st.floats(-2, 2))
@settings(max_examples=25, deadline=None)
def test_stays_within_its_bounds(measure: Measure, count: int, seed: int, common: float) -> None:
    x, y = atoms((count, 3, 3), seed)
    value = float(value_of(measure, x, y + common * x))
    low, high = measure.bounds
    assert low is not None
    assert high is not None
    assert low - 1e-12 <= value <= high + 1e-12


@measures
def test_single_precision_is_near_double(measure: Measure) -> None:
    x, y = atoms()
    assert float(value_of(measure, x.float(), y.float())) == pytest.approx(float(value_of(measure, x, y)), abs=1e-5)


@measures
def test_gradient_is_right(measure: Measure) -> None:
    x, y = atoms((4, 3, 3))
    assert torch.autograd.gradcheck(lambda a, b: value_of(measure, a, b), (x.requires_grad_(), y.requires_grad_()))


@measures
def test_all_pairs_at_once_are_the_pairs(measure: Measure) -> None:
    sets = torch.stack([side for seed in range(4) for side in atoms((4, 3, 3), seed)]).flatten(2)
    found = measure(Atoms(sets[:5], sets))
    assert found.shape == (5, 8)
    for i, j in ((0, 0), (1, 7), (4, 2)):
        assert float(found[i, j]) == pytest.approx(float(value_of(measure, sets[i], sets[j])), abs=1e-12)


@measures
def test_facts_are_complete(measure: Measure) -> None:
    facts = measure.facts()
    assert facts["summary"].strip()
    assert all(facts[key] for key in ("paper", "cost", "chance"))


def test_values_from_numpy_and_scipy() -> None:
    x, y = (side.numpy() for side in atoms())
    cosine = np.dot(x.ravel(), y.ravel()) / (np.linalg.norm(x) * np.linalg.norm(y))
    assert sosie.measure("atom_cosine", x, y) == pytest.approx(cosine, abs=1e-12)
    angles = scipy.linalg.subspace_angles(x.reshape(5, 9).T, y.reshape(5, 9).T)
    assert sosie.measure("atom_grassmann", x, y) == pytest.approx(np.cos(angles).mean(), abs=1e-12)
    assert sosie.measure("atom_cosine", x.reshape(5, 9), y.reshape(5, 9)) == pytest.approx(cosine, abs=1e-12)


def test_chance_of_independent_atoms_is_as_declared() -> None:
    x, y = (torch.randn(400, 6, 9, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (0, 1))
    cosines = MEASURES["atom_cosine"](Atoms(x, y)).flatten()
    assert abs(float(cosines.mean())) < 0.005
    assert float(cosines.std()) == pytest.approx(54**-0.5, rel=0.05)
    for m in (2, 4, 6):
        spans = MEASURES["atom_grassmann"](Atoms(x[:100, :m], y[:100, :m]))
        assert 0.8 < float(spans.mean()) / (m / 9) ** 0.5 < 1


@pytest.mark.parametrize("count", [9, 10])
def test_atoms_that_span_everything_are_refused(count: int) -> None:
    x, y = atoms((count, 3, 3))
    with pytest.raises(ValueError, match=rf"{count} atoms of 9 entries span all kernels.* fewer than 9"):
        sosie.measure("atom_grassmann", x, y)
    assert -1 < sosie.measure("atom_cosine", x, y) < 1


def test_bad_atoms_are_errors_in_words() -> None:
    x, y = atoms((4, 3, 3))
    with pytest.raises(ValueError, match=r"equally many atoms of one size, got \(4, 3, 3\), \(3, 3, 3\)"):
        sosie.measure("atom_cosine", x, y[:3])
    with pytest.raises(ValueError, match=r"\(number, height, width\).*got \(36,\)"):
        sosie.measure("atom_cosine", x.flatten(), y.flatten())
    with pytest.raises(ValueError, match="y: all atoms are 0"):
        sosie.measure("atom_cosine", x, torch.zeros_like(y))
    with pytest.raises(ValueError, match="x: the 4 atoms are linearly dependent"):
        sosie.measure("atom_grassmann", torch.cat([x[:3], x[:1] + x[1:2]]), y)
    with pytest.raises(ValueError, match="y: the 4 atoms are linearly dependent"):
        sosie.measure("atom_grassmann", x, torch.zeros_like(y))
    with pytest.raises(ValueError, match="x has 1 values that are NaN"):
        sosie.measure("atom_cosine", torch.where(x == x[0, 0, 0], torch.nan, x), y)
    with pytest.raises(ValueError, match=r"got \(2, 4, 9\) and \(2, 3, 9\)"):
        Atoms(torch.zeros(2, 4, 9), torch.zeros(2, 3, 9))


def test_a_table_of_atoms_is_the_mean_over_layers() -> None:
    random = torch.Generator().manual_seed(0)
    models = [
        {"a": torch.randn(6, 3, 3, generator=random), "b": torch.randn(4, 5, 5, generator=random)} for _ in range(5)
    ]
    table = AtomTable.of(models, torch.float64)
    for i, j in ((0, 1), (3, 2), (4, 4)):
        each = [sosie.measure("atom_cosine", models[i][layer], models[j][layer]) for layer in "ab"]
        assert float(table.cosines()[i, j]) == pytest.approx(np.mean(each), abs=1e-7)
        span = float(MEASURES["atom_grassmann"](table.at("b"))[i, j])
        assert span == pytest.approx(sosie.measure("atom_grassmann", models[i]["b"], models[j]["b"]), abs=1e-6)
    parts = AtomTable.of(models[:2], torch.float64).merge(AtomTable.of(models[2:], torch.float64))
    assert torch.equal(parts.rows, table.rows)
    torch.testing.assert_close(table.nearest(3), table.cosines()[3])
    torch.testing.assert_close(table.nearest(AtomTable.of(models[1:3], torch.float64)), table.cosines()[:, 1:3])
    with pytest.raises(ValueError, match=r"b: 0 has atoms of \(4, 5, 5\), 1 of \(3, 5, 5\)"):
        AtomTable.of([models[0], {**models[1], "b": models[1]["b"][:3]}])
    with pytest.raises(ValueError, match="a: the atoms of two are NaN"):
        AtomTable.of({"one": models[0], "two": {**models[1], "a": models[1]["a"] * torch.nan}})
    with pytest.raises(ValueError, match="a: the atoms of 1 are all 0"):
        AtomTable.of([models[0], {**models[1], "a": models[1]["a"] * 0}])


def test_the_laws_can_fail() -> None:
    liar = replace(MEASURES["atom_cosine"], invariant=frozenset({"rotation"}))
    with pytest.raises(AssertionError, match="atom_cosine under rotation moved"):
        check_invariance(liar, *atoms(), "rotation", value_of)
    with pytest.raises(AssertionError, match="did not move"):
        check_invariance(replace(MEASURES["atom_grassmann"], invariant=frozenset()), *atoms(), "linear", value_of)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_very_small_and_large_atoms_have_the_cosine_of_others(size: float) -> None:
    x, y = torch.randn(2, 3, 4, 9, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(MEASURES["atom_cosine"](Atoms(size * x, size * y)), MEASURES["atom_cosine"](Atoms(x, y)))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_table_in_few_digits_is_rounded_after_it_is_normalised(dtype: torch.dtype, size: float) -> None:
    layers = {"a": torch.randn(5, 2, 3, 3), "b": torch.randn(5, 4, 3, 3)}
    exact = AtomTable.stacked(layers, dtype=torch.float64)
    found = AtomTable.stacked({name: size * atoms for name, atoms in layers.items()}, dtype=dtype)
    torch.testing.assert_close(found.rows.double(), exact.rows, atol=0.01, rtol=0)
    torch.testing.assert_close(found.cosines().double(), exact.cosines(), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("layers", "names", "message"),
    [
        ({}, None, "at least one model with one layer"),
        ({"a": torch.ones(3, 2, 3, 3)}, ["one"], "1 names for 3 models"),
        ({"a": torch.ones(3, 2, 3, 3), "b": torch.ones(2, 2, 3, 3)}, None, "b has atoms of 2 models, a of 3"),
    ],
)
def test_a_table_of_things_that_do_not_fit(layers: dict, names: list | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AtomTable.stacked(layers, names)
