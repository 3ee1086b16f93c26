"""Sketches keep inner products on average and merge exactly."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from sketched import ALL, debiased, hadamard, matrix, random_rows, sketch_of, z_score

from sosie.linalg import double_centred
from sosie.sketching import sketches as making
from sosie.sketching.kernels import SketchPair
from sosie.sketching.sketches import TensorSketch, parts_of
from sosie.stats import Alignment, Buckets, DebiasedAlignment, row_hash

F, G = random_rows(40, 6, 1), random_rows(40, 6, 2)
SEEDS = range(200)


@pytest.mark.parametrize("stack", [1, 4])
def test_count_sketch_keeps_inner_products_on_average(stack: int) -> None:
    x, y = random_rows(40, 1, 1)[:, 0], random_rows(40, 1, 2)[:, 0]
    found = []
    for seed in SEEDS:
        s = matrix(Buckets(8, seed, stack), 40)
        assert torch.allclose(s.square().sum(0), torch.ones(40, dtype=torch.float64))
        assert torch.equal((s != 0).sum(0), torch.full((40,), stack))
        found.append(float((s @ x) @ (s @ y)))
    assert abs(z_score(found, float(x @ y))) < 3


@pytest.mark.parametrize("stack", [1, 4])
def test_columns_of_the_sketch_have_the_variance_that_the_correction_takes(stack: int) -> None:
    """E (SᵀS)ᵢⱼ² = 1/M beside the diagonal, stacked or not."""
    products = torch.stack([(s.T @ s)[0, 1:] for s in (matrix(Buckets(8, seed, stack), 20) for seed in SEEDS)])
    assert abs(z_score(products.square().mean(1).tolist(), 1 / 8)) < 3
    assert abs(z_score(products.mean(1).tolist(), 0.0)) < 3


@pytest.mark.parametrize("to", [5, 8, 64])
def test_tensor_sketch_keeps_products_of_kernels_on_average(to: int) -> None:
    f, g = F[:2], G[:2]
    truth = float((f[0] @ f[1]) * (g[0] @ g[1]))
    own, across = [], []
    for seed in SEEDS:
        maker = TensorSketch(6, to, seed)
        a, b = maker.product(maker.features(f), g)
        own += [float(a[0] @ a[1]), float(b[0] @ b[1])]
        across.append(float(a[0] @ a[0]) * float(b[1] @ b[1]))
    assert abs(z_score(own, truth)) < 3
    squares = f.square().sum(1) * g.square().sum(1)
    assert abs(z_score(across, float(squares[0] * squares[1]))) < 3  # the two copies are independent


@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize(("start", "seed"), [(0, 0), (7, 3), (2**40, 2**40 - 1), (123_456_789_012, -5)])
def test_buckets_and_signs_are_those_of_the_hash(start: int, seed: int, stack: int) -> None:
    """Files rely on them: by NumPy's unsigned integers, as they were first drawn."""
    drawn = Buckets(24, seed, stack).draw(start, 50)
    buckets, signs = drawn.buckets, drawn.signs
    for k in range(stack):
        hashes = row_hash(np.arange(start, start + 50), (seed << 8) + k + (0x5CE7C4 << 32))
        wanted = (hashes >> np.uint64(1)) % np.uint64(24 // stack)
        assert buckets[k].tolist() == [int(place) + k * (24 // stack) for place in wanted]
        assert signs[k].tolist() == [(2 * int(bit & np.uint64(1)) - 1) / stack**0.5 for bit in hashes]
    assert buckets.dtype == torch.int64


def test_buckets_do_not_change_from_version_to_version() -> None:
    drawn = Buckets(512, 0).draw(0, 8)
    buckets, signs = drawn.buckets, drawn.signs
    assert buckets[0].tolist() == [470, 100, 230, 393, 261, 413, 175, 19]
    assert signs[0].tolist() == [-1, 1, -1, -1, -1, -1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stack", [1, 4])
def test_wide_rows_are_added_like_narrow_ones(stack: int, dtype: torch.dtype) -> None:
    buckets = Buckets(8, 2, stack)
    rows = torch.randint(-8, 8, (40, 2**13 + 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    found = torch.zeros(8, rows.shape[1], dtype=dtype)
    drawn = buckets.draw(0, 40)
    drawn.add(found, rows)
    assert torch.equal(found.double(), matrix(buckets, 40) @ rows.double())  # small whole numbers: no rounding
    narrow = torch.zeros(8, 5, dtype=dtype)
    drawn.add(narrow, rows[:, :5])
    assert torch.equal(narrow, found[:, :5])


def test_pairs_are_the_rows_with_the_smallest_hashes_however_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "PAIR_NUMBERS", 0)  # 64 rows
    f, g = random_rows(500, 6, 8), random_rows(500, 6, 9)
    wanted = np.sort(np.argsort(row_hash(np.arange(500), 0))[:64])
    for step in (7, 50, 500):
        site = sketch_of({"a": (f, g), "b": (g, f)}, step=step)
        for label, features, gradients in (("a", f, g), ("b", g, f)):
            pairs = site.site(label).pairs
            assert (pairs.index == wanted).all()
            assert torch.equal(pairs.features, features[wanted])
            assert torch.equal(pairs.gradients, gradients[wanted])


def test_tensor_sketch_is_a_convolution_of_count_sketches() -> None:
    """The definition of Pham and Pagh, entry by entry."""
    maker, to = TensorSketch(6, 7, 3), 7
    found = maker.product(maker.features(F), G)
    for copy in range(2):
        of_f, of_g = (folds[copy].place(torch.device("cpu")) for folds in (maker._of_f, maker._of_g))
        wanted = torch.zeros(40, to, dtype=torch.float64)
        for i in range(6):
            for j in range(6):
                at = int(of_f[i] + of_g[j]) % to
                wanted[:, at] += (1 - 2 * int(of_f[i] >= to)) * (1 - 2 * int(of_g[j] >= to)) * F[:, i] * G[:, j]
        assert torch.allclose(found[copy], wanted, atol=1e-12)
    assert not torch.allclose(found[0], found[1])


def test_rows_are_added_up_bucket_by_bucket() -> None:
    for stack in (1, 4):
        s, k = matrix(Buckets(16, 5, stack), 40), sketch_of({"a": (F, G)}, seed=5, stack=stack)
        kept = k.site("a")
        assert torch.allclose(kept.features.rows, s @ F, atol=1e-12)
        assert torch.allclose(kept.gradients.rows, s @ G, atol=1e-12)
        assert torch.allclose(kept.maps.rows, s @ (F * G), atol=1e-12)
        maker = TensorSketch(6, 16, 5)
        assert torch.allclose(kept.hadamard.rows, s @ maker.product(maker.features(F), G), atol=1e-12)
        assert torch.allclose(kept.hadamard.diagonal, s @ hadamard(F, G).diagonal(), atol=1e-12)
        assert torch.allclose(k.ones, s.sum(1))
        assert torch.allclose(k.counts, s.abs().sum(1))


def test_centring_comes_before_the_sketch() -> None:
    s, k = matrix(Buckets(16, 0), 40), sketch_of({"a": (F, G)})
    centred = F - F.mean(0)
    wanted = s @ centred @ centred.T @ s.T
    assert torch.allclose(k.kernel("a", "features").gram, wanted, atol=1e-10)
    afterwards = double_centred(s @ F @ F.T @ s.T)
    assert (afterwards - wanted).norm() > 0.1 * wanted.norm()


# What is estimated without bias


def _pairs(kernel: str, stack: int, size: int, seeds: range) -> list[SketchPair]:
    other = (F + 0.5 * random_rows(40, 6, 3), G + 0.5 * random_rows(40, 6, 4))
    made = []
    for seed in seeds:
        a, b = (sketch_of({"a": rows}, size, seed=seed, stack=stack, parts=(kernel,)) for rows in ((F, G), other))
        made.append(SketchPair(a.kernels(kernel), b.kernels(kernel), size, False))
    return made


@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("kernel", ["features", "hadamard"])
def test_debiased_products_and_norms_have_no_bias(kernel: str, stack: int) -> None:
    f, g = F + 0.5 * random_rows(40, 6, 3), G + 0.5 * random_rows(40, 6, 4)
    k, m = (F @ F.T, f @ f.T) if kernel == "features" else (hadamard(F, G), hadamard(f, g))
    views = [pair.alignment(DebiasedAlignment) for pair in _pairs(kernel, stack, 16, range(250))]
    assert abs(z_score([float(v.xy) for v in views], debiased(k, m))) < 3
    assert abs(z_score([float(v.xx) for v in views], debiased(k, k))) < 3
    assert abs(z_score([float(v.yy) for v in views], debiased(m, m))) < 3
    biased = [float(pair.alignment(Alignment).xx) for pair in _pairs(kernel, stack, 16, range(100))]
    assert z_score(biased, debiased(k, k)) > 3.5  # the test can tell


def test_linear_cka_of_sketches_is_too_high_and_less_so_with_more_buckets() -> None:
    random = torch.Generator().manual_seed(0)
    f, g = torch.randn(2, 150, 40, generator=random, dtype=torch.float64)
    x, y = double_centred(f @ f.T), double_centred((f + g) @ (f + g).T)
    truth, found = float((x * y).sum() / (x.norm() * y.norm())), []
    for size in (16, 64, 256):
        values = []
        for seed in range(20):
            a, b = (sketch_of({"a": (r, r)}, size, seed=seed, parts=("features",)) for r in (f, f + g))
            view = SketchPair(a.kernels("features"), b.kernels("features"), size, False).alignment(Alignment)
            values.append(float(view.xy / (view.xx * view.yy).sqrt()))
        found.append(sum(values) / 20)
    assert found[0] > found[1] > found[2] > truth
    assert found[0] - truth > 3 * (found[2] - truth)


# Merging


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 3, 1)])
def test_any_split_in_any_order_merges_to_one_pass(size: int | None, order: tuple[int, ...]) -> None:
    labels = torch.arange(40) % 5
    whole = sketch_of({"a": (F, G), "b": (G, F)}, size, labels=labels)
    edges = [0, 7, 8, 30, 40]
    lots = [
        sketch_of({"a": (F[i:j], G[i:j]), "b": (G[i:j], F[i:j])}, size, start=i, labels=labels[i:j], step=6)
        for i, j in pairwise(edges)
    ]
    merged = lots[order[0]]
    for k in order[1:]:
        merged = merged.merge(lots[k])
    other_way = lots[order[0]].merge(lots[order[1]]).merge(lots[order[2]].merge(lots[order[3]]))
    for found in (merged, other_way):
        assert found.n == 40
        assert found.about["inputs"] == 40
        assert found.spans == whole.spans
        whole.check_shared(found)
        assert torch.allclose(found.labels, whole.labels)
        assert torch.allclose(found.unsigned_labels, whole.unsigned_labels)
        for label in ("a", "b"):
            one, two = whole.site(label), found.site(label)
            for name in whole.parts:
                for field in ("rows", "total", "squares", "diagonal"):
                    a, b = (getattr(getattr(site, name), field) for site in (one, two))
                    assert torch.allclose(a, b, rtol=1e-9, atol=1e-9), (name, field)
            assert torch.allclose(one.moment, two.moment, rtol=1e-9)
            assert torch.equal(one.pairs.features, two.pairs.features)
            for kernel in ("hadamard", "midpoint", "sum"):
                assert torch.allclose(whole.kernel(label, kernel).gram, found.kernel(label, kernel).gram, atol=1e-8)


def test_pairs_are_the_same_rows_however_they_came() -> None:
    rows = random_rows(3000, 3, 7)
    whole = sketch_of({"a": (rows, rows)}, 8).site("a").pairs
    assert whole.most == making.MOST_PAIRED == len(whole.index) < 3000
    for step in (3000, 700, 41):
        parts = [sketch_of({"a": (rows[i:j], rows[i:j])}, 8, start=i, step=step) for i, j in ((1000, 3000), (0, 1000))]
        found = parts[0].merge(parts[1]).site("a").pairs
        assert (found.index == whole.index).all()
        assert torch.equal(found.features, rows[torch.from_numpy(whole.index)])


def test_overlaps_and_strangers_are_not_merged() -> None:
    one = sketch_of({"a": (F, G)})
    with pytest.raises(ValueError, match="overlap: rows 39 to 39 are in both"):
        one.merge(sketch_of({"a": (F, G)}, start=39))
    with pytest.raises(ValueError, match="overlap"):
        one.merge(one)
    for other, word in (
        (sketch_of({"a": (F, G)}, 8, start=40), "size: 16 and 8"),
        (sketch_of({"a": (F, G)}, seed=1, start=40), "seed: 0 and 1"),
        (sketch_of({"a": (F, G)}, stack=2, start=40), "stack: 1 and 2"),
        (sketch_of({"b": (F, G)}, start=40), "sites: .*'a'.* and .*'b'"),
        (sketch_of({"a": (F, G), "b": (F, G)}, start=40), "sites: .*'a'.* and .*'a', 'b'"),
        (sketch_of({"a": (F[:, :4], G[:, :4])}, start=40), "site a: .*'width': 6.* and .*'width': 4"),
        (sketch_of({"a": (F, G)}, parts=("features",), start=40), "site a: .*'gradients': .* and "),
    ):
        with pytest.raises(ValueError, match=word):
            one.merge(other)


def test_different_numbers_of_classes_merge() -> None:
    few = sketch_of({"a": (F, G)}, labels=torch.zeros(40, dtype=torch.long))
    many = sketch_of({"a": (F, G)}, labels=torch.full((40,), 3), start=40)
    assert few.merge(many).labels.shape == (16, 4)
    assert few.merge(sketch_of({"a": (F, G)}, start=40)).labels is None


# What two must share


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"size": 8}, "different sizes, 16 and 8"),
        ({"size": None}, "different sizes, 16 and None"),
        ({"seed": 1}, "different seeds, 0 and 1"),
        ({"stack": 4}, "different stacks, 1 and 4"),
        ({"data": 1}, "different data, another order"),
        ({"start": 40}, "different rows, 0 to 39 and 40 to 79"),
    ],
)
def test_what_is_not_shared_is_said(options: dict[str, int | None], word: str) -> None:
    one = sketch_of({"a": (F, G)})
    with pytest.raises(ValueError, match=word):
        one.check_shared(sketch_of({"a": (F, G)}, **options))
    with pytest.raises(ValueError, match="different numbers of rows, 40 and 39"):
        one.check_shared(sketch_of({"a": (F[:39], G[:39])}))
    one.check_shared(sketch_of({"x": (G[:, :2], F[:, :2])}))


