"""What a measure makes of pairs of layers, with gradients: all pairs in one product where the measure allows it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...capture import Rule, to_rows
from ...linalg import centred_rows, inner_products, sized_gram, sized_grams, widened
from ...measures import Measure
from ...process_state import without_autocast
from ...stats import Alignment, Covariances, DebiasedAlignment, Differences, Neurons, Sample, UncentredAlignment
from ...stats.from_rows import NOTHING_LEFT, NOTHING_LEFT_IN_FLOAT32, from_products
from .columns import Column, Pair

SMALL = 2**18  # numbers of the largest layer up to which a CPU compares pairs sooner than a GPU
CONSTANT = 8  # roundings of the first row within which rows that differ do not differ


@dataclass(frozen=True)
class Values:
    """What pairs of columns give."""

    each: Tensor  # (P,)
    counts: Tensor  # (P,) how often each counts; 0 where a column of the pair is constant
    still: Tensor  # (L,) bool: which columns are constant over the rows, so that there is no value

    @property
    def total(self) -> Tensor:
        return self.each @ self.counts

    @property
    def numbers(self) -> list[float | None]:
        """None for a pair with a constant column."""
        both = zip(self.each.tolist(), self.counts.tolist(), strict=True)
        return [value if count else None for value, count in both]


def aligns(measure: Measure) -> bool:
    """Whether it reads nothing but inner products of Gram matrices."""
    return issubclass(measure.reads, Alignment)


def least_rows(measure: Measure) -> int:
    """With fewer rows than this the value is a constant."""
    if aligns(measure):
        return 4 if measure.reads is DebiasedAlignment else 2 if measure.reads is UncentredAlignment else 3
    return 3


def as_gram(activation: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
    """Gram matrix of the flattened activation, and the size of its first row; no copy is made."""
    rows = flat(activation)
    with without_autocast(rows.device.type):
        return sized_gram(rows, centre=centre)


def flat(activation: Tensor) -> Tensor:
    """(n, features) in the order they have in memory: the measures that ask do not look at it."""
    if activation.dim() == 1:
        return activation[:, None]
    if activation.dim() == 4 and activation.is_contiguous(memory_format=torch.channels_last):
        activation = activation.movedim(1, -1)
    return activation.flatten(1)


def rows_of(column: Column, rule: Rule, *, any_order: bool) -> Tensor:
    activation = column.shown.value
    if any_order and rule == "flatten":
        return flat(activation)
    return to_rows(activation, rule, site=column.shown.site, inputs=len(activation))


def values(
    measure: Measure, columns: Sequence[Column], pairs: Sequence[Pair], rule: Rule, *, directed: bool, times: float
) -> Values:
    """Of each pair, which counts so many times; a measure that is not symmetric is the mean of both directions, unless
    a pair is directed.
    """
    if aligns(measure):
        return _all_at_once(measure, columns, pairs, rule, times)
    rows = [rows_of(column, rule, any_order=False) for column in columns]
    _check_rows(measure, columns, rows, pairs)
    # A GPU is slow at decomposing small matrices, and is waited for anyway.
    home = "cpu" if max(part.numel() for part in rows) <= SMALL else rows[0].device
    found = _one_by_one(measure, columns, [part.double().to(home) for part in rows], pairs, directed)
    device = rows[0].device
    return Values(found.each.to(device), times * found.counts.to(device), found.still.to(device))


# All pairs in one product


def _all_at_once(
    measure: Measure, columns: Sequence[Column], pairs: Sequence[Pair], rule: Rule, times: float
) -> Values:
    products, still = _products(measure, columns, rule)
    places, sides, counts = _places(tuple(pairs), len(columns), times, products.device)
    constant = still[sides]
    # Of these pairs alone: a measure may have no value, or no gradient, for a layer and itself.
    xx, yy, xy = products.flatten()[places]
    # Before the measure divides by it: a gradient of 0/0 would spoil the others, whatever is chosen afterwards.
    each = measure(measure.reads(xx + constant[0], yy + constant[1], xy))
    return Values(each, counts.masked_fill(constant.any(0), 0.0), still)


@functools.lru_cache(maxsize=64)
def _places(pairs: tuple[Pair, ...], columns: int, times: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where the products of pairs are: (3, P) of one with itself, the other with itself, both; which columns (2, P) the
    pairs are of; and how often each counts. Made once: to make it anew a GPU would be waited for.
    """
    with torch.inference_mode(False):  # whoever asks first, gradients can flow past it
        sides = torch.tensor(pairs).T
        places = torch.stack([sides[0] * (columns + 1), sides[1] * (columns + 1), sides[0] * columns + sides[1]])
        counts = torch.full((len(pairs),), times, dtype=torch.float64)
        return places.to(device), sides.to(device), counts.to(device)


def _products(measure: Measure, columns: Sequence[Column], rule: Rule) -> tuple[Tensor, Tensor]:
    """The inner products of the Gram matrices of all columns, and which columns are constant."""
    kind = measure.reads
    centre, unbiased = kind is not UncentredAlignment, kind is DebiasedAlignment
    if isinstance(columns[0].shown.value, tuple):
        stacks, sizes = (list(part) for part in zip(*(column.shown.value for column in columns), strict=True))
        _check_counts(measure, columns, [stack[0] for stack in stacks])
        digits = _common([stack.dtype for stack in stacks])
    else:
        rows = [rows_of(column, rule, any_order=True) for column in columns]
        _check_counts(measure, columns, rows)
        if len(rows[0]) > sum(each.shape[1] for each in rows):
            return _by_covariances(rows, kind)
        stacks, sizes = sized_grams(rows, centre=centre)
        digits = _common([each.dtype for each in rows])
    products, traces = inner_products(stacks, centre=centre, unbiased=unbiased)
    still = _still(traces, sizes[0] if len(sizes) == 1 else torch.cat(sizes), digits, kind)
    if unbiased:
        whole = torch.cat(stacks).detach().double().square().sum((1, 2))
        left = products.detach().diagonal()
        still = still | (left <= NOTHING_LEFT.get(digits, NOTHING_LEFT_IN_FLOAT32) * whole)
    return products, still


