"""Views: what measures of activations read. Statistics supply them; a measure never sees where they came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..checks import paired_rows
from ..linalg import (
    ENOUGH_VARIANCE,
    SMALLEST_DIRECTION,
    SMALLEST_DIRECTION_FLOAT32,
    Loss,
    Span,
    Spectrum,
    best_assignment,
    column_squares,
    eigenvalues,
    inverse_root,
    leading_count,
    lock_of,
    loss_of,
    nuclear_norm,
    once,
    product,
    rank_tolerance,
    row_squares,
    self_product,
    singular_values,
    whitening,
    without_rounding,
)
from .sampling import Moves, Shuffle

T = TypeVar("T")
OUTLIER = 1e3  # times the median length of a row: from there on a row may hide directions of the others


@dataclass(frozen=True)
class Alignment:
    """Inner products of centred Gram matrices: ⟨Kx, Kx⟩, ⟨Ky, Ky⟩ and ⟨Kx, Ky⟩.

    Shapes broadcast: xx (A, 1), yy (1, B), xy (A, B) for every pair of sites at once, or three scalars.
    """

    xx: Tensor
    yy: Tensor
    xy: Tensor


@dataclass(frozen=True)
class DebiasedAlignment(Alignment):
    """The same from U-centred Gram matrices: independent rows give 0 on average."""


@dataclass(frozen=True)
class UncentredAlignment(Alignment):
    """The same from the Gram matrices as they are."""


@dataclass
class Scatter:
    """One site's covariance with its factorisations, each done once however many pairs ask."""

    given: Tensor | Callable[[], Tensor]  # (r, r): Σ (x − mean)(x − mean)ᵀ / n, or what makes it once it is needed
    n: int
    total: Tensor | None = None  # its trace, where that is known sooner
    tolerance: float | None = None  # what share of the largest eigenvalue is none; None: by the matrix's precision
    _kept: dict[object, object] = field(default_factory=dict, repr=False)

    def memo(self, key: object, make: Callable[[Scatter], T]) -> T:
        """`make(self)`, made once however many pairs ask for it."""
        with lock_of(self):
            if key not in self._kept:
                self._kept[key] = make(self)
            return self._kept[key]  # type: ignore[return-value]

    @once
    def matrix(self) -> Tensor:
        return self.given if isinstance(self.given, Tensor) else self.given()

    @once
    def trace(self) -> Tensor:
        return torch.trace(self.matrix) if self.total is None else self.total

    @once
    def spectrum(self) -> Spectrum:
        return Spectrum.of(self.matrix.detach(), self.tolerance)

    def leading(self, share: float) -> tuple[Tensor, int]:
        """Whitens the fewest leading directions that hold this share of the variance; their number."""

        def make(scatter: Scatter) -> tuple[Tensor, int]:
            leading = scatter.spectrum.leading(share)
            if not scatter.matrix.requires_grad:
                return leading.whitening.T, leading.rank
            return inverse_root(scatter.matrix, scatter.spectrum.cut_after(leading.rank)), leading.rank

        return self.memo(("leading", share), make)

    def leading_count(self, share: float) -> int:
        """How few directions hold this share of the variance."""
        return self.leading(share)[1]

    @once
    def scale(self) -> Tensor:
        """Standard deviations; 1 for a neuron that never varies."""
        variance = self.matrix.diagonal()
        positive = variance > 0
        return torch.where(positive, variance, torch.ones_like(variance)).sqrt()

    @once
    def correlation(self) -> Tensor:
        return self.matrix / (self.scale[:, None] * self.scale[None, :])

    @once
    def _whitening(self) -> tuple[Tensor, bool]:
        varies = self.correlation.diagonal() > 0
        if self.correlation.requires_grad or bool(varies.all()):
            return whitening(self.correlation, self.tolerance)
        found, everywhere = whitening(self.correlation[varies][:, varies], self.tolerance)
        return found.new_zeros(len(found), len(varies)).index_copy(1, varies.nonzero()[:, 0], found), everywhere

    @property
    def present(self) -> int:
        """How many directions the data are known to have, however small; 0: that is not known."""
        return 0

    def loss(self, rounding: float) -> Loss:
        """Directions that scaling and whitening the neurons drops; smaller ones than `rounding` are none."""
        whitener, everywhere = self._whitening
        if everywhere:
            return Loss(0, len(whitener), 1.0)
        tolerance = rank_tolerance(self.correlation.dtype) if self.tolerance is None else self.tolerance
        sizes = eigenvalues(self.correlation.detach()).clamp_min(0).sqrt()  # below 0 by rounding
        return loss_of(sizes, tolerance**0.5, rounding, self.present)

    @once
    def amplified(self) -> float:
        """By how much whitening makes rounding larger."""
        return float(self.whitener.detach().square().sum())

    @property
    def whitener(self) -> Tensor:
        """(k, r): makes scaled neurons uncorrelated; scaled first, so that a quiet neuron counts like a loud one."""
        return self._whitening[0]

    @once
    def rank(self) -> Tensor:
        """Directions that vary, as a scalar tensor."""
        return self._rank_of_matrix()

    def _rank_of_matrix(self) -> Tensor:
        """The trace of the projector W C Wᵀ."""
        whitener, everywhere = self._whitening
        if everywhere:
            return whitener.new_tensor(len(whitener))
        root = whitener.detach()
        return ((root @ self.correlation.detach()) * root).sum().round()


