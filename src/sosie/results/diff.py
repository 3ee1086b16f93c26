"""The result of `diff`: whether two models are the same, entry by entry, and if not, which layer makes the error."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from .storage import Result
from .tables import aligned, cell, html_table

QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True)
class Place:
    """Where a number stands: which input, and its index in that input's activation."""

    input: int
    index: tuple[int, ...]

    def __str__(self) -> str:
        return f"input {self.input}" + (f" {list(self.index)}" if self.index else "")


@dataclass(frozen=True)
class SiteDiff:
    """How a site of A and its counterpart of B differ, entry by entry, over all inputs."""

    site_a: str
    site_b: str
    paired: str  # how the two were found to belong together: "by name", "in order", "by the map" …
    shape: tuple[int, ...]  # of one input's activation
    dtype_a: str
    dtype_b: str
    error: float  # ‖a − b‖ / ‖a‖
    low: float | None = None  # its 95 % interval over groups of inputs
    high: float | None = None
    made: float | None = None  # the error that this module of B makes on A's inputs; None if it was not run on them
    floor: float | None = None  # the error that changes which must not matter make here
    made_floor: float | None = None  # the same for `made`
    beyond: bool = False  # whether an error is beyond its floor
    inside: str = ""  # the site of A that was opened to get here; "" for the sites that were asked for
    sqnr: float | None = None  # 20 log₁₀ ‖a‖ / ‖a − b‖, in dB; None if they are equal
    largest: float | None = None  # the largest |a − b|
    at: Place | None = None  # where that is
    cosine: float | None = None  # of an input's numbers in A and B, the mean over inputs
    least_cosine: float | None = None
    mismatched: float | None = None  # share of the entries beyond rtol and atol
    quantiles: tuple[float, ...] = ()  # of |a − b|, at QUANTILES; of large activations from a sample
    shift: float | None = None  # the mean of b − a
    slope: float | None = None  # of b on a, by least squares
    inputs: int = 0
    notes: tuple[str, ...] = ()  # what is to be said beside the numbers: scaled, shifted, axes in another order …


@dataclass(frozen=True)
class OutputDiff:
    """One number on what the two models answer: agreement, KL divergence …"""

    measure: str
    value: float
    low: float | None = None
    high: float | None = None
    at: Place | None = None  # of an extreme: the input and the token
    meaning: str = ""


@dataclass(frozen=True)
class TensorDiff:
    """A tensor of A's weights and its counterpart of B; None for the name that is missing."""

    name_a: str | None
    name_b: str | None
    shape: tuple[int, ...]
    dtype_a: str | None
    dtype_b: str | None
    equal: bool  # bit for bit, or number for number where the types differ
    change: float | None  # ‖a − b‖ / ‖a‖
    largest: float | None = None  # the largest |a − b|
    at: tuple[int, ...] | None = None  # where that is
    rank: float | None = None  # the effective rank of the change, from its spectrum
    low_rank: int | None = None  # the exact rank if it is much lower than full: a LoRA
    notes: tuple[str, ...] = ()


def short(value: float | None) -> str:
    """An error with the digits that matter; "" if it is not known."""
    return "" if value is None else f"{value:.2g}"


@dataclass(frozen=True, eq=False)
class Diff(Result):
    """Whether B is the same model as A, and if not, which layer makes the error."""

    format = "sosie-diff"

    name_a: str
    name_b: str
    same: bool
    verdict: str  # one sentence
    first: str | None = None  # the innermost module of B that makes the error; None if nothing was found, or not sought
    sites: tuple[SiteDiff, ...] = ()  # in execution order; what was found inside a site comes right after it
    outputs: tuple[OutputDiff, ...] = ()
    weights: tuple[TensorDiff, ...] = ()  # what changed most first
    floor: str = ""  # what must not matter, and how it was measured, in words
    factor: float | None = None  # an error beyond the floor is larger than the floor by this factor
    unpaired_a: tuple[str, ...] = ()  # sites without a counterpart
    unpaired_b: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """One dict per pair of sites; without sites one per tensor."""
        return [asdict(row) for row in self.sites or self.weights]

    def worst(self, count: int = 5) -> list[SiteDiff]:
        """The sites with the largest errors, largest first; undefined ones come first."""
        ordered = sorted(self.sites, key=lambda site: -site.error if math.isfinite(site.error) else -math.inf)
        return ordered[:count]

    def as_text(self, most: int = 20) -> str:
        """The verdict, and a line for each of the first sites or tensors that differ."""
        if self.sites:
            heads = ("site", "error", "makes itself", "floor")
            differ = [s for s in self.sites if s.beyond] or list(self.sites)
            rows = [(s.site_a, *map(short, (s.error, s.made, s.floor))) for s in differ]
        else:
            heads = ("tensor", "change", "largest", "")
            rows = [
                (t.name_a or t.name_b or "", short(t.change), short(t.largest), "; ".join(t.notes))
                for t in self.weights
                if not t.equal
            ]
        table = aligned([heads, *rows[:most]]) if rows else []
        more = [f"and {len(rows) - most:,} more"] if len(rows) > most else []
        return "\n".join([self.verdict, *table, *more, *self.caveats])

    __repr__ = as_text

    def __bool__(self) -> bool:
        raise TypeError("a Diff is neither true nor false: ask for .same")

    def _repr_html_(self) -> str:
        titles = ("site", "error", "makes itself", "floor", "")
        rows = [
            (s.site_a, cell(s.error), cell(s.made), cell(s.floor), "beyond" if s.beyond else "") for s in self.sites
        ]
        return f"<p>{escape(self.verdict)}</p>" + (html_table(titles, rows) if rows else "")
