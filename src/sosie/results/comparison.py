"""The result of a comparison: values, how many rows they rest on, how far to trust them, and where they came from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from .tables import as_frame, number

if TYPE_CHECKING:
    import pandas


Closer = Literal["up", "down"]
Kind = Literal["representations", "outputs", "shifts", "weights", "sketches", "stitching", "transfer"]
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Side:
    """One of the two things compared: its name and its sites in execution order."""

    name: str
    sites: tuple[str, ...]
    widths: tuple[int, ...]  # columns of each site's rows
    shapes: tuple[tuple[int, ...], ...]  # shape of one input's activation, before it became rows
    dtypes: tuple[str, ...] = ()  # of each site's activations; empty: not known
    left_out: tuple[tuple[str, str], ...] = ()  # sites that were not named one by one and gave no rows, and why

    def __post_init__(self) -> None:
        if not len(self.sites) == len(self.widths) == len(self.shapes):
            raise ValueError(
                f"{self.name}: {len(self.sites)} sites, {len(self.widths)} widths, {len(self.shapes)} shapes"
            )
        if self.dtypes and len(self.dtypes) != len(self.sites):
            raise ValueError(f"{self.name}: {len(self.sites)} sites, {len(self.dtypes)} dtypes")


@dataclass(frozen=True)
class Caveat:
    """What must be known to read a value; about one site of A, one of B, a pair, or (both None) all values."""

    text: str
    site_a: str | None = None
    site_b: str | None = None

    def concerns(self, site_a: str, site_b: str) -> bool:
        return self.site_a in (None, site_a) and self.site_b in (None, site_b)


class Facts(Protocol):
    """The facts needed to read a value; every measure declares them."""

    @property
    def closer(self) -> Closer: ...
    @property
    def bounds(self) -> tuple[float | None, float | None]: ...
    @property
    def same(self) -> float | None: ...


@dataclass(frozen=True)
class Estimate:
    """One measure over all pairs of sites, with the facts needed to read it without the registry."""

    value: Array  # (sites of A, sites of B); NaN where undefined, and then a caveat says why
    n: int  # rows the values rest on
    statistic: str  # which statistic supplied them, in words
    closer: Closer
    bounds: tuple[float | None, float | None]
    same: float | None  # the value of a thing compared with itself; None: it depends on the thing
    low: Array | None = None
    high: Array | None = None
    null: Array | None = None  # mean under shuffled pairing: what chance gives
    null_spread: Array | None = None  # its standard deviation
    p: Array | None = None  # how often chance gives a value as close as this
    p_search: Array | None = None  # how often it gives one anywhere in the matrix
    block_error: Array | None = None  # of values from blocks of rows: how far that from all rows may be (95 %)
    caveats: tuple[Caveat, ...] = ()

    @classmethod
    def of(
        cls,
        facts: Facts,
        value: Array,
        *,
        n: int,
        statistic: str,
        caveats: Iterable[Caveat] = (),
        **beside: Array | None,
    ) -> Estimate:
        """Values with the facts of their measure; what stands beside an undefined value is undefined too.

        `beside`: the interval (`low`, `high`), what chance gives (`null`, `null_spread`, `p`, `p_search`) and
        `block_error`, each of the values' shape, or None.
        """
        undefined = np.isnan(value)
        arrays = {name: None if a is None else np.where(undefined, np.nan, a) for name, a in beside.items()}
        return cls(
            value=value,
            n=n,
            statistic=statistic,
            closer=facts.closer,
            bounds=facts.bounds,
            same=facts.same,
            caveats=tuple(caveats),
            **arrays,
        )

    @property
    def score(self) -> Array | None:
        """Calibrated: 0 is what chance gives, 1 what a thing compared with itself gives."""
        if self.null is None or self.same is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.value - self.null) / (self.same - self.null)


ARRAYS = (
    "value",
    "low",
    "high",
    "null",
    "null_spread",
    "p",
    "p_search",
    "block_error",
)  # of an estimate, all of one shape


@dataclass(frozen=True, eq=False)
class Comparison:
    """Every site of A against every site of B, for each measure."""

    side_a: Side
    side_b: Side
    values: dict[str, Estimate]
    rows_rule: str = "flatten"
    provenance: dict[str, Any] = field(default_factory=dict)
    kind: Kind = "representations"

    def __post_init__(self) -> None:
        shape = (len(self.side_a.sites), len(self.side_b.sites))
        for name, values in self.values.items():
            for kind in ARRAYS:
                array = getattr(values, kind)
                if array is not None and array.shape != shape:
                    raise ValueError(f"{name}: {kind} has shape {array.shape}, the sites make it {shape}")

    @property
    def sites_a(self) -> list[str]:
        return list(self.side_a.sites)

    @property
    def sites_b(self) -> list[str]:
        return list(self.side_b.sites)

    @property
    def measures(self) -> list[str]:
        return list(self.values)

    def __getitem__(self, measure: str) -> Estimate:
        if measure in self.values:
            return self.values[measure]
        near = difflib.get_close_matches(measure, self.values, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise KeyError(f"no values for {measure!r}, only for {', '.join(self.values) or 'nothing'}{hint}")

    def _only(self, measure: str | None) -> str:
        if measure is not None:
            return measure
        if len(self.values) == 1:
            return next(iter(self.values))
        raise ValueError(f"name the measure: this comparison has {', '.join(self.values)}")

    def matrix(self, measure: str | None = None) -> Array:
        """The values, (len(sites_a), len(sites_b)); the name may be left out when there is one measure."""
        return self[self._only(measure)].value.copy()

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each measure and pair of sites."""
        rows = []
        for name, values in self.values.items():
            arrays = {kind: getattr(values, kind) for kind in (*ARRAYS[1:-1], "score", ARRAYS[-1])}
            for i, site_a in enumerate(self.side_a.sites):
                for j, site_b in enumerate(self.side_b.sites):
                    caveats = dict.fromkeys(c.text for c in values.caveats if c.concerns(site_a, site_b))
                    rows.append(
                        {
                            "measure": name,
                            "site_a": site_a,
                            "site_b": site_b,
                            "value": float(values.value[i, j]),
                            "n": values.n,
                            **{kind: None if a is None else float(a[i, j]) for kind, a in arrays.items()},
                            "caveats": list(caveats),
                        }
                    )
        return rows

    def best_match(self, measure: str | None = None) -> list[dict[str, Any]]:
        """The closest site of B for each site of A, by the measure's own direction."""
        values = self[self._only(measure)]
        matches = []
        for i, j in enumerate(closest(values)):
            site_b, value = (None, float("nan")) if j is None else (self.side_b.sites[j], float(values.value[i, j]))
            matches.append({"site_a": self.side_a.sites[i], "site_b": site_b, "value": value})
        return matches

    def to_pandas(self) -> pandas.DataFrame:
        """`rows()` as a data frame."""
        return as_frame(self.rows())

    def log(self, writer: Any, step: int | None = None) -> None:
        """Log same-depth and best-match means to a TensorBoard writer or a W&B run.

        Where p-values are known, also the share of pairs that are distinguishable from chance.
        """
        from .summary import at_layers, summarise

        scalars = {}
        for name in self.values:
            summary = summarise(self, name)
            if summary.best_mean is not None:
                scalars[f"sosie/{name}/best_match"] = summary.best_mean
            if summary.diagonal_mean is not None:
                scalars[f"sosie/{name}/same_depth"] = summary.diagonal_mean
            share = share_distinguishable(at_layers(self, name))
            if share is not None:
                scalars[f"sosie/{name}/distinguishable"] = share
        if hasattr(writer, "add_scalar"):
            for key, value in scalars.items():
                writer.add_scalar(key, value, step)
        elif hasattr(writer, "log"):
            writer.log(scalars) if step is None else writer.log(scalars, step=step)
        else:
            raise TypeError(f"{type(writer).__name__} has neither add_scalar (TensorBoard) nor log (W&B)")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON that `sosie.load` reads back exactly."""
        from .storage import save

        return save(self, path)

    def __repr__(self) -> str:
        a, b = self.side_a, self.side_b
        return (
            f"<Comparison {a.name} ({len(a.sites)} sites) x {b.name} ({len(b.sites)} sites): {', '.join(self.values)}>"
        )

    def _repr_html_(self) -> str:
        from .notebook import as_html

        return as_html(self)


def closest(values: Estimate) -> list[int | None]:
    """The closest column of each row, by the measure's own direction; None where all values are undefined."""
    score = values.value if values.closer == "up" else -values.value
    return [None if np.isnan(row).all() else int(np.nanargmax(row)) for row in score]


