"""How alike layers are, with gradients: which two make a pair, their Gram matrices, and what a measure makes of them.

A column is what a site showed: one layer of one model, or what goes into a stage of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ..capture import Rule, SiteError, nearest, to_rows
from ..engine.evaluate import view_of
from ..linalg import centred_rows, double_centred, sized_gram, u_centred, widened
from ..linalg.grams import WIDENED, Settled, squared_sizes
from ..measures import Measure
from ..process_state import without_autocast
from ..stats import Alignment, DebiasedAlignment, Differences, Sample, UncentredAlignment
from ..stats.from_rows import NOTHING_LEFT, NOTHING_LEFT_IN_FLOAT32, from_products
from .taps import Shown

Pairs = str | Sequence[tuple[str, str]] | None
KINDS = ("stage", "all", "same")
Pair = tuple[int, int]  # places among the columns


def check_pairs(pairs: Pairs, *, alone: bool) -> Pairs:
    """The pairs, checked; by default those within a stage of one model, or the same site of several."""
    if pairs is None:
        return "stage" if alone else "same"
    if isinstance(pairs, str):
        if pairs not in KINDS:
            raise ValueError(f"pairs={pairs!r}: 'stage', 'all', 'same' or a list of (site, site)")
        if alone == (pairs == "same"):
            raise ValueError(
                "pairs='same' compares one site of several models: give a list of models, or target="
                if alone
                else f"pairs={pairs!r} is for one model; several are compared at the same site, or by (site, site)"
            )
        return pairs
    listed = [tuple(pair) for pair in pairs]
    if not listed or any(len(pair) != 2 or not all(isinstance(site, str) for site in pair) for pair in listed):
        raise ValueError(f"pairs is a list of (site, site), two names each; got {pairs!r}")
    return listed  # type: ignore[return-value]


def stages(shown: Sequence[Shown]) -> list[list[Shown]]:
    """Sites that run one after the other under one parent with outputs of one shape, each run after its input.

    `layer1.0`, `layer1.1`, … of a residual network; the blocks of a transformer; in a plain chain of layers, as VGG's,
    all layers of one resolution and width. A layer that differs from its neighbours is a stage of its own.
    """
    found: list[list[Shown]] = []
    entered: dict[str, Shown] = {}
    before: tuple[Any, ...] | None = None
    for each in shown:
        if each.is_input:
            entered[each.site.label] = each
            continue
        key = (each.site.module_name.rpartition(".")[0], each.site.shape)
        if key != before:
            found.append([entered[each.site.label]] if each.site.label in entered else [])
        found[-1].append(each)
        before = key
    return found


def of_one(shown: Sequence[Shown], pairs: Pairs) -> tuple[list[Shown], list[Pair]]:
    """The columns of one model, and each two that are compared, once."""
    if pairs == "stage":
        columns: list[Shown] = []
        chosen: list[Pair] = []
        for stage in stages(shown):
            chosen += combinations(range(len(columns), len(columns) + len(stage)), 2)
            columns += stage
    else:
        columns = [each for each in shown if not each.is_input]
        chosen = list(combinations(range(len(columns)), 2)) if pairs == "all" else _listed(columns, columns, pairs)
    if not chosen:
        raise SiteError(
            f"the sites give one layer only ({columns[0].label!r}): a penalty within a model needs at least two, so "
            "name more, or leave sites out"
        )
    return columns, chosen


def across(models: Sequence[Sequence[Shown]], names: Sequence[str], pairs: Pairs) -> tuple[list[Shown], list[Pair]]:
    """The columns of several models, labelled "site of name", and each two of different models that are compared, once.

    A model without a name has the labels of its sites.
    """
    sides: list[list[Shown]] = []
    for model, name in zip(models, names, strict=True):
        outputs = [each for each in model if not each.is_input]
        sides.append([replace(each, label=f"{each.label} of {name}") if name else each for each in outputs])
    columns = [column for side in sides for column in side]
    starts = [sum(map(len, sides[:k])) for k in range(len(sides))]
    both = list(combinations(range(len(sides)), 2))
    if pairs != "same":
        chosen = [(starts[a] + i, starts[b] + j) for a, b in both for i, j in _listed(sides[a], sides[b], pairs)]
        return columns, chosen
    places = [
        {each.site.label: start + k for k, each in enumerate(side)} for side, start in zip(sides, starts, strict=True)
    ]
    for name, there in zip(names[1:], places[1:], strict=True):
        if missing := [label for label in places[0] if label not in there]:
            raise SiteError(
                f"{name} has no site {missing[0]!r}{nearest(missing[0], there)}; say which belongs to which: "
                "pairs=[(site, site), …]"
            )
    return columns, [(places[a][label], places[b][label]) for label in places[0] for a, b in both]


def used(columns: Sequence[Shown], pairs: Sequence[Pair]) -> tuple[list[Shown], list[Pair]]:
    """Drop the columns that are in no pair; the input of a stage becomes the column of the layer that computed it."""
    index: dict[int, int] = {}
    kept: list[Shown] = []
    at: dict[int, int] = {}
    for k in sorted({k for pair in pairs for k in pair}):
        column = columns[k]
        same = at.setdefault(id(column.value), len(kept))
        if same == len(kept) or not (column.is_input or kept[same].is_input):
            same = len(kept)  # also of a layer that passes on what it got: it keeps its name
            kept.append(column)
        index[k] = same
    return kept, [(index[a], index[b]) for a, b in pairs]


def _listed(a: Sequence[Shown], b: Sequence[Shown], pairs: Any) -> list[Pair]:
    """Places among the columns of each side; a pair of one and the same column is refused."""
    found = []
    for pair in pairs:
        ends = []
        for label, side in zip(pair, (a, b), strict=True):
            known = [column.site.label for column in side]
            if label not in known:
                raise SiteError(f"pairs names {label!r}, which is not among the sites{nearest(label, known)}")
            ends.append(known.index(label))
        if a is b and ends[0] == ends[1]:
            raise SiteError(f"pairs compares {pair[0]!r} with itself, which is constant")
        found.append((ends[0], ends[1]))
    return found


# Gram matrices of many layers at once, and their inner products, for gradients to flow through
#
# On a GPU the time of a training step depends on the number of operations, not on what they compute.

SMALL = 2**18  # entries up to which rows are copied, to be multiplied together with those of other layers
FEW = 64  # and how many rows at most: the partial sums have n² entries
CHUNK = 1024  # features that are multiplied at a time


def sized_grams(rows: Sequence[Tensor], *, centre: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Gram matrices in stacks (k, n, n) and sizes (k,) of many layers of n rows, in order; small ones together."""
    stacks, sizes = [], []
    for run in _runs(rows):
        stack, size = sized_gram(run[0], centre=centre) if len(run) == 1 else _joined_grams(run, centre)
        stacks.append(stack)
        sizes.append(size)
    return stacks, sizes


