"""How similar layers are, with gradients: the pairs of layers, their Gram matrices, and the value of each pair.

A column is the value of a site in a forward: the output of one layer of one model, or the input of a stage of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import Rule, SiteError, nearest, select, to_rows, unwrap, weighted_layers
from ..capture.sites import Names
from ..checks import one_of
from ..engine.evaluate import view_of
from ..linalg import centred_rows, chain_products, double_centred, sized_gram, u_centred, widened
from ..linalg.grams import WIDENED, SymmetricGradient, squared_sizes
from ..measures import Measure
from ..models import AtomConv2d
from ..process_state import without_autocast
from ..stats.outputs import Differences
from ..stats.row_grams import from_products, nothing_left
from ..stats.sample import Sample
from ..stats.views import Alignment, DebiasedAlignment, UncentredAlignment
from ..stats.weights import Atoms, LinearMaps, TensorPair, linear_maps
from .hooks import SiteValue

Pairs = str | Sequence[tuple[str, str]] | None
ColumnPair = tuple[SiteValue, SiteValue]
Pair = tuple[int, int]  # places among the columns


def check_pairs(pairs: Pairs, *, alone: bool) -> Pairs:
    """Check the pairs; the default is pairs within a stage of one model, or the same site of several."""
    if pairs is None:
        return "stage" if alone else "same"
    if isinstance(pairs, str):
        one_of(pairs, "pairs (or a list of (site, site))", ("stage", "all", "same"))
        if alone == (pairs == "same"):
            raise ValueError(
                "pairs='same' compares one site of several models: give a list of models, or target="
                if alone
                else f"pairs={pairs!r} is for one model; several are compared at the same site, or by (site, site)"
            )
        return pairs
    listed = [tuple(pair) for pair in pairs]
    if not listed or any(len(pair) != 2 or not all(isinstance(site, str) for site in pair) for pair in listed):
        raise ValueError(f"pairs is a list of (site, site), two names each, got {pairs!r}")
    return listed  # type: ignore[return-value]


def stages(shown: Sequence[SiteValue]) -> list[list[SiteValue]]:
    """Sites that run one after the other under one parent with outputs of one shape, each run after its input.

    For example `layer1.0`, `layer1.1`, … of a residual network, the blocks of a transformer, or in a plain chain of
    layers such as VGG all layers of one resolution and width. A layer that differs from its neighbours is a stage of
    its own.
    """
    made: list[list[SiteValue]] = []
    inputs = {each.site.label: each for each in shown if each.is_input}
    before: tuple[Any, ...] | None = None
    for each in (value for value in shown if not value.is_input):
        key = (each.site.module_name.rpartition(".")[0], each.site.shape)
        if key != before:
            made.append([inputs[each.site.label]] if each.site.label in inputs else [])
        made[-1].append(each)
        before = key
    return made


def column_pairs(sides: Sequence[Sequence[SiteValue]], names: Sequence[str], pairs: Pairs) -> list[ColumnPair]:
    """All pairs of columns that are compared, each once, labelled "site of name", or by the site alone.

    `sides`: the values of one model, whose layers are compared, or of several, which are compared with each other.
    """
    outputs = [
        [replace(v, label=f"{v.label} of {name}") if name else v for v in side if not v.is_input]
        for side, name in zip(sides, names, strict=True)
    ]
    if pairs == "stage":
        chosen = [pair for stage in stages(sides[0]) for pair in combinations(stage, 2)]
    elif pairs == "all":
        chosen = list(combinations(outputs[0], 2))
    elif pairs == "same":
        by_label = [{value.site.label: value for value in side} for side in outputs]
        for name, there in zip(names[1:], by_label[1:], strict=True):
            if missing := [label for label in by_label[0] if label not in there]:
                raise SiteError(
                    f"{name} has no site {missing[0]!r}{nearest(missing[0], there)}; name the sites that correspond: "
                    "pairs=[(site, site), …]"
                )
        chosen = [(a[label], b[label]) for label in by_label[0] for a, b in combinations(by_label, 2)]
    else:
        both = list(combinations(outputs, 2)) or [(outputs[0], outputs[0])]
        chosen = [pair for a, b in both for pair in _named_pairs(a, b, pairs)]
    if not chosen:
        raise SiteError(
            f"the sites give one layer only ({outputs[0][0].label!r}), and a penalty within a model needs at least "
            "two: name more, or leave sites out"
        )
    return chosen


def _named_pairs(a: Sequence[SiteValue], b: Sequence[SiteValue], pairs: Any) -> list[ColumnPair]:
    """The columns of each side that the pairs name; raises if a pair names the same column twice."""
    chosen = []
    for pair in pairs:
        ends = []
        for label, side in zip(pair, (a, b), strict=True):
            known = {column.site.label: column for column in side}
            if label not in known:
                raise SiteError(f"pairs names {label!r}, which is not one of the sites{nearest(label, known)}")
            ends.append(known[label])
        if ends[0] is ends[1]:
            raise SiteError(f"pairs compares {pair[0]!r} with itself, which is constant")
        chosen.append((ends[0], ends[1]))
    return chosen


def numbered(pairs: Sequence[ColumnPair]) -> tuple[list[SiteValue], list[Pair]]:
    """The columns of these pairs, and the pairs as places among them.

    A stage's input and the output of the layer before are one column if they are the same tensor.
    """
    columns: list[SiteValue] = []
    place_of: dict[SiteValue, int] = {}
    first_with: dict[int, int] = {}  # the place of the first column with this value
    for column in dict.fromkeys(column for pair in pairs for column in pair):
        place = first_with.setdefault(id(column.value), len(columns))
        if place == len(columns) or not (column.is_input or columns[place].is_input):
            place = len(columns)  # a layer that returns its input unchanged keeps its name
            columns.append(column)
        place_of[column] = place
    return columns, [(place_of[a], place_of[b]) for a, b in pairs]


# Gram matrices of many layers at once, and their inner products, with gradients
#
# On a GPU the time of a training step depends on the number of operations, not on what they compute.

SMALL = 2**18  # entries up to which rows are copied, to be multiplied together with those of other layers
FEW = 64  # the largest number of such rows: the partial sums have n² entries
CHUNK = 1024  # features that are multiplied at a time


def sized_grams(rows: Sequence[Tensor], *, centre: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Gram matrices in stacks (k, n, n) and sizes (k,) of many layers of n rows, in order; small layers together."""
    stacks, sizes = [], []
    for run in _runs(rows):
        stack, size = sized_gram(run[0], centre=centre) if len(run) == 1 else _joined_grams(run, centre)
        stacks.append(stack)
        sizes.append(size)
    return stacks, sizes


