"""Kernels of features and gradients against their definitions, and where the paper's inequalities fail."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from sketched import debiased, hadamard, matrix, random_rows, sketch_of
from torch import Tensor

import sosie
from sosie.engine.uncertainty import by_jackknife
from sosie.linalg import double_centred
from sosie.measures import MEASURES
from sosie.sketching.kernels import KERNELS, Kernel, SketchPair, kernel_of
from sosie.sketching.sketches import Part, SiteSketch
from sosie.stats import Alignment, Buckets, DebiasedAlignment, Resketch

N = 30
F, G = random_rows(N, 5, 1), random_rows(N, 5, 2)


def root(k: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(k)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def bures(k: Tensor, m: Tensor) -> float:
    """Squared distance: Tr K + Tr L − 2 Tr (K^½ L K^½)^½."""
    inside = torch.linalg.eigvalsh(root(k) @ m @ root(k)).clamp(min=0).sqrt().sum()
    return float(k.trace() + m.trace() - 2 * inside)


def transport_midpoint(f: Tensor, g: Tensor) -> Tensor:
    """½(F + G Qᵀ) by the brute force of a whole orthogonal matrix, where Fᵀ G has full rank."""
    u, _, vh = torch.linalg.svd(f.T @ g)
    half = (f + g @ (u @ vh).T) / 2
    return half @ half.T


DEFINED = {
    "hadamard": lambda f, g: (f @ f.T) * (g @ g.T),
    "features": lambda f, g: f @ f.T,
    "gradients": lambda f, g: g @ g.T,
    "sum": lambda f, g: f @ f.T + g @ g.T,
    "maps": lambda f, g: (f * g) @ (f * g).T,
    "midpoint": transport_midpoint,
    "hadamard_of_sketches": lambda f, g: (f @ f.T) * (g @ g.T),
}


@pytest.mark.parametrize("name", KERNELS)
def test_with_every_row_kept_kernels_are_what_they_are_called(name: str) -> None:
    found, k = sketch_of({"a": (F, G)}, None).kernel("a", name), DEFINED[name](F, G)
    assert torch.allclose(found.raw_gram, k, atol=1e-9 * float(k.norm()))
    assert torch.allclose(found.gram, double_centred(k), atol=1e-9 * float(k.norm()))
    assert torch.allclose(found.trace, double_centred(k).trace())
    assert torch.allclose(found.diagonal, double_centred(k).diagonal(), atol=1e-9 * float(k.norm()))
    assert torch.allclose(found.root @ found.root.T, found.gram, atol=1e-9 * float(k.norm()))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("size", "stack"), [(None, 1), (8, 2), (64, 1)])
def test_every_kernel_is_positive_semidefinite(name: str, size: int | None, stack: int) -> None:
    found = sketch_of({"a": (F, G)}, size, stack=stack).kernel("a", name)
    for gram in (found.gram, found.raw_gram):
        assert torch.equal(gram, gram.T)
        assert torch.linalg.eigvalsh(gram).min() > -1e-10 * gram.norm()


@pytest.mark.parametrize("name", ["features", "gradients", "sum", "maps"])
def test_sketched_kernels_are_sketches_of_the_centred_kernel(name: str) -> None:
    for stack in (1, 4):
        s, k = matrix(Buckets(16, 0, stack), N), DEFINED[name](F, G)
        found = sketch_of({"a": (F, G)}, 16, stack=stack).kernel("a", name)
        assert torch.allclose(found.gram, s @ double_centred(k) @ s.T, atol=1e-9 * float(k.norm()))
        assert torch.allclose(found.raw_gram, s @ k @ s.T, atol=1e-9 * float(k.norm()))
        assert torch.allclose(found.trace, double_centred(k).trace())
        assert torch.allclose(found.diagonal, s @ double_centred(k).diagonal(), atol=1e-9 * float(k.norm()))


@pytest.mark.parametrize("size", [8, 64])
def test_a_sketched_product_is_the_mean_of_its_two_copies(size: int) -> None:
    found = sketch_of({"a": (F, G)}, size).kernel("a")
    a, b = found.half_grams
    assert not torch.allclose(a, b)
    assert torch.allclose(found.gram, (a + b) / 2, atol=1e-9 * float(a.norm()))


def test_the_trace_of_a_sketched_product_is_exact_though_its_mean_is_large() -> None:
    f, g = F + 3, G + 3
    found = sketch_of({"a": (f, g)}, 8).kernel("a")
    assert torch.allclose(found.trace, double_centred(hadamard(f, g)).trace())


@pytest.mark.parametrize("stack", [1, 4])
def test_products_of_sketches_lose_their_mean_when_centred(stack: int) -> None:
    """A kernel of f ⊗ g that is one mean and nothing else has nothing left; each row counts once in every block."""
    f, g = (torch.ones(N, 2, dtype=torch.float64) for _ in range(2))
    found = sketch_of({"a": (F, G)}, 16, stack=stack).kernel("a", "hadamard_of_sketches")
    assert found.gram.sum(0).abs().max() < 1e-9 * found.gram.norm()
    assert found.gram.trace() > 0
    # Where every row has a bucket of its own, centring is the usual one.
    few = sketch_of({"a": (f[:3], g[:3])}, 256, stack=stack)
    assert few.counts.max() == 1 / stack**0.5
    assert (matrix(Buckets(256, 0, stack), 3) != 0).sum() == 3 * stack
    kernel = few.kernel("a", "hadamard_of_sketches")
    assert stack > 1 or kernel.gram.norm() < 1e-12 * kernel.raw_gram.norm()


def test_a_product_of_sketches_is_not_the_sketch_of_the_product() -> None:
    s, k = matrix(Buckets(16, 0), N), hadamard(F, G)
    found = sketch_of({"a": (F, G)}, 16).kernel("a", "hadamard_of_sketches").raw_gram
    f, g = s @ F, s @ G
    assert torch.allclose(found, (f @ f.T) * (g @ g.T), atol=1e-9 * float(k.norm()))
    signed = s @ k @ s.T
    assert (found - signed).norm() > 0.2 * signed.norm()
    assert found.trace() > 1.5 * k.trace()  # FACTS: far too large


# Values against the measures of rows, and the paper's formulae against each other


@pytest.mark.parametrize("measure", ["linear_cka", "debiased_cka", "normalized_bures", "kernel_alignment"])
def test_features_alone_give_the_measures_of_rows(measure: str) -> None:
    other = F[:, :3] + random_rows(N, 3, 6)
    a, b = (sketch_of({"a": (x, x)}, None, parts=("features",)) for x in (F, other))
    found = sosie.compare(a.using("features"), b.using("features"), measures=measure).matrix()[0, 0]
    assert found == pytest.approx(sosie.measure(measure, F, other), abs=1e-9)


def test_eq_10_and_11_are_eq_12_and_13() -> None:
    """Kernel form, by SciPy's matrix root, against the factored form that is computed; on the Hadamard kernel."""
    other = (F + random_rows(N, 5, 7), G + random_rows(N, 5, 8))
    a, b = (sketch_of({"a": rows}, None) for rows in ((F, G), other))
    k, m = (double_centred(hadamard(*rows)).numpy() for rows in ((F, G), other))
    cka = (k * m).sum() / (np.linalg.norm(k) * np.linalg.norm(m))
    half = sqrtm(k + 1e-13 * np.trace(k) * np.eye(N)).real
    nbs = np.trace(sqrtm(half @ m @ half).real) / np.sqrt(np.trace(k) * np.trace(m))
    found = sosie.compare(a, b, measures=["linear_cka", "normalized_bures"])
    assert found.matrix("linear_cka")[0, 0] == pytest.approx(cka, abs=1e-9)
    assert found.matrix("normalized_bures")[0, 0] == pytest.approx(nbs, abs=1e-5)
    # Eq. 12 and 13 with Ψ = f ⊗ g written out.
    x, y = ((f[:, :, None] * g[:, None]).flatten(1) for f, g in ((F, G), other))
    x, y = x - x.mean(0), y - y.mean(0)
    values = torch.linalg.svdvals(x.T @ y)
    factored = float(values.square().sum() / ((x @ x.T).norm() * (y @ y.T).norm()))
    assert found.matrix("linear_cka")[0, 0] == pytest.approx(factored, abs=1e-9)
    assert found.matrix("normalized_bures")[0, 0] == pytest.approx(
        float(values.sum() / (x.norm() * y.norm())), abs=1e-9
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.0, 1.0, 3.0]))
def test_eq_14_holds(seed: int, n: int, p: int, q: int, shared: float) -> None:
    """CKA(K₁, K₂) ≤ NBS(K₁², K₂²)."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, p, generator=random, dtype=torch.float64)
    y = torch.randn(n, q, generator=random, dtype=torch.float64)
    y = y + shared * x[:, :1]
    k, m = x @ x.T, y @ y.T
    cka = (k * m).sum() / (k.norm() * m.norm())
    nbs = torch.linalg.svdvals(k @ m).sum() / (k.norm() * m.norm())
    assert cka <= nbs + 1e-12


@pytest.mark.parametrize("kernel", ["features", "hadamard"])
def test_debiased_products_of_all_rows_are_those_of_u_centred_kernels(kernel: str) -> None:
    a, b = sketch_of({"a": (F, G)}, None), sketch_of({"a": (G, F + 1)}, None)
    view = SketchPair(a.kernels(kernel), b.kernels(kernel), N, True).alignment(DebiasedAlignment)
    k, m = DEFINED[kernel](F, G), DEFINED[kernel](G, F + 1)
    assert float(view.xy) == pytest.approx(debiased(k, m), rel=1e-9)
    assert float(view.xx) == pytest.approx(debiased(k, k), rel=1e-9)


# The midpoint


def test_the_midpoint_is_that_of_optimal_transport_where_the_kernel_is_invertible() -> None:
    f, g = (torch.randn(6, 6, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (0, 1))
    k, m = f @ f.T, g @ g.T
    half = root(k)
    inverse = torch.linalg.inv(half)
    transport = inverse @ root(half @ m @ half) @ inverse
    way = (torch.eye(6, dtype=torch.float64) + transport) / 2
    found = sketch_of({"a": (f, g)}, None).kernel("a", "midpoint").raw_gram
    assert torch.allclose(found, way @ k @ way, atol=1e-9)


def test_of_low_rank_the_papers_transport_fails_and_the_midpoint_holds() -> None:
    f, g = (torch.randn(20, 5, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (0, 1))
    k, m = f @ f.T, g @ g.T
    values, vectors = torch.linalg.eigh(k)
    inverse = vectors[:, -5:] * values[-5:].rsqrt() @ vectors[:, -5:].T  # the pseudo-inverse of the root
    transport = inverse @ root(root(k) @ m @ root(k)) @ inverse
    assert (transport @ k @ transport - m).norm() > 0.5 * m.norm()  # does not arrive at K_g
    way = (torch.eye(20, dtype=torch.float64) + transport) / 2
    printed, found = way @ k @ way, sketch_of({"a": (f, g)}, None).kernel("a", "midpoint").raw_gram
    whole = bures(k, m)
    assert bures(k, found) == pytest.approx(whole / 4, rel=1e-6)
    assert bures(m, found) == pytest.approx(whole / 4, rel=1e-6)
    assert bures(m, printed) > 1.3 * whole / 4


def test_gradients_at_dead_neurons_are_half_way_too() -> None:
    """A ReLU's dead neurons have no features but gradients: nothing of them may be lost."""
    f, g = F.clone(), G.clone()
    f[:, 2:] = 0
    k, m = f @ f.T, g @ g.T
    whole = bures(k, m)
    for rows, ends in (((f, g), (k, m)), ((g, f), (m, k))):
        found = sketch_of({"a": rows}, None).kernel("a", "midpoint").raw_gram
        assert bures(ends[0], found) == pytest.approx(whole / 4, rel=1e-6)
        assert bures(ends[1], found) == pytest.approx(whole / 4, rel=1e-6)
    one, other = (sketch_of({"a": rows}, None).kernel("a", "midpoint").raw_gram for rows in ((f, g), (g, f)))
    assert torch.allclose(one, other, atol=1e-9 * float(one.norm()))