# Bad input


@pytest.mark.parametrize("size", [0, 1, 2.5, "64", True, -4])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(ValueError, match="size of a sketch must be a whole number"):
        Buckets(size)  # type: ignore[arg-type]


def test_stacks_divide_the_size() -> None:
    with pytest.raises(ValueError, match="stack=3 does not divide the size 16"):
        Buckets(16, 0, 3)
    with pytest.raises(ValueError, match="stack of a sketch must be a whole number"):
        Buckets(16, 0, 0)
    with pytest.raises(ValueError, match="seed of a sketch must be a whole number"):
        Buckets(16, 0.5)  # type: ignore[arg-type]


def test_kernels_by_name() -> None:
    assert parts_of(["sum", "maps"]) == {"features", "gradients", "maps"}
    with pytest.raises(ValueError, match="kernel must be one of 'hadamard'"):
        parts_of("product")
    with pytest.raises(ValueError, match="at least one kernel"):
        parts_of([])
    one = sketch_of({"a": (F, G)}, parts=("features",))
    assert one.parts == ("features",)
    with pytest.raises(ValueError, match="needs a sketch of hadamard"):
        one.kernel("a")
    with pytest.raises(KeyError, match="no site 'z'"):
        one.kernel("z")
    assert set(ALL) == set(sketch_of({"a": (F, G)}).parts)


def test_wide_sites_are_projected_to_fit() -> None:
    wide = random_rows(40, 600, 5, rank=10)
    whole = sketch_of({"a": (wide, wide)}, 16, parts=("features",))
    small = sketch_of({"a": (wide, wide)}, 16, parts=("features",), memory=20_000)
    assert whole.site("a").folded is None
    assert small.site("a").folded == small.site("a").features.rows.shape[1] < 600
    assert small.site("a").features.squares == whole.site("a").features.squares
    assert sketch_of({"a": (wide, wide)}, 16, parts=("maps",), memory=700_000).site("a").folded
    with pytest.raises(MemoryError, match=r"with rows projected to \d+ columns, over the budget of 1000.0 B"):
        sketch_of({"a": (wide, wide)}, 16, memory=1000)
    with pytest.raises(MemoryError, match="keeping every row would take"):
        sketch_of({"a": (wide, wide)}, None, memory=1000)
