"""The alignment behind a value: equal to the measure on its own rows, held on others, saved and read."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from paired import correlated_rows

import sosie
from sosie.engine import Transform
from sosie.files import DamagedFile, OtherFile
from sosie.measures import MEASURES, Measure, transforms

aligned = pytest.mark.parametrize("measure", [m for m in MEASURES.values() if m.aligned_by], ids=lambda m: m.name)
WIDTHS = [(60, 7, 5), (60, 5, 7), (60, 6, 6), (12, 15, 9)]


def rows(n: int, p: int, q: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = correlated_rows(n, p, q, seed)
    return x.numpy() + 2, y.numpy() - 1


def fitted(measure: str | Measure, x: np.ndarray, y: np.ndarray) -> Transform:
    try:
        return sosie.align(measure, x, y)
    except ImportError as missing:
        pytest.skip(str(missing))


@aligned
@pytest.mark.parametrize("shape", WIDTHS, ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_on_its_own_rows_the_score_is_the_measure(measure: Measure, shape: tuple[int, int, int]) -> None:
    x, y = rows(*shape)
    assert fitted(measure, x, y).score(x, y) == pytest.approx(sosie.measure(measure, x, y), abs=1e-7)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_shapes_between_cca_and_procrustes(alpha: float) -> None:
    x, y = rows(60, 7, 5)
    expected = sosie.measure("shape_angle", x, y, alpha=alpha)
    assert sosie.align("shape_angle", x, y, alpha=alpha).score(x, y) == pytest.approx(expected, abs=1e-10)


def test_svcca_of_a_number_of_directions() -> None:
    x, y = rows(60, 7, 5)
    t = sosie.align("svcca", x, y, directions=3)
    assert t.apply(x).shape == (60, 3)
    assert t.score(x, y) == pytest.approx(sosie.measure("svcca", x, y, directions=3), abs=1e-10)
    with pytest.raises(ValueError, match="directions of svcca must be a whole number from 1 to 5, got 6"):
        sosie.align("svcca", x, y, directions=6)


@pytest.mark.parametrize("shape", [(60, 7, 5), (24, 15, 19)], ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_shapes_on_other_rows(shape: tuple[int, int, int]) -> None:
    """Also where the rows of the fit do not span all neurons."""
    x, y = rows(*shape)
    half = len(x) // 2
    (x1, x2), (y1, y2) = (x[:half], x[half:]), (y[:half], y[half:])
    rotation = sosie.align("procrustes_angle", x1, y1).score(x2, y2)
    assert sosie.align("shape_angle", x1, y1, alpha=1.0).score(x2, y2) == pytest.approx(rotation, abs=1e-9)

    partly = []
    for one, other in ((x1, x2), (y1, y2)):
        _, sizes, directions = np.linalg.svd(one - one.mean(0), full_matrices=False)
        seen = sizes > 1e-10 * sizes[0]
        unit = np.sqrt(np.mean(sizes[seen] ** 2))
        mapping = 0.3 * np.eye(one.shape[1]) / unit
        mapping += 0.7 * (directions[seen].T / sizes[seen]) @ directions[seen]
        partly.append(((one - one.mean(0)) @ mapping, (other - one.mean(0)) @ mapping))
    (a, a2), (b, b2) = partly
    left, found, right = np.linalg.svd(a.T @ b, full_matrices=False)
    known = found > 1e-10
    overlap = np.sum((a2 @ left[:, known]) * (b2 @ right[known].T)) / np.linalg.norm(a2) / np.linalg.norm(b2)
    scored = sosie.align("shape_angle", x1, y1, alpha=0.3).score(x2, y2)
    assert scored == pytest.approx(np.arccos(overlap), abs=1e-9)


@pytest.mark.parametrize("measure", [m for m in MEASURES.values() if not m.aligned_by], ids=lambda m: m.name)
def test_a_measure_without_alignment_says_which_have_one(measure: Measure) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(measure.name)} has no alignment.*procrustes_distance.*have one"):
        sosie.align(measure, *rows(20, 3, 3))


@aligned
def test_other_rows_score_worse_than_those_of_the_fit_if_nothing_is_shared(measure: Measure) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(2, 80, 6))
    t = fitted(measure, x[:40], y[:40])
    gap = t.score(x[40:], y[40:]) - t.score(x[:40], y[:40])
    assert gap < 0 if measure.closer == "up" else gap > 0


@aligned
def test_a_shared_map_holds_on_other_rows(measure: Measure) -> None:
    """y is x with its neurons in another order: a map that all families find."""
    x = rows(80, 6, 6)[0]
    y = x[:, [3, 1, 0, 5, 4, 2]]
    t = fitted(measure, x[:40], y[:40])
    assert t.score(x[40:], y[40:]) == pytest.approx(measure.same, abs=1e-6)
    np.testing.assert_allclose(
        t.apply(x[40:]) - t.apply(x[40:]).mean(0), t.apply_y(y[40:]) - t.apply_y(y[40:]).mean(0), atol=1e-8
    )


def test_held_out_values_against_formulas() -> None:
    x, y = rows(80, 5, 4)
    (x1, x2), (y1, y2) = (x[:50], x[50:]), (y[:50], y[50:])
    a, b = x1 - x1.mean(0), y1 - y1.mean(0)
    c, d = x2 - x1.mean(0), y2 - y1.mean(0)

    u, _, vt = np.linalg.svd(a.T @ b, full_matrices=False)
    overlap = np.sum((c @ u @ vt) * d) / np.linalg.norm(c) / np.linalg.norm(d)
    rotation = sosie.align("procrustes_angle", x1, y1)
    assert rotation.score(x2, y2) == pytest.approx(np.arccos(overlap), abs=1e-12)
    np.testing.assert_allclose(rotation.apply(x2), c @ u @ vt + y1.mean(0), atol=1e-10)
    np.testing.assert_array_equal(rotation.apply_y(y2), y2)

    weight = np.linalg.lstsq(a, b, rcond=None)[0]
    regression = sosie.align("regression_r2", x1, y1)
    np.testing.assert_allclose(regression.apply(x2), c @ weight + y1.mean(0), atol=1e-10)
    missed = np.sum((d - c @ weight) ** 2) / np.sum((y2 - y2.mean(0)) ** 2)
    assert regression.score(x2, y2) == pytest.approx(1 - missed, abs=1e-12)

    canonical = sosie.align("mean_cca", x1, y1)
    np.testing.assert_allclose(np.cov(canonical.apply(x1).T, bias=True), np.eye(4), atol=1e-10)
    found = [np.corrcoef(p, q)[0, 1] for p, q in zip(canonical.apply(x2).T, canonical.apply_y(y2).T, strict=True)]
    assert canonical.score(x2, y2) == pytest.approx(np.mean(found), abs=1e-12)
    assert sosie.align("cca_r2", x1, y1).score(x2, y2) == pytest.approx(np.mean(np.square(found)), abs=1e-12)


def test_pairs_are_the_matched_neurons() -> None:
    x = rows(60, 5, 5)[0]
    order = [3, 1, 0, 4, 2]
    pairs = sosie.align("permutation_procrustes_distance", x, x[:, order]).maps["pairs"]
    assert {(order[j], j) for j in range(5)} == set(map(tuple, pairs.T.tolist()))


def test_arrays_come_back_as_they_came() -> None:
    x, y = (torch.from_numpy(side).float() for side in rows(40, 4, 4))
    t = sosie.align("procrustes_distance", x, y)
    assert t.apply(x).dtype == torch.float32
    assert isinstance(t.apply(x.numpy()), np.ndarray)
    whole = (10 * x).long()
    torch.testing.assert_close(t.apply(whole), t.apply(whole.double()))
    assert repr(t) == "<Transform of procrustes_distance: rotation of 4 and 4 neurons, fitted on 40 rows>"


@aligned
def test_saved_and_read_it_is_the_same(measure: Measure, tmp_path: Path) -> None:
    x, y = rows(40, 5, 4)
    t = fitted(measure, x, y)
    again = Transform.load(t.save(tmp_path / "t.safetensors"))
    assert (again.measure, again.n) == (t.measure, 40)
    assert again.score(x[:20], y[:20]) == t.score(x[:20], y[:20])
    np.testing.assert_array_equal(again.apply(x), t.apply(x))


def test_a_file_that_does_not_fit_is_not_read(tmp_path: Path) -> None:
    x, y = rows(40, 5, 4)
    t = sosie.align("mean_cca", x, y)
    path = tmp_path / "t.safetensors"
    for wrong in (
        {**t.maps, "weights": t.maps["weights"][:2]},
        {**t.maps, "more": t.maps["weights"]},
        {**t.maps, "x": t.maps["x"] * torch.nan},
        {**t.maps, "x": t.maps["x"].long()},
    ):
        Transform(t.measure, t.n, t.centre_x, t.centre_y, wrong).save(path)
        with pytest.raises(DamagedFile, match=r"t\.safetensors"):
            Transform.load(path)
    Transform("linear_cka", t.n, t.centre_x, t.centre_y, t.maps).save(path)
    with pytest.raises(DamagedFile, match="linear_cka has no alignment"):
        Transform.load(path)
    pairs = sosie.align("hard_correlation_match", x, y)
    Transform(pairs.measure, 40, pairs.centre_x, pairs.centre_y, {"pairs": pairs.maps["pairs"] + 5}).save(path)
    with pytest.raises(DamagedFile, match="pairs"):
        Transform.load(path)
    with pytest.raises(DamagedFile, match=r"not a saved result; the class that saved a \.safetensors file loads it"):
        sosie.load(path)
    with pytest.raises(OtherFile, match="not a sosie transform file"):
        Transform.load(Path(__file__).parents[1] / "fixtures" / "sketch_a.safetensors")


def test_bad_input() -> None:
    x, y = rows(40, 5, 4)
    t = sosie.align("procrustes_distance", x, y)
    with pytest.raises(ValueError, match=r"fitted on x with 5 columns, got an array of \(40, 4\)"):
        t.apply(y)
    with pytest.raises(ValueError, match="fitted on y with 4 columns"):
        t.score(x, x)
    with pytest.raises(ValueError, match="need paired rows, got 40 and 39"):
        t.score(x, y[1:])
    with pytest.raises(ValueError, match="at least 2 rows"):
        t.score(x[:1], y[:1])
    with pytest.raises(ValueError, match="NaN or infinite"):
        t.apply(x * np.nan)
    for rows_x in (x + 1j, torch.from_numpy(x + 1j)):
        with pytest.raises(TypeError, match="x is complex"):
            t.apply(rows_x)
    with pytest.raises(ValueError, match="keep of svcca must be a number above 0 and at most 1, got 2"):
        sosie.align("svcca", x, y, keep=2)
    with pytest.raises(ValueError, match="at least 2 rows"):
        sosie.align("mean_cca", x[:1], y[:1])
    with pytest.raises(TypeError, match=r"comes first, align\('procrustes_distance', x, y\); it is in the third"):
        sosie.align(x, y, "mean_cca")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="4 dimensions for n=5 rows"):
        sosie.align("regression_r2", x[:5], y[:5])


def badly_scaled(n: int, p: int, nearly: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Neurons of sizes from 1e-6 to 1e6, one that never varies, one twice, and one with an almost equal one."""
    random = np.random.default_rng(3)
    x = random.normal(size=(2 * n, p)) * np.logspace(-6, 6, p)
    x[:, 1], x[:, 2] = 7.0, 5 * x[:, 3]
    x[:, 4] = x[:, 5] * (1 + nearly * random.normal(size=2 * n))
    y = (x / np.logspace(-6, 6, p)) @ random.normal(size=(p, 3)) + random.normal(size=(2 * n, 3))
    return x[:n], y[:n], x[n:]