@dataclass
class RowScatter(Scatter):
    """The covariance of a site whose rows, or some of them, are in memory: these are factorised where it lacks digits.

    With more neurons than rows, n principal coordinates stand for the neurons. Only what weighs neurons by their
    variance may read those, since a quiet neuron is lost in their rounding; what scales neurons first reads the rows.
    """

    raw: Tensor = field(kw_only=True, repr=False)  # (n, p) as they were given, or some of them

    @once
    def rows(self) -> Tensor:
        """(n, p) centred, in float64."""
        return without_rounding(self.raw, torch.float64)

    @property
    def wide(self) -> bool:
        """Whether there are more neurons than rows."""
        return self.raw.shape[1] > len(self.raw)

    @once
    def direct(self) -> bool:
        """Whether to read the rows: neurons repeat one another so nearly that their covariance does not show it."""
        if self.wide:
            return True
        whitener, everywhere = self._whitening
        if self.sampled:  # all rows in sums are better than some, unless these lose what the data have
            return not everywhere and len(self.span.sizes) > int(self._rank_of_matrix())
        return not everywhere or self.amplified * len(whitener) * ENOUGH_VARIANCE > 1

    @property
    def sampled(self) -> bool:
        """Whether the rows are fewer than those of the covariance."""
        return len(self.raw) < self.n

    @once
    def _limits(self) -> tuple[float, float]:
        """Shares of the largest direction from which on one counts, and below which it is rounding of the rows."""
        numbers = self.raw.double()
        narrow = bool((numbers == numbers.float()).all())  # carry float32's digits, whatever they are kept in
        eps = torch.finfo(torch.float32 if narrow else torch.float64).eps
        spread = self.rows.square().mean(0).sqrt()
        offset = float(torch.where(spread > 0, numbers.mean(0).abs() / spread, 0.0).max())
        rounding = eps * 2 * max(4.0, offset)
        if narrow:
            return SMALLEST_DIRECTION_FLOAT32, min(rounding, SMALLEST_DIRECTION_FLOAT32)
        least = max(SMALLEST_DIRECTION, 4 * rounding)
        return min(least, SMALLEST_DIRECTION_FLOAT32), max(rounding, max(self.raw.shape) * eps)

    @once
    def span(self) -> Span:
        """Of the neurons scaled to one size, so that a quiet one counts like a loud one."""
        return Span.of(_scaled(self.rows), *self._limits, self.present)

    @once
    def present(self) -> int:
        """Directions that the rows have once none is louder than most: an outlier hides the others in its rounding.

        0 where no row is so loud. Shrinking a row of [1, X] leaves its rank, one more than that of the centred rows.
        """
        numbers = _scaled(self.raw.double())
        sizes = numbers.norm(dim=1)
        if not bool((sizes > 0).any()):
            return 0
        usual = sizes[sizes > 0].median()
        if bool(sizes.max() <= OUTLIER * usual):
            return 0
        shrunk = torch.cat([torch.ones_like(numbers[:, :1]), numbers], 1) * (usual / sizes).clamp_max(1)[:, None]
        found = singular_values(_scaled(shrunk))
        return int((found > self._limits[0] * found[0]).sum()) - 1

    @once
    def components(self) -> Span:
        """Of the neurons as they are: the principal components, not yet scaled."""
        return Span.of(self.rows, *self._limits)

    @once
    def basis(self) -> Tensor:
        """(n, k): orthonormal columns that span what the neurons span."""
        if self.wide:
            scaled = _scaled(self.rows)
            spectrum = Spectrum.of(scaled @ scaled.T, ENOUGH_VARIANCE)
            if spectrum.rank >= self.n - 1:  # centring takes one direction away; where more are missing, rows say which
                return spectrum.vectors
        return self.span.basis

    @once
    def rank(self) -> Tensor:
        return self.matrix.new_tensor(self.basis.shape[1]) if self.direct else self._rank_of_matrix()

    @once
    def amplified(self) -> float:
        if self.wide:
            return self.span.condition
        whitener, everywhere = self._whitening
        return float(whitener.square().sum()) if everywhere else self.span.condition

    def loss(self, rounding: float) -> Loss:
        if self.wide and (rank := self.basis.shape[1]) >= self.n - 1:
            return Loss(0, rank, 1.0)
        return self.span.loss if self.direct else super().loss(rounding)

    def lacks_digits(self, share: float) -> bool:
        """Whether the covariance does not show all of the leading directions that hold this share of the variance."""
        values = self.spectrum.values
        if self.sampled:
            return 1 - share < ENOUGH_VARIANCE and len(self.components.sizes) > len(values)
        count = leading_count(values, share)
        if bool(values[count - 1] < ENOUGH_VARIANCE * values[0]):
            return True
        return 1 - share < ENOUGH_VARIANCE and len(values) < self.raw.shape[1]

    def leading_count(self, share: float) -> int:
        if not self.lacks_digits(share):
            return super().leading_count(share)
        return leading_count(self.components.sizes.square(), share)