def test_without_anything_in_common_the_midpoint_is_a_quarter_of_the_sum() -> None:
    f, g = F.clone(), G.clone()
    q, _ = torch.linalg.qr(torch.cat([f, g], 1))
    f, g = q[:, :5], q[:, 5:]
    found = sketch_of({"a": (f, g)}, None).kernel("a", "midpoint").raw_gram
    assert torch.allclose(found, (f @ f.T + g @ g.T) / 4, atol=1e-12)


# Where the paper's inequalities fail


def test_eq_18_fails_where_features_and_gradients_are_orthogonal() -> None:
    f, g = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 2.0]]).double()
    kept = sketch_of({"a": (f, g)}, 4).site("a")
    assert float(kept.moment.norm()) == 2
    assert float((f * g).sum()) == 0  # the Fisher-Rao norm is 0, which is to bound the mean's


def test_eq_15_fails_where_features_are_orthogonal_and_eq_39_holds() -> None:
    n, size = 64, 32
    q, _ = torch.linalg.qr(random_rows(n, 8, 9))
    x, y = q[:, :4], q[:, 4:]
    s = matrix(Buckets(size, 1), n)
    assert float((x.T @ y).norm()) < 1e-12
    sketched = float((x.T @ s.T @ s @ y).norm())
    assert sketched > 0.1  # Eq. 15 allows no more than ε times 0
    products, norms = (s @ x).T @ (s @ y) - x.T @ y, x.norm(dim=0)[:, None] * y.norm(dim=0)
    epsilon = float((products.abs() / norms).max())
    bound = (epsilon**2 + 2 * epsilon) * float(x.square().sum() * y.square().sum())
    assert abs(sketched**2 - float((x.T @ y).square().sum())) <= bound
    for seed in range(20):  # and with features that do have something in common
        s, z = matrix(Buckets(size, seed), n), y + 0.5 * x
        gap = ((s @ x).T @ (s @ z) - x.T @ z).abs() / (x.norm(dim=0)[:, None] * z.norm(dim=0))
        epsilon = float(gap.max())
        bound = (epsilon**2 + 2 * epsilon) * float(x.square().sum() * z.square().sum())
        found = float(((s @ x).T @ (s @ z)).square().sum())
        assert abs(found - float((x.T @ z).square().sum())) <= bound


