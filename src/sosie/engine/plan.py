"""The request, and the plan to meet it: for each measure the cheapest statistic that fits, chosen before the pass."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..checks import one_of, whole_number
from ..measures import Measure, find_all
from ..stats import (
    BLOCK,
    NO_NEURONS,
    ROWS,
    Covariances,
    GramMaker,
    Grams,
    MomentMaker,
    Moments,
    Neurons,
    RowSampler,
    SampleMaker,
    SplitMaker,
    Splits,
    UncentredAlignment,
    check_folds,
)

StatisticKind = Literal["moments", "grams", "sample", "splits"]
Widths = tuple[tuple[int, ...], tuple[int, ...]]  # columns of every site of A, and of B

MEMORY = 4 * 2**30  # bytes that statistics may take by default
SMALL_WORK = 4_000_000  # multiply-adds per row that are not worth avoiding: exact moments are taken instead
NARROWEST = 2048  # columns below which rows are not projected; fewer rows are kept instead
PRECISIONS = ("tf32", "float32", "float64")  # of our own matrix products on a GPU
_COPIES = 3  # moments are held as the total, the part and their sum while they merge
_ELSEWHERE = {
    "layers": "of layers, which needs data; use compare",
    "outputs": "of outputs, not of layers; use compare_outputs",
    "weights": "of weights, without data; use compare_weights",
    "entries": "entry by entry, of two sites that belong together; use sosie.diff",
    "repetitions": "of repeated responses (n, repeats, p); use sosie.measure",
}


def find_measures(measures: str | Measure | Sequence[str | Measure], *, of: str) -> tuple[Measure, ...]:
    """The measures by name; all must read `of` ("layers", "outputs" or "weights"), else the error says what to use."""
    chosen = tuple(find_all(measures))
    for reads in _ELSEWHERE:
        if reads != of and (names := [measure.name for measure in chosen if _reads(measure) == reads]):
            raise ValueError(f"{', '.join(names)}: {_ELSEWHERE[reads]}")
    return chosen


def _reads(measure: Measure) -> str:
    if measure.reads_entries:
        return "entries"
    if measure.reads_repetitions:
        return "repetitions"
    return "outputs" if measure.reads_outputs else "weights" if measure.reads_weights else "layers"


def draws_of(null: str | None, draws: int, kind: str = "permutation") -> int:
    """The number of draws: 0 unless `null` asks for them."""
    if null not in (None, kind):
        raise ValueError(f"null={null!r}: it must be {kind!r} or None")
    whole_number(draws, "draws", least=1)
    return 0 if null is None else draws


@dataclass(frozen=True)
class Request:
    """The options of `compare`."""

    measures: tuple[Measure, ...]
    device: str | torch.device | None = None
    precision: str | None = None
    memory: int = MEMORY
    max_rows: int | None = None
    exact: bool = False
    block: int = BLOCK
    seed: int = 0
    draws: int = 0
    interval: bool = False
    groups: np.ndarray[Any, Any] | None = field(default=None, compare=False)  # (inputs,) which are held out together

    def __post_init__(self) -> None:
        if self.precision is not None:
            one_of(self.precision, "precision", PRECISIONS)
        if self.max_rows is not None:
            whole_number(self.max_rows, "max_rows", least=1)
        folds = {tuple(measure.folds.values()) for measure in self.measures if measure.folds}
        if len(folds) > 1:
            got = " and ".join(f"folds={each}, seed={seed}" for each, seed in sorted(folds))
            raise ValueError(f"measures of held-out rows need the same folds in one comparison, got {got}")
        if folds:
            check_folds(*self.folds)
        elif self.groups is not None:
            raise TypeError(f"{', '.join(m.name for m in self.measures)} hold no rows out: leave groups out")

    @property
    def folds(self) -> tuple[int, int]:
        """The number of folds that rows are held out in, and their seed."""
        return next(((m.folds["folds"], m.folds["seed"]) for m in self.measures if m.folds), (1, 0))

    @property
    def tf32(self) -> bool:
        """Whether Gram matrices on a GPU may use TF32 products.

        That moves a CKA by less than 1e-5, since rows are centred first.
        """
        return self.precision in (None, "tf32")

    def as_text(self) -> dict[str, Any]:
        """The settings in the provenance of a result."""
        settings: dict[str, Any] = {
            "block": self.block,
            "exact": self.exact,
            "seed": self.seed,
            "precision": self.precision or "default",
            "device": str(self.device or "each model's own"),
        }
        if self.max_rows is not None:
            settings["max_rows"] = self.max_rows
        if self.groups is not None:
            settings["groups"] = f"{len(np.unique(self.groups))} of {len(self.groups)} inputs"
        if self.draws:
            settings["null"] = f"permutation, {self.draws} draws"
        return settings


@dataclass(frozen=True)
class Plan:
    """The statistics that one pass collects, and which measure reads which."""

    kinds: dict[str, StatisticKind]  # measure name -> statistic
    block: int = BLOCK
    uncentred: bool = False
    products: torch.dtype = torch.float32
    sample_rows: int = ROWS
    widest: int | None = None
    notes: dict[str, str] = field(default_factory=dict)  # measure -> why it rests on less than it could
    folds: tuple[int, int] = (1, 0)  # see Request
    fold_of: Tensor | None = field(default=None, repr=False, compare=False)  # (inputs,) that of each, by its group
    rows_beside: bool = False  # whether rows are sampled too, for intervals and chance alone

    @property
    def statistics(self) -> list[StatisticKind]:
        kinds: list[StatisticKind] = [*self.kinds.values(), *(("sample",) if self.rows_beside else ())]
        return list(dict.fromkeys(kinds))

    def maker(
        self, kind: StatisticKind, sampler: RowSampler | None = None, *, per_input: int = 1, tf32: bool = True
    ) -> Any:
        """What makes the parts of one side; the sampler of a sample is that of both sides."""
        if kind == "grams":
            return GramMaker(self.block, self.uncentred, tf32)
        if kind == "moments":
            return MomentMaker(self.products)
        if kind == "splits":
            return SplitMaker(*self.folds, per_input=per_input, fold_of=self.fold_of)
        assert sampler is not None
        return SampleMaker(sampler, self.widest)


def make_plan(request: Request, widths: Widths, rows: int | None, *, budget: int, blocks: bool = True) -> Plan:
    """Choose for each measure the cheapest statistic that supplies its view within `budget` bytes.

    `rows`: their number, if known. Without `blocks` there are no Gram matrices of blocks: 64 positions of one image
    or sentence are not a sample of the data.
    """
    measures, exact, columns = request.measures, request.exact, (*widths[0], *widths[1])
    needed = moments_bytes(widths)
    kinds: dict[str, StatisticKind] = {
        measure.name: _kind(measure, widths, rows, budget, exact=exact or not blocks, block=request.block)
        if measure.reads is not Splits
        else _kind_of_splits(measure, widths, rows, budget, several=not blocks)
        for measure in measures
    }
    sampled = [measure for measure in measures if kinds[measure.name] == "sample"]
    sample_rows, widest = _sample_size(widths, rows, budget, exact)
    if exact and sampled and rows is not None and (need := sample_bytes(widths, rows)) > budget:
        share = "" if budget == request.memory else f" (a pair's share of {size_text(request.memory)} for all pairs)"
        raise MemoryError(
            f"exact=True would keep {rows} rows of {sum(columns)} columns: {size_text(need)}, more than the budget of "
            f"{size_text(budget)}{share}. Raise memory=, pool with rows='mean', choose fewer sites, or leave out "
            "exact=True"
        )
    matching = [m.name for m in sampled if issubclass(m.reads, Neurons)]
    if matching and widest is not None and max(columns) > widest:
        names, neurons = ", ".join(matching), max(columns)
        raise ValueError(f"{names} would read rows of {neurons} neurons projected to {widest} columns, {NO_NEURONS}")
    notes = {}
    for m in sampled:
        if issubclass(m.reads, Covariances | Neurons | Splits):
            size = splits_bytes(widths, m.folds["folds"]) if m.folds else needed
            if size > budget:
                covariances = "covariances of every fold" if m.folds else "covariances of all rows"
                text = f"{covariances} would take {size_text(size)}, over the budget of {size_text(budget)}"
                notes[m.name] = text
    by_moments = [measure for measure in measures if kinds[measure.name] == "moments"]
    precise = request.precision == "float64" or any(measure.precise for measure in by_moments)
    rows_fit = needed + sample_bytes(widths, min(ROWS, rows or ROWS)) <= budget
    return Plan(
        kinds=kinds,
        block=request.block,
        uncentred=any(m.reads is UncentredAlignment and kinds[m.name] == "grams" for m in measures),
        products=torch.float64 if precise else torch.float32,
        sample_rows=sample_rows,
        widest=widest,
        notes=notes,
        folds=request.folds,
        rows_beside=bool(by_moments or "splits" in kinds.values()) and widest is None and rows_fit,
    )


def _kind(measure: Measure, widths: Widths, rows: int | None, budget: int, *, exact: bool, block: int) -> StatisticKind:
    columns, work = sum(widths[0]) + sum(widths[1]), _moments_work(widths)
    fits = moments_bytes(widths) <= budget
    rows_fit = rows is not None and sample_bytes(widths, rows) <= budget
    if measure.reads in Grams.supplies:
        if not exact:
            return "moments" if fits and work <= max(SMALL_WORK, block * columns) else "grams"
        # Gram matrices of all rows, which a sample then holds, may take less work than covariances.
        of_rows = (rows or 0) * (columns + len(widths[0]) * len(widths[1]))
        cheaper = rows is not None and rows <= ROWS and rows_fit and of_rows < work
        return "moments" if fits and not cheaper else "sample"
    if measure.reads in Moments.supplies:
        # With fewer rows than neurons the rows themselves are the smaller, and exact, description.
        few = rows is not None and rows <= min(ROWS, max((*widths[0], *widths[1])))
        return "moments" if fits and not (few and rows_fit) else "sample"
    return "sample"


def _kind_of_splits(measure: Measure, widths: Widths, rows: int | None, budget: int, *, several: bool) -> StatisticKind:
    """`several`: inputs have several rows, which a sample would not keep in one fold."""
    needed = splits_bytes(widths, measure.folds["folds"])
    few = rows is not None and rows <= min(ROWS, max((*widths[0], *widths[1])))
    if several and needed > budget:
        raise MemoryError(
            f"{measure.name} keeps the rows of an input in one fold by covariances of every fold, which take "
            f"{size_text(needed)}, more than the budget of {size_text(budget)}: raise memory=, choose fewer sites, or "
            "pool with rows='mean'"
        )
    return "sample" if not several and (needed > budget or few) else "splits"


def _sample_size(widths: Widths, rows: int | None, budget: int, exact: bool) -> tuple[int, int | None]:
    """The number of rows that a sample keeps, and the width that wider rows are projected to."""
    if exact:
        return rows or 2**40, None
    kept = max(4, min(ROWS, rows or ROWS))
    if sample_bytes(widths, kept) <= budget:
        return ROWS, None  # even where there are fewer: more may be merged later
    sites = len(widths[0]) + len(widths[1])
    while True:
        widest = (budget - 8 * kept * kept * sites) // (8 * kept * sites)
        if widest >= NARROWEST or kept <= 64:
            return kept, max(widest, 64)
        kept //= 2


def _moments_work(widths: Widths) -> int:
    """Multiply-adds per row."""
    return sum(widths[0]) * sum(widths[1]) + sum(width * width for side in widths for width in side)


def moments_bytes(widths: Widths) -> int:
    return 8 * _COPIES * _moments_work(widths)


def splits_bytes(widths: Widths, folds: int) -> int:
    """Moments of every fold, and for each site of A components of the rows outside every one and two folds."""
    pairs = folds * (folds - 1)
    return folds * moments_bytes(widths) + 8 * (pairs + pairs // 2 + 2 * folds) * sum(w * w for w in widths[0])


def sample_bytes(widths: Widths, rows: int) -> int:
    """Rows of float32, twice while they merge, and one Gram matrix per site."""
    columns = sum(map(sum, widths))
    return 8 * rows * columns + 8 * rows * rows * (len(widths[0]) + len(widths[1]))


def parse_size(text: str | int | None) -> int | None:
    """Bytes from 2_000_000, "500MB" or "4GiB"."""
    if text is None or isinstance(text, int):
        size = text
    else:
        match = re.fullmatch(r"\s*([\d.]+)\s*([kKmMgGtT]?)(i?)[bB]?\s*", text)
        if match is None:
            raise ValueError(f"memory is a number of bytes or a size like '4GiB', got {text!r}")
        power = " kmgt".index(match[2].lower() or " ")
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if size is not None and size <= 0:
        raise ValueError(f"memory must be positive, got {text!r}")
    return size


def size_text(size: int) -> str:
    power = min(int(math.log(max(size, 1), 1024)), 4)
    return f"{size / 1024**power:.1f} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
