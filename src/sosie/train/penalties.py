"""How alike layers or models are, as a term of the loss."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import Rule, Site, SiteError, as_found, check_rule, select, to_rows, unwrap, watch, weighted_layers
from ..capture.batches import explain_types
from ..capture.sites import Names
from ..checks import one_of
from ..linalg import chain_products
from ..measures import MEASURES, Measure, find
from ..models import AtomConv2d
from ..models.atoms import check_shared
from ..process_state import without_autocast
from ..stats import Atoms, LinearMaps, TensorPair, UncentredAlignment, linear_maps
from . import likeness
from .likeness import Pair, Pairs, PenaltyValues, aligns, as_gram, least_rows, values
from .taps import Attached, Shown, Taps

Target = nn.Module | Mapping[str, Tensor]


def check_models(models: Sequence[nn.Module], target: Target | None) -> None:
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise TypeError("Penalty needs a torch.nn.Module, or a list of them")
    if len({id(model) for model in models}) < len(models):
        raise ValueError("the same model is listed twice: members of an ensemble are models of their own")
    if target is not None and len(models) > 1:
        raise ValueError(f"target= is for one model, got {len(models)}: make a penalty for each")
    if target is not None and any(target is model for model in models):
        raise ValueError("the target is the model itself: give a copy (copy.deepcopy) to stay close to what it is now")
    if target is not None and not isinstance(target, (nn.Module, Mapping)):
        raise TypeError(f"target is a model or {{site: activation}}, got {type(target).__name__}")


def check_measure(measure: Measure, rows: int | None, *, alone: bool, towards: bool) -> None:
    if not measure.differentiable or measure.needs:
        others = ["linear_cka", "debiased_cka", "mean_cca", "procrustes_distance"]
        if measure.reads_weights:
            others = [m.name for m in MEASURES.values() if m.differentiable and m.reads is measure.reads][:4] or others
        why = "is not differentiable" if not measure.differentiable else f"needs {', '.join(measure.needs)}"
        raise ValueError(f"{measure.name} {why}, so it cannot be trained with; take {', '.join(others)}")
    if towards and measure.closer == "up" and measure.bounds[1] is None:
        raise ValueError(
            f"{measure.name} has no largest value, so that no model is ever close to a target; take mean_cca"
        )
    if measure.reads_weights:
        if alone:
            raise ValueError(f"{measure.name} compares the weights of models: give several, or target=")
    elif rows is not None and rows < least_rows(measure):
        least = least_rows(measure)
        raise ValueError(f"{measure.name} of {rows} rows is constant: it needs at least {least}")


def layers_of(model: nn.Module, measure: Measure, sites: Any) -> dict[str, nn.Module]:
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
            chain_products([layer.weight.mT for layer in _linear_layers(model)])  # refuses those that do not fit
    elif issubclass(measure.reads, Atoms):
        kind = AtomConv2d
    chosen = list(names.unique() if sites is None else select(model, sites))
    found = {
        name: layer
        for name in chosen
        if isinstance(layer := names.by_name[name], kind)
        and (kind is not nn.Module or getattr(getattr(layer, "weight", None), "ndim", 0) > 1)
    }
    if not found or (sites is not None and len(found) < len(chosen)):
        wrong = [name for name in chosen if name not in found] if sites is not None else []
        raise SiteError(
            f"{measure.name} needs layers of type {kind.__name__}; "
            + (f"site {wrong[0]!r} is not one" if wrong else f"there are none in this {type(model).__name__}")
        )
    return found


def columns_of(model: nn.Module, measure: Measure, layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that the measure reads, one for each layer, in float64; gradients flow."""
    if issubclass(measure.reads, LinearMaps):
        chain = _linear_layers(model)
        products = chain_products([layer.weight.mT.double() for layer in chain])
        at = {id(layer): product for layer, product in zip(chain, products, strict=True)}
        return {name: at[id(layer)] for name, layer in layers.items()}
    if issubclass(measure.reads, Atoms):
        return {name: layer.atoms.flatten(1)[None].double() for name, layer in layers.items()}
    return {name: layer.weight.double() for name, layer in layers.items()}