def test_alignment_of_independent_sketches_is_about_the_spectrum() -> None:
    """FACTS: r / (r + M) with r = (Tr K)² / ‖K‖², for one kernel sketched twice."""
    k = double_centred(F @ F.T)
    r = float(k.trace() ** 2 / k.square().sum())
    rows = torch.randn(400, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for size in (64, 256):
        k = double_centred(rows @ rows.T)
        r = float(k.trace() ** 2 / k.square().sum())
        values = []
        for seed in range(0, 12, 2):
            a, b = (sketch_of({"a": (rows, rows)}, size, seed=s, parts=("features",)) for s in (seed, seed + 1))
            view = SketchPair(a.kernels("features"), b.kernels("features"), size, False).alignment(Alignment)
            values.append(float(view.xy / (view.xx * view.yy).sqrt()))
        assert np.mean(values) == pytest.approx(r / (r + size), rel=0.05)


def test_the_correction_is_exact_over_all_sketches_there_are() -> None:
    """Every way of putting 5 rows into 2 buckets with signs, each once: the mean is the U-centred product itself."""
    n, size = 5, 2
    x, y = random_rows(n, 3, 1), random_rows(n, 2, 2)
    found = []
    for choice in itertools.product(range(2 * size), repeat=n):
        s = torch.zeros(size, n, dtype=torch.float64)
        for row, code in enumerate(choice):
            s[code // 2, row] = 1 - 2 * (code % 2)
        sketch = SimpleNamespace(n=n, ones=s.sum(1), counts=s.abs().sum(1), exact=False, seed=0)
        kernels = []
        for rows in (x, y):
            squares = rows.square().sum(1)
            part = Part(s @ rows, rows.sum(0), squares.sum(), s @ squares)
            kernels.append(kernel_of(SiteSketch(rows.shape[1], part, *[None] * 7), "features", sketch))
        view = SketchPair(kernels[:1], kernels[1:], size, False).alignment(DebiasedAlignment)
        found.append([float(view.xy), float(view.xx), float(view.yy)])
    k, m = x @ x.T, y @ y.T
    assert np.mean(found, 0) == pytest.approx([debiased(k, m), debiased(k, k), debiased(m, m)], rel=1e-9)


def test_redrawn_signs_are_fair_where_there_are_signs() -> None:
    drawn = {}
    for name in ("features", "hadamard_of_sketches"):
        one = Kernel(name, 64, lambda centred: torch.ones(64, 1, dtype=torch.float64))
        both = SketchPair([one], [one], 64, False)
        drawn[name] = [float(both.redrawn(3, k).alignment(Alignment).xy) for k in range(300)]
    assert set(drawn["hadamard_of_sketches"]) == {64.0**2}
    assert np.mean(drawn["features"]) == pytest.approx(64, rel=0.3)  # tr · tr / M
    assert torch.equal(Resketch.draw(64, 3, 1).order, Resketch.draw(64, 3, 1).order)
    assert not torch.equal(Resketch.draw(64, 3, 1).order, Resketch.draw(64, 4, 1).order)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("size", "width"), [(96, 70), (96, 96), (96, 300)])
def test_bures_of_sketches_without_losing_digits(power: float, size: int, width: int) -> None:
    """Against singular values in float64, of wide rows by way of QR."""
    fall = torch.arange(1, width + 1, dtype=torch.float64) ** -power
    turn = torch.linalg.qr(torch.from_numpy(np.random.default_rng(0).normal(size=(width, width)))).Q
    common = random_rows(400, width, 1)
    sides = [((common + random_rows(400, width, seed)) * fall) @ turn for seed in (2, 3)]
    for dtype, within in ((torch.float64, 1e-10), (torch.float32, 1e-7)):
        kernels = [
            sketch_of({"a": (f.to(dtype), f.to(dtype))}, size, parts=["features"]).kernel("a", "features")
            for f in sides
        ]
        assert {kernel.dtype for kernel in kernels} == {dtype}
        pair = SketchPair(kernels[:1], kernels[1:], size, exact=False)
        found = float(MEASURES["normalized_bures"](pair.covariances(0, 0)))
        x, y = (np.linalg.qr(kernel.rows.numpy().T, mode="r").T for kernel in kernels)
        lengths = np.linalg.norm(x) * np.linalg.norm(y)
        assert found == pytest.approx(np.linalg.svd(x.T @ y, compute_uv=False).sum() / lengths, rel=within)


def test_leaving_a_bucket_out_is_leaving_its_row_and_column_out() -> None:
    """Against Gram matrices without it, pairs of buckets scaled to as many as there were."""
    size = 12
    kernels = [sketch_of({"a": sides}, size).kernel("a", "sum") for sides in ((F, G), (G, F * F))]
    pair = SketchPair(kernels[:1], kernels[1:], size, exact=False)
    for kind in (Alignment, DebiasedAlignment):
        found = pair.left_out(kind)
        for gone in (0, 7):
            kept = [b for b in range(size) if b != gone]
            a, b = (side[0].gram[kept][:, kept] for side in (pair.a, pair.b))
            x, y = (side[0].diagonal[kept] for side in (pair.a, pair.b))
            for name, one, two, d, e in (("xx", a, a, x, x), ("yy", b, b, y, y), ("xy", a, b, x, y)):
                products = one * two
                diagonal = products.diagonal().sum()
                beside = (products.sum() - diagonal) / ((size - 1) * (size - 2))
                expected = size * (size - 1) * beside + size / (size - 1) * diagonal
                if kind is DebiasedAlignment:
                    traces = {"xx": (pair.a, pair.a), "yy": (pair.b, pair.b), "xy": (pair.a, pair.b)}[name]
                    known = traces[0][0].trace * traces[1][0].trace
                    n, of_rows = pair.n, size / (size - 1) * (d * e).sum()
                    expected = (size * expected - known + 2 * of_rows) / (size + 1)
                    expected += known / ((n - 1) * (n - 2)) - n / (n - 2) * of_rows
                torch.testing.assert_close(getattr(found, name)[gone, 0, 0], expected, rtol=1e-10, atol=0)


def test_the_spread_of_buckets_tells_the_spread_of_sketches() -> None:
    """New inputs in new buckets: the standard error is the standard deviation, for both CKAs."""
    found: dict[str, list[tuple[float, float]]] = {"linear_cka": [], "debiased_cka": []}
    for seed in range(80):
        random = torch.Generator().manual_seed(seed)
        z = torch.randn(400, 3, generator=random, dtype=torch.float64)
        sides = [torch.cat([z, torch.randn(400, width, generator=random, dtype=torch.float64)], 1) for width in (5, 4)]
        kernels = [sketch_of({"a": (f, f)}, 64, seed=seed, parts=["features"]).kernel("a", "features") for f in sides]
        pair = SketchPair(kernels[:1], kernels[1:], 64, exact=False)
        for name, values in found.items():
            measure = MEASURES[name]
            error = by_jackknife(measure(pair.left_out(measure.reads)).numpy())
            values.append((float(measure(pair.alignment(measure.reads))), float(error.size[0, 0])))
    for name, values in found.items():
        value, error = np.array(values).T
        # The spread of 80 values is known to 8 %.
        assert np.sqrt(np.mean(error**2)) == pytest.approx(value.std(ddof=1), rel=0.25), name
