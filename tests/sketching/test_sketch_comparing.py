"""Sketches compare like models: values, chance and caveats, with rows in common and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_nets import InPlace, Residual, built
from torch import Tensor, nn

import sosie
from sosie.data import DataPart
from sosie.files import DamagedFile
from sosie.results import Comparisons
from sosie.sketching import Sketch, sketch
from sosie.sketching.kernels import SketchPair
from sosie.stats import Alignment, Resketch, UncentredAlignment

SITES = ["stem", "mix", "head"]
ALL = ["features", "gradients", "hadamard", "maps"]


def rows(n: int = 160, seed: int = 1) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed)).double()


def made(model_seed: int = 0, data: Tensor | None = None, first_row: int = 0, **options: Any) -> Sketch:
    x = DataPart((rows() if data is None else data).split(64), first_row)
    return sketch(built(Residual, model_seed), x, sites=SITES, kernels=ALL, **{"size": 32, **options})


@pytest.fixture(scope="module")
def pair() -> tuple[Sketch, Sketch]:
    return made(0), made(1)


@pytest.mark.parametrize("size", [None, 32])
@pytest.mark.parametrize("kernel", ["hadamard", "features", "sum", "maps", "midpoint", "hadamard_of_sketches"])
def test_a_sketch_with_itself(size: int | None, kernel: str) -> None:
    one = made(size=size)
    measures = ["linear_cka", "kernel_alignment", "normalized_bures"]
    if size is None or kernel not in ("midpoint", "hadamard_of_sketches"):
        measures += ["debiased_cka"]
    found = sosie.compare(one.using(kernel), made(size=size).using(kernel), measures=measures)
    for name in found.measures:
        value = found.matrix(name).diagonal()
        assert np.allclose(value[~np.isnan(value)], 1, atol=1e-9), name
        assert np.isfinite(value).any(), name


@pytest.mark.parametrize("measure", ["linear_cka", "debiased_cka", "normalized_bures", "procrustes_angle"])
def test_features_of_all_rows_give_what_comparing_models_gives(measure: str) -> None:
    a, b = built(Residual, 0), built(Residual, 1)
    wanted = sosie.compare(
        a, b, rows(), measures=measure, sites_a=SITES, sites_b=SITES, exact=True, precision="float64"
    )
    found = sosie.compare(made(0, size=None).using("features"), made(1, size=None).using("features"), measures=measure)
    assert np.abs(found.matrix() - wanted.matrix()).max() < 1e-9


def test_sketches_come_near_to_what_all_rows_give() -> None:
    exact = sosie.compare(
        made(0, size=None).using("features"), made(1, size=None).using("features"), measures="debiased_cka"
    ).matrix()
    found = sosie.compare(
        made(0, size=128).using("features"), made(1, size=128).using("features"), measures="debiased_cka"
    ).matrix()
    assert np.abs(found - exact).max() < 0.15


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"size": 16}, "different sizes, 32 and 16"),
        ({"size": None}, "different sizes, 32 and None"),
        ({"seed": 3}, "different seeds, 0 and 3"),
        ({"stack": 2}, "different stacks, 1 and 2"),
        ({"data": rows(159)}, "different numbers of rows, 160 and 159"),
        ({"data": rows(seed=2)}, "different data, another order"),
        ({"data": rows().flip(0)}, "different data, another order"),
        ({"first_row": 160}, "different rows, 0 to 159 and 160 to 319"),
    ],
)
def test_what_is_not_shared_is_refused(pair: tuple[Sketch, Sketch], options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"{word}.*compare_unpaired"):
        sosie.compare(pair[0], made(1, **options), measures="linear_cka")


def test_one_input_that_differs_is_noticed() -> None:
    other = rows()
    other[17] += 0.1
    with pytest.raises(ValueError, match="different data"):
        sosie.compare(made(size=None), made(1, other, size=None))
    two = rows()
    two[[3, 4]] = two[[4, 3]]
    with pytest.raises(ValueError, match="another order"):
        sosie.compare(made(), made(1, two))


@pytest.mark.parametrize("size", [None, 32])
def test_another_order_of_inputs_far_from_zero_is_noticed(size: int | None) -> None:
    far = (rows() / 300 + 100).float().double()
    sosie.compare(made(0, far, size=size), made(1, far + 1e-7, size=size))
    with pytest.raises(ValueError, match="another order"):
        sosie.compare(made(0, far, size=size), made(1, far.flip(0), size=size))


def test_the_networks_may_differ_in_everything_else() -> None:
    x = torch.randn(30, 2, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    a = sketch(built(InPlace), x.split(7), sites=["b1", "fc"], size=16)
    torch.manual_seed(0)
    b = sketch(nn.Sequential(nn.Flatten(), nn.Linear(32, 9), nn.Tanh(), nn.Linear(9, 2)), [x.float()], size=16)
    found = sosie.compare(a, b, measures="linear_cka")
    assert found.matrix().shape == (2, len(b.sites))
    assert found.sites_a == ["b1", "fc"]


def test_several_sketches_give_all_pairs(pair: tuple[Sketch, Sketch], tmp_path: Path) -> None:
    third = made(2)
    third.save(tmp_path / "k.safetensors")
    found = sosie.compare([*pair, tmp_path / "k.safetensors"], measures="linear_cka")
    assert isinstance(found, Comparisons)
    alone = sosie.compare(pair[1], third, measures="linear_cka")
    assert np.allclose(found[1, 2].matrix(), alone.matrix())
    with pytest.raises(ValueError, match="different seeds"):
        sosie.compare([*pair, made(2, seed=5)], measures="linear_cka")


def test_files_of_sketches_compare(pair: tuple[Sketch, Sketch], tmp_path: Path) -> None:
    paths = [k.save(tmp_path / f"{i}.safetensors") for i, k in enumerate(pair)]
    found = sosie.compare(*paths, measures="linear_cka")
    assert np.array_equal(found.matrix(), sosie.compare(*pair, measures="linear_cka").matrix())
    paths[1].write_bytes(paths[1].read_bytes()[:-50])
    with pytest.raises((DamagedFile, ValueError)):
        sosie.compare(*paths, measures="linear_cka")


@pytest.mark.parametrize("measure", ["mutual_knn", "rsa", "jaccard", "rbf_cka"])
def test_measures_that_need_rows_are_refused(pair: tuple[Sketch, Sketch], measure: str) -> None:
    with pytest.raises(ValueError, match=f"{measure} reads rows or neurons"):
        sosie.compare(*pair, measures=measure)


def test_reports_and_words(pair: tuple[Sketch, Sketch], tmp_path: Path) -> None:
    found = sosie.compare(*pair, measures=["linear_cka", "debiased_cka", "normalized_bures"])
    page = sosie.write_report(found, tmp_path / "c.html").read_text()
    assert "hadamard kernel" in page
    assert "160 rows, sketched to 32" in str(found.rows()) or "sketched to 32" in page
    assert "linear_cka" in str(found)
    texts = [caveat.text for caveat in found["linear_cka"].caveats]
    assert any("160 rows in 32 buckets: biased; debiased_cka" in text for text in texts)
    assert not any("biased" in caveat.text for caveat in found["debiased_cka"].caveats)
    found.save(tmp_path / "c.json")
    assert np.allclose(sosie.load(tmp_path / "c.json").matrix("linear_cka"), found.matrix("linear_cka"))
    unpaired = sosie.compare_unpaired(pair[0], made(1, rows(90, 5)))
    assert "share no rows" in sosie.write_report(unpaired, tmp_path / "u.html").read_text()
    several = sosie.compare([*pair, made(2)], measures="linear_cka")
    assert "net" in str(several).lower() or str(several)


def test_products_of_sketches_say_what_they_are(pair: tuple[Sketch, Sketch]) -> None:
    found = sosie.compare(*(k.using("hadamard_of_sketches") for k in pair), measures="linear_cka")
    assert any("not the sketch of their product" in c.text for c in found["linear_cka"].caveats)
    assert (found.matrix() > sosie.compare(*pair, measures="linear_cka").matrix()).mean() > 0.5
    with pytest.raises(ValueError, match="not known how much sketching adds"):
        sosie.compare(*(k.using("hadamard_of_sketches") for k in pair), measures="debiased_cka")
    with pytest.raises(ValueError, match=r"kernel must be one of 'hadamard', .*got 'product'"):
        sosie.compare(*(k.using("product") for k in pair), measures="linear_cka")
    with pytest.raises(ValueError, match="one kernel of both sketches, got 'features' and 'hadamard'"):
        sosie.compare(pair[0].using("features"), pair[1])


def test_sketched_ckas_have_an_interval_where_buckets_tell_it(pair: tuple[Sketch, Sketch]) -> None:
    names = ["linear_cka", "debiased_cka", "kernel_alignment", "normalized_bures"]
    found = sosie.compare(*(k.using("features") for k in pair), measures=names)
    for name in names[:3]:
        values = found[name]
        assert values.low is not None
        assert values.high is not None
        finite = np.isfinite(values.value)
        assert ((values.low <= values.value) & (values.value <= values.high))[finite].all()
        assert (values.high - values.low)[finite].max() > 0.01
    assert found["normalized_bures"].low is None
    assert not any("columns of the sketch" in c.text for c in found["linear_cka"].caveats)
    itself = sosie.compare(pair[0].using("features"), made(0).using("features"), measures="linear_cka")["linear_cka"]
    assert itself.low is not None
    assert np.allclose(itself.low.diagonal(), 1)
    product = sosie.compare(*pair, measures="linear_cka")["linear_cka"]
    assert product.low is not None
    assert any("not other columns of the sketch" in c.text for c in product.caveats)
    for other in (
        sosie.compare(made(0, size=None), made(1, size=None), measures="linear_cka"),
        sosie.compare(*(k.using("hadamard_of_sketches") for k in pair), measures="linear_cka"),
        sosie.compare(made(0, size=4), made(1, size=4), measures="linear_cka"),
        sosie.compare_unpaired(pair[0], made(1, seed=5), measures="linear_cka"),
    ):
        assert other["linear_cka"].low is None


# Chance


def test_redrawn_buckets_give_the_product_of_traces_on_average(pair: tuple[Sketch, Sketch]) -> None:
    both = SketchPair(pair[0].kernels("hadamard"), pair[1].kernels("hadamard"), 32, False)
    drawn = torch.stack([both.redrawn(0, number).alignment(Alignment).xy for number in range(600)])
    a, b = both.traces
    error = drawn.std(0) / 600**0.5
    assert ((drawn.mean(0) - a[:, None] * b / 32).abs() < 4 * error).all()
    again = both.redrawn(0, 1).alignment(Alignment)
    assert torch.allclose(again.yy, both.alignment(Alignment).yy)


def test_what_is_redrawn_is_what_would_have_been_sketched(pair: tuple[Sketch, Sketch]) -> None:
    """The shortcuts of a redrawn kernel against making it from redrawn rows."""
    for name in ("features", "hadamard", "sum"):
        kernel, draw = pair[0].kernel("mix", name), Resketch.draw(32, 0, 3)
        found = kernel.redrawn(draw)
        turned = draw.rows(kernel.make(True).double())
        assert torch.allclose(found.gram, turned @ turned.T, rtol=1e-9)
        assert torch.allclose(found.root @ found.root.T, found.gram, atol=1e-9 * float(found.gram.norm()))
        one, two = (draw.rows(half.double()) for half in (kernel.halves() if kernel.halves else (kernel.rows,) * 2))
        assert torch.allclose(found.half_grams[0], one @ one.T, rtol=1e-9)
        assert torch.allclose(found.half_grams[1], two @ two.T, rtol=1e-9)
        assert torch.allclose(found.diagonal, draw.rows(kernel.diagonal))


def _unpaired(kind: str, seeds: range) -> Iterator[tuple[Sketch, Sketch]]:
    for seed in seeds:
        a = made(0, seed=seed, size=64)
        if kind == "other data":
            yield a, made(1, rows(150, seed + 50), seed=seed + 100, size=64)
        elif kind == "other data, one seed":
            yield a, made(1, rows(160, seed + 50), seed=seed, size=64)
        else:
            yield a, made(1, seed=seed + 100, size=64)


@pytest.mark.parametrize("kind", ["other data", "same data", "other data, one seed"])
@pytest.mark.parametrize("kernel", ["features", "hadamard", "hadamard_of_sketches"])
def test_values_without_common_rows_lie_within_chance(kind: str, kernel: str) -> None:
    scores = []
    for a, b in _unpaired(kind, range(4)):
        found = sosie.compare_unpaired(a.using(kernel), b.using(kernel), measures="linear_cka", draws=60)["linear_cka"]
        scores.append((found.value - found.null) / found.null_spread)
    scores = np.stack(scores)
    assert np.abs(scores.mean((1, 2))).max() < 3.5  # sites of one pair share their buckets and lie together
    assert np.abs(scores.mean()) < 1.5


def test_one_seed_does_not_make_different_data_alike() -> None:
    """As many rows fall into each bucket of both, which a product of sketches shows: the buckets of B are redrawn."""
    a, b = made(0, seed=4, size=64), made(1, rows(160, 50), seed=4, size=64)
    a, b = (k.using("hadamard_of_sketches") for k in (a, b))
    found = sosie.compare_unpaired(a, b, measures="kernel_alignment", draws=60)["kernel_alignment"]
    as_they_are = SketchPair(a.kernels(), b.kernels(), 64, False)
    view = as_they_are.alignment(UncentredAlignment)
    too_high = (view.xy / (view.xx * view.yy).sqrt()).numpy()
    assert np.abs((found.value - found.null) / found.null_spread).max() < 4
    assert ((too_high - found.null) / found.null_spread)[-1, -1] > 4


def test_unpaired_needs_one_size_and_no_common_rows(pair: tuple[Sketch, Sketch]) -> None:
    with pytest.raises(ValueError, match="same rows with one seed"):
        sosie.compare_unpaired(*pair)
    with pytest.raises(ValueError, match="one size, got 32 and 16"):
        sosie.compare_unpaired(pair[0], made(1, size=16))
    with pytest.raises(ValueError, match="one size, got 32 and one that kept every row"):
        sosie.compare_unpaired(pair[0], made(1, size=None))
    other = made(1, rows(90, 5))
    with pytest.raises(ValueError, match="debiased_cka: needs common rows"):
        sosie.compare_unpaired(pair[0], other, measures="debiased_cka")
    with pytest.raises(ValueError, match="at least 2, got 1"):
        sosie.compare_unpaired(pair[0], other, draws=1)
    with pytest.raises(TypeError, match="got Residual"):
        sosie.compare_unpaired(pair[0], built(Residual))
    found = sosie.compare_unpaired(pair[0], other)
    assert found["linear_cka"].null is not None
    assert found["spectral_bures_distance"].null is None
    assert found["linear_cka"].n == 90


def test_spectra_are_compared_without_rows() -> None:
    """One network on halves of one distribution: nearer than two networks."""
    a, b = made(0, rows(400, 1), size=128).using("features"), made(0, rows(400, 2), size=128)
    torch.manual_seed(9)
    other = built(Residual, 9)
    with torch.no_grad():
        other.stem.weight[1:] *= 0.01
    c = sketch(other, [rows(400, 2)], sites=SITES, size=128)
    near, far = (
        sosie.compare_unpaired(a, k.using("features"), measures="spectral_bures_distance").matrix()[0, 0]
        for k in (b, c)
    )
    assert near < 0.5 * far


def test_projected_sites_are_named() -> None:
    x = rows(40)
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(6, 3000), nn.Tanh(), nn.Linear(3000, 3)).double()
    options: dict[str, Any] = {"sites": ["0", "2"], "size": 16, "kernels": "features"}
    a, b = (sketch(wide, [x], memory=memory, **options) for memory in ("100kB", "1GB"))
    found = sosie.compare(a.using("features"), b.using("features"), measures="linear_cka")
    caveats = [c for c in found["linear_cka"].caveats if "projected to" in c.text]
    assert [(c.site_a, c.site_b) for c in caveats] == [("0", None)]
    with pytest.raises(MemoryError, match=r"187.7 KiB, and .* over the budget of 100.0 B"):
        sketch(wide, [x], memory=100, **options)
    with pytest.raises(MemoryError, match=r"keeping every row would take 469.2 KiB, over the budget of 1000.0 B"):
        sketch(wide, [x], memory=1000, **{**options, "size": None})