# Which values chance could have given too, and how a p-value is written

LEVEL = 0.05  # a value that chance gives more often than this is not distinguishable from chance

Mask = np.ndarray[Any, np.dtype[np.bool_]]


def decisive_p(values: Estimate) -> Array | None:
    """The p-value that decides: corrected for the search where that is known, else the plain one, NaN where neither."""
    if values.p_search is None:
        return values.p
    return values.p_search if values.p is None else np.where(np.isnan(values.p_search), values.p, values.p_search)


def by_chance(values: Estimate) -> Mask | None:
    """True where a defined value is not distinguishable from chance; None where no p-values are known."""
    p = decisive_p(values)
    return None if p is None else (p > LEVEL) & np.isfinite(values.value)


def distinguishable(values: Estimate) -> Mask | None:
    """True where a defined value is distinguishable from chance; where p is unknown, this and `by_chance` are False."""
    p = decisive_p(values)
    return None if p is None else (p <= LEVEL) & np.isfinite(values.value)


def share_distinguishable(values: Estimate) -> float | None:
    """The share of pairs that are distinguishable from chance, among those whose p is known."""
    yes, no = distinguishable(values), by_chance(values)
    if yes is None or no is None or not (yes | no).any():
        return None
    return float(yes.sum() / (yes | no).sum())