def _scaled(rows: Tensor) -> Tensor:
    """Columns of length 1, but for those that are 0."""
    lengths = rows.norm(dim=0)
    return rows / torch.where(lengths > 0, lengths, torch.ones_like(lengths))


def with_rows(scatter: Scatter, raw: Tensor) -> Scatter:
    """A covariance with the rows that it was made of, or a sample; of more neurons than rows it is left as it is."""
    n, width = raw.shape
    return RowScatter(scatter.given, scatter.n, raw=raw) if width <= n else scatter


def coordinates(raw: Tensor, *, differentiable: bool) -> tuple[Tensor, Scatter]:
    """One site's centred rows, in as few columns as they span, and their covariance."""
    n, width = raw.shape
    if differentiable:  # in the rows' own precision, which both sides share
        rows = without_rounding(raw, raw.dtype)
        return rows, Scatter(lambda: self_product(rows) / n, n, column_squares(rows).sum() / n)
    if width <= n:
        scatter = RowScatter(lambda: self_product(scatter.rows) / n, n, raw=raw)
        scatter.total = column_squares(scatter.rows).sum() / n
        return scatter.rows, scatter
    # More neurons than rows: n coordinates say as much, and all that reads them ignores rotations.
    rows = without_rounding(raw, torch.float64)
    spectrum = Spectrum.of(rows @ rows.T)
    return spectrum.vectors * spectrum.values.sqrt(), RowScatter(torch.diag(spectrum.values) / n, n, raw=raw)


