"""Which statistic supplies which measure: the cheapest that fits, stated before the pass."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..capture import Rule
from ..measures import Measure
from ..stats import BLOCK, NO_NEURONS, ROWS, Covariances, Grams, Moments, Neurons, UncentredAlignment

Kind = Literal["moments", "grams", "sample"]

MEMORY = 4 * 2**30  # bytes that statistics may take unless told otherwise
SMALL_WORK = 4_000_000  # multiply-adds a row that are not worth avoiding: exact moments are taken instead
NARROWEST = 2048  # columns below which rows are not projected; fewer rows are kept instead
_COPIES = 3  # moments are held as the total, the part and their sum while they merge


@dataclass(frozen=True)
class Widths:
    """What the plan is made from: columns of every site of both sides, and the rows where they are known."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    rows: int | None

    @property
    def moments_bytes(self) -> int:
        own = sum(w * w for w in (*self.a, *self.b))
        return 8 * _COPIES * (sum(self.a) * sum(self.b) + own)

    @property
    def moments_work(self) -> int:
        return sum(self.a) * sum(self.b) + sum(w * w for w in (*self.a, *self.b))

    def sample_bytes(self, rows: int, widest: int | None = None) -> int:
        """Rows of float32, twice while they merge, and one Gram matrix a site."""
        columns = sum(w if widest is None else min(w, widest) for w in (*self.a, *self.b))
        return 8 * rows * columns + 8 * rows * rows * (len(self.a) + len(self.b))


@dataclass(frozen=True)
class Plan:
    """The statistics one pass collects, and which measure reads which."""

    kinds: dict[str, Kind]  # measure name -> statistic
    block: int = BLOCK
    uncentred: bool = False
    products: torch.dtype = torch.float32
    sample_rows: int = ROWS
    widest: int | None = None
    notes: dict[str, str] = field(default_factory=dict)  # measure -> why it rests on less than it could
    rows_beside: bool = False  # whether rows are sampled too, only to tell how far values can be trusted

    @property
    def statistics(self) -> list[Kind]:
        kinds: list[Kind] = [*self.kinds.values(), *(("sample",) if self.rows_beside else ())]
        return list(dict.fromkeys(kinds))


def make_plan(
    measures: Sequence[Measure],
    widths: Widths,
    *,
    memory: int,
    exact: bool,
    block: int,
    precision: str | None,
    blocks: bool = True,
) -> Plan:
    """Choose for each measure the cheapest statistic that supplies its view within the memory budget.

    Without `blocks` no block Grams are taken: 64 positions of one image or sentence are no sample of the data.
    """
    budget = memory
    rows, widest = _sample_size(widths, budget, exact)
    kinds: dict[str, Kind] = {}
    for measure in measures:
        kinds[measure.name] = _kind(measure, widths, budget, exact=exact or not blocks, block=block)
    if exact and "sample" in kinds.values():
        _check_exact(widths, budget)
    _check_neurons([m for m in measures if kinds[m.name] == "sample"], widths, widest)
    precise = precision == "float64" or any(m.precise and kinds[m.name] == "moments" for m in measures)
    return Plan(
        kinds=kinds,
        block=block,
        uncentred=any(m.reads is UncentredAlignment and kinds[m.name] == "grams" for m in measures),
        products=torch.float64 if precise else torch.float32,
        sample_rows=rows,
        widest=widest,
        notes=_notes(measures, kinds, widths, budget),
        rows_beside="moments" in kinds.values() and widest is None and _room_for_rows(widths, budget),
    )


def _kind(measure: Measure, widths: Widths, budget: int, *, exact: bool, block: int) -> Kind:
    fits = widths.moments_bytes <= budget
    if measure.reads in Grams.supplies:
        if exact:
            return "moments" if fits and not _rows_are_cheaper(widths, budget) else "sample"
        by_blocks = block * (sum(widths.a) + sum(widths.b))
        cheap = widths.moments_work <= max(SMALL_WORK, by_blocks)
        return "moments" if fits and cheap else "grams"
    if measure.reads in Moments.supplies:
        # With fewer rows than neurons the rows themselves are the smaller, and exact, description.
        few = widths.rows is not None and widths.rows <= min(ROWS, max((*widths.a, *widths.b)))
        return "moments" if fits and not (few and widths.sample_bytes(widths.rows or 0) <= budget) else "sample"
    return "sample"


def _rows_are_cheaper(widths: Widths, budget: int) -> bool:
    """Whether Gram matrices of all rows, which a sample then holds, take less work than covariances."""
    if widths.rows is None or widths.rows > ROWS or widths.sample_bytes(widths.rows) > budget:
        return False
    return widths.rows * (sum(widths.a) + sum(widths.b) + len(widths.a) * len(widths.b)) < widths.moments_work


