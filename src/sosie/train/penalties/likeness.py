"""What a measure makes of pairs of layers, with gradients: all pairs in one product where the measure allows it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...capture import Rule, to_rows
from ...linalg import centred_grams, centred_rows, live_gram, u_centred
from ...linalg.live_grams import grams as grams_of
from ...measures import Measure
from ...stats import Alignment, Covariances, DebiasedAlignment, Differences, Neurons, Sample, UncentredAlignment
from ...stats.from_rows import NOTHING_LEFT, NOTHING_LEFT_IN_FLOAT32, from_products
from .columns import Column

SMALL = 2**18  # numbers of a layer up to which layers of one shape are stacked
CONSTANT = 8  # roundings of the first row within which rows that differ do not differ


@dataclass(frozen=True)
class Values:
    """One value a pair; `varies` says of which columns there is one at all."""

    pairs: Tensor  # (P,) 0 where a column of the pair is constant
    defined: Tensor  # (P,) bool
    varies: Tensor  # (L,) bool


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
    with torch.autocast(rows.device.type, enabled=False):
        return live_gram(rows, centre=centre), _squared_size(rows[0])


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
    measure: Measure, columns: Sequence[Column], pairs: Sequence[tuple[int, int]], rule: Rule, *, directed: bool
) -> Values:
    """Of each pair; a measure that is not symmetric is the mean of both directions, unless a pair is directed."""
    if aligns(measure):
        view, varies = _view(measure, columns, rule)
        device = view.xy.device
        a, b = (_index(tuple(pair[side] for pair in pairs), device) for side in (0, 1))
        defined = varies[a] & varies[b]
        found = measure(view)[a, b]
        return Values(torch.where(defined, found, torch.zeros_like(found)), defined, varies)
    rows = [rows_of(column, rule, any_order=False) for column in columns]
    _check_rows(measure, columns, rows, pairs)
    # A GPU is slow at decomposing small matrices, and is waited for anyway.
    home = "cpu" if max(part.numel() for part in rows) <= SMALL else rows[0].device
    each = _one_by_one(measure, columns, [part.double().to(home) for part in rows], pairs, directed)
    return Values(*(part.to(rows[0].device) for part in (each.pairs, each.defined, each.varies)))


# All pairs in one product


def _view(measure: Measure, columns: Sequence[Column], rule: Rule) -> tuple[Alignment, Tensor]:
    """The inner products of all pairs, and which columns vary; those that do not stand in the view as if of norm 1."""
    kind = measure.reads
    if isinstance(columns[0].shown.value, tuple):
        _check_counts(measure, columns, [column.shown.value[0] for column in columns])
        grams = torch.stack([column.shown.value[0] for column in columns])
        sizes = torch.stack([column.shown.value[1] for column in columns])
    else:
        rows = [rows_of(column, rule, any_order=True) for column in columns]
        _check_counts(measure, columns, rows)
        if len(rows[0]) > sum(each.shape[1] for each in rows):
            return _by_covariances(rows, kind)
        grams, sizes = _grams(rows, centre=kind is not UncentredAlignment)
    count = grams.shape[-1]
    digits, grams = grams.dtype, grams.double()
    varies = _varies(grams.diagonal(dim1=1, dim2=2).sum(1), sizes, count, digits, kind)
    if kind is DebiasedAlignment:
        whole, grams = grams.square().sum((1, 2)), u_centred(grams)
        varies = varies & (grams.detach().square().sum((1, 2)) > _rounding(digits) * whole.detach())
    flats = grams.flatten(1)
    return _aligned(flats @ flats.T, kind, varies), varies


def _grams(rows: Sequence[Tensor], *, centre: bool) -> tuple[Tensor, Tensor]:
    """(L, n, n), and the squared size of each first row; small layers of one shape are done together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for k, each in enumerate(rows):
        own = (each.shape, each.dtype) if each.numel() <= SMALL else (k,)
        groups.setdefault(own, []).append(k)
    grams: list[Tensor] = []
    sizes: list[Tensor] = []
    for group in groups.values():
        first = rows[group[0]]
        stack = first[None] if first.numel() > SMALL else torch.stack([rows[k] for k in group])
        sizes.append(_squared_size(stack[:, 0]))
        if first.numel() > SMALL:
            grams.append(live_gram(first, centre=centre)[None])
        else:
            wide = stack.to(torch.promote_types(stack.dtype, torch.float32))
            grams.append(centred_grams(wide) if centre else grams_of(wide))
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in grams))
    placed = [k for group in groups.values() for k in group]
    order = _index(tuple(placed.index(k) for k in range(len(rows))), rows[0].device)
    return torch.cat([each.to(dtype) for each in grams])[order], torch.cat(sizes)[order]


