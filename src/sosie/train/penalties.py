"""Loss terms computed from activations or weights: a term of your own, the similarity of layers, decorrelation."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..capture import Rule, Site, SiteError, borrowed, check_rule, to_rows, unwrap, watch
from ..capture.batches import explain_types
from ..checks import listed, one_of, whole_number
from ..measures import MEASURES, Measure, find
from ..models.atoms import check_shared
from ..process_state import without_autocast
from ..stats import Atoms, UncentredAlignment
from . import similarity
from .hooks import ActivationHooks, SiteValue
from .similarity import Pair, Pairs, least_rows, reads_grams

Term = Callable[..., Tensor]
Target = nn.Module | Mapping[str, Tensor]
LOOKS = 50  # due steps between looks at the values on a GPU: each look waits for it
IN_USE = (
    "a penalty is attached to this model in another thread, which trains it: run it there, or after the penalty's with "
    "block"
)


class Attached(AbstractContextManager["Attached"]):
    """`with Attached(model, sites, term) as penalty`: `penalty()` is weight × `term` of the last forward's activations.

    `sites`: names, globs or types (see `select`). `term` is called with {site: activation}, in execution order, and
    returns a single number; gradients flow. `every`: each call of `penalty()` is a step, and one in `every` steps is
    due; in the others nothing is kept, and `penalty()` is 0. `rows`: the number of inputs of a batch to take; None:
    all. An activation that the model overwrites later (a ReLU in place) is seen as it was before. With torch.compile,
    attach before the first call of the model. After the block, also after an error, the model is as before. Inside it,
    other threads cannot compare the model.
    """

    recordable = True  # whether a due step can be recorded into a CUDA graph: `term` must not wait for the device

    def __init__(
        self, model: nn.Module, sites: Any, term: Term, *, rows: int | None = None, every: int = 1, weight: float = 1.0
    ) -> None:
        self._set_up([model], rows, every, weight)
        self._term = term
        self._hooks.append(ActivationHooks(model, sites, rows=rows))

    def _set_up(self, models: Sequence[nn.Module], rows: int | None, every: int, weight: float) -> None:
        """Set what every kind of penalty has; each adds its own hooks."""
        if rows is not None:
            whole_number(rows, "rows", least=1, why="the number of inputs of a batch to take, or None for all")
        whole_number(every, "every", least=1, why="1 for every step, 5 for the first of every five")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight={weight!r}: need a number of at least 0; a sign cannot turn a penalty around")
        self.rows, self.every, self.weight = rows, every, weight
        self.step = 0  # calls of penalty() so far
        self._models = models
        self._hooks: list[ActivationHooks] = []
        self._attached = False
        self._first: Tensor | None = None  # of the parameters, while attached: finding it at every step is slow
        self._bad: Tensor | None = None  # (LOOKS,) of the last due steps: NaN where the value was not finite, else 0

    @property
    def due(self) -> bool:
        """Whether the next call of `penalty()` computes the term."""
        return self.is_due(self.step)

    def is_due(self, step: int) -> bool:
        return self._attached and self.weight > 0 and step % self.every == 0

    def go_to(self, step: int) -> None:
        """Set the number of calls so far."""
        self.step = step
        for hooks in self._hooks:
            hooks.forget()
            hooks.due = self.due

    def begin_again(self) -> None:
        """Go back to before the first call."""
        if self._bad is not None:
            self._bad.zero_()  # in place: recorded steps write to this tensor
        self.go_to(0)

    def settings(self) -> dict[str, Any]:
        """The options, which a checkpoint compares."""
        sites = [hooks.requested for hooks in self._hooks]
        return {"weight": self.weight, "rows": self.rows, "every": self.every, "sites": sites}

    def state_dict(self) -> dict[str, int]:
        """The steps so far, which decide when the next one is due."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume after that many steps, attached already or not."""
        self.go_to(whole_number(state["step"], "step", least=0, why="the calls of penalty() so far"))

    def __enter__(self) -> Self:
        if self._attached:
            raise RuntimeError("this penalty is attached already")
        self._hold = borrowed([hooks.model for hooks in self._hooks], refusal=IN_USE)
        self._hold.__enter__()
        self._attached, self._bad = True, None
        parameters = (parameter for model in self._models for parameter in model.parameters())
        self._first = next((parameter for parameter in parameters if parameter.is_floating_point()), None)
        for hooks in self._hooks:
            hooks.open()
            hooks.due = self.due
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._attached, self._first = False, None
        for hooks in self._hooks:
            hooks.close()
        self._hold.__exit__(None, None, None)
        del self._hold  # it could not be copied
        if kind is None:
            self._look((self.step - 1) // self.every)

    def __call__(self) -> Tensor:
        if not self._attached:
            raise RuntimeError("this penalty is not attached to the model: use it inside its with block")
        if not self.due:
            value = torch.zeros((), device=None if self._first is None else self._first.device)
        else:
            shown = [hooks.take() for hooks in self._hooks]
            self._check_gradients([value for model in shown for value in model])
            value = self.weight * self._value(shown)
            self._watch_value(value, shown)
        self.go_to(self.step + 1)
        return value

    def _value(self, shown: Sequence[Sequence[SiteValue]]) -> Tensor:
        """The term of what the models' sites showed in the last forward."""
        value = self._term(*({each.site: each.value for each in model if not each.is_input} for model in shown))
        if not isinstance(value, Tensor) or value.dim():
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the term of a penalty is a single number, a tensor of no dimensions; got {got}")
        return value

    def _check_gradients(self, shown: Sequence[SiteValue]) -> None:
        """Raise if the penalty would be a constant, from which nothing learns."""
        flows = any(part.requires_grad for each in shown for part in _tensors(each.value))
        if shown and torch.is_grad_enabled() and not flows:
            raise SiteError(
                f"no gradient flows from {listed(repr(each.label) for each in shown)}: all parameters before them are "
                "frozen (requires_grad), so the penalty changes nothing; name later sites, or measure under "
                "torch.no_grad()"
            )

    # Values that are NaN or infinite

    def _watch_value(self, value: Tensor, shown: Sequence[Sequence[SiteValue]]) -> None:
        """Note whether the value is NaN or infinite, without waiting for a GPU at every step."""
        due = self.step // self.every
        if self._bad is None:
            with torch.inference_mode(False):  # it may be written to outside of it
                self._bad = torch.zeros(LOOKS, dtype=value.dtype, device=value.device)
        # One operation, in place as recorded steps are: 0 × NaN and 0 × ∞ are NaN, and stay so.
        self._bad[due % LOOKS].add_(value.detach(), alpha=0)
        if not value.is_cuda or (due + 1) % LOOKS == 0:
            self._look(due, shown)

    def _look(self, due: int, shown: Sequence[Sequence[SiteValue]] = ()) -> None:
        """Raise if a value since the last look, up to this due step, was NaN or infinite."""
        wrong = [] if self._bad is None else self._bad.isnan().nonzero().tolist()
        if not wrong:
            return
        assert self._bad is not None
        self._bad.zero_()  # so that it raises once
        step = (due // LOOKS * LOOKS + wrong[0][0]) * self.every + 1
        values = [value for model in shown for value in model]
        sites = [v.label for v in values if not all(bool(part.isfinite().all()) for part in _tensors(v.value))]
        where = f"; not finite at {listed(map(repr, sites))}" if sites else self._where()
        raise ValueError(
            f"the penalty of step {step} is NaN or infinite{where}: take a smaller weight than {self.weight:g}, "
            "a lower rate, or look for such values in the inputs"
        )

    def _where(self) -> str:
        """More about such a value if the activations of the model are finite."""
        return ""


def _tensors(value: Any) -> tuple[Tensor, ...]:
    """A tensor, or the tensors that a sink made."""
    return value if isinstance(value, tuple) else (value,)


class Penalty(Attached):
    """`with Penalty(model) as penalty: fit(model, …, penalty=penalty)`: weight × how similar a model's layers are.

    One model: its layers become less similar. `pairs="stage"` takes all pairs of layers of a stage, with the stage's
    input (CKA-SR): a stage is sites that run one after the other under one parent with outputs of one shape. "all"
    takes all pairs of sites, with reduce="mean" that is AugCKA-SR; or a list of (site, site). Several models: their
    same sites become less similar (pairs="same", or (site of one, site of another)). `target`, a model or {site:
    activation}: the model's sites become *more* similar to those of the target; the term is 1 − similarity. A positive
    weight always pushes that way, whether the measure is a similarity or a distance.

    `measure`: any that is differentiable. Those that read Gram matrices (`linear_cka`, `debiased_cka`) take one Gram
    matrix per layer and one product for all pairs. Measures of weights (`wcka` of chains of Linear layers,
    `weight_cosine`, `atom_cosine`) compare several models, or one with a target, and need no forward.

    `reduce="sum"` adds ordered pairs, as in the paper, so each pair of layers counts twice (a target's pairs and listed
    ones count once); a layer with itself, which is constant, is left out. "mean" is over pairs. `rows`: the first so
    many inputs of a batch, None: all. `every`: the first of so many steps, a step being a call of `penalty()`. `rule`:
    how activations become rows (`flatten`, `mean`, `positions` …). Computed in float32 at least, under autocast too. A
    layer that is constant over the rows has no similarity: its pairs count 0, without gradient, and `constant` and a
    warning at the end report it.
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
        _check_models(models, target)
        self._set_up(models, rows, every, weight)
        self.measure, self.target, self.rule, self.reduce = find(measure), target, rule, reduce
        self.recordable = reads_grams(self.measure)  # decompositions of matrices wait for the device
        alone = len(models) == 1 and target is None
        _check_measure(self.measure, rows, alone=alone, towards=target is not None)
        check_rule(rule)
        one_of(reduce, "reduce", ("sum", "mean"))
        self.pairs = similarity.check_pairs(pairs, alone=alone)
        self._sites = sites
        self._last: tuple[Sequence[str], Sequence[Pair], Tensor, Tensor] | None = None
        self._constant: dict[tuple[str, ...], Tensor] = {}  # how often each of these columns was constant
        if self.measure.reads_weights:
            self._layers = [
                similarity.layers_to_compare(each, self.measure, self._sites_of(k)) for k, each in enumerate(models)
            ]
            if issubclass(self.measure.reads, Atoms) and "linear" not in self.measure.invariant:
                # Atoms of models whose coefficients differ do not correspond: their cosine would have no meaning.
                every_model = [*models, *([target] if isinstance(target, nn.Module) else [])]
                check_shared([(f"model {k}", unwrap(each)) for k, each in enumerate(every_model)])
            return
        # Where Gram matrices are enough, a sink makes them of whole activations inside the hook.
        whole = rows is None and rule == "flatten" and reads_grams(self.measure)
        centre = self.measure.reads is not UncentredAlignment
        self._sink = partial(similarity.as_gram, centre=centre) if whole else None
        for k, each in enumerate(models):
            inputs, calls = self.pairs == "stage", k == 0 and isinstance(target, nn.Module)
            sites_of = self._sites_of(k)
            self._hooks.append(ActivationHooks(each, sites_of, rows=rows, sink=self._sink, inputs=inputs, calls=calls))

    def _sites_of(self, k: int) -> Any:
        """The sites of the k-th model: listed pairs name those of the first model first."""
        if self._sites is not None or isinstance(self.pairs, str):
            return self._sites
        sides = len(self._models) + (self.target is not None)
        ends = (0, 1) if sides == 1 or 0 < k < sides - 1 else (0,) if k == 0 else (1,)
        return list(dict.fromkeys(pair[end] for pair in self.pairs or () for end in ends))

    def _value(self, shown: Sequence[Sequence[SiteValue]]) -> Tensor:
        first = self._first if self.measure.reads_weights else _tensors(shown[0][0].value)[0]
        with without_autocast("cpu" if first is None else first.device.type):
            if self.measure.reads_weights:
                columns, pairs = self._columns(self._weights())
                ends = [(columns[a].value, columns[b].value) for a, b in pairs]
                values = torch.stack([similarity.value_of_weights(self.measure, x, y.to(x)) for x, y in ends])
                if torch.is_grad_enabled() and not values.requires_grad:
                    raise ValueError("no gradient flows from the compared weights: they are frozen (requires_grad)")
                counts = torch.full_like(values, self._times(len(pairs)))
                constant = torch.zeros(len(columns), dtype=torch.bool, device=values.device)
            else:
                columns, pairs = self._columns(shown if self.target is None else [*shown, self._target_values()])
                directed, times = self.target is not None, self._times(len(pairs))
                values, counts, constant = similarity.values(
                    self.measure, columns, pairs, self.rule, directed=directed, times=times
                )
        labels = tuple(column.label for column in columns)
        self._last = labels, pairs, values.detach(), counts
        if labels not in self._constant:
            with torch.inference_mode(False):  # it may be written to outside of it
                self._constant[labels] = torch.zeros_like(constant, dtype=torch.long)
        self._constant[labels] += constant  # in place, so that a recorded step counts as well
        total = values @ counts
        if self.target is not None and self.measure.same:
            total = total - self.measure.same * counts.sum()
        return total.to(torch.float32 if self._first is None else torch.promote_types(self._first.dtype, torch.float32))

    def _times(self, pairs: int) -> float:
        """The factor of each pair, of this many; negative if similarity is to increase."""
        lessen = (self.measure.closer == "up") == (self.target is None)
        once = self.target is not None or not isinstance(self.pairs, str)
        times = 1 / pairs if self.reduce == "mean" else 1 if once else 2
        return times if lessen else -times

    def _columns(self, sides: Sequence[Sequence[SiteValue]]) -> tuple[list[SiteValue], list[Pair]]:
        """The columns that are compared, of all models, and their pairs."""
        alone = len(sides) == 1 or self.target is not None
        names = ["", "the target"][: len(sides)] if alone else [f"model {k}" for k in range(len(sides))]
        return similarity.numbered(similarity.column_pairs(sides, names, self.pairs))

    def _target_values(self) -> list[SiteValue]:
        hooks = self._hooks[0]
        if isinstance(self.target, nn.Module):
            with hooks.as_called(self.target) as (args, kwargs), watch(self.target, self._sites_of(1)) as seen:
                try:
                    seen.run(*args, **kwargs)
                except RuntimeError as error:
                    explain_types(error, self.target, [args, kwargs], "inputs")
                    raise
            activations = dict(zip(seen.sites, seen.values(), strict=True))
        else:
            activations = {}
            for label, value in (self.target or {}).items():
                if not isinstance(value, Tensor) or not value.dim() or len(value) != hooks.count:
                    got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    raise ValueError(f"the target at {label!r} is {got} for a batch of {hooks.count} inputs")
                activations[Site(label, label, 1, tuple(value.shape[1:]), value.dim() < 4)] = value.detach()
        sink = self._sink or (lambda value: value)
        return [SiteValue(site, False, sink(value[: self.rows]), site.label) for site, value in activations.items()]

    def _weights(self) -> list[list[SiteValue]]:
        """The weights that are compared, of all models."""
        parts: list[Mapping[str, Tensor]] = [
            similarity.weights_to_compare(model, self.measure, layers)
            for model, layers in zip(self._models, self._layers, strict=True)
        ]
        if isinstance(self.target, nn.Module):
            with torch.no_grad():
                layers = similarity.layers_to_compare(self.target, self.measure, self._sites_of(1))
                parts.append(similarity.weights_to_compare(self.target, self.measure, layers))
        elif self.target is not None:
            parts.append(self.target)
        return [
            [SiteValue(Site(name, name, 1, tuple(w.shape), True), False, w, name) for name, w in part.items()]
            for part in parts
        ]

    def begin_again(self) -> None:
        super().begin_again()
        for counts in self._constant.values():
            counts.zero_()

    def settings(self) -> dict[str, Any]:
        layers = {"layers": [list(each) for each in self._layers]} if self.measure.reads_weights else {}
        return {
            **super().settings(),
            "measure": f"{self.measure.name} {self.measure.options or ''}".strip(),
            "pairs": self.pairs,
            "reduce": self.reduce,
            "rule": self.rule if isinstance(self.rule, str) else self.rule.__qualname__,
            "target": type(self.target).__qualname__ if isinstance(self.target, nn.Module) else self.target is not None,
            **layers,
        }

    # What it measured

    def _where(self) -> str:
        rows = [row for row in self.last if row["value"] is not None]
        wrong = [f"{row['site_a']!r} and {row['site_b']!r}" for row in rows if not math.isfinite(row["value"])]
        if wrong or not rows:
            return f"; not finite between {listed(wrong, separator='; ')}" if wrong else ""
        top = max(rows, key=lambda row: abs(row["value"]))
        return f"; every pair is finite, the largest {top['value']:.3g} of {top['site_a']!r} and {top['site_b']!r}"

    @property
    def last(self) -> list[dict[str, Any]]:
        """The pairs of the last due step with their values; None for a pair with a constant layer."""
        if self._last is None:
            return []
        labels, pairs, values, counts = self._last
        return [
            {"site_a": labels[a], "site_b": labels[b], "value": value if count else None}
            for (a, b), value, count in zip(pairs, values.tolist(), counts.tolist(), strict=True)
        ]

    @property
    def constant(self) -> dict[str, int]:
        """The layers that were constant over the rows, whose pairs count 0, and in how many due steps."""
        counts: Counter[str] = Counter()
        for labels, times in self._constant.items():
            counts.update(dict(zip(labels, times.tolist(), strict=True)))
        return {label: count for label, count in counts.items() if count}

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        super().__exit__(kind, *details)
        if kind is None and (constant := self.constant):
            layers = listed(f"{label!r} in {count}" for label, count in constant.items())
            warnings.warn(
                f"layers that were constant over the rows, so that their pairs counted 0: {layers} due steps; if they "
                "died in training, take a smaller weight",
                stacklevel=2,
            )


def _check_models(models: Sequence[nn.Module], target: Target | None) -> None:
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise TypeError("Penalty needs a torch.nn.Module, or a list of them")
    if len({id(model) for model in models}) < len(models):
        raise ValueError("the same model is listed twice: the members of an ensemble must be different models")
    if target is None:
        return
    if len(models) > 1:
        raise ValueError(f"target= is for one model, got {len(models)}: make a penalty for each")
    if target is models[0]:
        raise ValueError("the target is the model itself: give a copy (copy.deepcopy) to stay close to what it is now")
    if not isinstance(target, (nn.Module, Mapping)):
        raise TypeError(f"target is a model or {{site: activation}}, got {type(target).__name__}")


def _check_measure(measure: Measure, rows: int | None, *, alone: bool, towards: bool) -> None:
    if not measure.differentiable or measure.needs:
        others = ["linear_cka", "debiased_cka", "mean_cca", "procrustes_distance"]
        if measure.reads_weights:
            others = [m.name for m in MEASURES.values() if m.differentiable and m.reads is measure.reads][:4] or others
        why = "is not differentiable" if not measure.differentiable else f"needs {', '.join(measure.needs)}"
        raise ValueError(f"{measure.name} {why}, so it cannot be trained with; take {', '.join(others)}")
    if towards and measure.closer == "up" and measure.bounds[1] is None:
        raise ValueError(f"{measure.name} has no largest value, so no model is ever close to a target; take mean_cca")
    if measure.reads_weights and alone:
        raise ValueError(f"{measure.name} compares the weights of models: give several, or target=")
    if not measure.reads_weights and rows is not None and rows < least_rows(measure):
        raise ValueError(f"{measure.name} of {rows} rows is constant: it needs at least {least_rows(measure)}")


def decorrelation(z: Tensor, *, normalised: bool = False) -> Tensor:
    """Σ (ZᵀZ)²ᵢⱼ over all pairs of different channels: 0 if all are orthogonal.

    z is rows (n, c), or maps (n, c, h, w) whose positions are rows. This plain sum, as printed in the paper, grows with
    the fourth power of the activations and the square of the number of rows. `normalised` is the mean over pairs of the
    squared cosine of two channels, from 0 to 1 whatever the scale and the number of rows; a channel that is 0
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
        sizes = gram.diagonal()
        # Subtracted before squaring: the difference of two large sums of squares would be rounding.
        apart = gram - torch.diag(sizes)
        if not normalised:
            return apart.square().sum()
        lengths = torch.where(sizes > 0, sizes, torch.ones_like(sizes)).sqrt()
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
        super().__init__(model, sites, self._sum, rows=rows, every=every, weight=weight)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "normalised": self.normalised}

    def _sum(self, seen: Mapping[Site, Tensor]) -> Tensor:
        rows = (to_rows(z, "positions", site=site, inputs=len(z)) for site, z in seen.items())
        return torch.stack([decorrelation(each, normalised=self.normalised) for each in rows]).sum()
