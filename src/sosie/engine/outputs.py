"""The door to comparing what models answer: one pass, one result, the same kind as for layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import Chunk, answer_in, borrowed, model_arguments, without_labels
from ..data.shifts import Shift, open_shifts
from ..measures import MEASURES, Measure, chance_of, find, snap_to_bounds
from ..process_state import products
from ..progress import Progress
from ..results import ARRAYS, Caveat, Comparison, Comparisons, Estimate, Side
from ..stats import Answers, MarkedPredictions, OutputSums, Predictions, moved, on_device
from . import caveats
from .answering import SITE, Answering, Labels, ModelAnswering, SavedAnswering, open_answering
from .distributed import SingleProcess, together
from .network import number_duplicates
from .provenance import digest_of, provenance
from .stream import Stream
from .uncertainty import FEWEST_GROUPS, around, by_jackknife

# From sums over outputs to values, with interval, chance and caveats

Grid = dict[tuple[str, str], OutputSums]  # by the sites of A and of B


def evaluate_outputs(
    measures: Sequence[Measure], grid: Grid, sides: tuple[Side, Side], doubts: Sequence[str]
) -> dict[str, Estimate]:
    """The values of measures of outputs, for every pair of sites."""
    return {measure.name: _of_grid(measure, grid, sides, doubts) for measure in measures}


def _of_grid(measure: Measure, grid: Grid, sides: tuple[Side, Side], doubts: Sequence[str]) -> Estimate:
    cells = {sites: _values(measure, sums, doubts) for sites, sums in grid.items()}
    first = next(iter(cells.values()))
    if len(cells) == 1:
        return first
    own = {  # what is said of every cell is said once
        Caveat(caveat.text) if caveat.text in doubts else Caveat(caveat.text, *sites): None
        for sites, values in cells.items()
        for caveat in values.caveats
    }
    arrays: dict[str, Any] = {kind: _joined(cells, sides, kind) for kind in ARRAYS}
    return replace(first, caveats=tuple(own), **arrays)


def _joined(cells: dict[tuple[str, str], Estimate], sides: tuple[Side, Side], kind: str) -> np.ndarray | None:
    """One matrix of all cells; NaN where a cell has no such number, None where none has."""
    found = {sites: getattr(values, kind) for sites, values in cells.items()}
    if all(number is None for number in found.values()):
        return None
    rows = [[found[a, b] for b in sides[1].sites] for a in sides[0].sites]
    return np.array([[np.nan if number is None else number.item() for number in row] for row in rows])


def accuracies(sums: OutputSums) -> tuple[float, float] | None:
    """Of both models, where there were labels."""
    if MarkedPredictions not in sums.supplies:
        return None
    a, b = (float(sums.sums[name].sum()) / sums.n for name in ("right_a", "right_b"))
    return a, b


def _values(measure: Measure, sums: OutputSums, doubts: Sequence[str]) -> Estimate:
    found = [Caveat(text) for text in doubts]
    try:
        with torch.no_grad():
            value = np.array([[float(snap_to_bounds(measure.from_outputs(sums), measure))]])
    except ValueError as error:
        value = np.array([[np.nan]])
        found.append(Caveat(f"undefined: {error}"))
    found += [*_ties(measure, sums), *caveats.of_bounds(measure, value)]
    low, high = _interval(measure, sums, value)
    chance = None if np.isnan(value).any() else chance_of(measure.base, sums)
    return Estimate(
        value=value,
        n=sums.n,
        statistic=sums.describe(),
        closer=measure.closer,
        bounds=measure.bounds,
        same=measure.same,
        low=low,
        high=high,
        null=None if chance is None else np.array([[chance.mean]]),
        null_spread=None if chance is None or chance.spread is None else np.array([[chance.spread]]),
        p=None if chance is None or chance.p is None else np.array([[chance.p]]),
        caveats=tuple(found),
    )


def _interval(measure: Measure, sums: OutputSums, value: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Delete-one-group jackknife; none where there are few groups, or one carries all that defines the value."""
    if np.isnan(value).any() or int(sums.groups.sum()) < FEWEST_GROUPS:
        return None, None
    try:
        with torch.no_grad():
            without = measure.from_outputs(sums, jackknife=True)[sums.groups]
    except ValueError:
        return None, None
    return around(measure, value, by_jackknife(without[:, None, None].detach().cpu().numpy()))