@dataclass
class Covariances:
    """Covariances of one pair of sites, in coordinates of each site's own (any rotation of the neurons).

    Where the rows of both sites are in memory, they tell what the covariances do not show.
    """

    x: Scatter
    y: Scatter
    given: Tensor | Callable[[], Tensor]  # (r, s): the cross-covariance, or what makes it once it is needed
    order: Tensor | None = field(default=None, kw_only=True, repr=False)  # of the rows of y, where they were shuffled

    @once
    def xy(self) -> Tensor:
        return self.given if isinstance(self.given, Tensor) else self.given()

    @once
    def nuclear(self) -> Tensor:
        """Sum of the singular values of the cross-covariance."""
        return nuclear_norm(self.xy, most=self.x.trace.sqrt() * self.y.trace.sqrt())

    @once
    def whitened(self) -> Tensor:
        """Cross-correlation of whitened sides; its singular values are the canonical correlations."""
        if (sides := self._in_memory) and (sides[0].direct or sides[1].direct):
            return product(sides[0].basis.T, self._shuffled(sides[1].basis))
        scaled = self.xy / (self.x.scale[:, None] * self.y.scale[None, :])
        return product(product(self.x.whitener, scaled), self.y.whitener.T)

    @once
    def whitened_neurons(self) -> Tensor:
        """(k, p): covariance of the whitened directions of x, as `whitened` has them, with each of its neurons."""
        if (sides := self._in_memory) and (sides[0].direct or sides[1].direct):
            return product(sides[0].basis.T, sides[0].rows) / len(sides[0].rows) ** 0.5
        return self.x.whitener @ (self.x.matrix / self.x.scale[:, None])

    @once
    def x_whitened(self) -> Tensor:
        """Covariance of whitened x with y as it is: what a regression on x explains."""
        if not (sides := self._in_memory) or not sides[0].direct:
            return product(self.x.whitener, self.xy / self.x.scale[:, None])
        x, y = sides
        found = product(x.basis.T, self._shuffled(y.rows)) / len(x.rows) ** 0.5
        # A share of the variance of the sampled rows; what divides by the variance knows that of all rows.
        return found * (y.trace / row_squares(y.rows).mean()).sqrt() if y.sampled else found

    def principal(self, share: float) -> tuple[Tensor, Tensor, Tensor] | None:
        """Correlations (k, l) of both sides' principal components and their standard deviations, from the rows.

        None where there are no rows, or the covariances tell the components that hold this share well enough.
        """
        if not (sides := self._in_memory) or not any(side.lacks_digits(share) for side in sides):
            return None
        x, y = (side.components for side in sides)
        sizes = (side.sizes / len(sides[0].rows) ** 0.5 for side in (x, y))
        return product(x.basis.T, self._shuffled(y.basis)), *sizes

    @property
    def _in_memory(self) -> tuple[RowScatter, RowScatter] | None:
        """Both sides, if the rows of both are in memory."""
        both = isinstance(self.x, RowScatter) and isinstance(self.y, RowScatter)
        return (self.x, self.y) if both else None  # type: ignore[return-value]

    def _shuffled(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else rows[self.order]


@dataclass
class SiteRows:
    """The rows of one site, with room to keep what a measure derives from them alone."""

    rows: Tensor  # (n, p)
    _kept: dict[object, object] = field(default_factory=dict, repr=False)
    _before: tuple[SiteRows, Shuffle] | None = field(default=None, repr=False)  # where shuffled rows come from

    def memo(self, key: object, make: Callable[[Tensor], T], moves: Moves | None = None) -> T:
        """`make(rows)`, made once however many pairs ask for it; in float64, or as they are if a gradient is wanted.

        `moves` says how the result follows when the rows are shuffled, so that it need not be made again.
        """
        with lock_of(self):
            if key not in self._kept:
                if self._before is not None and moves is not None:
                    original, shuffle = self._before
                    self._kept[key] = shuffle(original.memo(key, make, moves), moves)  # type: ignore[arg-type]
                else:
                    self._kept[key] = make(self.rows if self.rows.requires_grad else self.rows.double())
            return self._kept[key]  # type: ignore[return-value]

    def shuffled(self, shuffle: Shuffle) -> SiteRows:
        return SiteRows(self.rows[shuffle.order], _before=(self, shuffle))


@dataclass
class PairedRows:
    """The rows themselves; row i of x and row i of y belong to the same input."""

    x: SiteRows
    y: SiteRows
    inputs: SiteRows | None = None  # what the networks were given, where a measure needs it

    def __post_init__(self) -> None:
        paired_rows(len(self.x.rows), len(self.y.rows))


MOST_PAIRS = 4096**2  # of neurons that are matched: 128 MiB of covariances, some ten seconds to assign


def check_pairs(p: int, q: int) -> None:
    """Refuse to match neurons where there are too many pairs of them, before their covariances are made."""
    if p * q > MOST_PAIRS:
        raise ValueError(
            f"matching {p} neurons with {q} means {p * q:,} pairs, more than {MOST_PAIRS:,}: pool with rows='mean', "
            "or take narrower sites"
        )


@dataclass
class Neurons:
    """How the neurons of two sites vary together, neuron by neuron."""

    x: Tensor  # (p,) variances
    y: Tensor  # (q,)
    xy: Tensor  # (p, q) covariances

    @once
    def correlations(self) -> Tensor:
        """(p, q); 0 for a neuron that never varies."""
        x, y = (torch.where(v > 0, v, torch.inf).rsqrt() for v in (self.x, self.y))
        return self.xy * x[:, None] * y[None, :]

    @once
    def matched(self) -> Tensor:
        """Covariances of min(p, q) pairs of neurons, matched one to one so that their sum is largest."""
        return self.xy[best_assignment(self.xy)]

    @once
    def matched_correlations(self) -> Tensor:
        """Correlations of min(p, q) pairs of neurons, matched one to one so that their sum is largest."""
        return self.correlations[best_assignment(self.correlations)]


class PairViews(Protocol):
    """What supplies the views of a pair of sites and is no statistic of rows: a pair of sketches, say."""

    @property
    def n(self) -> int: ...
    @property
    def traces(self) -> tuple[Tensor, Tensor]: ...
    @property
    def own(self) -> tuple[Tensor, Tensor]: ...
    def covariances(self, i: int, j: int) -> Covariances: ...
    def paired(self, i: int, j: int) -> PairedRows: ...
