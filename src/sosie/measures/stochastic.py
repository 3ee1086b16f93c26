"""Measures of noisy responses: repetitions (n, repeats, p) of each stimulus, or its mean and covariance.

Dropout, augmentation, sampling or several passes give repetitions, as do trials of an experiment. Stimuli are paired;
repetitions need not be, and the sides may have other numbers of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..capture import number_array
from ..checks import one_of, whole_number
from ..linalg import (
    cholesky,
    cross_product,
    eigenvalues,
    product,
    rank_tolerance,
    singular,
    squared_distances,
    triangular_inverse,
    upper_triangle,
)
from ..process_state import torch_on_one_core
from ..stats import PairedRepetitions, Repetitions
from .define import define
from .dissimilarities import COMPARATORS, KENDALL, kendall, to_length
from .shape import distance_between, distance_from

TRIED = 10  # steps from each start, of which the best goes on
STEPS = 1000
MIXED = 6  # slopes
SETTLED = 1e-14  # gain of the last step, as a share of the sum
UNEVEN = 1e-6  # of the largest entry of a given covariance: more than this is no rounding
NEAREST = 1e-8  # of the mean distance: closer responses pull no harder

by_distribution = functools.partial(
    define,
    reads=PairedRepetitions,
    bounds=(0, None),
    closer="down",
    invariant={"rotation", "shift"},
    differentiable=False,
    paper="duong2023",
    chance="of the size of the responses",
)
by_noise = functools.partial(
    define,
    reads=PairedRepetitions,
    bounds=(-1, 1),
    closer="up",
    invariant={"rotation", "scale", "shift"},
    differentiable=False,
    cost="n² r (p + q) + n r (p² + q²)",
)


@by_distribution(cost="(n r (r + p) p + p³) steps (starts + 1)")
def gaussian_shape_distance(pair: PairedRepetitions, alpha: float = 1.0, starts: int = 6) -> Tensor:
    """Distance of Gaussian responses after the best rotation: √ mean α ‖μ − μ′‖² + (2 − α) B²(Σ, Σ′) over stimuli.

    B is the Bures distance of covariances. alpha=1 is the 2-Wasserstein distance, alpha=0 compares the noise alone, and
    alpha=2 the means alone: √2 times raw_procrustes_distance / √n. Means are centred over stimuli. The narrower side is
    padded with neurons that are always 0. Covariances are divided by r − 1; few repetitions make equal networks differ.

    The sum may have several local optima: it is followed from the rotation of the means, from principal components onto
    principal components, and from `starts` random rotations and their inverses. What it finds is an upper bound: of 30
    pairs of unrelated responses (3 stimuli, 4 neurons) 20 starts found less than 6 in none at alpha=1, in 7 at alpha=0.
    """
    if not 0 <= alpha <= 2:
        raise ValueError(f"gaussian_shape_distance goes from noise (alpha=0) to means (alpha=2), got alpha={alpha!r}")
    x, y = pair.x, pair.y
    of_means = alpha * x.means.T @ y.means

    noise = x.noise.flatten(0, 1)

    def step(rotation: Tensor) -> tuple[Tensor, Tensor]:
        turned = product(noise, rotation).view(*x.noise.shape[:2], -1)
        u, shared, v = torch.linalg.svd(turned @ y.noise.mT, full_matrices=False)
        slope = of_means + (2 - alpha) * cross_product(noise, (u @ v @ y.noise).flatten(0, 1))
        return (of_means * rotation).sum() + (2 - alpha) * shared.sum(), slope

    best, n = _highest(step, of_means, starts), len(x.means)
    lengths = [(alpha * side.means.square().sum() + (2 - alpha) * side.noise.square().sum()) / n for side in (x, y)]
    return distance_between(lengths[0], lengths[1], best / n) if bool(sum(lengths) > 0) else best


@by_distribution(cost="(n r² p + n r p² + p³) steps (starts + 1)")
def energy_shape_distance(pair: PairedRepetitions, q: float = 1.0, starts: int = 6) -> Tensor:
    """Energy distance of responses after the best rotation: √ mean E‖X − Y‖^q − ½ E‖X − X′‖^q − ½ E‖Y − Y′‖^q.

    Over stimuli; 0 < q < 2 sees every difference of the distributions, not only means and covariances, and q=2 compares
    the means alone: raw_procrustes_distance / √n. Expectations are over all pairs of repetitions, those with themselves
    included, so that it is the distance of the empirical distributions: a metric, which few repetitions make larger.
    Each side is centred at its mean response. Needs repetitions. `starts` is that of gaussian_shape_distance.
    """
    if not 0 < q <= 2:
        raise ValueError(f"energy_shape_distance needs a power q above 0 and at most 2, got {q!r}")
    sides = [side.repeated("energy_shape_distance") for side in (pair.x, pair.y)]
    x, y = sorted(sides, key=lambda rows: -rows.shape[2])  # the narrower is rotated into the wider

    def step(rotation: Tensor) -> tuple[Tensor, Tensor]:
        apart = _apart(x, y @ rotation.T)
        if not bool(apart.any()):  # equal responses: no rotation is better
            return -apart.mean(), torch.zeros_like(rotation)
        pull = apart.clamp_min(NEAREST * float(apart.mean())) ** (q - 2)
        return -(apart**q).mean(), torch.einsum("nrp,nrs,nsq->pq", x, pull, y)

    between = -_highest(step, x.mean(1).T @ y.mean(1), starts)
    within = [(_apart(side, side) ** q).mean() for side in (x, y)]
    if not bool(between > 0):
        return between
    return between.sqrt() * distance_from((within[0] + within[1]) / (4 * between) + 0.5)


def _apart(x: Tensor, y: Tensor) -> Tensor:
    """(n, r, s) distances of the responses to each stimulus."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _highest(step: Callable[[Tensor], tuple[Tensor, Tensor]], of_means: Tensor, starts: int) -> Tensor:
    """The largest value over rotations (p, q) that is found by following `step`, which gives value and slope."""
    whole_number(starts, "starts", least=0)
    p, q = of_means.shape
    first = [_closest(of_means), torch.eye(p, q, dtype=of_means.dtype, device=of_means.device)]
    random = torch.Generator().manual_seed(0)
    for _ in range(starts):
        square = torch.linalg.qr(torch.randn(max(p, q), max(p, q), generator=random, dtype=torch.float64)).Q
        first += [each[:p, :q].to(of_means) for each in (square, square.T)]  # the same when the sides are swapped
    tried = [_followed(step, *step(rotation), steps=TRIED) for rotation in first]
    return _followed(step, *max(tried, key=lambda each: float(each[0])), steps=STEPS, mixed=True)[0]


