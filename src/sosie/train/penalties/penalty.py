"""How alike layers or models are, as a term of the loss."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...capture import Rule, Site, as_found, check_rule, watch
from ...measures import Measure, find
from ...process_state import without_autocast
from ...stats import UncentredAlignment
from ..attached import Attached
from ..checks import tell_types
from ..taps import Shown, Taps
from . import columns as chosen
from . import weights
from .checks import Target, check_measure, check_models
from .columns import Column, Pair, Pairs
from .likeness import Values, aligns, as_gram, values


class Penalty(Attached):
    """`with Penalty(model) as penalty: fit(model, …, penalty=penalty)`: weight × how alike a model's layers are.

    One model: its layers become less alike. `pairs="stage"` takes each two layers of a stage, the stage's input among
    them (CKA-SR): a stage is sites that run one after the other under one parent with outputs of one shape. "all" takes
    each two sites, and with reduce="mean" that is AugCKA-SR; or a list of (site, site). Several models: their same
    sites become less alike (pairs="same", or (site of one, site of another)). `target`, a model or {site: activation}:
    the model's sites become *more* like those of the target; the term is 1 − similarity. A positive weight always
    pushes that way, whichever way the measure counts.

    `measure`: any that is differentiable. Those that read Gram matrices (`linear_cka`, `debiased_cka`) take one Gram
    matrix a layer and one product for all pairs. Measures of weights (`wcka` of chains of Linear layers,
    `weight_cosine`, `atom_cosine`) compare several models, or one with a target, and need no forward.

    `reduce="sum"` adds ordered pairs, as the paper writes it, so that each two layers count twice (a target's pairs and
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
        if reduce not in ("sum", "mean"):
            raise ValueError(f"reduce={reduce!r}: 'sum' or 'mean' over pairs")
        self.pairs = chosen.check_pairs(pairs, alone=len(models) == 1 and target is None)
        self._listed = not isinstance(self.pairs, str)
        self.reduce = reduce
        self._sites = sites
        self._last: tuple[tuple[str, ...], Sequence[Pair], Values] | None = None
        self._plan = chosen.Plan()
        self._still: dict[tuple[str, ...], Tensor] = {}
        if self.measure.reads_weights:
            self._layers = [weights.layers_of(each, self.measure, self._named(k)) for k, each in enumerate(models)]
            weights.check_atoms([*models, *([target] if isinstance(target, nn.Module) else [])], self.measure)
        else:
            self._taps += [self._tap(each, k) for k, each in enumerate(models)]

    def _tap(self, model: nn.Module, k: int) -> Taps:
        return Taps(
            model,
            self._named(k),
            rows=self.rows,
            sink=self._sink if self.rows is None else None,
            inputs=self.pairs == "stage",
            calls=k == 0 and isinstance(self.target, nn.Module),
        )

    @property
    def _sink(self) -> Any:
        """What is made of whole activations inside the hook: their Gram matrix, where that is all that is read."""
        if not aligns(self.measure) or self.rule != "flatten":
            return None
        return partial(as_gram, centre=self.measure.reads is not UncentredAlignment)

    def _named(self, k: int) -> Any:
        """The sites of the k-th model: listed pairs name those of the first model first."""
        if self._sites is not None or not self._listed:
            return self._sites
        sides = len(self._models) + (self.target is not None)
        ends = (0, 1) if sides == 1 or 0 < k < sides - 1 else (0,) if k == 0 else (1,)
        return list(dict.fromkeys(pair[end] for pair in self.pairs or () for end in ends))

    # The value

    def _value(self, shown: Sequence[Sequence[Shown]]) -> Tensor:
        first = self._first if self.measure.reads_weights else shown[0][0].value
        with without_autocast("cpu" if first is None else _device(first)):
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
        """How often each of so many pairs counts: less than 0 times if it is to become more."""
        lessen = (self.measure.closer == "up") == (self.target is None)
        times = 1 / pairs if self.reduce == "mean" else 1 if self.target is not None or self._listed else 2
        return times if lessen else -times

    def _columns(self, shown: Sequence[Sequence[Shown]]) -> tuple[list[Column], Sequence[Pair]]:
        sides = shown if self.target is None else [*shown, self._of_target()]
        return self._plan.columns(sides, self._choose)

    def _choose(self, sides: Sequence[Sequence[Shown]]) -> tuple[list[Column], list[Pair]]:
        if self.target is not None:
            return chosen.used(*chosen.with_target(sides[0], sides[1], self.pairs))
        if len(sides) > 1:
            return chosen.used(*chosen.of_several(sides, self.pairs))
        if self.pairs == "stage":
            starts = [stage[0] for stage in chosen.stages(sides[0])]
            entered = {start.site.label for start in starts if start.is_input}
            self._taps[0].read_inputs_of(entered, lacking={start.site.label for start in starts} - entered)
        return chosen.used(*chosen.of_one(sides[0], self.pairs))

    def _of_target(self) -> list[Shown]:
        sink = self._sink if self.rows is None else None
        if isinstance(self.target, nn.Module):
            with as_found(self.target), self._taps[0].as_called():
                args, kwargs = self._taps[0].called or ((), {})
                with watch(self.target, self._named(1)) as seen:
                    try:
                        seen.run(*args, **kwargs)
                    except RuntimeError as error:
                        tell_types(error, self.target, [args, kwargs], "inputs")
                        raise
                found = list(zip(seen.sites, seen.values(), strict=True))
        else:
            found = [_given(label, each, self._taps[0].count) for label, each in (self.target or {}).items()]
        kept = [(site, value[: self.rows]) for site, value in found]
        return [Shown(site, False, value if sink is None else sink(value)) for site, value in kept]

    def _of_weights(self) -> tuple[list[Column], Sequence[Pair], Values]:
        parts = [
            weights.columns_of(model, self.measure, layers)
            for model, layers in zip(self._models, self._layers, strict=True)
        ]
        shown = [[_weight(label, value) for label, value in part.items()] for part in parts]
        if self.target is not None:
            target = self._target_weights()
            found = chosen.with_target(shown[0], [_weight(*item) for item in target.items()], self.pairs)
        else:
            found = chosen.of_several(shown, self.pairs)
        columns, pairs = chosen.used(*found)
        each = [
            weights.value_of(self.measure, columns[a].shown.value, columns[b].shown.value.to(columns[a].shown.value))
            for a, b in pairs
        ]
        stacked = torch.stack(each)
        if torch.is_grad_enabled() and not stacked.requires_grad:
            raise ValueError("no gradient flows from the weights that are compared: they are frozen (requires_grad)")
        still = torch.zeros(len(columns), dtype=torch.bool, device=stacked.device)
        return columns, pairs, Values(stacked, torch.full_like(stacked, self._times(len(pairs))), still)

    @torch.no_grad()
    def _target_weights(self) -> Mapping[str, Tensor]:
        if not isinstance(self.target, nn.Module):
            return self.target or {}
        layers = weights.layers_of(self.target, self.measure, self._named(1))
        return weights.columns_of(self.target, self.measure, layers)

    @property
    def recordable(self) -> bool:
        """Gram matrices are products alone; measures that decompose matrices wait for them."""
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

    # What it was

    def _remember(self, columns: list[Column], pairs: Sequence[Pair], found: Values) -> None:
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
        """In how many due steps a layer was constant over the rows, so that its pairs counted 0; only where it was."""
        counts: Counter[str] = Counter()
        for labels, found in self._still.items():
            counts.update(dict(zip(labels, found.tolist(), strict=True)))
        return {label: count for label, count in counts.items() if count}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
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


def _weight(label: str, value: Tensor) -> Shown:
    return Shown(Site(label, label, 1, tuple(value.shape), True), False, value)


def _device(value: Any) -> str:
    """Of an activation, or of what a sink made of one."""
    first: Tensor = value[0] if isinstance(value, tuple) else value
    return first.device.type
