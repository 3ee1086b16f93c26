"""From models to their maps, and from maps to the values of each pair of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture import Site
from ..engine import caveats
from ..engine.uncertainty import FEWEST_GROUPS, Chance, around, by_jackknife, judged
from ..linalg import Invariants, permuted_moments
from ..measures import Measure, snap_to_bounds
from ..progress import Progress
from ..results import Array, Caveat, Comparison, Estimate
from ..stats import UncentredLinearMaps
from .maps import (
    PROBES,
    Chain,
    Kernels,
    Probed,
    WeightSource,
    chain_of,
    common_scale,
    inner_products,
    of_chains,
    of_maps,
    probe,
    shuffled,
    stacked,
)

# Values of one pair of models, with their interval, what chance gives, and caveats

FEWEST_ENTRIES = 4  # of an input, for the formula of the chance level
OF_ARCHITECTURE = (
    "what networks give that have nothing to do with each other depends on how they are built: convolutions alone make "
    "them alike. null='weights' measures it"
)


@dataclass(frozen=True)
class PairValues:
    """Values (S, T) of one pair of models; each block of probes left out (blocks, S, T); what chance depends on."""

    value: Tensor
    without: Tensor | None
    invariants: tuple[Invariants, Invariants] | None


@dataclass(frozen=True)
class Context:
    """What a result says beside the values."""

    a: WeightSource
    b: WeightSource
    statistic: str
    n: int
    draws: int
    matched: bool


def values_of(measure: Measure, found: PairValues, drawn: Sequence[PairValues], told: Context) -> Estimate:
    value = array_of(snap_to_bounds(found.value, measure))
    low, high = _interval(measure, found, value)
    chance = _chance(measure, found, drawn, value, told)
    return Estimate(
        value=value,
        n=told.n,
        statistic=told.statistic,
        closer=measure.closer,
        bounds=measure.bounds,
        same=measure.same,
        low=low,
        high=high,
        caveats=tuple(_doubts(measure, value, chance, told, bounded=low is not None)),
        **({} if chance is None else chance.fields()),
    )


def _interval(measure: Measure, found: PairValues, value: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    if found.without is None or len(found.without) < FEWEST_GROUPS:
        return None, None
    return around(measure, value, by_jackknife(array_of(found.without)))


def _chance(
    measure: Measure, found: PairValues, drawn: Sequence[PairValues], value: np.ndarray, told: Context
) -> Chance | None:
    """By shuffled weights where they were drawn; else by shuffled entries of an input that has no layout."""
    if drawn:
        return judged(measure, value, np.stack([array_of(snap_to_bounds(each.value, measure)) for each in drawn]))
    if found.invariants is None or _has_layout(told) or told.n < FEWEST_ENTRIES or "shift" not in measure.invariant:
        return None
    a, b = found.invariants
    x = Invariants(a.trace[:, None], a.norm[:, None], a.diagonal[:, None])
    y = Invariants(b.trace[None], b.norm[None], b.diagonal[None])
    mean, variance = permuted_moments(x, y, told.n)
    # Below 0 by rounding only, where a kernel is a multiple of the centring matrix: all shuffles give the same.
    spread = torch.where(variance > 0, variance, torch.zeros_like(variance)).sqrt()
    return Chance(array_of(mean), array_of(torch.where(variance.isnan(), variance, spread)))


def _has_layout(told: Context) -> bool:
    return len(told.a.shape) > 1 or len(told.b.shape) > 1


def _doubts(
    measure: Measure, value: np.ndarray, chance: Chance | None, told: Context, *, bounded: bool
) -> Iterator[Caveat]:
    yield from _undefined(value, told)
    if told.matched:
        yield Caveat(f"{measure.name} is the same for neurons in any order: they were not matched")
    for source in (told.a, told.b):
        if source.guessed:
            shape = " × ".join(map(str, source.shape))
            yield Caveat(f"{source.name}: an input was taken to be {shape}; input_shape= says otherwise")
        yield from (Caveat(f"{source.name}: {text}") for text in source.notes)
    if "Gaussian" in told.statistic:
        more = "more probes= narrow the interval" if bounded else f"probes={PROBES} or more give an interval"
        yield Caveat(f"estimated from {told.statistic}; {more}, more memory= makes it exact")
    yield from caveats.of_draws(told.draws)
    if chance is None and _has_layout(told):
        yield Caveat(OF_ARCHITECTURE)
    yield from caveats.of_bounds(measure, value)


def _undefined(value: np.ndarray, told: Context) -> Iterator[Caveat]:
    text = "undefined: the product of the weights up to here is zero, or the same for each entry of the input"
    lost = np.isnan(value)
    for i in np.flatnonzero(lost.all(1)):
        yield Caveat(text, site_a=told.a.known.sites[i])
    for j in np.flatnonzero(lost.all(0)):
        yield Caveat(text, site_b=told.b.known.sites[j])


def array_of(value: Tensor) -> np.ndarray:
    return value.detach().cpu().double().numpy()


CHUNK = 128  # inputs a forward pass

ByKind = dict[bool, Kernels]  # centred (True) or not


@dataclass(frozen=True)
class Plan:
    """How weights are compared; see `compare_weights`."""

    measures: tuple[Measure, ...]
    input_shape: Sequence[int] | None
    probes: int | None
    draws: int
    seed: int
    memory: int
    matched: bool = False  # whether neurons were to be put into matching order first

    @property
    def kinds(self) -> list[bool]:
        """Which kernels are asked for: centred (True), as they are (False), or both."""
        return list(dict.fromkeys(centred(measure) for measure in self.measures))


def centred(measure: Measure) -> bool:
    return not issubclass(measure.reads, UncentredLinearMaps)


def measure_all(
    sources: Sequence[WeightSource], plan: Plan, about: dict[str, Any]
) -> tuple[Callable[[int, int], Comparison], Callable[[int, int, str], Array]]:
    """What a pair gives, and its values alone; what concerns each model alone is done now."""
    chains = [_look(source, plan) for source in sources]
    _check_entries(sources)
    exact = plan.probes is None and _bytes(sources, chains, len(plan.kinds)) <= plan.memory
    every = Exact(sources, chains, plan) if exact else Estimated(sources, plan)
    about = {**about, "input": list(sources[0].shape)}

    def compared(i: int, j: int) -> Comparison:
        a, b = sources[i], sources[j]
        drawn: list[dict[str, PairValues]] = []
        if plan.draws:
            with Progress(f"chance for {a.name} and {b.name}", plan.draws, "shuffled copies") as bar:
                for draw in range(plan.draws):
                    drawn.append(every.with_other(i, shuffled(b, plan.seed, draw)))
                    bar.advance()
        told = Context(a, b, every.statistic, every.n, plan.draws, plan.matched)
        values = {m.name: values_of(m, every.found(i, j, m), [d[m.name] for d in drawn], told) for m in plan.measures}
        return Comparison(a.known, b.known, values, "entries of the input", about, kind="weights")

    chosen = {measure.name: measure for measure in plan.measures}
    return compared, lambda i, j, name: every.value(i, j, chosen[name])


def _look(source: WeightSource, plan: Plan) -> Chain | None:
    chain = chain_of(source.model, source.sites, source.prepare)
    if chain is None:
        source.look(plan.input_shape)
        return None
    entries = chain.layers[0].in_features
    if plan.input_shape is not None and torch.Size(plan.input_shape).numel() != entries:
        given = "×".join(map(str, plan.input_shape))
        raise ValueError(f"{source.name} takes {entries} numbers, which is not input_shape {given}")
    source.shape, source.side = (entries,), chain.side(source.name)
    return chain


def _check_entries(sources: Sequence[WeightSource]) -> None:
    sizes = {source.entries for source in sources}
    if len(sizes) > 1:
        text = ", ".join(f"{source.name} takes {'×'.join(map(str, source.shape))}" for source in sources[:6])
        raise ValueError(
            f"need models of one input, but {text}{' …' if len(sources) > 6 else ''}; where an image may have several "
            "sizes, input_shape= says which"
        )


def _bytes(sources: Sequence[WeightSource], chains: Sequence[Chain | None], kinds: int) -> int:
    """What trying each entry takes: all kernels, and the maps of one model while they are made."""
    kept = maps = 0
    for source, chain in zip(sources, chains, strict=True):
        d, sites = source.entries, len(source.known.sites)
        rank = d if chain is None else min(d, chain.layers[0].out_features)
        kept += 8 * kinds * (sites * rank * rank + (0 if chain is None else d * rank))
        maps = max(maps, 0 if chain is not None else 8 * d * sum(source.known.widths))
    return kept + maps


class Exact:
    """Every entry of the input was tried."""

    def __init__(self, sources: Sequence[WeightSource], chains: Sequence[Chain | None], plan: Plan) -> None:
        self.plan, self.n = plan, sources[0].entries
        self.statistic = f"each of {self.n} entries of the input"
        groups: dict[Any, list[int]] = {}
        for k, chain in enumerate(chains):
            groups.setdefault(k if chain is None else chain.key, []).append(k)
        self._members = list(groups.values())
        self._place = {k: (g, m) for g, members in enumerate(self._members) for m, k in enumerate(members)}
        self._kernels = [
            kernels_of([sources[k] for k in members], [chains[k] for k in members], plan.kinds)
            for members in self._members
        ]
        self._index = [_index(source, chain) for source, chain in zip(sources, chains, strict=True)]
        self._tables: dict[tuple[int, int, bool], Tensor] = {}
        self._settled: dict[tuple[int, int, str], Array] = {}
        self._invariants: dict[tuple[int, bool], Invariants] = {}

    def found(self, i: int, j: int, measure: Measure) -> PairValues:
        kind = centred(measure)
        (g, m), (h, n) = self._place[i], self._place[j]
        xy = self._table(g, h, kind)[m, n] if g <= h else self._table(h, g, kind)[n, m].T
        return _exactly(measure, self._depends(i, kind), self._depends(j, kind), xy, self._index[i], self._index[j])

    def value(self, i: int, j: int, measure: Measure) -> Array:
        """The values alone, made for all pairs of two groups at once."""
        (g, m), (h, n) = self._place[i], self._place[j]
        key = (g, h, measure.name) if g <= h else (h, g, measure.name)
        if key not in self._settled:
            one, xy = torch.ones((), dtype=torch.float64), self._table(key[0], key[1], centred(measure))
            self._settled[key] = array_of(snap_to_bounds(measure(measure.reads(one, one, xy)), measure))
        table = self._settled[key][m, n] if g <= h else self._settled[key][n, m].T
        return table[np.ix_(self._index[i], self._index[j])]

    def _table(self, first: int, second: int, kind: bool) -> Tensor:
        """Inner products of all pairs of two groups, made when one is asked for."""
        key = first, second, kind
        if key not in self._tables:
            a, b = self._kernels[first][kind], self._kernels[second][kind]
            self._tables[key] = inner_products(a, b, upper=first == second)
        return self._tables[key]

    def _depends(self, k: int, kind: bool) -> Invariants:
        """What the chance level of a model depends on, made once however many pairs it is in."""
        if (k, kind) not in self._invariants:
            group, member = self._place[k]
            self._invariants[k, kind] = self._kernels[group][kind].invariants(member)
        return self._invariants[k, kind]

    def with_other(self, i: int, other: WeightSource) -> dict[str, PairValues]:
        """The values of a model with one that is not among them."""
        g, m = self._place[i]
        other.shape = other.shape or (self.n,)
        chain = chain_of(other.model, other.sites, other.prepare)
        kernels = kernels_of([other], [chain], self.plan.kinds)
        found = {}
        for measure in self.plan.measures:
            a, b = self._kernels[g][centred(measure)].member(m), kernels[centred(measure)]
            xy = inner_products(a, b)[0, 0]
            index = _index(other, chain)
            found[measure.name] = _exactly(measure, a.invariants(0), b.invariants(0), xy, self._index[i], index)
        return found


def _index(source: WeightSource, chain: Chain | None) -> list[int]:
    """Which kernel is that of each site."""
    return list(range(len(source.known.sites))) if chain is None else chain.index


def _exactly(
    measure: Measure, a: Invariants, b: Invariants, xy: Tensor, index_a: list[int], index_b: list[int]
) -> PairValues:
    one = xy.new_ones(())
    at_sites = [
        Invariants(each.trace[index], each.norm[index], each.diagonal[index])
        for each, index in ((a, index_a), (b, index_b))
    ]
    value = measure(measure.reads(one, one, xy[index_a][:, index_b]))
    return PairValues(value, None, (at_sites[0], at_sites[1]))


def kernels_of(sources: Sequence[WeightSource], chains: Sequence[Chain | None], kinds: Sequence[bool]) -> ByKind:
    """Of models that are stacked: chains of one shape, or one model of any kind."""
    stack = [chain for chain in chains if chain is not None]
    if stack:
        weights = stacked(stack, sources[0].device)
        return {kind: of_chains(weights, stack[0].depths, centre=kind) for kind in kinds}
    maps = _maps(sources[0])
    return {kind: of_maps(maps, centre=kind) for kind in kinds}


def _maps(source: WeightSource) -> list[Tensor]:
    """(d, p) each site, to one scale a site: entry by entry of the input."""
    d = source.entries
    found = [torch.empty(d, width, dtype=torch.float64) for width in source.known.widths]
    exponents = torch.zeros(d, len(found), dtype=torch.long)

    def keep(site: Site, rows: Tensor, exponent: int) -> tuple[Tensor, int]:
        return rows, exponent

    with source.opened(keep) as run, Progress(f"weights of {source.name}", d, "entries of the input") as bar:
        for start in range(0, d, CHUNK):
            entries = torch.arange(start, min(start + CHUNK, d))
            basis = torch.nn.functional.one_hot(entries, d).double()
            for k, (rows, exponent) in enumerate(run.run(source.shaped(basis))):
                found[k][entries] = rows.cpu()
                exponents[entries, k] = exponent
            bar.advance(len(entries))
    scale = common_scale(exponents)
    return [each * scale[:, k, None] for k, each in enumerate(found)]


class Estimated:
    """Gaussian inputs were tried."""

    def __init__(self, sources: Sequence[WeightSource], plan: Plan) -> None:
        self.plan, self.n = plan, plan.probes or PROBES
        self.statistic = f"{self.n} Gaussian inputs, seed {plan.seed}"
        self._probed = [probe(source, self.n, plan.seed) for source in sources]

    def found(self, i: int, j: int, measure: Measure) -> PairValues:
        return _estimated(measure, self._probed[i], self._probed[j])

    def value(self, i: int, j: int, measure: Measure) -> Array:
        return array_of(snap_to_bounds(self.found(i, j, measure).value, measure))

    def with_other(self, i: int, other: WeightSource) -> dict[str, PairValues]:
        probed = probe(other, self.n, self.plan.seed)
        return {measure.name: _estimated(measure, self._probed[i], probed) for measure in self.plan.measures}


def _estimated(measure: Measure, a: Probed, b: Probed) -> PairValues:
    kind = centred(measure)
    xy, xx, yy = a.met(b, centre=kind), a.size(centre=kind)[..., :, None], b.size(centre=kind)[..., None, :]
    whole = measure(measure.reads(xx.sum(0), yy.sum(0), xy.sum(0)))
    without = measure(measure.reads(*(each.sum(0) - each for each in (xx, yy, xy))))
    return PairValues(whole, without, None)