def _followed(
    step: Callable[[Tensor], tuple[Tensor, Tensor]], best: Tensor, slope: Tensor, *, steps: int, mixed: bool = False
) -> tuple[Tensor, Tensor]:
    """The value and the slope after so many steps, each to the best rotation for a slope; none lowers the value.

    `mixed` slopes are those mixes of the last few that would stay as they are if the slope that follows one were linear
    in it (Anderson 1965, Journal of the ACM 12), which takes a fifth of the steps. A mix that leads down is not taken.
    """
    goal, goals, slopes = slope, list[Tensor](), list[Tensor]()
    for _ in range(steps):
        value, found = step(_closest(goal))
        gain, plain = value - best, goal is slope
        if bool(gain > 0):
            best, slope = value, found
            goals, slopes = [*goals[1 - MIXED :], goal], [*slopes[1 - MIXED :], found]
        if not bool(gain > SETTLED * best.abs()):
            if plain:
                break
            goals, slopes = [], []
        goal = _mix(goals, slopes) if mixed and len(goals) > 1 else slope
    return best, slope


def _mix(goals: list[Tensor], slopes: list[Tensor]) -> Tensor:
    """The sum of the slopes, by weights of sum 1, that is nearest to the same sum of the goals that led to them."""
    made = torch.stack(slopes)
    away = (made - torch.stack(goals)).flatten(1)
    changes = away.diff(dim=0)
    weights = torch.linalg.pinv(changes @ changes.T, hermitian=True) @ (changes @ away[-1])
    return made[-1] - torch.tensordot(weights, made.diff(dim=0), 1)


