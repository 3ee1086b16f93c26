"""Views of activations that measures read. Statistics supply them; a measure never sees where they came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

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
    loss_of,
    memo,
    nuclear_norm,
    once,
    orthonormal_square,
    product,
    rank_tolerance,
    row_squares,
    self_product,
    singular_values,
    total_squares,
    whitening,
    without_rounding,
)
from .sampling import Moves, Shuffle

T = TypeVar("T")
ROUNDINGS = 100  # below this many, 1 − ρ² counts as 0: above, it has two digits or more
OUTLIER = 1e3  # times the median length of a row, from which a row may hide directions of the others


@dataclass(frozen=True)
class Alignment:
    """Inner products of centred Gram matrices: ⟨Kx, Kx⟩, ⟨Ky, Ky⟩ and ⟨Kx, Ky⟩.

    Shapes broadcast: xx (A, 1), yy (1, B), xy (A, B) for every pair of sites at once, or three scalars.
    """

    xx: Tensor
    yy: Tensor
    xy: Tensor


class DebiasedAlignment(Alignment):
    """Inner products of U-centred Gram matrices: 0 on average for independent rows."""


class UncentredAlignment(Alignment):
    """Inner products of uncentred Gram matrices."""


@dataclass
class Scatter:
    """The covariance of one site with its factorisations, each made once for all pairs."""

    given: Tensor | Callable[[], Tensor]  # (r, r): Σ (x − mean)(x − mean)ᵀ / n, or a function that makes it
    n: int
    total: Tensor | Callable[[], Tensor] | None = None  # its trace, if that is known sooner
    tolerance: float | None = None  # share of the largest eigenvalue that counts as 0; None: by precision

    def memo(self, key: object, make: Callable[[Scatter], T]) -> T:
        """`make(self)`, made once for all pairs."""
        return memo(self, key, lambda: make(self))

    @once
    def matrix(self) -> Tensor:
        return self.given if isinstance(self.given, Tensor) else self.given()

    @once
    def trace(self) -> Tensor:
        if self.total is None:
            return torch.trace(self.matrix)
        return self.total if isinstance(self.total, Tensor) else self.total()

    @once
    def spectrum(self) -> Spectrum:
        return Spectrum.of(self.matrix.detach(), self.tolerance)

    def leading(self, share: float) -> tuple[Tensor, int]:
        """The whitening of the fewest leading directions that hold this share of the variance, and their number."""

        def make(scatter: Scatter) -> tuple[Tensor, int]:
            leading = scatter.spectrum.leading(share)
            if not scatter.matrix.requires_grad:
                return leading.whitening.T, leading.rank
            return inverse_root(scatter.matrix, scatter.spectrum.cut_after(leading.rank)), leading.rank

        return self.memo(("leading", share), make)

    def leading_count(self, share: float) -> int:
        """The fewest directions that hold this share of the variance."""
        return self.leading(share)[1]

    @property
    def variances(self) -> Tensor:
        """The variances of the principal components, descending, up to a factor."""
        return self.spectrum.values

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
        some, everywhere = whitening(self.correlation[varies][:, varies], self.tolerance)
        return some.new_zeros(len(some), len(varies)).index_copy(1, varies.nonzero()[:, 0], some), everywhere

    @property
    def present(self) -> int:
        """The number of directions that the data are known to have, however small; 0 if it is not known."""
        return 0

    def loss(self, rounding: float) -> Loss:
        """The directions that scaling and whitening the neurons drops; those smaller than `rounding` do not count."""
        whitener, everywhere = self._whitening
        if everywhere:
            return Loss(0, len(whitener), 1.0)
        tolerance = rank_tolerance(self.correlation.dtype) if self.tolerance is None else self.tolerance
        sizes = eigenvalues(self.correlation.detach()).clamp_min(0).sqrt()  # below 0 by rounding
        return loss_of(sizes, tolerance**0.5, rounding, self.present)

    @once
    def amplified(self) -> float:
        """The factor by which whitening amplifies rounding."""
        return float(self.whitener.detach().square().sum())

    @property
    def whitener(self) -> Tensor:
        """(k, r): makes scaled neurons uncorrelated; scaling lets a quiet neuron count like a loud one."""
        return self._whitening[0]

    @once
    def rank(self) -> Tensor:
        """The number of directions that vary, as a scalar tensor."""
        return self._rank_of_matrix()

    def _rank_of_matrix(self) -> Tensor:
        """The trace of the projector W C Wᵀ."""
        whitener, everywhere = self._whitening
        if everywhere:
            return whitener.new_tensor(len(whitener))
        root = whitener.detach()
        return ((root @ self.correlation.detach()) * root).sum().round()


@dataclass
class Subspace:
    """A space of centred vectors (n,), such as all that the neurons of one site span."""

    columns: Tensor  # (n, k) orthonormal

    @once
    def complement(self) -> Tensor:
        """(n, n − 1 − k): orthonormal columns for the other centred vectors."""
        ones = torch.ones_like(self.columns[:, :1])
        return orthonormal_square(torch.cat([ones, self.columns], 1))[:, 1 + self.columns.shape[1] :].clone()

    def in_common(self, other: Subspace) -> int:
        """The dimensions that both have in common whatever they are, in n − 1 dimensions."""
        (n, k), l = self.columns.shape, other.columns.shape[1]
        return max(0, k + l - (n - 1))

    def cosines(self, other: Subspace, order: Tensor | None = None) -> Tensor:
        """The sum of the cosines of the principal angles with another space, whose rows are in another order.

        Beyond the dimensions that both have in common, these are also the angles between the complements, which are
        small then.
        """
        most = min(self.columns.shape[1], other.columns.shape[1])
        if (common := self.in_common(other)) == most:
            return self.columns.new_tensor(common)
        x, y = (space.complement if common else space.columns for space in (self, other))
        return common + nuclear_norm(product(x.T, y if order is None else y[order]), most - common)


@dataclass
class RowScatter(Scatter):
    """The covariance of a site with its rows, or some of them, which are factorised where the covariance lacks digits.

    With more neurons than rows, n principal coordinates stand for the neurons. Only what weighs neurons by variance may
    read them, since a quiet neuron is lost in their rounding; what scales neurons first reads the rows.
    """

    raw: Tensor = field(kw_only=True, repr=False)  # (n, p), all rows or some
    coordinates: Tensor | None = field(default=None, kw_only=True, repr=False)  # (n, r) of all rows, if they are kept
    gram: Spectrum | None = field(default=None, kw_only=True, repr=False)  # of the centred rows of a wide site

    @once
    def rows(self) -> Tensor:
        """(n, p) centred, in float64."""
        return without_rounding(self.raw, torch.float64)

    @property
    def wide(self) -> bool:
        """Whether the site has more neurons than rows."""
        return self.raw.shape[1] > len(self.raw)

    @once
    def direct(self) -> bool:
        """Whether to read the rows, since neurons are so nearly dependent that their covariance does not show it."""
        if self.wide:
            return True
        whitener, everywhere = self._whitening
        if self.sampled:  # sums of all rows are better than some rows, unless they lose directions
            return not everywhere and len(self.span.sizes) > int(self._rank_of_matrix())
        return not everywhere or self.amplified * len(whitener) * ENOUGH_VARIANCE > 1

    @property
    def sampled(self) -> bool:
        """Whether there are fewer rows than the covariance is of."""
        return len(self.raw) < self.n

    @once
    def _limits(self) -> tuple[float, float]:
        """Shares of the largest direction above which a direction counts, and below which it is rounding."""
        numbers = self.raw.double()
        narrow = bool((numbers == numbers.float()).all())  # float32 numbers, in whatever precision
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
        """The span of the neurons scaled to one size, so that a quiet neuron counts like a loud one."""
        return Span.of(_scaled(self.rows), *self._limits, self.present)

    @once
    def present(self) -> int:
        """The number of directions once outliers, whose rounding hides other rows, are shrunk; 0 without an outlier.

        Shrinking a row of [1, X] leaves its rank, one more than that of the centred rows.
        """
        numbers = _scaled(self.raw.double())
        sizes = numbers.norm(dim=1)
        if not bool((sizes > 0).any()):
            return 0
        usual = sizes[sizes > 0].median()
        if bool(sizes.max() <= OUTLIER * usual):
            return 0
        shrunk = torch.cat([torch.ones_like(numbers[:, :1]), numbers], 1) * (usual / sizes).clamp_max(1)[:, None]
        values = singular_values(_scaled(shrunk))
        return int((values > self._limits[0] * values[0]).sum()) - 1

    @once
    def components(self) -> Span:
        """The span of the unscaled neurons: their principal components."""
        return Span.of(self.rows, *self._limits)

    @once
    def scaled_gram(self) -> Spectrum | None:
        """Of the neurons of a wide site scaled to one size; None if the Gram matrix does not show all directions."""
        if not self.wide:
            return None
        scaled = _scaled(self.rows)
        spectrum = Spectrum.of(product(scaled, scaled.T), ENOUGH_VARIANCE)
        return spectrum if spectrum.rank >= self.n - 1 else None  # centring removes one direction

    @once
    def basis(self) -> Tensor:
        """(n, k): orthonormal columns with the span of the neurons."""
        return self.span.basis if self.scaled_gram is None else self.scaled_gram.vectors

    @once
    def space(self) -> Subspace:
        """The span of the neurons, whitened by the covariance where it shows all directions."""
        if self.direct or self.sampled:
            return Subspace(self.basis)
        return Subspace(product(self.rows / self.scale, self.whitener.T) / self.n**0.5)

    def leading_space(self, share: float, count: int | None, *, by_covariance: bool) -> Subspace:
        """The span of the fewest principal components that hold this share of the variance, or of so many."""

        def make(_: Scatter) -> Subspace:
            if by_covariance and self.coordinates is not None:
                return Subspace(product(self.coordinates, self.leading(share)[0].T) / self.n**0.5)
            span = self.components
            return Subspace(span.basis[:, : leading_count(span.sizes.square(), share) if count is None else count])

        return self.memo(("leading space", share, count, by_covariance), make)

    @once
    def whitened_neurons(self) -> Tensor:
        """(k, p): covariance of the space's columns, in units of variance 1, with each neuron."""
        return product(self.space.columns.T, self.rows) / len(self.rows) ** 0.5

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
        """Return whether the covariance lacks some of the leading directions that hold this share of the variance."""
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
        return leading_count(self.variances, share)

    @property
    def variances(self) -> Tensor:
        return self.components.sizes.square() if self.lacks_digits(1) else self.spectrum.values