def _room_for_rows(widths: Widths, budget: int) -> bool:
    return widths.moments_bytes + widths.sample_bytes(min(ROWS, widths.rows or ROWS)) <= budget


def _sample_size(widths: Widths, budget: int, exact: bool) -> tuple[int, int | None]:
    """How many rows a sample keeps, and the width that wider rows are projected to."""
    if exact:
        return widths.rows or 2**40, None
    rows = max(4, min(ROWS, widths.rows or ROWS))
    if widths.sample_bytes(rows) <= budget:
        return ROWS, None  # even where there are fewer: more may be merged later
    sites = len(widths.a) + len(widths.b)
    while True:
        room = (budget - 8 * rows * rows * sites) // (8 * rows * sites)
        if room >= NARROWEST or rows <= 64:
            return rows, max(room, 64)
        rows //= 2


def _check_exact(widths: Widths, budget: int) -> None:
    if widths.rows is None:
        return
    need = widths.sample_bytes(widths.rows)
    if need > budget:
        raise MemoryError(
            f"exact=True would keep {widths.rows} rows of {sum(widths.a) + sum(widths.b)} columns: "
            f"{size_text(need)}, more than the budget of {size_text(budget)}. Raise memory=, pool with rows='mean', "
            "take fewer sites, or leave exact out"
        )


def _check_neurons(sampled: Sequence[Measure], widths: Widths, widest: int | None) -> None:
    """Measures that match neurons with neurons cannot read projected rows."""
    matching = [m.name for m in sampled if issubclass(m.reads, Neurons)]
    too_wide = [w for w in (*widths.a, *widths.b) if widest is not None and w > widest]
    if matching and too_wide:
        raise ValueError(
            f"{', '.join(matching)} would read rows of {max(too_wide)} neurons projected to {widest} columns, "
            f"{NO_NEURONS}"
        )


def _notes(measures: Sequence[Measure], kinds: dict[str, Kind], widths: Widths, budget: int) -> dict[str, str]:
    if widths.moments_bytes <= budget:
        return {}
    text = (
        f"covariances of all rows would take {size_text(widths.moments_bytes)}, over the budget of {size_text(budget)}"
    )
    return {m.name: text for m in measures if issubclass(m.reads, Covariances | Neurons) and kinds[m.name] == "sample"}


def parse_size(text: str | int | None) -> int | None:
    """Bytes from 2_000_000, "500MB" or "4GiB"."""
    if text is None or isinstance(text, int):
        found = text
    else:
        match = re.fullmatch(r"\s*([\d.]+)\s*([kKmMgGtT]?)(i?)[bB]?\s*", text)
        if match is None:
            raise ValueError(f"memory is a number of bytes or a size like '4GiB', got {text!r}")
        power = " kmgt".index(match[2].lower() or " ")
        found = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if found is not None and found <= 0:
        raise ValueError(f"memory must be positive, got {text!r}")
    return found


def size_text(size: int) -> str:
    power = min(int(math.log(max(size, 1), 1024)), 4)
    return f"{size / 1024**power:.1f} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"


# How much work it is worth to know how far values can be trusted


@dataclass(frozen=True)
class UncertaintyOptions:
    """How much work doubt is worth: draws of shuffled rows, and intervals where they are not nearly free."""

    draws: int = 0
    seed: int = 0
    interval: bool = False


NO_DOUBT = UncertaintyOptions()


# How a comparison is made


@dataclass(frozen=True)
class Settings:
    """How a comparison is made; see `compare`."""

    measures: tuple[Measure, ...]
    rows: Rule
    device: str | torch.device | None
    precision: str | None
    memory: int | None
    max_rows: int | None
    exact: bool
    block: int
    seed: int
    first_row: int
    doubt: UncertaintyOptions

    def as_text(self) -> dict[str, Any]:
        """For the record that a result keeps."""
        found: dict[str, Any] = {
            "block": self.block,
            "exact": self.exact,
            "seed": self.seed,
            "precision": self.precision or "default",
            "device": str(self.device or "each model's own"),
        }
        if self.max_rows is not None:
            found["max_rows"] = self.max_rows
        if self.doubt.draws:
            found["null"] = f"permutation, {self.doubt.draws} draws"
        return found


def draws_of(null: str | None, draws: int, kind: str = "permutation") -> int:
    if null not in (None, kind):
        raise ValueError(f"null={null!r}: chance is told by {kind!r}, or not at all (None)")
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    return 0 if null is None else draws


# The precision of our own float32 matrix products on a GPU

PRECISIONS = ("tf32", "float32", "float64")


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}")


def allows_tf32(precision: str | None) -> bool:
    """Whether Gram matrices on a GPU may be made of TF32 products: unless more is asked for.

    Rounding the activations so moves a CKA by less than 1e-5, since rows are centred first.
    """
    return precision in (None, "tf32")