def _closest(slope: Tensor) -> Tensor:
    u, _, v = singular(slope)
    return u @ v


# Dissimilarities of stimuli in units of the noise, and how alike those of two networks are


@by_noise(paper="walther2016, nili2014, diedrichsen2020", chance="0")
def crossnobis_rsa(pair: PairedRepetitions, shrinkage: float | None = None, compare: str = "cosine") -> Tensor:
    """Similarity of the two sides' crossnobis dissimilarities of all pairs of stimuli; see `crossnobis`.

    By cosine, since their zero means that stimuli do not differ; `compare` knows the other comparators of rsa.
    """
    return _compared("crossnobis_rsa", compare, *(_crossnobis(side, shrinkage) for side in (pair.x, pair.y)))


@by_noise(paper="walther2016, nili2014", chance="above 0: noise makes all dissimilarities larger")
def noise_mahalanobis_rsa(pair: PairedRepetitions, shrinkage: float | None = None, compare: str = "cosine") -> Tensor:
    """Similarity of the two sides' squared Mahalanobis distances of all pairs of mean responses, in units of the noise.

    Not cross-validated: noise adds to all distances. Takes means and covariances too. See `noise_mahalanobis`.
    """
    return _compared("noise_mahalanobis_rsa", compare, *(_mahalanobis(side, shrinkage) for side in (pair.x, pair.y)))


@torch_on_one_core()
def crossnobis(rows: Any, *, noise: Any = None, shrinkage: float | None = None) -> Any:
    """Crossnobis dissimilarities (n, n) of the stimuli in rows (n, repeats, p): cross-validated squared Mahalanobis.

    The mean over all pairs of different repetitions i ≠ j of dᵢᵀ Σ⁻¹ dⱼ / p, with d the difference of two stimuli.
    Noise is independent between repetitions, so equal stimuli have 0 on average, and values can be negative. That holds
    exactly for a covariance Σ of the `noise` (p, p) from elsewhere. By default Σ is that of the repetitions about their
    means, pooled over stimuli and shrunk towards a multiple of 1 as Ledoit and Wolf say; `shrinkage` sets the share, 0
    for none. The same noise is then in Σ and in d, which adds 2 (p + 1) / (r (m − p − 1)) on average without shrinkage,
    with r repetitions and m = n (r − 1). NumPy or torch, as rows came.
    """
    given = _responses(rows, least=2)
    if noise is None:
        found = _crossnobis(Repetitions.of(given), shrinkage)
    else:
        found = _crossed(given.double() @ _given_whitening(given, noise, shrinkage), given.shape[2])
    return found if isinstance(rows, Tensor) else found.numpy()


@torch_on_one_core()
def noise_mahalanobis(rows: Any, *, noise: Any = None, shrinkage: float | None = None) -> Any:
    """Squared Mahalanobis distances (n, n) of the mean responses to the stimuli, in units of the noise, over p.

    Not cross-validated: noise adds 2 / r on average. `rows` and the options are those of `crossnobis`.
    """
    given = _responses(rows, least=2 if noise is None else 1)
    if noise is None:
        found = _mahalanobis(Repetitions.of(given), shrinkage)
    else:
        found = squared_distances(given.double().mean(1) @ _given_whitening(given, noise, shrinkage)) / given.shape[2]
    return found if isinstance(rows, Tensor) else found.numpy()


def _responses(rows: Any, least: int) -> Tensor:
    given = _tensor(rows)
    if given.ndim != 3 or given.shape[1] < least or not given.numel():
        shape = tuple(given.shape)
        raise ValueError(f"rows must be (n, repeats, p), with at least {least} of each stimulus, got {shape}")
    return given


def _tensor(values: Any) -> Tensor:
    found = values.detach() if isinstance(values, Tensor) else torch.from_numpy(number_array(values, "rows").copy())
    if found.is_complex() or not bool(found.isfinite().all()):
        raise ValueError("some responses are complex, NaN or infinite")
    return found