@pytest.mark.parametrize("nearly", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize(("n", "p"), [(200, 12), (24, 40)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_regression_and_canonical_directions_of_badly_scaled_neurons(n: int, p: int, nearly: float) -> None:
    x, y, x2 = badly_scaled(n, p, nearly)
    lengths = np.linalg.norm(x - x.mean(0), axis=0)
    scaled, others = ((each - x.mean(0)) / np.where(lengths > 1e-12, lengths, np.inf) for each in (x, x2))
    weights = np.linalg.lstsq(scaled, y - y.mean(0), rcond=1e-10)[0]
    predicted = others @ weights + y.mean(0)
    error = sosie.align("regression_r2", x, y).apply(x2) - predicted
    assert np.abs(error).max() < 1e-6 * np.abs(predicted).max()
    t = sosie.align("mean_cca", x, y)
    for variables in (t.apply(x), t.apply_y(y)):
        np.testing.assert_allclose(variables.T @ variables / n, np.eye(3), atol=1e-8)


@pytest.mark.parametrize("shape", [(40, 60, 90), (40, 90, 30)], ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rotations_of_more_neurons_than_rows(shape: tuple[int, int, int]) -> None:
    x, y = rows(*shape)
    t = sosie.align("procrustes_distance", x, y)
    for side in "xy":
        directions = t.maps[side].numpy()
        np.testing.assert_allclose(directions.T @ directions, np.eye(directions.shape[1]), atol=1e-12)
    assert t.score(x, y) == pytest.approx(sosie.measure("procrustes_distance", x, y), abs=1e-10)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_map_of_all_neurons_is_made_for_wide_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows(12, 300, 400)
    t, larger = sosie.align("procrustes_distance", x, y), []
    plain = torch.Tensor.__matmul__
    monkeypatch.setattr(transforms, "product", lambda a, b: larger.append(len(a) * b.shape[1]) or plain(a, b))
    t.apply(x), t.score(x, y)
    assert max(larger) <= 12 * 400


def test_scores_do_not_change_what_they_are_given() -> None:
    x, y = rows(30, 4, 3)
    for name in ("procrustes_distance", "regression_r2", "mean_cca"):
        t, given = sosie.align(name, x, y), (torch.tensor(x), torch.tensor(y))
        t.score(*given), t.apply(given[0]).add_(1), t.apply_y(given[1]).add_(1)
        np.testing.assert_array_equal(given[0].numpy(), x)
        np.testing.assert_array_equal(given[1].numpy(), y)
        t.apply_y(y)[:] = 0
        assert y.any()