def correction(values: Estimate) -> str:
    """Words that say whether the deciding p-value is corrected for the search over pairs."""
    return "not corrected for the search" if values.p_search is None else "corrected for the search"


def written_p(p: float) -> str:
    """Three decimals; four where three would hide on which side of the level it lies."""
    if not np.isfinite(p):
        return "unknown"
    if p < 0.001:
        return "<0.001"
    return f"{p:.4f}" if f"{p:.3f}" == f"{LEVEL:.3f}" else f"{p:.3f}"


def stars(p: float) -> str:
    if not np.isfinite(p):
        return ""
    return "n.s." if p > LEVEL else "*" * (1 + (p <= 0.01) + (p <= 0.001))


def doubts(values: Estimate, i: int, j: int | None, digits: int = 3) -> dict[str, str]:
    """The interval, what chance gives and p of one pair as text, those that are known; "" where there is no pair."""
    texts = {}
    if values.low is not None and values.high is not None:
        ends = (np.nan, np.nan) if j is None else (values.low[i, j], values.high[i, j])
        texts["interval"] = f"[{number(ends[0], digits)}, {number(ends[1], digits)}]" if np.isfinite(ends).all() else ""
    if values.null is not None:
        spread = "" if j is None or values.null_spread is None else f"±{number(values.null_spread[i, j], digits)}"
        texts["chance"] = "" if j is None else f"{number(values.null[i, j], digits)}{spread}"
    if (p := decisive_p(values)) is not None:
        known = np.nan if j is None else float(p[i, j])
        texts["p"] = f"{written_p(known)} {stars(known):<4}" if stars(known) and digits > 2 else stars(known)
    return texts