def _given_whitening(rows: Tensor, noise: Any, shrinkage: float | None) -> Tensor:
    if shrinkage is not None:
        raise ValueError("shrinkage is of the noise that is estimated from the rows: give it or noise=, not both")
    matrix = _tensor(noise).to(rows.device, torch.float64)
    if matrix.shape != (rows.shape[2], rows.shape[2]):
        raise ValueError(f"noise of rows {tuple(rows.shape)} is a covariance (p, p), got {tuple(matrix.shape)}")
    if bool((matrix - matrix.T).abs().max() > UNEVEN * matrix.abs().max()) or bool(matrix.diagonal().min() < 0):
        raise ValueError("noise is a covariance: symmetric, with no variance below 0")
    return _whitening(matrix)


def _compared(name: str, compare: str, x: Tensor, y: Tensor) -> Tensor:
    one_of(compare, "compare", (*COMPARATORS, *KENDALL))
    if (n := len(x)) < 3:
        raise ValueError(f"{name} needs at least 3 stimuli, got {n}")
    x, y = upper_triangle(x), upper_triangle(y)
    if compare in KENDALL:
        return kendall(compare, x, y)
    return torch.dot(*(to_length(compare, COMPARATORS[compare](side, n)) for side in (x, y)))


def _crossnobis(side: Repetitions, shrinkage: float | None) -> Tensor:
    return _crossed(side.repeated("crossnobis") @ _whitening(_noise_of(side, shrinkage)), side.width)


def _crossed(rows: Tensor, width: int) -> Tensor:
    """Σ over i ≠ j of dᵢ · dⱼ is ‖Σ d‖² − Σ ‖d‖²."""
    r = rows.shape[1]
    single = torch.stack([squared_distances(rows[:, i]) for i in range(r)]).sum(0)
    return (squared_distances(rows.sum(1)) - single) / (r * (r - 1) * width)


def _mahalanobis(side: Repetitions, shrinkage: float | None) -> Tensor:
    return squared_distances(side.means @ _whitening(_noise_of(side, shrinkage))) / side.width


def _noise_of(side: Repetitions, shrinkage: float | None) -> Tensor:
    """The covariance of the noise, pooled over stimuli and shrunk towards a multiple of 1."""
    noise = side.noise.flatten(0, 1)
    matrix = noise.T @ noise / len(side.noise)
    if shrinkage is None:
        shrinkage = 0.0 if side.rows is None else _shrinkage(side.rows - side.rows.mean(1, keepdim=True), side.width)
    elif not 0 <= shrinkage <= 1:
        raise ValueError(f"shrinkage is a share from 0 to 1, or None for that of Ledoit and Wolf, got {shrinkage!r}")
    share = shrinkage * matrix.trace() / side.width
    return (1 - shrinkage) * matrix + share * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _shrinkage(residuals: Tensor, width: int) -> float:
    """Ledoit and Wolf's share, of residuals (n, r, k) with a mean of 0 in `width` neurons."""
    rows = residuals.flatten(0, 1)
    matrix = rows.T @ rows / len(rows)
    size = matrix.square().sum()
    away = size - matrix.trace().square() / width  # from a multiple of 1
    varies = (rows.square().sum(1).square().mean() - size) / len(rows)
    if not bool(away > 0):  # it is a multiple of 1 already
        return 0.0
    return float((varies / away).clamp(0, 1))  # a share by definition, whose estimate can lie outside (Ledoit and Wolf)


def _whitening(noise: Tensor) -> Tensor:
    """(k, k): turns rows into units of the noise."""
    values = eigenvalues(noise)
    count = int((values > rank_tolerance(noise.dtype) * values[-1]).sum())
    if count < len(noise):
        raise ValueError(
            f"the covariance of the noise is singular: it has {count} of the {len(noise)} directions of the responses; "
            "use more repetitions, or shrinkage"
        )
    return triangular_inverse(cholesky(noise)).T