def _scaled(rows: Tensor) -> Tensor:
    """The rows with columns scaled to length 1; columns of 0 stay."""
    lengths = rows.norm(dim=0)
    return rows / torch.where(lengths > 0, lengths, torch.ones_like(lengths))


def with_rows(scatter: Scatter, raw: Tensor) -> Scatter:
    """The covariance with its rows, or a sample of them; unchanged if there are more neurons than rows."""
    n, width = raw.shape
    return RowScatter(scatter.given, scatter.n, raw=raw) if width <= n else scatter


def coordinates(raw: Tensor, *, differentiable: bool) -> tuple[Tensor, Scatter]:
    """The centred rows of a site, in as few columns as they span, and their covariance."""
    n, width = raw.shape
    if differentiable:  # in the rows' own precision, which both sides share
        rows = without_rounding(raw, raw.dtype)
        return rows, Scatter(lambda: self_product(rows) / n, n, lambda: column_squares(rows).sum() / n)
    if width <= n:
        scatter = RowScatter(lambda: self_product(scatter.rows) / n, n, raw=raw)
        scatter.total = lambda: column_squares(scatter.rows).sum() / n
        scatter.coordinates = scatter.rows
        return scatter.rows, scatter
    # With more neurons than rows, n coordinates suffice, since all that reads them ignores rotations.
    rows = without_rounding(raw, torch.float64)
    spectrum = Spectrum.of(product(rows, rows.T))
    few = spectrum.vectors * spectrum.values.sqrt()
    return few, RowScatter(torch.diag(spectrum.values) / n, n, raw=raw, gram=spectrum, coordinates=few)


