"""The door to comparing what models answer: one pass, one result, the same kind as for layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..capture import Chunk, borrowed
from ..data.shifts import open_shifts
from ..measures import MEASURES, Measure, find
from ..process_state import products
from ..progress import Progress
from ..results import Comparison, Comparisons, Side
from ..stats import Answers, OutputSums, moved, on_device
from .answering import Answering, Labels, ModelAnswering, SavedAnswering, open_answering
from .digest import digest_of
from .output_values import Grid, accuracies, evaluate_outputs
from .provenance import provenance
from .sources import tell_apart
from .spread import Alone, together
from .stimuli import Key, Stimuli, check_shiftable
from .stream import Stream

Pair = tuple[int, int]
SAVED_CHUNK = 8192  # saved outputs that are read at a time


def compare_outputs(
    model_a: Any,
    model_b: Any = None,
    data: Any = None,
    measures: str | Measure | Sequence[str | Measure] | None = None,
    *,
    labels: Any = None,
    kind: str = "auto",
    shifts: str | Sequence[str] | None = None,
    seed: int = 0,
    prepare_a: Callable[[Any], Any] | None = None,
    prepare_b: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    max_rows: int | None = None,
    spread: bool = True,
) -> Comparison | Comparisons:
    """Compare what models answer to the same inputs: agreement, errors in common, divergence; in one pass.

    `model_a`, `model_b`: modules, model specifications, or predictions made earlier (an array, {name: array}, a
    .npz or .safetensors file with one array). `compare_outputs([m1, m2, m3], data)` and `compare_outputs({name: array
    or model, …})` compare all pairs. `data`: as in `compare`; predictions alone need none. `measures`: None takes all
    that the outputs and labels at hand support.

    `labels`: (n,) class numbers, or a function batch → labels; None takes whole numbers y from (x, y) batches or
    `labels` from dicts. `kind`: what the outputs are, see `sosie.measure`. Of tuples, dicts and ModelOutputs `logits`
    count, else the first tensor. Each side has one site, "output". Intervals leave out each of 32 groups of inputs in
    turn; `null` is the mean over shuffled pairings, in closed form, where that is known.

    `shifts`: what happens to the images, in [0, 1] before `prepare`: "clean", a corruption ("fog", "fog(severity=5)"),
    an attack ("pgd(epsilon=0.1)") or "gaussian" noise; "corruptions" and "attacks" name all. They are the sites, an
    attack being two, on A and on B; each is compared with each, on the same inputs. Attacks lead away from the labels,
    or without any from what the attacked model answers. What is random comes from `seed`. `spread`: as in `compare`.
    """
    with together(spread) as ranks:
        things, names, data = _things(model_a, model_b, data)
        chosen = None if measures is None else _chosen(measures)
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        if len(things) > 2 and prepare_b is not None:
            raise ValueError("with more than two models, prepare_a is for all of them; leave prepare_b out")
        prepares = [prepare_a] * len(things) if len(things) > 2 else [prepare_a, prepare_b]
        sources = [
            open_answering(
                thing, name, kind=kind, prepare=prepare, inputs=inputs if shifts is None else None, device=device
            )
            for thing, name, prepare in zip(things, names, prepares, strict=True)
        ]
        tell_apart(sources)
        stimuli = Stimuli()
        if shifts is not None:
            check_shiftable(sources)
            stimuli = Stimuli(open_shifts(shifts), seed, inputs)
        asked = _Asked(sources, chosen, Labels(labels), max_rows, stimuli, ranks)
        sums = asked.run(data)

        def result() -> Comparison | Comparisons:
            doubts = asked.check_ends(sums)
            settings = {"kind": kind, "device": str(device or "each model's own"), **asked.about_shifts()}
            if max_rows is not None:
                settings["max_rows"] = str(max_rows)
            models = [source.describe() for source in sources]
            about = provenance(settings=settings, models=models, data=data, processes=ranks.several)
            found = {
                pair: _comparison(grid, asked.sides(*pair), chosen, [*doubts, *asked.mixing(*pair)], about)
                for pair, grid in sums.items()
            }
            return found[0, 1] if len(sources) == 2 else Comparisons(tuple(source.name for source in sources), found)

        return ranks.once(result)


@dataclass
class _Asked:
    """One pass over the data: every source answers each chunk once, and each pair's sums grow."""

    sources: list[Answering]
    measures: tuple[Measure, ...] | None
    labels: Labels
    max_rows: int | None
    stimuli: Stimuli
    ranks: Alone
    _labelled: bool = field(default=False, init=False)
    _place: torch.device | None = field(default=None, init=False)
    _mixing: dict[int, str | None] = field(default_factory=dict, init=False)  # of each model, in words

    def __post_init__(self) -> None:
        identities = [source.identity() for source in self.sources]
        self.twins = [identities.index(identity) for identity in identities]

    def run(self, data: Any) -> dict[Pair, Grid]:
        """The sums of each pair; of several processes in the first only."""
        wanted = self.measures is None or any("labels" in measure.needs for measure in self.measures)
        wanted = wanted or self.stimuli.wants_labels
        names = " and ".join(dict.fromkeys(source.name for source in self.sources))
        totals: dict[Pair, Grid] = {}
        task = f"comparing the outputs of {names}"
        with ExitStack() as stack:
            models = [source.model for source in self.sources if isinstance(source, ModelAnswering)]
            stack.enter_context(borrowed(models))
            for k in dict.fromkeys(self.twins):
                stack.enter_context(self.sources[k].opened())
            chunks, expected = self._chunks(data)
            bar = stack.enter_context(Progress(task, expected, "inputs", shown=self.ranks.first))
            for chunk in self.ranks.deal(chunks, self):
                parts = self._answer(chunk, wanted)
                if not totals and self.measures is not None:
                    _check_measures(self.measures, parts)
                _add(totals, parts)
                bar.advance(chunk.count)
        self.ranks.collect(on_device(totals, torch.device("cpu")), lambda theirs: _add(totals, theirs))
        return totals

    def learnt(self) -> list[tuple[str, int | None]]:
        """What the first answers were: classes, probabilities, numbers."""
        return [source.reader.learnt() for source in self.sources]

    def learn(self, found: list[tuple[str, int | None]]) -> None:
        for source, decided in zip(self.sources, found, strict=True):
            source.reader.learn(decided)

    def _answer(self, chunk: Chunk, wanted: bool) -> dict[Pair, Grid]:
        labels = self.labels.of(chunk) if wanted else None
        self._labelled = labels is not None
        unique = {k: self.sources[k] for k in dict.fromkeys(self.twins)}
        shown = self.stimuli.of(chunk, unique, labels)
        answers: dict[tuple[int, Key], Answers] = {}
        for (k, source), (key, stimulus) in itertools.product(unique.items(), shown.items()):
            answers[k, key] = answer = source.answer(stimulus, self._place)
            found = answer.values if answer.predicted is None else answer.predicted
            self._place = self._place or (None if found is None else found.device)
        return self._join(answers, labels, chunk.start)

    @products()
    def _join(
        self, answers: dict[tuple[int, Key], Answers], labels: torch.Tensor | None, start: int
    ) -> dict[Pair, Grid]:
        parts: dict[Pair, Grid] = {}
        for i, j in itertools.combinations(range(len(self.sources)), 2):
            a, b = self.twins[i], self.twins[j]
            sites = self.stimuli.sites((a, b)).items()
            try:
                parts[i, j] = {
                    (site_a, site_b): OutputSums.join(answers[a, s], answers[b, t], labels, start=start)
                    for (site_a, s), (site_b, t) in itertools.product(sites, sites)
                }
            except ValueError as error:
                names = f"{self.sources[i].name} and {self.sources[j].name}"
                raise ValueError(f"{names}, inputs from {start} on: {error}") from error
        return parts

    def mixing(self, *pair: int) -> list[str]:
        """What there is to say about models that mix the inputs of a batch."""
        notes = (self._mixing.get(k) for k in dict.fromkeys(self.twins[i] for i in pair))
        return [note for note in notes if note is not None]

    def about_shifts(self) -> dict[str, str]:
        if not self.stimuli.shifts:
            return {}
        found = {"shifts": ", ".join(shift.label for shift in self.stimuli.shifts), "seed": str(self.stimuli.seed)}
        if self.stimuli.wants_labels:
            found["attacks"] = f"away from {'the labels' if self._labelled else 'what the attacked model answers'}"
        return found

    def _chunks(self, data: Any) -> tuple[Iterator[Chunk], int | None]:
        if data is not None:
            stream = Stream.reading(data)
            self.ranks.agree(lambda: self._about_parts(stream))
            first = self.stimuli.unchanged(stream.first)
            self._mixing = {k: self.sources[k].mixing(first) for k in dict.fromkeys(self.twins)}
            most = stream.total if stream.total is None else min(stream.total, self.max_rows or stream.total)
            most = most if most is None else -(-most // self.ranks.share.of)
            return stream.chunks(block=None, max_rows=self.max_rows, share=self.ranks.share), most
        counts = {source.name: len(source.saved) for source in self.sources if isinstance(source, SavedAnswering)}
        if any(isinstance(source, ModelAnswering) for source in self.sources):
            raise TypeError("comparing the outputs of models needs data: compare_outputs(model_a, model_b, data)")
        if len(set(counts.values())) > 1:
            text = ", ".join(f"{count} of {name}" for name, count in counts.items())
            raise ValueError(f"need outputs of the same inputs, got {text}")
        end = next(iter(counts.values()))
        if not end:
            raise ValueError("no outputs to compare: the predictions are empty")
        end = min(end, self.max_rows or end)
        starts = range(0, end, SAVED_CHUNK)
        return (Chunk(None, start, min(SAVED_CHUNK, end - start)) for start in starts), end

    def _about_parts(self, stream: Stream) -> dict[str, str]:
        """What processes that share the work have to have in common."""
        weights = [source.model.state_dict() for source in self.sources if isinstance(source, ModelAnswering)]
        return {
            "models": digest_of(weights),
            "the first batch": digest_of(stream.first),
            "the number of inputs": str(stream.total),
            "what is asked": repr((self.measures, self.max_rows, [source.name for source in self.sources])),
        }

    def check_ends(self, sums: dict[Pair, Grid]) -> list[str]:
        """What there is to say about the end; predictions or labels that go on after the data are of other inputs."""
        done = next(iter(next(iter(sums.values())).values())).n
        if self.max_rows is not None:
            short = done < self.max_rows
            return [f"max_rows={self.max_rows}, but the data had {done} inputs"] if short else []
        lengths = {source.name: len(source.saved) for source in self.sources if isinstance(source, SavedAnswering)}
        if isinstance(self.labels.given, torch.Tensor):
            lengths["labels"] = len(self.labels.given)
        for name, length in lengths.items():
            if length != done:
                raise ValueError(f"need outputs of the same inputs: {name} has {length}, the data {done}")
        return []

    def sides(self, i: int, j: int) -> tuple[Side, Side]:
        found = []
        for k in (i, j):
            side = self.sources[self.twins[k]].side
            assert side is not None
            sites = tuple(self.stimuli.sites((i, j)))
            each = {name: getattr(side, name) * len(sites) for name in ("widths", "shapes", "dtypes")}
            found.append(replace(side, name=self.sources[k].name, sites=sites, **each))
        return found[0], found[1]


def _things(model_a: Any, model_b: Any, data: Any) -> tuple[list[Any], list[str | None], Any]:
    """What is compared, its names where they are given, and the data."""
    several = isinstance(model_a, (list, tuple)) and not isinstance(model_a, nn.Module)
    if isinstance(model_a, Mapping) and len(model_a) > 1:
        several = True
    if not several:
        if model_b is None:
            raise TypeError("compare_outputs needs two models (or predictions), or a list of them and data")
        return [model_a, model_b], [None, None], data
    if data is not None and model_b is not None:
        raise TypeError("with several models there is no second one: compare_outputs([m1, m2, m3], data)")
    things = list(model_a.values()) if isinstance(model_a, Mapping) else list(model_a)
    if len(things) < 2:
        raise ValueError(f"need at least two models to compare, got {len(things)}")
    names: list[str | None] = list(map(str, model_a)) if isinstance(model_a, Mapping) else [None] * len(things)
    return things, names, model_b if data is None else data


def _chosen(measures: str | Measure | Sequence[str | Measure]) -> tuple[Measure, ...]:
    found = tuple(find(m) for m in ([measures] if isinstance(measures, (str, Measure)) else measures))
    if not found:
        raise ValueError("no measures asked for; `sosie measures` lists them")
    if others := [measure.name for measure in found if not measure.reads_outputs]:
        raise ValueError(f"{', '.join(others)}: of layers, not of what models answer; use compare")
    return found


def _check_measures(measures: Sequence[Measure], parts: Mapping[Pair, Grid]) -> None:
    """What was asked for must be there, and that is known after the first chunk."""
    every = itertools.chain.from_iterable(grid.values() for grid in parts.values())
    for sums, measure in itertools.product(every, measures):
        if measure.reads not in sums.supplies:
            raise ValueError(f"{measure.name}: {sums.why_not(measure.reads)}")


def _add(totals: dict[Pair, Grid], parts: Mapping[Pair, Grid]) -> None:
    for pair, part in parts.items():
        grid = totals.get(pair)
        totals[pair] = part if grid is None else {s: sums.merge(moved(part[s], like=sums)) for s, sums in grid.items()}


@products()
def _comparison(
    grid: Grid,
    sides: tuple[Side, Side],
    chosen: tuple[Measure, ...] | None,
    doubts: list[str],
    about: dict[str, Any],
) -> Comparison:
    sums = next(iter(grid.values()))
    if chosen is None:
        chosen = tuple(m for m in MEASURES.values() if m.reads_outputs and m.reads in sums.supplies)
    about = {**about, "inputs": sums.n, "outputs": list(sums.kinds)}
    known = {site: accuracies(grid[site, site]) for site in sides[0].sites}
    if None not in known.values():
        right = {site: list(both) for site, both in known.items() if both is not None}
        about["accuracy"] = right if len(right) > 1 else next(iter(right.values()))
    return Comparison(*sides, evaluate_outputs(chosen, grid, sides, doubts), "outputs", about)