def _ties(measure: Measure, sums: OutputSums) -> Iterator[Caveat]:
    if issubclass(measure.reads, Predictions):
        for side, count in zip("AB", sums.ties, strict=True):
            if count:
                yield Caveat(f"{count} of {sums.n} outputs of {side} have several largest entries: the first counts")


# What models are shown: the inputs as they are, or each of them under several shifts

Key = tuple[str, int | None]  # a shift, and the model it is against
AS_THEY_ARE: Key = (SITE, None)


@dataclass(frozen=True)
class Stimuli:
    """No shifts: one site, "output". Shifts: a site for each, and two for an attack, on A and on B."""

    shifts: tuple[Shift, ...] = ()
    seed: int = 0
    inputs: Callable[[Any], Any] | None = None

    @property
    def wants_labels(self) -> bool:
        return any(shift.attack is not None and shift.attack.needs_labels for shift in self.shifts)

    def sites(self, pair: tuple[int, int]) -> dict[str, Key]:
        """The sites of a pair of models, by name."""
        if not self.shifts:
            return {SITE: AS_THEY_ARE}
        found: dict[str, Key] = {}
        for shift in self.shifts:
            if shift.is_against_a_model:
                found |= {f"{shift.label} on {side}": (shift.label, k) for side, k in zip("AB", pair, strict=True)}
            else:
                found[shift.label] = (shift.label, None)
        return found

    def of(self, chunk: Chunk, sources: Mapping[int, Answering], labels: Tensor | None) -> dict[Key, Chunk]:
        """The chunk under every shift, each attack on every model."""
        if not self.shifts:
            return {AS_THEY_ARE: chunk}
        images = self._images(chunk.batch)
        index = torch.arange(chunk.start, chunk.start + chunk.count)
        found: dict[Key, Chunk] = {}
        for shift in self.shifts:
            if not shift.is_against_a_model:
                changed = shift.of_any_model(images, seed=self.seed, index=index)
                found[shift.label, None] = replace(chunk, batch=changed)
                continue
            for k, source in sources.items():
                assert shift.attack is not None
                moved = images.to(_home(source))
                changed = shift.attack(_logits_of(source, chunk), moved, labels, seed=self.seed, index=index)
                found[shift.label, k] = replace(chunk, batch=changed)
        return found

    def unchanged(self, batch: Any) -> Any:
        """What the models are given of a batch under no shift."""
        return self._images(batch) if self.shifts else batch

    def _images(self, batch: Any) -> Tensor:
        images = without_labels(batch) if self.inputs is None else self.inputs(batch)
        if isinstance(images, (tuple, list)) and len(images) == 1:
            images = images[0]
        if not isinstance(images, Tensor) or not images.is_floating_point():
            what = str(images.dtype) if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"shifts change images, a tensor of floats in [0, 1], but a batch gives {what}")
        return images


def check_shiftable(sources: list[Answering]) -> None:
    if saved := [source.name for source in sources if not isinstance(source, ModelAnswering)]:
        raise TypeError(f"shifts need models to show changed inputs to, but {saved[0]} is saved predictions")


def _logits_of(source: Answering, chunk: Chunk) -> Callable[[Tensor], Tensor]:
    """What the model answers to images, as numbers whose softmax is its prediction."""
    assert isinstance(source, ModelAnswering)

    def logits(images: Tensor) -> Tensor:
        args, kwargs = model_arguments(images, prepare=source.prepare)
        found = answer_in(source.model(*args, **kwargs))
        assert found is not None
        return found.log() if source.reader.kind == "probabilities" else found

    if source.reader.kind == "auto":
        source.answer(chunk, None)  # the first answer decides what the outputs are
    if source.reader.kind not in ("logits", "probabilities"):
        raise ValueError(f"{source.name}: attacks need logits or probabilities over classes, not {source.reader.kind}")
    return logits


def _home(source: Answering) -> torch.device:
    assert isinstance(source, ModelAnswering)
    return source.home or torch.device("cpu")


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
        number_duplicates(sources)
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
    ranks: SingleProcess
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
