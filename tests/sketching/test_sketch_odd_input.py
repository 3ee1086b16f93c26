"""Odd input to sketches and to their comparison: an answer with a reason, or an error in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_nets import InPlace, Residual, built, images, rows
from torch import Tensor

import sosie
from sosie.linalg import Spectrum
from sosie.sketching import Sketch, classify
from sosie.stats import Fold

SITES = ["stem", "left", "head"]


def made(seed: int = 0, x: Tensor | None = None, **options: Any) -> Sketch:
    data = [rows(40) if x is None else x]
    return sosie.sketch(built(Residual, seed), data, **{"sites": SITES, "size": 16, **options})


def caveats(found: Any, measure: str = "linear_cka") -> dict[str, list[tuple[str | None, str | None]]]:
    texts: dict[str, list[tuple[str | None, str | None]]] = {}
    for caveat in found[measure].caveats:
        texts.setdefault(caveat.text, []).append((caveat.site_a, caveat.site_b))
    return texts


# Options


@pytest.mark.parametrize("seed", [2**40, -(2**40), 2**63, 10**30, True, 1.5, None])
@pytest.mark.parametrize("size", [16, None])
def test_seeds_that_no_generator_takes(seed: Any, size: int | None) -> None:
    with pytest.raises(ValueError, match="seed of a sketch must be a whole number"):
        sosie.sketch(built(Residual), [rows()], size=size, seed=seed)


def test_the_largest_seeds_go_all_the_way() -> None:
    for seed in (2**40 - 1, 1 - 2**40):
        a, b = (sosie.sketch(built(Residual, k), [rows(40)], sites=SITES, size=16, seed=seed) for k in (0, 1))
        assert Fold(64, 8, seed)(torch.ones(2, 64)).shape == (2, 8)
        assert np.isfinite(sosie.compare(a, b, measures="linear_cka", null="permutation", seed=seed).matrix()).all()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_rows": 1.5}, "max_rows must be a whole number"),
        ({"kernels": None}, "at least one kernel"),
        ({"size": None, "stack": 2}, "nothing to stack"),
    ],
)
def test_numbers_that_are_none(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        made(**options)


def test_no_data_is_said_of_sketching() -> None:
    with pytest.raises(TypeError, match=r"sketch\(model, data\)"):
        sosie.sketch(built(Residual), None)


def test_a_budget_that_projection_does_not_help_says_one_size() -> None:
    with pytest.raises(MemoryError) as caught:
        made(memory=1000)
    assert "projected" not in str(caught.value)


def test_inference_mode_with_changes_in_place() -> None:
    x, model = images(), built(InPlace)
    apart = sosie.sketch(model, [x], sites=["c2", "fc"], size=8)
    with torch.inference_mode():
        inside = sosie.sketch(model, [x], sites=["c2", "fc"], size=8)
    assert torch.equal(inside.site("c2").gradients.rows, apart.site("c2").gradients.rows)


# Comparing


@pytest.mark.parametrize(
    "option",
    [
        {"sites_a": ["stem"]},
        {"sites_b": "head"},
        {"rows": "mean"},
        {"max_rows": 3},
        {"exact": True},
        {"interval": True},
        {"memory": "1GB"},
        {"prepare_a": torch.nn.Identity()},
        {"data": [rows()]},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_was_settled_when_sketching_is_not_ignored(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(option))}: not for sketches"):
        sosie.compare(made(), made(1), **option)


def test_sketches_with_models_are_told_to_sketch() -> None:
    for pair in ((made(), built(Residual)), (built(Residual), made())):
        with pytest.raises(TypeError, match="make one with"):
            sosie.compare(*pair, [rows(40)])


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("size", [16, None])
def test_too_few_rows_to_debias(n: int, size: int | None) -> None:
    with pytest.raises(ValueError, match=f"needs at least 4 rows, got {n}"):
        sosie.compare(made(x=rows(n), size=size), made(1, rows(n), size=size), measures="debiased_cka")


def _dead(site: str) -> torch.nn.Module:
    model = built(Residual)
    with torch.no_grad():
        for parameter in getattr(model, site).parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("measure", ["debiased_cka", "linear_cka", "normalized_bures", "spectral_bures_distance"])
@pytest.mark.parametrize("size", [16, None])
def test_a_site_without_gradients_is_called_by_its_name(measure: str, size: int | None) -> None:
    """All gradients below a head of zeros are 0: that is no matter of the size."""
    dead = sosie.sketch(_dead("head"), [rows(40)], sites=SITES, size=size)
    found = sosie.compare(dead, made(size=size), measures=measure)
    assert np.isnan(found.matrix()).all()
    texts = caveats(found, measure)
    assert texts["rows of the hadamard kernel do not vary: no similarity is defined"] == [(s, None) for s in SITES]
    assert not any("larger size" in text for text in texts)


@pytest.mark.parametrize(("size", "count"), [(16, 3000), (None, 900)])  # a whole kernel of 3,000 rows takes a minute
def test_the_same_row_many_times_does_not_vary(size: int | None, count: int) -> None:
    x = rows(1).expand(count, -1).contiguous()
    found = sosie.compare(made(x=x, size=size), made(1, x, size=size), measures=["debiased_cka", "linear_cka"])
    for measure in found.measures:
        assert np.isnan(found.matrix(measure)).all()
        assert sum("do not vary" in text for text in caveats(found, measure)) == 1


def test_a_dead_site_among_sketches_without_common_rows() -> None:
    dead = sosie.sketch(_dead("head"), [rows(40)], sites=SITES, size=16)
    found = sosie.compare_unpaired(dead, made(1, rows(60)))
    for measure in found.measures:
        assert np.isnan(found.matrix(measure)).all()
        assert any("do not vary" in text for text in caveats(found, measure))


def test_the_spectrum_of_nothing_has_no_values() -> None:
    assert Spectrum.of(torch.zeros(0, 0)).rank == 0


def test_gradients_of_different_losses_are_a_caveat() -> None:
    a, b = made(), made(1, beta=0.3)
    text = "the gradients are of different losses, logits, beta 0.5 and logits, beta 0.3"
    assert text in caveats(sosie.compare(a, b))
    assert text not in caveats(sosie.compare(a.using("features"), b.using("features")))
    assert not any("losses" in words for words in caveats(sosie.compare(a, made(1))))


def test_rows_that_fit_into_the_buckets_need_none() -> None:
    text = "40 rows fit into 64 buckets: size=None (--size all) keeps every row, which is exact"
    assert text in caveats(sosie.compare(made(size=64), made(1, size=64)))
    assert not any("fit into" in words for words in caveats(sosie.compare(made(), made(1))))


def test_unpaired_sketches_of_every_row_are_told_why_not() -> None:
    with pytest.raises(ValueError, match="got one that kept every row and 16"):
        sosie.compare_unpaired(made(size=None), made(1, rows(20)))
    with pytest.raises(ValueError, match="at least 2"):
        sosie.compare_unpaired(made(), made(1, rows(20)), draws=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed of a sketch must be a whole number"):
        sosie.compare_unpaired(made(), made(1, rows(20)), seed=2**63)


# Answers


def test_hidden_states_are_no_logits() -> None:
    class Headless(Residual):
        def forward(self, x: Tensor) -> Any:
            return {"last_hidden_state": super().forward(x)[:, None].expand(-1, 4, -1), "pooler_output": x}

    model = built(Headless)
    with pytest.raises(ValueError, match="hidden states, since it has no head"):
        sosie.sketch(model, [rows()], sites=["stem"], size=8)
    assert sosie.sketch(model, [rows()], sites=["stem"], size=8, kernels="features").parts == ("features",)
    own = sosie.sketch(
        model, [rows()], sites=["stem"], size=8, output=lambda answer, _: answer["last_hidden_state"].mean((1, 2))
    )
    assert "gradients" in own.parts


# Classifying


def test_classify_takes_a_file_and_says_what_it_needs(tmp_path: Path) -> None:
    labelled = sosie.sketch(built(Residual), [(rows(40), torch.arange(40) % 3)], sites=["left"], size=16)
    path = labelled.save(tmp_path / "k.safetensors")
    assert classify(path).alphas == classify(labelled).alphas
    with pytest.raises(TypeError, match="need a sketch"):
        classify(built(Residual))  # type: ignore[arg-type]


def test_measures_together_are_what_each_is_alone() -> None:
    a, b = made(), made(1)
    names = ["linear_cka", "normalized_bures", "procrustes_angle"]
    together = sosie.compare(a, b, measures=names, null="permutation", draws=4)
    for name in names:
        alone = sosie.compare(a, b, measures=name, null="permutation", draws=4)
        for what in ("value", "null", "p"):
            assert np.array_equal(getattr(together[name], what), getattr(alone[name], what))


def test_one_direction_that_decides_is_a_caveat() -> None:
    model = built(Residual)
    with torch.no_grad():
        model.stem.weight[1:] *= 1e-3
    narrow = sosie.sketch(model, [rows(40)], sites=["stem"], size=16)
    for one, doubtful in ((narrow, True), (made().at("stem"), False)):
        found = caveats(sosie.compare(one.using("features"), made(1).at("stem").using("features")))
        about = [where for words, where in found.items() if words.startswith("one direction holds about")]
        assert about == ([[("stem", None)]] if doubtful else [])


def wide(x: Tensor, **options: Any) -> Sketch:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 3)).double()
    return sosie.sketch(network, [x], sites=["1"], size=16, **options)


def test_neurons_are_compared_where_columns_correspond() -> None:
    """Other seeds project, and sketch f ⊗ g, to other columns; a product of Gram matrices has eigenvectors for them."""

    def distance(a: Sketch, b: Sketch, kernel: str) -> tuple[float, str]:
        found = sosie.compare_unpaired(a.using(kernel), b.using(kernel), measures="bures_distance")
        return found.matrix()[0, 0], " ".join(caveats(found, "bures_distance"))

    whole, seeded, elsewhere = wide(rows(40)), wide(rows(40), seed=1), wide(rows(40, seed=5))
    folded, more = wide(rows(40, seed=5), memory="120kB"), wide(rows(40), memory="240kB")
    other = wide(rows(40), memory="120kB", seed=1)
    assert (folded.sites[0].folded, more.sites[0].folded, other.sites[0].folded) == (18, 37, 18)
    for a, b, kernel, words in (
        (whole, seeded, "features", ""),
        (whole, elsewhere, "hadamard", ""),
        (whole, seeded, "hadamard", "do not correspond"),
        (folded, other, "features", "do not correspond"),
        (folded, more, "features", "do not correspond"),
        (folded, whole, "features", "do not correspond"),
        (folded, wide(rows(40), memory="120kB"), "features", "projected to 18"),
        (whole, elsewhere, "hadamard_of_sketches", "has no columns"),
    ):
        value, text = distance(a, b, kernel)
        assert words in text
        assert np.isfinite(value) == (words in ("", "projected to 18"))


def test_projected_sites_are_named_on_both_sides_without_common_rows() -> None:
    """The buckets of B are drawn anew where both have one seed."""
    a, b = (wide(rows(40, seed=seed), memory="120kB") for seed in (0, 5))
    found = caveats(sosie.compare_unpaired(a.using("features"), b.using("features")))
    assert found["rows were projected to 18 columns"] == [("1", None), (None, "1")]


def test_a_value_without_an_interval_says_why() -> None:
    x = rows(5)
    found = sosie.compare(made(0, x).using("features"), made(1, x).using("features"), measures="debiased_cka")
    values = found["debiased_cka"]
    assert values.low is not None
    missing = np.argwhere(np.isnan(values.low) & np.isfinite(values.value)).tolist()
    assert missing
    said = caveats(found, "debiased_cka")
    assert said["no interval: with one of 16 buckets left out the value is undefined; take a larger size"] == [
        (SITES[i], SITES[j]) for i, j in missing
    ]


def test_an_interval_of_a_stack_says_when_it_is_too_narrow() -> None:
    for n, stack, said in ((40, 4, True), (40, 1, False), (80, 4, False)):
        x = rows(n)
        found = sosie.compare(made(0, x, stack=stack).using("features"), made(1, x, stack=stack).using("features"))
        assert any("take stack=1" in text for text in caveats(found)) == said


def test_a_sketch_of_no_sites() -> None:
    with pytest.raises(ValueError, match="name at least one site of stem, left, head"):
        made().at()