def value_of(measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    """The value of a measure of weights between two columns."""
    if issubclass(measure.reads, LinearMaps):
        return measure(linear_maps(x, y, measure.reads))
    if issubclass(measure.reads, Atoms):
        return measure(Atoms(x, y)).squeeze()
    return measure(TensorPair(x, y))


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [layer for layer in Names.of(unwrap(model)).unique().values() if isinstance(layer, nn.Linear)]


class Penalty(Attached):
    """`with Penalty(model) as penalty: fit(model, …, penalty=penalty)`: weight × how alike a model's layers are.

    One model: its layers become less alike. `pairs="stage"` takes each two layers of a stage, the stage's input among
    them (CKA-SR): a stage is sites that run one after the other under one parent with outputs of one shape. "all" takes
    each two sites, and with reduce="mean" that is AugCKA-SR; or a list of (site, site). Several models: their same
    sites become less alike (pairs="same", or (site of one, site of another)). `target`, a model or {site: activation}:
    the model's sites become *more* like those of the target; the term is 1 − similarity. A positive weight always
    pushes that way, whichever way the measure counts.

    `measure`: any that is differentiable. Those that read Gram matrices (`linear_cka`, `debiased_cka`) take one Gram
    matrix per layer and one product for all pairs. Measures of weights (`wcka` of chains of Linear layers,
    `weight_cosine`, `atom_cosine`) compare several models, or one with a target, and need no forward.

    `reduce="sum"` adds ordered pairs, as in the paper, so that each two layers count twice (a target's pairs and
    listed ones count once); a layer with itself, which is constant, is left out. "mean" is over pairs. `rows`: the
    first so many inputs of a batch, None: all. `every`: the first of so many steps, a step being a call of `penalty()`.
    `rule`: how activations become rows (`flatten`, `mean`, `positions` …). Computed in float32 at least, under autocast
    too. A layer that is constant over the rows has no similarity: its pairs count 0, without gradient, and `constant`
    and a warning at the end say so.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        measure: str | Measure = "linear_cka",
        sites: Any = None,
        weight: float = 8e-4,
        *,
        pairs: Pairs = None,
        reduce: str = "sum",
        rows: int | None = 8,
        every: int = 5,
        rule: Rule = "flatten",
        target: Target | None = None,
    ) -> None:
        models = [model] if isinstance(model, nn.Module) else list(model)
        check_models(models, target)
        self._take_on(models, rows, every, weight)
        self.measure, self.target, self.rule = find(measure), target, rule
        check_measure(self.measure, rows, alone=len(models) == 1 and target is None, towards=target is not None)
        check_rule(rule)
        one_of(reduce, "reduce", ("sum", "mean"))
        self.pairs = likeness.check_pairs(pairs, alone=len(models) == 1 and target is None)
        self._listed = not isinstance(self.pairs, str)
        self.reduce = reduce
        self._sites = sites
        self._last: tuple[tuple[str, ...], Sequence[Pair], PenaltyValues] | None = None
        self._chosen: tuple[Any, list[tuple[str, int]], Sequence[Pair]] | None = None  # of the last step
        self._still: dict[tuple[str, ...], Tensor] = {}
        if self.measure.reads_weights:
            self._layers = [layers_of(each, self.measure, self._named(k)) for k, each in enumerate(models)]
            if issubclass(self.measure.reads, Atoms) and "linear" not in self.measure.invariant:
                # A cosine of atoms between models whose coefficients differ would pull at numbers without meaning.
                both = [*models, *([target] if isinstance(target, nn.Module) else [])]
                check_shared([(f"model {k}", unwrap(each)) for k, each in enumerate(both)])
        else:
            for k, each in enumerate(models):
                calls = k == 0 and isinstance(target, nn.Module)
                inputs = self.pairs == "stage"
                self._taps.append(Taps(each, self._named(k), rows=rows, sink=self._sink, inputs=inputs, calls=calls))

    @property
    def _sink(self) -> Any:
        """A function that turns whole activations into their Gram matrix inside the hook, where that is enough."""
        if self.rows is not None or not aligns(self.measure) or self.rule != "flatten":
            return None
        return partial(as_gram, centre=self.measure.reads is not UncentredAlignment)

    def _named(self, k: int) -> Any:
        """The sites of the k-th model: listed pairs name those of the first model first."""
        if self._sites is not None or not self._listed:
            return self._sites
        sides = len(self._models) + (self.target is not None)
        ends = (0, 1) if sides == 1 or 0 < k < sides - 1 else (0,) if k == 0 else (1,)
        return list(dict.fromkeys(pair[end] for pair in self.pairs or () for end in ends))

    def _value(self, shown: Sequence[Sequence[Shown]]) -> Tensor:
        first = self._first if self.measure.reads_weights else shown[0][0].value
        first = first[0] if isinstance(first, tuple) else first  # what a sink made of an activation
        with without_autocast("cpu" if first is None else first.device.type):
            if self.measure.reads_weights:
                columns, pairs, found = self._of_weights()
            else:
                columns, pairs = self._columns(shown)
                directed, times = self.target is not None, self._times(len(pairs))
                found = values(self.measure, columns, pairs, self.rule, directed=directed, times=times)
        self._remember(columns, pairs, found)
        total = found.total
        if self.target is not None and self.measure.same:
            total = total - self.measure.same * found.counts.sum()
        return total.to(torch.float32 if self._first is None else torch.promote_types(self._first.dtype, torch.float32))

    def _times(self, pairs: int) -> float:
        """The factor of each of so many pairs; below 0 where similarity is to increase."""
        lessen = (self.measure.closer == "up") == (self.target is None)
        times = 1 / pairs if self.reduce == "mean" else 1 if self.target is not None or self._listed else 2
        return times if lessen else -times

    def _columns(self, shown: Sequence[Sequence[Shown]]) -> tuple[list[Shown], Sequence[Pair]]:
        """The columns and their pairs, computed anew only if other sites are shown or share a value than before."""
        sides = shown if self.target is None else [*shown, self._of_target()]
        every = [each for side in sides for each in side]
        first: dict[int, int] = {}
        shares = [(each.site, each.is_input, first.setdefault(id(each.value), k)) for k, each in enumerate(every)]
        key = [len(side) for side in sides], shares
        if self._chosen is None or self._chosen[0] != key:
            columns, pairs = self._choose(sides)
            place = {(id(each.value), each.site, each.is_input): k for k, each in enumerate(every)}
            places = [(column.label, place[id(column.value), column.site, column.is_input]) for column in columns]
            self._chosen = key, places, pairs
        return [replace(every[k], label=label) for label, k in self._chosen[1]], self._chosen[2]

    def _choose(self, sides: Sequence[Sequence[Shown]]) -> tuple[list[Shown], list[Pair]]:
        if len(sides) > 1:
            return likeness.used(*likeness.across(sides, self._sides, self.pairs))
        if self.pairs == "stage":
            starts = [stage[0] for stage in likeness.stages(sides[0])]
            entered = {start.site.label for start in starts if start.is_input}
            self._taps[0].read_inputs_of(entered, lacking={start.site.label for start in starts} - entered)
        return likeness.used(*likeness.of_one(sides[0], self.pairs))

    @property
    def _sides(self) -> list[str]:
        """The names of the models in labels."""
        return ["", "the target"] if self.target is not None else [f"model {k}" for k in range(len(self._models))]

    def _of_target(self) -> list[Shown]:
        sink = self._sink
        if isinstance(self.target, nn.Module):
            with as_found(self.target), self._taps[0].as_called():
                args, kwargs = self._taps[0].called or ((), {})
                with watch(self.target, self._named(1)) as seen:
                    try:
                        seen.run(*args, **kwargs)
                    except RuntimeError as error:
                        explain_types(error, self.target, [args, kwargs], "inputs")
                        raise
                found = list(zip(seen.sites, seen.values(), strict=True))
        else:
            found = [_given(label, each, self._taps[0].count) for label, each in (self.target or {}).items()]
        kept = [(site, value[: self.rows]) for site, value in found]
        return [Shown(site, False, value if sink is None else sink(value), site.label) for site, value in kept]

    def _of_weights(self) -> tuple[list[Shown], Sequence[Pair], PenaltyValues]:
        both = zip(self._models, self._layers, strict=True)
        parts: list[Mapping[str, Tensor]] = [columns_of(model, self.measure, layers) for model, layers in both]
        if isinstance(self.target, nn.Module):
            with torch.no_grad():
                layers = layers_of(self.target, self.measure, self._named(1))
                parts.append(columns_of(self.target, self.measure, layers))
        elif self.target is not None:
            parts.append(self.target)
        shown = [
            [
                Shown(Site(label, label, 1, tuple(value.shape), True), False, value, label)
                for label, value in part.items()
            ]
            for part in parts
        ]
        columns, pairs = likeness.used(*likeness.across(shown, self._sides, self.pairs))
        each = [value_of(self.measure, columns[a].value, columns[b].value.to(columns[a].value)) for a, b in pairs]
        stacked = torch.stack(each)
        if torch.is_grad_enabled() and not stacked.requires_grad:
            raise ValueError("no gradient flows from the weights that are compared: they are frozen (requires_grad)")
        still = torch.zeros(len(columns), dtype=torch.bool, device=stacked.device)
        return columns, pairs, PenaltyValues(stacked, torch.full_like(stacked, self._times(len(pairs))), still)

    @property
    def recordable(self) -> bool:
        """Whether the measure reads only Gram matrices; those that decompose matrices wait for the device."""
        return aligns(self.measure)

    def begin_again(self) -> None:
        super().begin_again()
        for counts in self._still.values():
            counts.zero_()

    def settings(self) -> dict[str, Any]:
        measure = f"{self.measure.name} {self.measure.options or ''}".strip()
        own = {"measure": measure, "pairs": self.pairs, "reduce": self.reduce}
        rule = self.rule if isinstance(self.rule, str) else self.rule.__qualname__
        target = type(self.target).__qualname__ if isinstance(self.target, nn.Module) else self.target is not None
        layers = {"layers": [list(each) for each in self._layers]} if self.measure.reads_weights else {}
        return {**super().settings(), **own, "rule": rule, "target": target, **layers}

    def _remember(self, columns: list[Shown], pairs: Sequence[Pair], found: PenaltyValues) -> None:
        labels = tuple(column.label for column in columns)
        self._last = labels, pairs, replace(found, each=found.each.detach())
        if labels not in self._still:
            with torch.inference_mode(False):  # it may be written to outside of it
                self._still[labels] = torch.zeros_like(found.still, dtype=torch.long)
        self._still[labels] += found.still  # in place, so that a recorded step counts as well

    def _where(self) -> str:
        rows = [row for row in self.last if row["value"] is not None]
        wrong = [f"{row['site_a']!r} and {row['site_b']!r}" for row in rows if not math.isfinite(row["value"])]
        if wrong or not rows:
            return f"; not finite between {'; '.join(wrong[:5])}" if wrong else ""
        top = max(rows, key=lambda row: abs(row["value"]))
        return f"; every pair is finite, the largest {top['value']:.3g} of {top['site_a']!r} and {top['site_b']!r}"

    @property
    def last(self) -> list[dict[str, Any]]:
        """The pairs of the last due step with their values; None for a pair with a constant layer."""
        if self._last is None:
            return []
        labels, pairs, found = self._last
        return [
            {"site_a": labels[a], "site_b": labels[b], "value": value}
            for (a, b), value in zip(pairs, found.numbers, strict=True)
        ]

    @property
    def constant(self) -> dict[str, int]:
        """The layers that were constant over the rows, so that their pairs counted 0, and in how many due steps."""
        counts: Counter[str] = Counter()
        for labels, found in self._still.items():
            counts.update(dict(zip(labels, found.tolist(), strict=True)))
        return {label: count for label, count in counts.items() if count}

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        super().__exit__(kind, *details)
        if kind is None and (found := self.constant):
            listed = ", ".join(f"{label!r} in {count}" for label, count in list(found.items())[:5])
            warnings.warn(
                f"layers that were constant over the rows, so that their pairs counted 0: {listed} due steps"
                + (f" and {len(found) - 5} more" if len(found) > 5 else "")
                + "; if they died in training, take a smaller weight",
                stacklevel=2,
            )


def _given(label: str, activation: Any, count: int) -> tuple[Site, Tensor]:
    if not isinstance(activation, Tensor) or not activation.dim() or len(activation) != count:
        got = tuple(activation.shape) if isinstance(activation, Tensor) else type(activation).__name__
        raise ValueError(f"the target's activation at {label!r} is {got} for a batch of {count} inputs")
    return Site(label, label, 1, tuple(activation.shape[1:]), activation.dim() < 4), activation.detach()


def decorrelation(z: Tensor, *, normalised: bool = False) -> Tensor:
    """Σ (ZᵀZ)²ᵢⱼ over all pairs of different channels: 0 where all are orthogonal.

    z is rows (n, c), or maps (n, c, h, w) whose positions are rows. As printed in the paper it is a plain sum, so that
    it grows with the fourth power of the activations and the square of the number of rows. `normalised` is the mean
    over pairs of the squared cosine of two channels, from 0 to 1 whatever the scale and the rows; a channel that is 0
    everywhere counts as orthogonal to the others. Neither subtracts a mean. Computed in float32 at least.
    """
    if z.ndim not in (2, 4):
        raise ValueError(f"need rows (n, c) or maps (n, c, h, w), got {tuple(z.shape)}")
    rows = z if z.ndim == 2 else z.movedim(1, -1).flatten(0, -2)
    count, channels = rows.shape
    if not count or (normalised and channels < 2):
        raise ValueError(f"need at least one row and, normalised, two channels, got {tuple(z.shape)}")
    with torch.autocast(z.device.type, enabled=False):
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        gram = rows.T @ rows
        # Taken off before squaring: of two large sums of squares the difference would be rounding.
        apart = gram - torch.diag(gram.diagonal())
        if not normalised:
            return apart.square().sum()
        own = gram.diagonal()
        lengths = torch.where(own > 0, own, torch.ones_like(own)).sqrt()
        return (apart / lengths / lengths[:, None]).square().sum() / (channels * (channels - 1))


class Decorrelation(Attached):
    """`with Decorrelation(model, sites, weight=3e-3) as penalty: fit(model, …, penalty=penalty)`.

    `penalty()` is weight × the sum over sites of `decorrelation` of the last forward; maps and tokens give one row per
    position. `rows` and `every` as in `Attached`.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Any = None,
        weight: float = 3e-3,
        *,
        normalised: bool = False,
        rows: int | None = None,
        every: int = 1,
    ) -> None:
        self.normalised = normalised
        super().__init__(model, sites, self._of, rows=rows, every=every, weight=weight)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "normalised": self.normalised}

    def _of(self, seen: Mapping[Site, Tensor]) -> Tensor:
        rows = (to_rows(z, "positions", site=site, inputs=len(z)) for site, z in seen.items())
        return torch.stack([decorrelation(each, normalised=self.normalised) for each in rows]).sum()