@functools.lru_cache(maxsize=64)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once: to make it anew a GPU would be waited for. Whoever asks first, gradients can flow past it."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)


def _squared_size(row: Tensor) -> Tensor:
    return row.detach().double().square().sum(-1)


def _by_covariances(rows: Sequence[Tensor], kind: type[Alignment]) -> tuple[Alignment, Tensor]:
    """The same for more rows than neurons in all: one product of all neurons, squared and added up layer by layer."""
    count = len(rows[0])
    sizes = torch.stack([_squared_size(each[0]) for each in rows])
    wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in rows]
    if kind is not UncentredAlignment:
        wide = [centred_rows(each) for each in wide]
    joined = torch.cat(wide, dim=1)
    squares = (joined.T @ joined).double().square()
    owner = _index(tuple(k for k, each in enumerate(rows) for _ in range(each.shape[1])), joined.device)
    owns = (owner[:, None] == torch.arange(len(rows), device=joined.device)).to(squares)
    products = owns.T @ squares @ owns
    trace = torch.stack([each.detach().double().square().sum() for each in wide])
    varies = _varies(trace, sizes, count, joined.dtype, kind)
    if kind is DebiasedAlignment:
        own = products.diagonal()
        view = from_products((own[:, None], own[None, :], products), wide, wide, kind)
        varies = varies & (view.xx.detach()[:, 0] != 0)
        return _with_ones(view, varies), varies
    return _aligned(products, kind, varies), varies


def _aligned(products: Tensor, kind: type[Alignment], varies: Tensor) -> Alignment:
    own = products.diagonal()
    return _with_ones(kind(own[:, None], own[None, :], products), varies)


def _with_ones(view: Alignment, varies: Tensor) -> Alignment:
    # Before the measure divides by it: a gradient of 0/0 would spoil the others, whatever is chosen afterwards.
    xx = torch.where(varies[:, None], view.xx, torch.ones_like(view.xx))
    yy = torch.where(varies[None, :], view.yy, torch.ones_like(view.yy))
    return type(view)(xx, yy, view.xy)


def _varies(trace: Tensor, sizes: Tensor, count: int, digits: torch.dtype, kind: type[Alignment]) -> Tensor:
    """Whether rows differ by more than rounding (uncentred: are not all 0). A NaN counts, so that it is noticed."""
    if kind is UncentredAlignment:
        return ~(trace.detach() == 0)
    noise = (CONSTANT * torch.finfo(digits).eps) ** 2 * count * sizes
    return ~(trace.detach() <= noise)


def _rounding(digits: torch.dtype) -> float:
    return NOTHING_LEFT.get(digits, NOTHING_LEFT_IN_FLOAT32)


# One pair after the other


def _one_by_one(
    measure: Measure,
    columns: Sequence[Column],
    rows: Sequence[Tensor],
    pairs: Sequence[tuple[int, int]],
    directed: bool,
) -> Values:
    sample = Sample.of(rows, rows)
    apart = torch.stack([(each - each[:1]).detach().abs().amax() for each in rows])
    size = torch.stack([each[0].detach().abs().amax() for each in rows])
    varies = ~(apart <= CONSTANT * torch.finfo(torch.float32).eps * size)
    alive = varies.tolist()
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
    defined = torch.tensor([alive[i] and alive[j] for i, j in pairs], device=varies.device)
    return Values(torch.stack(found), defined, varies)


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


def _check_rows(
    measure: Measure, columns: Sequence[Column], rows: Sequence[Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
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