def inner_products(stacks: Sequence[Tensor], *, centre: bool, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """(L, L) in float64: ⟨K, K'⟩ of all Gram matrices of the stacks (k, n, n), U-centred if `unbiased`.

    And their traces (L,), before U-centring and without gradients.
    """
    products, traces, _ = _InnerProducts.apply(centre, unbiased, *stacks)
    return products, traces


def _runs(rows: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours that are multiplied together: few rows each and not many entries in all; or one layer alone."""
    runs: list[list[Tensor]] = []
    widest = 0
    for each in rows:
        small = len(each) <= FEW and each.numel() <= SMALL
        if not (small and widest and max(widest, each.numel()) * (len(runs[-1]) + 1) <= WIDENED):
            runs.append([])
            widest = 0
        runs[-1].append(each)
        widest = max(widest, each.numel()) if small else 0
    return runs


def _joined_grams(rows: Sequence[Tensor], centre: bool) -> tuple[Tensor, Tensor]:
    """Gram matrices and sizes of several layers: their rows side by side, each filled up with zeros to one width."""
    count, width = len(rows[0]), max(each.shape[1] for each in rows)
    width += -width % min(CHUNK, width)
    missing = [width - each.shape[1] for each in rows]
    zeros = rows[0].new_zeros(count, max(missing))
    fill = {gap: zeros[:, :gap] for gap in set(missing)}
    parts = [part for each, gap in zip(rows, missing, strict=True) for part in (each, fill[gap]) if part.shape[1]]
    joined = widened(torch.cat(parts, dim=1))
    sizes = count * squared_sizes(joined[0].view(-1, width))
    if centre:
        joined = joined - joined[:1].detach()  # as in `centred_rows`; gradients pass as they are
    return _JoinedGrams.apply(joined, width, centre), sizes


class _JoinedGrams(torch.autograd.Function):
    """(L, n, n) in float64, of joined rows (n, L × width); the incoming gradient must be symmetric and centred."""

    @staticmethod
    def forward(joined: Tensor, width: int, centre: bool) -> Tensor:
        rows = joined - joined.mean(0, keepdim=True) if centre else joined
        # In chunks, which a GPU shares out, and added up in float64.
        chunks = _layers(rows, min(CHUNK, width))
        parts = torch.bmm(chunks, chunks.mT)
        return parts.unflatten(0, (joined.shape[1] // width, -1)).sum(1, dtype=torch.float64)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, bool], output: Tensor) -> None:
        joined, ctx.width, _ = inputs
        ctx.save_for_backward(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (joined,) = ctx.saved_tensors
        pull = gradients[0].to(joined.dtype)
        found = torch.baddbmm(pull[:, :1, :1], pull, _layers(joined, ctx.width), beta=0, alpha=2)
        return found.transpose(0, 1).reshape(joined.shape), None, None


def _layers(joined: Tensor, width: int) -> Tensor:
    """(L, n, width)."""
    return joined.unflatten(1, (-1, width)).transpose(0, 1)


class _InnerProducts(torch.autograd.Function):
    """Inner products of Gram matrices. Centring and U-centring are orthogonal projections, so that the backward needs
    no second one: the gradient of a Gram matrix is a sum of the others, symmetric and centred as they are.
    """

    @staticmethod
    def forward(centre: bool, unbiased: bool, *stacks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grams = _float64(stacks)
        traces = grams.diagonal(dim1=1, dim2=2).sum(1)
        flat = (u_centred(grams) if unbiased else grams).flatten(1)
        return flat @ flat.T, traces, flat

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.centre, ctx.unbiased, *stacks = inputs
        _, traces, flat = output
        ctx.save_for_backward(*stacks, flat)
        ctx.mark_non_differentiable(traces, flat)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *stacks, flat = ctx.saved_tensors
        if gradients[0] is None:
            return None, None, *(None for _ in stacks)
        if torch.is_grad_enabled():  # for the gradient of this gradient
            grams = Settled.apply(_float64(stacks), ctx.centre)
            flat = (u_centred(grams) if ctx.unbiased else grams).flatten(1)
        pull = gradients[0] + gradients[0].T
        found = (pull @ flat).view(-1, *stacks[0].shape[1:])
        if ctx.centre:  # what float32 left uncentred, where large terms of the sum cancel
            found = double_centred(found)
        if len({stack.dtype for stack in stacks}) == 1:
            found = found.to(stacks[0].dtype)  # all at once
        return None, None, *found.split([len(stack) for stack in stacks])


def _float64(stacks: Sequence[Tensor]) -> Tensor:
    return (stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))).double()


# Values of pairs of layers, with gradients: all pairs in one product where the measure allows it

SMALL_LAYER = 2**18  # entries of the largest layer up to which a CPU is faster at single pairs than a GPU
CONSTANT = 8  # roundings of the first row within which rows count as equal


@dataclass(frozen=True)
class PenaltyValues:
    """The values of pairs of columns."""

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
    """Whether the measure reads nothing but inner products of Gram matrices."""
    return issubclass(measure.reads, Alignment)


def least_rows(measure: Measure) -> int:
    """The number of rows below which the value is a constant."""
    if aligns(measure):
        return 4 if measure.reads is DebiasedAlignment else 2 if measure.reads is UncentredAlignment else 3
    return 3


def as_gram(activation: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
    """Gram matrix of the flattened activation, and the size of its first row; no copy is made."""
    rows = flat(activation)
    with without_autocast(rows.device.type):
        return sized_gram(rows, centre=centre)


def flat(activation: Tensor) -> Tensor:
    """(n, features), the features in memory order, which Gram matrices do not depend on."""
    if activation.dim() == 1:
        return activation[:, None]
    if activation.dim() == 4 and activation.is_contiguous(memory_format=torch.channels_last):
        activation = activation.movedim(1, -1)
    return activation.flatten(1)


def rows_of(column: Shown, rule: Rule, *, any_order: bool) -> Tensor:
    activation = column.value
    if any_order and rule == "flatten":
        return flat(activation)
    return to_rows(activation, rule, site=column.site, inputs=len(activation))


def values(
    measure: Measure, columns: Sequence[Shown], pairs: Sequence[Pair], rule: Rule, *, directed: bool, times: float
) -> PenaltyValues:
    """The value of each pair, counted `times`; one that is not symmetric is the mean of both directions, unless
    `directed`.
    """
    if aligns(measure):
        return _all_at_once(measure, columns, pairs, rule, times)
    rows = [rows_of(column, rule, any_order=False) for column in columns]
    _check_rows(measure, columns, rows, pairs)
    # A GPU is slow at decomposing small matrices, and the host waits for it anyway.
    home = "cpu" if max(part.numel() for part in rows) <= SMALL_LAYER else rows[0].device
    found = _one_by_one(measure, columns, [part.double().to(home) for part in rows], pairs, directed)
    device = rows[0].device
    return PenaltyValues(found.each.to(device), times * found.counts.to(device), found.still.to(device))


def _all_at_once(
    measure: Measure, columns: Sequence[Shown], pairs: Sequence[Pair], rule: Rule, times: float
) -> PenaltyValues:
    products, still = _products(measure, columns, rule)
    places, sides, counts = _places(tuple(pairs), len(columns), times, products.device)
    constant = still[sides]
    # Of these pairs alone: a measure may have no value, or no gradient, for a layer and itself.
    xx, yy, xy = products.flatten()[places]
    # Before the measure divides by it: a gradient of 0/0 would spoil the others, whatever is chosen afterwards.
    each = measure(measure.reads(xx + constant[0], yy + constant[1], xy))
    return PenaltyValues(each, counts.masked_fill(constant.any(0), 0.0), still)


@functools.lru_cache(maxsize=64)
def _places(pairs: tuple[Pair, ...], columns: int, times: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where the products of pairs are: (3, P) of one with itself, the other with itself, both; the columns (2, P) of
    the pairs; and how often each counts. Cached: making it again would wait for a GPU.
    """
    with torch.inference_mode(False):  # so that gradients can flow, whoever called first
        sides = torch.tensor(pairs).T
        places = torch.stack([sides[0] * (columns + 1), sides[1] * (columns + 1), sides[0] * columns + sides[1]])
        counts = torch.full((len(pairs),), times, dtype=torch.float64)
        return places.to(device), sides.to(device), counts.to(device)


def _products(measure: Measure, columns: Sequence[Shown], rule: Rule) -> tuple[Tensor, Tensor]:
    """The inner products of the Gram matrices of all columns, and which columns are constant."""
    kind = measure.reads
    centre, unbiased = kind is not UncentredAlignment, kind is DebiasedAlignment
    if isinstance(columns[0].value, tuple):
        stacks, sizes = (list(part) for part in zip(*(column.value for column in columns), strict=True))
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
    """The products for more rows than neurons in all: one product of all neurons, squared and summed by layer."""
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
    """(neurons, layers): 1 where a neuron belongs to a layer."""
    with torch.inference_mode(False):
        own = torch.eye(len(widths), dtype=torch.float64)
        return own.repeat_interleave(torch.tensor(widths), dim=0).to(device)


def _still(traces: Tensor, sizes: Tensor, digits: torch.dtype, kind: type[Alignment]) -> Tensor:
    """Whether rows differ by no more than rounding (uncentred: are all 0); not where they are NaN or infinite."""
    if kind is UncentredAlignment:
        return traces == 0
    return torch.sub(traces, sizes, alpha=(CONSTANT * torch.finfo(digits).eps) ** 2) <= 0


def _one_by_one(
    measure: Measure, columns: Sequence[Shown], rows: Sequence[Tensor], pairs: Sequence[Pair], directed: bool
) -> PenaltyValues:
    sample = Sample.of(rows, rows)
    apart = torch.stack([(each - each[:1]).detach().abs().amax() for each in rows])
    size = torch.stack([each[0].detach().abs().amax() for each in rows])
    still = apart <= CONSTANT * torch.finfo(torch.float32).eps * size
    alive = [not each for each in still.tolist()]
    found, nothing = [], rows[0].new_zeros(())

    def of(i: int, j: int) -> Tensor:
        try:
            if measure.reads_outputs:
                kind = "regression" if issubclass(measure.reads, Differences) else "logits"
                return measure.of(rows[i], rows[j], kind=kind)
            return measure(view_of(measure.reads, sample, i, j))
        except ValueError as error:
            raise ValueError(f"{measure.name} of {columns[i].label!r} and {columns[j].label!r}: {error}") from error

    for i, j in pairs:
        if not (alive[i] and alive[j]):
            found.append(nothing)
        elif measure.symmetric or directed:
            found.append(of(i, j))
        else:
            found.append((of(i, j) + of(j, i)) / 2)
    each = torch.stack(found)
    return PenaltyValues(each, each.new_tensor([alive[i] and alive[j] for i, j in pairs]), still)


def _check_counts(measure: Measure, columns: Sequence[Shown], rows: Sequence[Tensor]) -> None:
    for column, each in zip(columns, rows, strict=True):
        if len(each) != len(rows[0]):
            raise ValueError(
                f"{columns[0].label!r} gives {len(rows[0])} rows and {column.label!r} {len(each)}: these cannot be "
                "paired; take another rule, pairs of layers of one resolution, or the same inputs for all models"
            )
    if len(rows[0]) < least_rows(measure):
        raise ValueError(f"{measure.name} of {len(rows[0])} rows is constant: it needs at least {least_rows(measure)}")


def _check_rows(measure: Measure, columns: Sequence[Shown], rows: Sequence[Tensor], pairs: Sequence[Pair]) -> None:
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