def inner_products(stacks: Sequence[Tensor], *, centre: bool, unbiased: bool = False) -> tuple[Tensor, Tensor]:
    """The inner products (L, L) of all Gram matrices of the stacks (k, n, n), U-centred if `unbiased`, in float64.

    Also their traces (L,), before U-centring and without gradients.
    """
    products, traces, _ = _InnerProducts.apply(centre, unbiased, *stacks)
    return products, traces


def _runs(rows: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours that are multiplied together: few rows each and not many entries in total; or one layer alone."""
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
    """Gram matrices and sizes of several layers: their rows side by side, each padded with zeros to one width."""
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
        # In chunks, which a GPU computes in parallel, added up in float64.
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
        gradient = torch.baddbmm(pull[:, :1, :1], pull, _layers(joined, ctx.width), beta=0, alpha=2)
        return gradient.transpose(0, 1).reshape(joined.shape), None, None


def _layers(joined: Tensor, width: int) -> Tensor:
    """(L, n, width)."""
    return joined.unflatten(1, (-1, width)).transpose(0, 1)


class _InnerProducts(torch.autograd.Function):
    """Inner products of Gram matrices. Centring and U-centring are orthogonal projections, so the backward needs
    no second one: the gradient of a Gram matrix is a sum of the others, symmetric and centred like them.
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
        if torch.is_grad_enabled():  # for second derivatives
            grams = SymmetricGradient.apply(_float64(stacks), ctx.centre)
            flat = (u_centred(grams) if ctx.unbiased else grams).flatten(1)
        pull = gradients[0] + gradients[0].T
        gradient = (pull @ flat).view(-1, *stacks[0].shape[1:])
        if ctx.centre:  # float32 leaves an uncentred rest where large terms of the sum cancel
            gradient = double_centred(gradient)
        if len({stack.dtype for stack in stacks}) == 1:
            gradient = gradient.to(stacks[0].dtype)  # all at once
        return None, None, *gradient.split([len(stack) for stack in stacks])


def _float64(stacks: Sequence[Tensor]) -> Tensor:
    return (stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))).double()


