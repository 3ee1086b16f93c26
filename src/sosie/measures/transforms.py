"""The alignment behind a value: maps fitted on some rows, what they make of other rows, and the value under them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..capture import number_array
from ..checks import positive, whole_number
from ..files import DamagedFile, read_tensors, reading, write_tensors
from ..linalg import (
    ENOUGH_VARIANCE,
    RANK_TOLERANCE,
    best_assignment,
    column_squares,
    cross_product,
    product,
    row_squares,
    singular,
    take_columns,
    total_squares,
    without_mean,
)
from ..process_state import torch_on_one_core
from ..stats import HeldCovariances, HeldNeurons, Neurons, RowScatter, Sample, Scatter

if TYPE_CHECKING:
    from .define import Measure

VERSION = 1
Maps = dict[str, Tensor]


@dataclass(frozen=True)
class Aligner:
    """How measures of a family align two sides: the maps that they fit, and what these make of rows.

    A column of `x` belongs to the same column of `y`. `centred` rows are those less the mean of the rows of the fit.
    """

    name: str
    fit: Callable[..., Maps]  # from a sample, with the options of the measure
    shapes: Mapping[str, str]  # of each map: p and q neurons, k directions
    x: Callable[[Transform, Tensor], Tensor]
    y: Callable[[Transform, Tensor], Tensor]
    value: Callable[[Transform, Measure, Tensor, Tensor], Tensor]  # of (n, p) and (n, q), about the centres
    centres: bool = True


@dataclass(frozen=True)
class Transform:
    """The alignment that a measure found between rows of x (n, p) and y (n, q), to use on other rows."""

    measure: str  # with its options
    n: int  # rows that it was fitted on
    centre_x: Tensor  # (p,) their mean; 0 for measures that do not centre
    centre_y: Tensor  # (q,)
    maps: Maps

    def __repr__(self) -> str:
        p, q = len(self.centre_x), len(self.centre_y)
        return f"<Transform of {self.measure}: {self.aligner.name} of {p} and {q} neurons, fitted on {self.n} rows>"

    def apply(self, x: Any) -> Any:
        """The rows of x (m, p), aligned: each column belongs to that column of `apply_y(y)`.

        In the neurons of y for rotations, regressions and transport; matched neurons; or canonical variables. NumPy or
        torch, as they came.
        """
        return self._applied(x, "x")

    def apply_y(self, y: Any) -> Any:
        """The rows of y (m, q) in the columns of `apply(x)`: y itself where those are its neurons."""
        return self._applied(y, "y")

    @torch_on_one_core()
    def score(self, x: Any, y: Any) -> float:
        """The value of the measure for paired rows under this alignment, which is not fitted again.

        On the rows of the fit that is `sosie.measure`, on others the held-out value. Rows are centred by the mean of
        the rows of the fit; their lengths, and the means in correlations and R², are their own.
        """
        from .define import find, snap_to_bounds

        rows_x, rows_y = self._rows(x, "x"), self._rows(y, "y")
        if len(rows_x) != len(rows_y):
            raise ValueError(f"need paired rows, got {len(rows_x)} and {len(rows_y)}")
        if len(rows_x) < 2:
            raise ValueError(f"need at least 2 rows for a score, got {len(rows_x)}")
        measure = find(self.measure)
        value = self.aligner.value(self, measure, rows_x - self.centre_x, rows_y - self.centre_y)
        if not bool(value.isfinite()):
            raise ValueError(f"{self.measure} is undefined here: the aligned rows of one side do not vary, or are huge")
        return float(snap_to_bounds(value, measure))

    @property
    def aligner(self) -> Aligner:
        return aligner_of(self.measure)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write safetensors that `Transform.load` reads back exactly."""
        tensors = {"centre_x": self.centre_x, "centre_y": self.centre_y, **self.maps}
        return write_tensors(path, "transform", VERSION, tensors, {"measure": self.measure, "rows": str(self.n)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Transform:
        """Read what `save` wrote; nothing is unpickled."""
        text, tensors = read_tensors(path, "transform", VERSION)
        with reading(path):
            shapes = {"centre_x": "p", "centre_y": "q", **aligner_of(text["measure"]).shapes}
            if set(tensors) != set(shapes):
                raise DamagedFile(f"it holds {', '.join(sorted(tensors))} instead of {', '.join(sorted(shapes))}")
            sizes: dict[str, int] = {}
            for name, letters in shapes.items():
                shape = tensors[name].shape
                fits = len(shape) == len(letters) and all(
                    size == (int(letter) if letter.isdigit() else sizes.setdefault(letter, size))
                    for letter, size in zip(letters, shape, strict=True)
                )
                numbers = tensors[name].dtype == (torch.int64 if name == "pairs" else torch.float64)
                if not fits or not numbers or not bool(tensors[name].isfinite().all()):
                    raise DamagedFile(f"{name} of shape {tuple(shape)} does not fit, or is not finite")
            if (pairs := tensors.get("pairs")) is not None:
                most = torch.tensor([[sizes["p"]], [sizes["q"]]])
                if not bool(((pairs >= 0) & (pairs < most)).all()):
                    raise DamagedFile("pairs names neurons that are not there")
            centres = tensors.pop("centre_x"), tensors.pop("centre_y")
            return cls(text["measure"], int(text["rows"]), *centres, tensors)

    @torch_on_one_core()
    def _applied(self, values: Any, side: str) -> Any:
        rows = getattr(self.aligner, side)(self, self._rows(values, side))
        if not isinstance(values, Tensor):
            return rows.cpu().numpy()
        return rows.to(values.dtype) if values.is_floating_point() else rows

    def _rows(self, values: Any, side: str) -> Tensor:
        centre = self.centre_x if side == "x" else self.centre_y
        rows = (
            values.detach()
            if isinstance(values, Tensor)
            else torch.from_numpy(np.require(number_array(values, side), requirements=["C", "W"]))
        )
        if rows.is_complex():
            raise TypeError(f"{side} is complex ({rows.dtype}); compare real and imaginary parts as columns")
        if rows.ndim != 2 or rows.shape[1] != len(centre):
            raise ValueError(
                f"this alignment was fitted on {side} with {len(centre)} columns, got an array of {tuple(rows.shape)}"
            )
        rows = rows.to(centre)
        if not bool(total_squares(rows).isfinite() or rows.isfinite().all()):
            raise ValueError(f"{side} has values that are NaN or infinite")
        return rows


def aligner_of(name: str | Measure) -> Aligner:
    """The aligner of a measure; the error names the measures that have one."""
    from .define import MEASURES, find

    measure = find(name)
    if measure.aligned_by is None:
        known = ", ".join(m.name for m in MEASURES.values() if m.aligned_by is not None)
        raise ValueError(f"{measure.name} has no alignment: it does not map one side to the other. {known} have one")
    return measure.aligned_by


def fit_transform(measure: Measure, sample: Sample) -> Transform:
    """The alignment of the first site of each side of a sample."""
    aligner = aligner_of(measure)
    x, y = (rows.mean(0) if aligner.centres else torch.zeros_like(rows[0]) for rows in (sample.xs[0], sample.ys[0]))
    maps = {name: each.contiguous() for name, each in aligner.fit(sample, **measure.options).items()}
    return Transform(measure.name, sample.n, x, y, maps)


# Rotations: directions of each side, of which the first k belong together


def _scatters(sample: Sample) -> tuple[RowScatter, RowScatter]:
    x, y = sample.scatters[0][0], sample.scatters[1][0]
    assert isinstance(x, RowScatter)
    assert isinstance(y, RowScatter)
    return x, y


class _Basis(NamedTuple):
    """Orthonormal columns (n, r) with the span of the neurons, or some of it."""

    mapping: Tensor  # (p, r): makes them of the centred rows
    columns: Tensor | None = None  # None: centred rows @ mapping has enough digits

    def of(self, scatter: RowScatter, rows: Tensor) -> Tensor:
        """(r, q): what is in these columns of other rows (n, q)."""
        if self.columns is None:
            return product(self.mapping.T, cross_product(scatter.rows, rows))
        return cross_product(self.columns, rows)


def _principal(scatter: RowScatter) -> tuple[_Basis, Tensor]:
    """The principal components and their singular values, from covariances or a Gram matrix that have the digits."""
    if not scatter.wide and not scatter.lacks_digits(1):
        sizes = (scatter.n * scatter.spectrum.values).sqrt()
        return _Basis(scatter.spectrum.vectors / sizes), sizes
    gram = scatter.gram
    if gram is not None and gram.rank >= scatter.n - 1 and bool(gram.values[-1] > ENOUGH_VARIANCE * gram.values[0]):
        return _Basis(cross_product(scatter.rows, gram.vectors) / gram.values, gram.vectors), gram.values.sqrt()
    count = len(scatter.components.sizes)
    basis, sizes, directions = singular(scatter.rows)
    return _Basis(directions[:count].T / sizes[:count], basis[:, :count]), sizes[:count]


def _overlap(sample: Sample, a: _Basis, b: _Basis) -> Tensor:
    """The inner products (r, s) of the columns of both sides."""
    x, y = _scatters(sample)
    return product(a.of(x, y.rows), b.mapping) if b.columns is None else a.of(x, b.columns)


def _rotation(sample: Sample) -> Maps:
    x, y = _scatters(sample)
    if not (x.wide or y.wide):
        left, sizes, right = singular(cross_product(x.rows, y.rows))
        if bool(sizes[-1] > RANK_TOLERANCE * sizes[0]):
            return {"x": left, "y": right.T}
    # Directions that the rows do not have would be matched at random.
    (a, sizes_x), (b, sizes_y) = _principal(x), _principal(y)
    left, _, right = singular(sizes_x[:, None] * _overlap(sample, a, b) * sizes_y)
    return {"x": product(a.mapping * sizes_x, left), "y": product(b.mapping * sizes_y, right.T)}


def _uncentred_rotation(sample: Sample) -> Maps:
    (x, of_x), (y, of_y) = (_narrow(rows.double()) for rows in (sample.xs[0], sample.ys[0]))
    left, _, right = singular(cross_product(x, y))
    return {
        "x": left if of_x is None else product(of_x, left),
        "y": right.T if of_y is None else product(of_y, right.T),
    }


def _narrow(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows in no more columns than there are rows, and the directions (p, n) of those, unless they are neurons."""
    if rows.shape[1] <= len(rows):
        return rows, None
    directions, turned = torch.linalg.qr(rows.T)
    return turned.T, directions


def _shape(sample: Sample, alpha: float = 0.5) -> Maps:
    """Maps that whiten partly, then rotate, and what is kept of directions that the fit did not see."""
    (a, sizes_x), (b, sizes_y) = map(_principal, _scatters(sample))
    units = [sizes.square().mean().sqrt() for sizes in (sizes_x, sizes_y)]
    gain_x, gain_y = (alpha * sizes / unit + (1 - alpha) for sizes, unit in zip((sizes_x, sizes_y), units, strict=True))
    overlap = gain_x[:, None] * _overlap(sample, a, b) * gain_y
    left, _, right = torch.linalg.svd(overlap, full_matrices=True)  # all directions, since whitening changes lengths
    return {
        "x": product(a.mapping * gain_x, left), "y": product(b.mapping * gain_y, right.T),
        "outside_x": alpha / units[0], "outside_y": alpha / units[1],
    }  # fmt: skip


def _matched(transform: Transform) -> tuple[Tensor, Tensor]:
    """(p, k) and (q, k): the directions that belong together."""
    x, y = transform.maps["x"], transform.maps["y"]
    count = min(x.shape[1], y.shape[1])
    return x[:, :count], y[:, :count]


def _as_one(transform: Transform, n: int) -> Tensor | None:
    """The map (p, q), if n rows pass it in less time than its factors: then it is smaller than both sides."""
    x, y = _matched(transform)
    (p, k), q = x.shape, len(y)
    return product(x, y.T) if p * q * (n + k) < n * k * (p + q) else None


def _mapped(transform: Transform, rows: Tensor) -> Tensor:
    """Centred rows of x, as neurons of y about their centre."""
    x, y = _matched(transform)
    whole = _as_one(transform, len(rows))
    return product(product(rows, x), y.T) if whole is None else product(rows, whole)


def _into_y(transform: Transform, rows: Tensor) -> Tensor:
    return _mapped(transform, rows - transform.centre_x).add_(transform.centre_y)


def _own(transform: Transform, rows: Tensor) -> Tensor:
    return rows.clone()


def _in_directions_x(transform: Transform, rows: Tensor) -> Tensor:
    return product(rows - transform.centre_x, _matched(transform)[0])


def _in_directions_y(transform: Transform, rows: Tensor) -> Tensor:
    return product(rows - transform.centre_y, _matched(transform)[1])


def _under(transform: Transform, measure: Measure, x: Tensor, y: Tensor, lengths: tuple[Tensor, Tensor]) -> Tensor:
    """The value for aligned rows with these squared lengths."""
    n, whole = len(x), _as_one(transform, len(x))
    if whole is None:
        overlap = _inner(*(product(rows, to) for rows, to in zip((x, y), _matched(transform), strict=True)))
    else:
        overlap = _inner(cross_product(x, y), whole)
    a, b = (Scatter(x.new_zeros(1, 1), n, length / n) for length in lengths)
    return measure(HeldCovariances(a, b, x.new_zeros(1, 1), held=overlap / n))


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return torch.dot(x.flatten(), y.flatten())


def _value_rotated(transform: Transform, measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    return _under(transform, measure, x, y, (total_squares(x), total_squares(y)))


def _value_shaped(transform: Transform, measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    lengths = []
    for side, rows in (("x", x), ("y", y)):
        mapping = transform.maps[side]
        unseen = total_squares(rows) - total_squares(product(rows, torch.linalg.qr(mapping).Q))
        lengths.append(total_squares(product(rows, mapping)) + transform.maps[f"outside_{side}"].square() * unseen)
    return _under(transform, measure.using(alpha=1.0), x, y, (lengths[0], lengths[1]))


def _value_by_row(transform: Transform, measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    overlaps = (_mapped(transform, x) * y).sum(1)
    return (overlaps / (row_squares(x) * row_squares(y)).sqrt()).mean()


ROTATION = Aligner("rotation", _rotation, {"x": "pk", "y": "qk"}, _into_y, _own, _value_rotated)
UNCENTRED_ROTATION = Aligner(
    "rotation", _uncentred_rotation, {"x": "pk", "y": "qk"}, _into_y, _own, _value_by_row, centres=False
)
SHAPE = Aligner(
    "rotation of partly whitened rows",
    _shape,
    {"x": "pr", "y": "qs", "outside_x": "", "outside_y": ""},
    _in_directions_x,
    _in_directions_y,
    _value_shaped,
)

# Canonical directions, and regression on the directions of x


def _basis(scatter: RowScatter) -> _Basis:
    """Orthonormal columns with the span of the neurons, of which a quiet one counts as much as others."""
    if not scatter.direct:
        return _Basis((scatter.whitener / scatter.scale).T / scatter.n**0.5)
    lengths = scatter.rows.norm(dim=0)
    lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    if (gram := scatter.scaled_gram) is not None:
        back = cross_product(scatter.rows / lengths, gram.vectors)
        return _Basis(back / gram.values / lengths[:, None], gram.vectors)
    basis, sizes, directions = singular(scatter.rows / lengths)
    count = int(scatter.rank)
    return _Basis(directions[:count].T / sizes[:count] / lengths[:, None], basis[:, :count])


def _leading_basis(scatter: RowScatter, keep: float, count: int | None) -> _Basis:
    """The same of so many principal components, or of those that hold this share of the variance."""
    whole, sizes = _principal(scatter)
    if count is None:
        count = scatter.leading_count(positive(keep, "keep of svcca", most=1))
    else:
        whole_number(count, "directions of svcca", least=1, most=len(sizes))
    return _Basis(whole.mapping[:, :count], None if whole.columns is None else whole.columns[:, :count])


def _canonical(sample: Sample, basis: Callable[[RowScatter], _Basis]) -> Maps:
    """The directions of the canonical variables, which have unit variance."""
    a, b = map(basis, _scatters(sample))
    left, correlations, right = singular(_overlap(sample, a, b))
    maps = {
        "x": product(a.mapping, left) * sample.n**0.5,
        "y": product(b.mapping, right.T) * sample.n**0.5,
        "correlations": correlations,
    }
    return {**maps, "weights": torch.full_like(correlations, 1 / len(correlations))}


def _cca(sample: Sample) -> Maps:
    return _canonical(sample, _basis)


def _svcca(sample: Sample, keep: float = 0.99, directions: int | None = None) -> Maps:
    return _canonical(sample, lambda scatter: _leading_basis(scatter, keep, directions))


def canonical_weights(u: Tensor, correlations: Tensor, neurons: Tensor, rank: int, resolution: float) -> Tensor:
    """(k,) How much of x each canonical direction u (r, k) accounts for, from its neurons (r, p) in the same basis.

    Directions whose correlations are equal, to this resolution, are any orthonormal ones of their space: each has the
    mean of Σⱼ |⟨hᵢ, xⱼ⟩| over all choices. With m dimensions that is Σⱼ ‖xⱼ in the space‖ times the mean of |v₁| over
    unit vectors v. The space of the correlations of 0 includes all that is left of the `rank` directions of x.
    """
    first = torch.cat([correlations.new_ones(1, dtype=torch.bool), correlations.diff() < -resolution])
    tied = first.cumsum(0) - 1
    projected = product(u.T, neurons)
    squares = projected.new_zeros(int(tied[-1]) + 1, neurons.shape[1]).index_add(0, tied, projected.square())
    sizes = torch.bincount(tied).double()
    if bool(correlations[-1] <= resolution):
        others = u[:, tied < tied[-1]]
        squares[-1] = column_squares(neurons - product(others, product(others.T, neurons)))
        sizes[-1] = rank - others.shape[1]
    mean = (torch.lgamma(sizes / 2) - torch.lgamma((sizes + 1) / 2)).exp() / math.pi**0.5
    return (mean * squares.sqrt().sum(1))[tied]


def _pwcca(sample: Sample) -> Maps:
    maps, x = _canonical(sample, _basis), _scatters(sample)[0]
    directions = product(x.rows, maps["x"]) / sample.n**0.5
    resolution = sample.covariances().resolution
    weights = canonical_weights(directions, maps["correlations"], x.rows, int(x.rank), resolution)
    return {**maps, "weights": weights / weights.sum()}


def _regression(sample: Sample) -> Maps:
    x, y = _scatters(sample)
    basis = _basis(x)
    return {"x": basis.mapping, "y": basis.of(x, y.rows).T}


def _correlations(x: Tensor, y: Tensor) -> Tensor:
    """(k,): Pearson's, column by column; 0 where one does not vary."""
    x, y = without_mean(x), without_mean(y)
    sizes = (column_squares(x) * column_squares(y)).sqrt()
    return (x * y).sum(0) / torch.where(sizes > 0, sizes, torch.inf)


def _value_canonical(transform: Transform, measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    found = _correlations(product(x, transform.maps["x"]), product(y, transform.maps["y"]))
    return (transform.maps["weights"] * found).sum()


def _value_squared(transform: Transform, measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    return _correlations(product(x, transform.maps["x"]), product(y, transform.maps["y"])).square().mean()


def _value_explained(transform: Transform, measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    missed = _mapped(transform, x).sub_(y)
    return 1 - total_squares(missed) / total_squares(without_mean(y))


def _canonical_aligner(fit: Callable[..., Maps], value: Callable[..., Tensor] = _value_canonical) -> Aligner:
    shapes = {"x": "pk", "y": "qk", "correlations": "k", "weights": "k"}
    return Aligner("canonical directions", fit, shapes, _in_directions_x, _in_directions_y, value)


CANONICAL, CANONICAL_SQUARED = _canonical_aligner(_cca), _canonical_aligner(_cca, _value_squared)
CANONICAL_LEADING, CANONICAL_WEIGHTED = _canonical_aligner(_svcca), _canonical_aligner(_pwcca)
REGRESSION = Aligner("regression", _regression, {"x": "pk", "y": "qk"}, _into_y, _own, _value_explained)

# Matches of neurons: pairs, or a transport plan


def _match(sample: Sample) -> Maps:
    return {"pairs": torch.stack(best_assignment(sample.neurons().xy))}


def _match_by_correlation(sample: Sample) -> Maps:
    return {"pairs": torch.stack(best_assignment(sample.neurons().correlations))}


def _closest(sample: Sample) -> Maps:
    closest = sample.neurons().correlations.argmax(1)
    return {"pairs": torch.stack([torch.arange(len(closest), device=closest.device), closest])}


def _chosen_x(transform: Transform, rows: Tensor) -> Tensor:
    return take_columns(rows, transform.maps["pairs"][0])


def _chosen_y(transform: Transform, rows: Tensor) -> Tensor:
    return take_columns(rows, transform.maps["pairs"][1])


def _value_matched(transform: Transform, measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    squares = [column_squares(rows) / len(rows) for rows in (x, y)]
    held = (_chosen_x(transform, x) * _chosen_y(transform, y)).mean(0)
    return measure(HeldNeurons(squares[0], squares[1], x.new_zeros(0, 0), held=held))


def _value_correlated(transform: Transform, measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    held = _correlations(_chosen_x(transform, x), _chosen_y(transform, y))
    return measure(HeldNeurons(x.new_zeros(0), y.new_zeros(0), x.new_zeros(0, 0), held=held))


def _matcher(fit: Callable[..., Maps], value: Callable[..., Tensor] = _value_correlated) -> Aligner:
    return Aligner("matched neurons", fit, {"pairs": "2m"}, _chosen_x, _chosen_y, value)


MATCH, MATCH_BY_CORRELATION, CLOSEST = (
    _matcher(_match, _value_matched),
    *map(_matcher, (_match_by_correlation, _closest)),
)


def transport(plan_of: Callable[[Neurons], Tensor]) -> Aligner:
    """An aligner by a transport plan (p, q) of neurons to neurons."""

    def fit(sample: Sample) -> Maps:
        return {"plan": plan_of(sample.neurons())}

    def into_y(transform: Transform, rows: Tensor) -> Tensor:
        plan = transform.maps["plan"]
        return (rows - transform.centre_x) @ plan * plan.shape[1] + transform.centre_y

    def value(transform: Transform, measure: Measure, x: Tensor, y: Tensor) -> Tensor:
        plan = transform.maps["plan"]
        squares = [column_squares(rows) / len(rows) for rows in (x, y)]
        held = _inner(cross_product(x, y), plan) / len(x)
        return measure(HeldNeurons(squares[0], squares[1], x.new_zeros(plan.shape), held=held[None]))

    return Aligner("transport plan", fit, {"plan": "pq"}, into_y, _own, value)
