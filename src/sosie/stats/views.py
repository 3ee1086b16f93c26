"""Views: what a measure reads. Statistics supply them; a measure never sees where they came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..linalg import (
    Loss,
    Spectrum,
    best_assignment,
    centred,
    eigenvalues,
    inverse_root,
    lock_of,
    loss_of,
    nuclear_norm,
    once,
    product,
    rank_tolerance,
    unit,
    whitening,
)
from .shuffle import Moves, Shuffle

# What measures of weights read


@dataclass(frozen=True)
class Weights:
    """What two models are made of; no data."""


@dataclass(frozen=True)
class LinearMaps(Weights):
    """Inner products of the Gram matrices W Wᵀ of two maps, entry by entry of their input, centred over the entries.

    Shapes broadcast as those of `Alignment` do.
    """

    xx: Tensor
    yy: Tensor
    xy: Tensor


@dataclass(frozen=True)
class UncentredLinearMaps(LinearMaps):
    """The same from the Gram matrices as they are."""


@dataclass(frozen=True)
class TensorPair(Weights):
    """Two tensors of weights of one shape, the first axis being that of the neurons; float64."""

    x: Tensor
    y: Tensor
    kept: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)  # of one side, by id

    def __post_init__(self) -> None:
        if self.x.shape != self.y.shape:
            raise ValueError(f"need weights of one shape, got {tuple(self.x.shape)} and {tuple(self.y.shape)}")


@dataclass(frozen=True)
class Atoms(Weights):
    """Filter atoms of N and M models at one layer, (N, m, d) and (M, m, d): m atoms of d entries each.

    Atom i of one model belongs to atom i of another only where the models share their coefficients.
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.ndim != 3 or self.x.shape[1:] != self.y.shape[1:]:
            raise ValueError(
                f"need atoms (models, atoms, entries) of one number and size, got {tuple(self.x.shape)} and "
                f"{tuple(self.y.shape)}"
            )


T = TypeVar("T")


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
        """Directions that vary, as a scalar tensor: the trace of the projector W C Wᵀ."""
        whitener, everywhere = self._whitening
        if everywhere:
            return whitener.new_tensor(len(whitener))
        root = whitener.detach()
        return ((root @ self.correlation.detach()) * root).sum().round()


@dataclass
class Covariances:
    """Covariances of one pair of sites, in coordinates of each site's own (any rotation of the neurons)."""

    x: Scatter
    y: Scatter
    given: Tensor | Callable[[], Tensor]  # (r, s): the cross-covariance, or what makes it once it is needed

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
        scaled = self.xy / (self.x.scale[:, None] * self.y.scale[None, :])
        return product(product(self.x.whitener, scaled), self.y.whitener.T)

    @once
    def whitened_neurons(self) -> Tensor:
        """(k, p): covariance of the whitened directions of x, as `whitened` has them, with each of its neurons."""
        return self.x.whitener @ (self.x.matrix / self.x.scale[:, None])

    @once
    def x_whitened(self) -> Tensor:
        """Covariance of whitened x with y as it is: what a regression on x explains."""
        return product(self.x.whitener, self.xy / self.x.scale[:, None])

    def principal(self, share: float) -> tuple[Tensor, Tensor, Tensor] | None:
        """Correlations (k, l) of both sides' principal components and their standard deviations, from the rows.

        None where there are no rows, or the covariances tell the components that hold this share well enough.
        """
        return None


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
        if len(self.x.rows) != len(self.y.rows):
            raise ValueError(f"need paired rows, got {len(self.x.rows)} and {len(self.y.rows)}")


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


@dataclass(frozen=True)
class Outputs:
    """What two models answer to the same inputs, as counts: one number each, or one for each group left out."""

    n: Tensor


@dataclass(frozen=True)
class Predictions(Outputs):
    """Which class each model names."""

    equal: Tensor  # inputs for which both name the same


@dataclass(frozen=True)
class MarkedPredictions(Predictions):
    """The same, marked by labels."""

    right_a: Tensor
    right_b: Tensor
    both_right: Tensor


@dataclass(frozen=True)
class Distributions(Outputs):
    """Probabilities of the classes."""

    divergence: Tensor  # Σ Jensen-Shannon divergence, in bits


@dataclass(frozen=True)
class Differences(Outputs):
    """How much numeric outputs differ, d of them per input."""

    squared: Tensor  # Σ over inputs of the mean squared difference of the d outputs


@dataclass(frozen=True)
class Continuous(Differences):
    """The same, and how they vary together."""

    xx: Tensor  # (…, d) Σ (x − mean)²
    yy: Tensor  # (…, d)
    xy: Tensor  # (…, d)


View = Alignment | Covariances | PairedRows | Neurons | Outputs | Weights


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


# Views of two linear maps, from their matrices: rows are the entries of the input, columns the outputs


def linear_maps(x: Tensor, y: Tensor, view: type[LinearMaps] = LinearMaps) -> LinearMaps:
    """The view of maps x (d, p) and y (d, q) of one input; has gradients."""
    if x.dim() != 2 or y.dim() != 2:
        raise ValueError(f"a linear map is (inputs, outputs), got shapes {tuple(x.shape)} and {tuple(y.shape)}")
    if len(x) != len(y):
        raise ValueError(f"need maps of one input, got {len(x)} and {len(y)} entries")
    x, y = unit(x), unit(y)
    if not issubclass(view, UncentredLinearMaps):
        x, y = centred(x), centred(y)
    return view(_squares(x, x), _squares(y, y), _squares(x, y))


def _squares(x: Tensor, y: Tensor) -> Tensor:
    """⟨x xᵀ, y yᵀ⟩, by whichever way is shorter."""
    if x.shape[1] * y.shape[1] <= len(x) * (x.shape[1] + y.shape[1]):
        return (x.T @ y).square().sum()
    return ((x @ x.T) * (y @ y.T)).sum()