# Values of pairs of layers, with gradients: all pairs in one product if the measure allows it

SMALL_LAYER = 2**18  # entries of the largest layer up to which a CPU is faster than a GPU at single pairs
CONSTANT = 8  # roundings of the first row within which rows count as equal
Values = tuple[Tensor, Tensor, Tensor]  # see `values`


def reads_grams(measure: Measure) -> bool:
    """Whether the measure reads only inner products of Gram matrices."""
    return issubclass(measure.reads, Alignment)


def least_rows(measure: Measure) -> int:
    """The number of rows below which the value is a constant."""
    return 4 if measure.reads is DebiasedAlignment else 2 if measure.reads is UncentredAlignment else 3


def as_gram(activation: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
    """The Gram matrix of the flattened activation, and the size of its first row, without a copy."""
    rows = _flat(activation)
    with without_autocast(rows.device.type):
        return sized_gram(rows, centre=centre)


def _flat(activation: Tensor) -> Tensor:
    """(n, features), the features in memory order, which Gram matrices do not depend on."""
    if activation.dim() == 1:
        return activation[:, None]
    if activation.dim() == 4 and activation.is_contiguous(memory_format=torch.channels_last):
        activation = activation.movedim(1, -1)
    return activation.flatten(1)


def values(
    measure: Measure, columns: Sequence[SiteValue], pairs: Sequence[Pair], rule: Rule, *, directed: bool, times: float
) -> Values:
    """The values (P,) of pairs of columns, how often each counts (P,), and which columns are constant (L,).

    A pair counts `times`, or 0 if one of its columns is constant over the rows: it has no value then. A measure that is
    not symmetric gives the mean of both directions, unless `directed`.
    """
    if reads_grams(measure):
        products, constant = _products(measure, columns, rule)
        places, sides, counts = _places(tuple(pairs), len(columns), times, products.device)
        # Only of these pairs: a measure may have no value, or no gradient, for a layer and itself.
        xx, yy, xy = products.flatten()[places]
        # Before the measure divides by it: a gradient of 0/0 would spoil the others even if the value is not used.
        either = constant[sides]
        each = measure(measure.reads(xx + either[0], yy + either[1], xy))
        return each, counts.masked_fill(either.any(0), 0.0), constant
    rows = [to_rows(column.value, rule, site=column.site, inputs=len(column.value)) for column in columns]
    _check_counts(measure, columns, rows)
    _check_widths(measure, columns, rows, pairs)
    device = rows[0].device
    # A GPU is slow at decomposing small matrices, and the host waits for it anyway.
    home = "cpu" if max(part.numel() for part in rows) <= SMALL_LAYER else device
    wide = [part.double().to(home) for part in rows]
    each, counts, constant = (part.to(device) for part in _one_by_one(measure, columns, wide, pairs, directed))
    return each, times * counts, constant


@functools.lru_cache(maxsize=64)
def _places(pairs: tuple[Pair, ...], columns: int, times: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The places (3, P) of the products of pairs: of the first with itself, the second with itself, and both; the
    columns (2, P) of the pairs; and how often each counts. Cached: making it again would wait for a GPU.
    """
    with torch.inference_mode(False):  # so that gradients can flow, whoever called first
        sides = torch.tensor(pairs).T
        places = torch.stack([sides[0] * (columns + 1), sides[1] * (columns + 1), sides[0] * columns + sides[1]])
        counts = torch.full((len(pairs),), times, dtype=torch.float64)
        return places.to(device), sides.to(device), counts.to(device)


def _products(measure: Measure, columns: Sequence[SiteValue], rule: Rule) -> tuple[Tensor, Tensor]:
    """The inner products of the Gram matrices of all columns, and which columns are constant."""
    kind = measure.reads
    centre, unbiased = kind is not UncentredAlignment, kind is DebiasedAlignment
    if isinstance(columns[0].value, tuple):  # the hooks made Gram matrices
        stacks, sizes = (list(part) for part in zip(*(column.value for column in columns), strict=True))
        _check_counts(measure, columns, [stack[0] for stack in stacks])
        dtypes = {stack.dtype for stack in stacks}
    else:
        rows = [
            _flat(column.value)
            if rule == "flatten"
            else to_rows(column.value, rule, site=column.site, inputs=len(column.value))
            for column in columns
        ]
        _check_counts(measure, columns, rows)
        if len(rows[0]) > sum(each.shape[1] for each in rows):
            return _by_covariances(rows, kind)
        stacks, sizes = sized_grams(rows, centre=centre)
        dtypes = {each.dtype for each in rows}
    digits = functools.reduce(torch.promote_types, dtypes, torch.float32)
    products, traces = inner_products(stacks, centre=centre, unbiased=unbiased)
    constant = _is_constant(traces, sizes[0] if len(sizes) == 1 else torch.cat(sizes), digits, kind)
    if unbiased:
        whole = torch.cat(stacks).detach().double().square().sum((1, 2))
        left = products.detach().diagonal()
        constant = constant | (left <= nothing_left(digits) * whole)
    return products, constant


def _by_covariances(rows: Sequence[Tensor], kind: type[Alignment]) -> tuple[Tensor, Tensor]:
    """The products if there are more rows than neurons: one product of all neurons, squared and summed by layer."""
    sizes = len(rows[0]) * torch.stack([each[0].detach().double().square().sum() for each in rows])
    wide = [centred_rows(each) if kind is not UncentredAlignment else widened(each) for each in rows]
    joined = torch.cat(wide, dim=1)
    squares = (joined.T @ joined).double().square()
    layer_of = _layer_of_neurons(tuple(each.shape[1] for each in rows), joined.device)
    products = layer_of.T @ squares @ layer_of
    traces = torch.stack([each.detach().double().square().sum() for each in wide])
    constant = _is_constant(traces, sizes, joined.dtype, kind)
    if kind is DebiasedAlignment:
        norms = products.diagonal()
        view = from_products((norms[:, None], norms[None, :], products), wide, wide, kind)
        return view.xy, constant | (view.xx.detach()[:, 0] == 0)
    return products, constant


@functools.lru_cache(maxsize=64)
def _layer_of_neurons(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """(neurons, layers): 1 where a neuron belongs to a layer."""
    with torch.inference_mode(False):
        identity = torch.eye(len(widths), dtype=torch.float64)
        return identity.repeat_interleave(torch.tensor(widths), dim=0).to(device)


def _is_constant(traces: Tensor, sizes: Tensor, digits: torch.dtype, kind: type[Alignment]) -> Tensor:
    """Whether rows differ only by rounding (uncentred: whether all are 0); False where they are NaN or infinite."""
    if kind is UncentredAlignment:
        return traces == 0
    return torch.sub(traces, sizes, alpha=(CONSTANT * torch.finfo(digits).eps) ** 2) <= 0


def _one_by_one(
    measure: Measure, columns: Sequence[SiteValue], rows: Sequence[Tensor], pairs: Sequence[Pair], directed: bool
) -> Values:
    sample = Sample.of(rows, rows)
    apart = torch.stack([(each - each[:1]).detach().abs().amax() for each in rows])
    size = torch.stack([each[0].detach().abs().amax() for each in rows])
    constant = apart <= CONSTANT * torch.finfo(torch.float32).eps * size

    def value(i: int, j: int) -> Tensor:
        try:
            if measure.reads_outputs:
                kind = "regression" if issubclass(measure.reads, Differences) else "logits"
                return measure.of(rows[i], rows[j], kind=kind)
            return measure(view_of(measure, sample, i, j))
        except ValueError as error:
            raise ValueError(f"{measure.name} of {columns[i].label!r} and {columns[j].label!r}: {error}") from error

    varies = [not each for each in constant.tolist()]
    counts = [varies[i] and varies[j] for i, j in pairs]
    both_ways = not (measure.symmetric or directed)
    each = torch.stack(
        [
            rows[0].new_zeros(()) if not counted else (value(i, j) + value(j, i)) / 2 if both_ways else value(i, j)
            for (i, j), counted in zip(pairs, counts, strict=True)
        ]
    )
    return each, each.new_tensor(counts), constant


def _check_counts(measure: Measure, columns: Sequence[SiteValue], rows: Sequence[Tensor]) -> None:
    for column, each in zip(columns, rows, strict=True):
        if len(each) != len(rows[0]):
            raise ValueError(
                f"{columns[0].label!r} gives {len(rows[0])} rows and {column.label!r} {len(each)}, which cannot be "
                "paired: take another rule, pairs of layers of one resolution, or the same inputs for all models"
            )
    if len(rows[0]) < least_rows(measure):
        raise ValueError(f"{measure.name} of {len(rows[0])} rows is constant: it needs at least {least_rows(measure)}")


def _check_widths(
    measure: Measure, columns: Sequence[SiteValue], rows: Sequence[Tensor], pairs: Sequence[Pair]
) -> None:
    count = len(rows[0])
    for i, j in pairs:
        p, q = rows[i].shape[1], rows[j].shape[1]
        if measure.same_width and p != q:
            raise ValueError(
                f"{measure.name} compares neuron by neuron, so it needs equal widths: {columns[i].label!r} has {p}, "
                f"{columns[j].label!r} {q}"
            )
        widest = i if p >= q or measure.few_rows == "saturates in x" else j
        if (measure.few_rows or "").startswith("saturates") and rows[widest].shape[1] >= count - 1:
            raise ValueError(
                f"{measure.name} of {count} rows is 1 whatever the layers do, without a gradient, once a layer has "
                f"{count - 1} neurons; {columns[widest].label!r} has {rows[widest].shape[1]}: pool with rule='mean', "
                "take rule='positions' with more rows, or take linear_cka"
            )


# Measures of weights: the layers they compare, the tensors they read, and their values


def layers_to_compare(model: nn.Module, measure: Measure, sites: Any) -> dict[str, nn.Module]:
    """The layers that a measure of weights compares, by name: the chosen ones that have what it reads."""
    names = Names.of(unwrap(model))
    kind: type[nn.Module] = nn.Module
    if issubclass(measure.reads, LinearMaps):
        kind = nn.Linear
        others = {name: names.by_name[name] for name in weighted_layers(model) if name != "."}
        if wrong := [name for name, layer in others.items() if not isinstance(layer, nn.Linear)]:
            raise SiteError(
                f"{measure.name} as a penalty takes chains of Linear layers; {wrong[0]!r} is a "
                f"{type(others[wrong[0]]).__name__}: take weight_cosine, or a measure of activations"
            )
        with torch.no_grad():
            chain_products([layer.weight.mT for layer in _linear_layers(model)])  # raises if they do not fit
    elif issubclass(measure.reads, Atoms):
        kind = AtomConv2d
    chosen = list(names.unique() if sites is None else select(model, sites))
    layers = {
        name: layer
        for name in chosen
        if isinstance(layer := names.by_name[name], kind)
        and (kind is not nn.Module or getattr(getattr(layer, "weight", None), "ndim", 0) > 1)
    }
    wrong = [name for name in chosen if name not in layers] if sites is not None else []
    if wrong or not layers:
        raise SiteError(
            f"{measure.name} needs layers of type {kind.__name__}; "
            + (f"site {wrong[0]!r} is not one" if wrong else f"there are none in this {type(model).__name__}")
        )
    return layers


def weights_to_compare(model: nn.Module, measure: Measure, layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that a measure of weights reads, one per layer, in float64; gradients flow."""
    if issubclass(measure.reads, LinearMaps):
        chain = _linear_layers(model)
        products = chain_products([layer.weight.mT.double() for layer in chain])
        product_of = {id(layer): product for layer, product in zip(chain, products, strict=True)}
        return {name: product_of[id(layer)] for name, layer in layers.items()}
    if issubclass(measure.reads, Atoms):
        return {name: layer.atoms.flatten(1)[None].double() for name, layer in layers.items()}
    return {name: layer.weight.double() for name, layer in layers.items()}


def value_of_weights(measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    if issubclass(measure.reads, LinearMaps):
        return measure(linear_maps(x, y, measure.reads))
    if issubclass(measure.reads, Atoms):
        return measure(Atoms(x, y)).squeeze()
    return measure(TensorPair(x, y))


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer in Names.of(unwrap(model)).unique().values() if isinstance(layer, nn.Linear)]