@dataclass
class Covariances:
    """Covariances of one pair of sites, each in coordinates of its own (any rotation of the neurons).

    If the rows of both sites are in memory, they supply what the covariances do not show.
    """

    x: Scatter
    y: Scatter
    given: Tensor | Callable[[], Tensor]  # (r, s): the cross-covariance, or a function that makes it
    order: Tensor | None = field(default=None, kw_only=True, repr=False)  # of the rows of y, if they were shuffled

    @once
    def xy(self) -> Tensor:
        return self.given if isinstance(self.given, Tensor) else self.given()

    @once
    def nuclear(self) -> Tensor:
        """The sum of the singular values of the cross-covariance."""
        return nuclear_norm(self.xy, most=self.x.trace.sqrt() * self.y.trace.sqrt())

    @once
    def whitened(self) -> Tensor:
        """The cross-correlation of whitened sides, whose singular values are the canonical correlations."""
        if sides := self._by_rows:
            return product(sides[0].space.columns.T, self._shuffled(sides[1].space.columns))
        scaled = self.xy / (self.x.scale[:, None] * self.y.scale[None, :])
        return product(product(self.x.whitener, scaled), self.y.whitener.T)

    @once
    def correlated(self) -> Tensor:
        """The sum of the canonical correlations."""
        if sides := self._by_rows:
            return sides[0].space.cosines(sides[1].space, self.order)
        return nuclear_norm(self.whitened, most=torch.minimum(self.x.rank, self.y.rank))

    @once
    def shared(self) -> Tensor:
        """The sum of the squares of the canonical correlations."""
        return self.whitened.square().sum()

    @property
    def whitened_neurons(self) -> Tensor:
        """(k, p): covariance of the whitened directions of x, as in `whitened`, with each of its neurons."""
        if sides := self._by_rows:
            return sides[0].whitened_neurons
        return self.x.memo("whitened neurons", lambda s: s.whitener @ (s.matrix / s.scale[:, None]))

    @property
    def explained(self) -> Tensor:
        """The variance of y that a regression on x explains."""
        return self.x_whitened.square().sum()

    @property
    def between(self) -> Tensor:
        """The sum of the squares of the cross-covariance."""
        return total_squares(self.xy)

    @once
    def x_whitened(self) -> Tensor:
        """The covariance of whitened x with y, which a regression on x explains."""
        if not (sides := self._in_memory) or not (sides[0].direct or callable(self.given)):
            return product(self.x.whitener, self.xy / self.x.scale[:, None])
        x, y = sides
        explained = product(x.space.columns.T, self._shuffled(y.rows)) / len(x.rows) ** 0.5
        # Scaled from the variance of the sampled rows to that of all rows.
        return explained * (y.trace / row_squares(y.rows).mean()).sqrt() if y.sampled else explained

    @property
    def saturated(self) -> bool:
        """Whether all canonical correlations are 1, for want of rows."""
        if not (sides := self._by_rows):
            return False
        x, y = (side.space for side in sides)
        return x.in_common(y) == min(x.columns.shape[1], y.columns.shape[1])

    @once
    def resolution(self) -> float:
        """The least 1 − ρ² that is not 0: the tolerance of both ranks, or the rounding that whitening amplifies."""
        dtype = torch.promote_types(self.x.matrix.dtype, self.y.matrix.dtype)
        largest = max(side.amplified for side in (self.x, self.y))
        tolerances = [side.tolerance or rank_tolerance(dtype) for side in (self.x, self.y)]
        return max(*tolerances, ROUNDINGS * torch.finfo(dtype).eps * largest)

    def leading(self, shares: Sequence[float], count: int | None) -> tuple[Subspace, Subspace] | None:
        """The spaces of the principal components of each side that hold its share of the variance, from the rows."""
        if not (sides := self._in_memory):
            return None
        enough = not any(side.lacks_digits(max(shares)) for side in sides)
        if enough and not callable(self.given):
            return None
        both = zip(sides, shares, strict=True)
        x, y = (side.leading_space(share, count, by_covariance=enough) for side, share in both)
        return x, y

    def principal(self, share: float) -> tuple[Tensor, Tensor, Tensor] | None:
        """The correlations (k, l) of both sides' principal components and their standard deviations, from the rows.

        None without rows, or if the covariances show the components that hold this share well enough.
        """
        if not (sides := self._in_memory) or not any(side.lacks_digits(share) for side in sides):
            return None
        x, y = (side.components for side in sides)
        sizes = (side.sizes / len(sides[0].rows) ** 0.5 for side in (x, y))
        return product(x.basis.T, self._shuffled(y.basis)), *sizes

    @property
    def _by_rows(self) -> tuple[RowScatter, RowScatter] | None:
        """Both sides, if their rows show more than the covariances do, or take less work than one that is not made."""
        sides = self._in_memory
        return sides if sides and (sides[0].direct or sides[1].direct or callable(self.given)) else None

    @property
    def _in_memory(self) -> tuple[RowScatter, RowScatter] | None:
        """Both sides, if the rows of both are in memory."""
        both = isinstance(self.x, RowScatter) and isinstance(self.y, RowScatter)
        return (self.x, self.y) if both else None  # type: ignore[return-value]

    def _shuffled(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else rows[self.order]


@dataclass
class HeldCovariances(Covariances):
    """The covariances of rows under an alignment that was found on other rows."""

    held: Tensor = field(kw_only=True)  # of the aligned rows, in place of the best sum

    @property
    def nuclear(self) -> Tensor:
        return self.held


@dataclass
class SiteRows:
    """The rows of one site, with a cache of what measures derive from them alone."""

    rows: Tensor  # (n, p)
    _before: tuple[SiteRows, Shuffle] | None = field(default=None, repr=False)  # the source of shuffled rows

    def memo(self, key: object, make: Callable[[Tensor], T], moves: Moves | None = None) -> T:
        """`make(rows)`, made once for all pairs; in float64, or in their own precision if rows need a gradient.

        `moves` says how the result follows when the rows are shuffled, so that it need not be made again.
        """

        def made() -> Any:
            if self._before is not None and moves is not None:
                original, shuffle = self._before
                return shuffle(original.memo(key, make, moves), moves)  # type: ignore[arg-type]
            return make(self.rows if self.rows.requires_grad else self.rows.double())

        return memo(self, key, made)

    def shuffled(self, shuffle: Shuffle) -> SiteRows:
        return SiteRows(self.rows[shuffle.order], _before=(self, shuffle))


@dataclass
class PairedRows:
    """The rows themselves; row i of x and row i of y belong to the same input."""

    x: SiteRows
    y: SiteRows
    inputs: SiteRows | None = None  # inputs of the networks, if a measure needs them

    def __post_init__(self) -> None:
        paired_rows(len(self.x.rows), len(self.y.rows))

    @property
    def n(self) -> int:
        return len(self.x.rows)

    def inner(self, key: object, make: Callable[[Tensor], Tensor], moves: Moves | None = None) -> Tensor:
        """The inner product of what `make` gives for the rows of each side; see `SiteRows.memo`."""
        x, y = (side.memo(key, make, moves).flatten() for side in (self.x, self.y))
        dtype = torch.promote_types(x.dtype, y.dtype)
        return torch.dot(x.to(dtype), y.to(dtype))


MOST_PAIRS = 4096**2  # of matched neurons: 128 MiB of covariances, about ten seconds to assign


def check_pairs(p: int, q: int) -> None:
    """Raise if there are too many pairs of neurons to match, before their covariances are made."""
    if p * q > MOST_PAIRS:
        raise ValueError(
            f"matching {p} neurons with {q} means {p * q:,} pairs, more than {MOST_PAIRS:,}: pool with rows='mean', "
            "or take narrower sites"
        )


@dataclass
class Neurons:
    """The variances and covariances of the neurons of two sites."""

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
        """Covariances of min(p, q) pairs of neurons, matched one to one for the largest sum."""
        return self.xy[best_assignment(self.xy)]

    @once
    def matched_correlations(self) -> Tensor:
        """Correlations of min(p, q) pairs of neurons, matched one to one for the largest sum."""
        return self.correlations[best_assignment(self.correlations)]

    @once
    def closest_correlations(self) -> Tensor:
        """(p,) The correlation of each neuron of x with its most correlated neuron of y."""
        return self.correlations.amax(1)

    def transported(self, plan: Callable[[Neurons], Tensor]) -> Tensor:
        """The covariance of x with y under the transport plan (p, q) that the function finds."""
        return (plan(self) * self.xy).sum()


@dataclass
class HeldNeurons(Neurons):
    """Neurons under a match that was found on other rows; `xy` has their numbers, but is not filled in."""

    held: Tensor = field(kw_only=True)  # (m,) of matched pairs, what the measure reads; (1,) of a transport plan

    @property
    def matched(self) -> Tensor:
        return self.held

    matched_correlations = closest_correlations = matched

    def transported(self, plan: Callable[[Neurons], Tensor]) -> Tensor:
        return self.held.sum()


class PairViews(Protocol):
    """A source of views of pairs of sites that is not a statistic of rows, such as a pair of sketches."""

    @property
    def n(self) -> int: ...
    @property
    def traces(self) -> tuple[Tensor, Tensor]: ...
    @property
    def own(self) -> tuple[Tensor, Tensor]: ...
    def covariances(self, i: int, j: int) -> Covariances: ...
    def paired(self, i: int, j: int) -> PairedRows: ...