def _common(digits: Sequence[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, set(digits), torch.float32)


def _by_covariances(rows: Sequence[Tensor], kind: type[Alignment]) -> tuple[Tensor, Tensor]:
    """The same for more rows than neurons in all: one product of all neurons, squared and added up layer by layer."""
    sizes = len(rows[0]) * torch.stack([each[0].detach().double().square().sum() for each in rows])
    wide = [centred_rows(each) if kind is not UncentredAlignment else widened(each) for each in rows]
    joined = torch.cat(wide, dim=1)
    squares = (joined.T @ joined).double().square()
    owns = _owners(tuple(each.shape[1] for each in rows), joined.device)
    products = owns.T @ squares @ owns
    traces = torch.stack([each.detach().double().square().sum() for each in wide])
    still = _still(traces, sizes, joined.dtype, kind)
    if kind is DebiasedAlignment:
        own = products.diagonal()
        view = from_products((own[:, None], own[None, :], products), wide, wide, kind)
        return view.xy, still | (view.xx.detach()[:, 0] == 0)
    return products, still


@functools.lru_cache(maxsize=64)
def _owners(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """(neurons, layers): 1 where a neuron is of a layer."""
    with torch.inference_mode(False):
        own = torch.eye(len(widths), dtype=torch.float64)
        return own.repeat_interleave(torch.tensor(widths), dim=0).to(device)


def _still(traces: Tensor, sizes: Tensor, digits: torch.dtype, kind: type[Alignment]) -> Tensor:
    """Whether rows differ by no more than rounding (uncentred: are all 0). NaN and ∞ do, to be noticed."""
    if kind is UncentredAlignment:
        return traces == 0
    return torch.sub(traces, sizes, alpha=(CONSTANT * torch.finfo(digits).eps) ** 2) <= 0


# One pair after the other


def _one_by_one(
    measure: Measure,
    columns: Sequence[Column],
    rows: Sequence[Tensor],
    pairs: Sequence[Pair],
    directed: bool,
) -> Values:
    sample = Sample.of(rows, rows)
    apart = torch.stack([(each - each[:1]).detach().abs().amax() for each in rows])
    size = torch.stack([each[0].detach().abs().amax() for each in rows])
    still = apart <= CONSTANT * torch.finfo(torch.float32).eps * size
    alive = [not each for each in still.tolist()]
    found, nothing = [], rows[0].new_zeros(())

    def of(i: int, j: int) -> Tensor:
        try:
            return of_rows(i, j)
        except ValueError as error:
            raise ValueError(f"{measure.name} of {columns[i].label!r} and {columns[j].label!r}: {error}") from error

    def of_rows(i: int, j: int) -> Tensor:
        if issubclass(measure.reads, Covariances):
            return measure(sample.covariances(i, j))
        if issubclass(measure.reads, Neurons):
            return measure(sample.neurons(i, j))
        if measure.reads_outputs:
            kind = "regression" if issubclass(measure.reads, Differences) else "logits"
            return measure.of(rows[i], rows[j], kind=kind)
        return measure(sample.paired(i, j))

    for i, j in pairs:
        if not (alive[i] and alive[j]):
            found.append(nothing)
        elif measure.symmetric or directed:
            found.append(of(i, j))
        else:
            found.append((of(i, j) + of(j, i)) / 2)
    each = torch.stack(found)
    return Values(each, each.new_tensor([alive[i] and alive[j] for i, j in pairs]), still)


def _check_counts(measure: Measure, columns: Sequence[Column], rows: Sequence[Tensor]) -> None:
    for column, each in zip(columns, rows, strict=True):
        if len(each) != len(rows[0]):
            raise ValueError(
                f"{columns[0].label!r} gives {len(rows[0])} rows and {column.label!r} {len(each)}: these cannot be "
                "paired; take another rule, pairs of layers of one resolution, or the same inputs for all models"
            )
    if len(rows[0]) < least_rows(measure):
        raise ValueError(
            f"{measure.name} of {len(rows[0])} rows is always the same: it needs {least_rows(measure)} at least"
        )


def _check_rows(measure: Measure, columns: Sequence[Column], rows: Sequence[Tensor], pairs: Sequence[Pair]) -> None:
    _check_counts(measure, columns, rows)
    count = len(rows[0])
    for i, j in pairs:
        p, q = rows[i].shape[1], rows[j].shape[1]
        if measure.same_width and p != q:
            raise ValueError(
                f"{measure.name} compares neuron by neuron, so needs equal widths: {columns[i].label!r} has {p}, "
                f"{columns[j].label!r} {q}"
            )
        widest = i if p >= q or measure.few_rows == "saturates in x" else j
        if (measure.few_rows or "").startswith("saturates") and rows[widest].shape[1] >= count - 1:
            raise ValueError(
                f"{measure.name} of {count} rows is 1 whatever the layers do, and has no gradient, once a layer has "
                f"{count - 1} neurons or more; {columns[widest].label!r} has {rows[widest].shape[1]}: pool with "
                "rule='mean' or take rule='positions', with more rows; or take linear_cka"
            )
