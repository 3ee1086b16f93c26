"""`diff`: whether two models are the same, entry by entry, and if not, which module makes the error.

The way of one diff: a look at a few inputs pairs the sites (`pairing`), one pass over the data measures the errors
(`replay`), the floor says which of them matter (`floor`), and the first that does is followed down to the innermost
module that makes it (`_Search`). The rest turns numbers into rows and a sentence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..capture import Chunk, count_inputs, cut, named_arguments, select, unwrap, without_labels
from ..capture.batches import is_text
from ..capture.calls import Seen, calls_inside
from ..capture.restore import borrowed
from ..capture.sites import Names, SilentSite, ancestors, find_name, split_call
from ..checks import listed
from ..engine.network import OUTPUT, for_each, models_and_data, number_duplicates, pairing_notes
from ..engine.outputs import ids_in, right_answers
from ..engine.plan import MEMORY, parse_size
from ..engine.provenance import provenance
from ..engine.stream import CACHE, Stream
from ..files import OtherFile
from ..measures import largest_difference, least_row_cosine, mismatched_share, relative_error, row_cosine
from ..models.exported import AsExported
from ..models.specification import Tokenise
from ..models.values import Part
from ..progress import Progress
from ..results import QUANTILES, Diff, Place, SiteDiff, counted
from ..stats import coarser, jackknife
from .answers import AnswerSums, logits_in
from .explain import near, notes_of, same_features, with_axes
from .floor import BITS, Floor, Level
from .pairing import NEAR, Map, Pair, check_map, fused, no_pairs, pair_sites, read_map
from .record import Record, is_record
from .replay import WHOLE, Gap, Reference, Replay, Subject
from .saved import Saved, saved_in

FEW = 2  # inputs that show whether a model takes batches of any size, and whether a forward changes it
LOOK = 8  # inputs of the first batch that are looked at before the pass, and on which a module is opened
FLOOR_INPUTS = 100  # the most on which the floor is measured; else a tenth of them
OPENED = 3  # guilty sites that are opened
INPUTS = Pair("input", "input", "the inputs")


def diff(
    model_a: Any,
    model_b: Any = None,
    data: Any = None,
    *,
    sites: Any = None,
    sites_a: Any = None,
    sites_b: Any = None,
    map: Map = None,
    floor: Any = "batch",
    rtol: float | None = None,
    atol: float | None = None,
    replay: bool = True,
    prepare: Callable[[Any], Any] | None = None,
    prepare_a: Callable[[Any], Any] | None = None,
    prepare_b: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    inputs_a: Callable[[Any], Any] | None = None,
    inputs_b: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    memory: int | str | None = None,
    max_rows: int | None = None,
    names: Sequence[str | None] | None = None,
) -> Diff:
    """Whether `model_b` is the same model as `model_a`, entry by entry, and if not, which module makes the error.

    `model_a`, `model_b`: modules or model specifications, also as {name: model}; `data` as in `compare`. Two folders
    or files of weights are compared tensor by tensor without data. Both models read the same inputs and see the same
    random numbers. They run in evaluation mode; a layer that is in training mode inside a model in evaluation mode
    stays so. In place of A, a record (`sosie.diffing.record`), which holds its inputs; in place of either, saved
    activations ({site: array}, .npz, or a file of `extract`), the answer as "output", or a second record.

    `sites`, `sites_a`, `sites_b`: where the models are watched, by default their blocks or layers, always with the
    output. `map`: {site of A: site of B} where names differ, a function of A's names or a file with lines a=b; else
    sites are paired by name, or in order and by shape.

    `prepare`, `prepare_a`, `prepare_b`: how the inputs of both models, of A or of B are prepared, as in `compare`.
    `inputs`, `inputs_a`, `inputs_b`: a function from a batch to a model's arguments, which may have other names in A
    and B.

    `floor`: what must not matter. "batch": half as many inputs at a time, and the rounding of the models' type;
    "bfloat16", "float16" or "tf32": A in that precision; a model that counts as the same as A; or a relative error. An
    error is beyond the floor if it is more than `factor` (of the result) times as large.

    `replay` runs every paired module of B on A's activations too, which tells the error that it makes from what it
    inherits, and descends to the innermost module: `first` of the result. `rtol` and `atol`: the tolerances of
    `mismatched`, by default those of `torch.testing.assert_close`.
    """
    things, names, data = models_and_data(model_a, model_b, data, names)
    if len(things) != 2:
        raise ValueError(f"diff compares two models, got {len(things)}")
    model_a, model_b = things
    recorded = Record.load(model_a, names[0]) if is_record(model_a) else None
    if recorded is not None:
        data = recorded.data(data)
    saved = [None if recorded is not None else saved_in(model_a, data), saved_in(model_b, data, recorded)]
    if data is None and None not in saved:
        data = torch.arange(min(each.file.n for each in saved if each is not None))
    if data is None:
        return _without_data(model_a, model_b, names)
    prepares = for_each("prepare", 2, prepare_a, prepare_b, prepare)
    given = for_each("inputs", 2, inputs_a, inputs_b, inputs)

    def subject(k: int) -> Subject:
        if (found := saved[k]) is not None:
            return Saved(found, names[k] or found.name)
        return Subject.of(things[k], name=names[k], prepare=prepares[k], inputs=given[k], device=device)

    a: Reference = recorded or subject(0)
    b = subject(1)
    a.sites, b.sites = for_each("sites", 2, sites_a, sites_b, sites)
    if isinstance(b, Saved) and a.sites is None and isinstance(a, Subject):
        a.sites = [site.label for site in b.file.sites if find_name(Names.of(unwrap(a.model)), site.label)] or None
    number_duplicates([a, b])
    with ExitStack() as stack:
        stack.enter_context(borrowed([each.model for each in (a, b) if isinstance(each, Subject)]))
        stack.enter_context(a.borrowed())
        stack.enter_context(b.borrowed())
        run = _Run(a, b, Stream.of(data, [a, b], max_rows), map, floor, parse_size(memory) or MEMORY)
        return run.result(replay=replay, rtol=rtol, atol=atol, data=data)


def _without_data(a: Any, b: Any, names: Sequence[str | None] | None) -> Diff:
    """Two folders, files or state dicts of weights."""
    if any(isinstance(model, nn.Module) for model in (a, b)):
        needs = "diff needs data to run models on, the third argument: diff(model_a, model_b, data)"
        if isinstance(a, (str, os.PathLike)) and Path(a).is_file():
            raise OtherFile(f"{a} is not a golden record, which would hold its inputs; {needs}")
        if isinstance(a, (str, os.PathLike)) and Path(a).suffix == ".safetensors" and "@" not in str(a):
            raise FileNotFoundError(f"no file {a}: a golden record would hold its inputs; {needs}")
        raise TypeError(needs)
    paths = [str(path).removeprefix("hf:") for path in (a, b) if isinstance(path, (str, os.PathLike))]
    if missing := [path for path in paths if not Path(path).exists()]:
        raise TypeError(
            f"there is no folder or file {listed(missing)}, whose weights could be compared without data; to run "
            "models, give data as the third argument (--data)"
        )
    from .weights import diff_weights

    name_a, name_b = names or (None, None)
    return diff_weights(a, b, names=(name_a, name_b))


@dataclass
class _Guilt:
    """Where an error is made: by a module of B, or by the code of the module around, before one of its parts."""

    pair: Pair
    made: float
    floor: float
    inside: bool  # the module makes it, so it can be opened; else the code before it, or after the last


Look = tuple[list[Seen], dict[str, Tensor]]  # sites in execution order, and their activations for a few inputs


def _paired(
    a: Look, b: Look, wanted: Mapping[str, str], *, strict: bool = True
) -> tuple[list[Pair], list[Pair], set[str]]:
    """The pairs of sites; those of them by place and shape alone whose numbers are not alike; and the sites of A whose
    features B has in another order.
    """
    (seen_a, first_a), (seen_b, first_b) = a, b
    found = pair_sites(seen_a, seen_b, wanted=wanted, strict=strict)
    guessed = {pair.a for pair in found if pair.is_doubtful}
    if len(guessed) == len(found) < min(len(seen_a), len(seen_b)) / 2 + 0.5 and seen_a and seen_b and strict:
        raise no_pairs(seen_a, seen_b)
    shuffled = {pair.a for pair in found if same_features(first_a[pair.a], first_b[pair.b])}
    pairs = with_axes(found, first_a, first_b)
    doubtful = [
        pair
        for pair in pairs
        if pair.a in guessed - shuffled and pair.axes is None and not near(first_a[pair.a], first_b[pair.b])
    ]
    return pairs, doubtful, shuffled


class _Run:
    """One diff: what it knows before the pass, the pass, and what follows from it."""

    def __init__(self, a: Reference, b: Subject, stream: Stream, map: Map, floor: Any, memory: int) -> None:
        self.a, self.b, self.stream, self.memory = a, b, stream, memory
        self.caveats: list[str] = []
        self.answers = AnswerSums()
        self.look = self._first(min(LOOK, count_inputs(stream.first)))
        for subject in (a, b):
            if training := subject.in_training():
                self.caveats.append(
                    f"{subject.name} is in evaluation mode, but not {listed(training, 3)}, which stay in training mode"
                )
        if isinstance(a, Saved) or isinstance(b, Saved):
            self.caveats += pairing_notes(a, b, stream.first)
        if a.dtype != b.dtype:
            b.cast = b.dtype if b.values is None else None  # which casts by itself
            self.caveats.append(
                f"{a.name} is of {BITS.get(a.dtype, a.dtype)} and {b.name} of {BITS.get(b.dtype, b.dtype)}: inputs are "
                f"cast, and the floor is that of {BITS.get(coarser(a.dtype, b.dtype))}"
            )
        self.batch_size: int | None = None  # the only one that the models take; None: any
        for subject in (a, b):
            if isinstance(subject, Subject):
                self._settle(subject)
        self._pair(map)
        if isinstance(a, Record):
            self.floor = a.floor(floor, b)
        else:
            self.floor = Floor.of(floor, cast(Subject, a), b, memory, stream.first)

    # Before the pass

    def _first(self, count: int) -> Chunk:
        return Chunk(cut(self.stream.first, 0, count), self.stream.first_row, count)

    def _settle(self, subject: Subject) -> None:
        """Run a few inputs, in a batch of the size that the model takes."""
        few = self._first(min(FEW, self.look.count))

        def run() -> None:
            if subject.batch_size is not None:
                self._read_in_batches_of(subject.batch_size, subject.name)
            subject.settle(few if self.batch_size is None else self.look)

        subject.learn_batch_size(few, count_inputs(self.stream.first), run)

    def _read_in_batches_of(self, size: int, name: str) -> None:
        if self.batch_size not in (None, size):
            raise ValueError(
                f"{self.a.name} takes batches of {self.batch_size} and {name} batches of {size}: export both for one "
                "batch size, or for any"
            )
        self.batch_size, self.stream = size, self.stream.in_batches_of(size)
        if (there := min(count_inputs(self.stream.first), self.stream.max_rows or size)) < size:
            raise ValueError(f"{name} takes batches of {size}, but there are only {counted(there, 'input')}")
        self.look = self._first(size)

    def _pair(self, map: Map) -> None:
        """Find the sites of both models, from a look at a few inputs, and which belong together."""
        look_a = self._sites(self.a)
        wanted = read_map(map, [site.label for site in look_a[0]])
        given = self.a.sites, self.b.sites
        self.of_record = isinstance(self.a, Record) and given[1] is not None  # some of its sites, as asked for
        self.b.sites = self._sites_of_b(look_a[0], wanted)
        try:
            look_b = self._sites(self.b)
        except SilentSite:  # B has modules of these names, but what they did is written out, as by torch.fx
            if given != (None, None) or wanted or isinstance(self.a, Record):
                raise
            self.a.sites = self.b.sites = "leaves"
            look_a, look_b = self._sites(self.a), self._sites(self.b)
        seen_a, first_a = look_a
        if isinstance(unwrap(self.b.model), torch.jit.ScriptModule):
            layers = _layers_of_script(self.b, seen_a)
            look_b = layers, {each.label: first_a[each.label] for each in layers}
            if layers:
                self.caveats.append(
                    f"the layers of {self.b.name}, which is TorchScript, cannot be watched: each is run alone on A's "
                    "inputs, so that its error is the one that it makes itself"
                )
        check_map(wanted, [site.label for site in seen_a], [site.label for site in look_b[0]])
        self.pairs, doubtful, self.shuffled = _paired(look_a, look_b, wanted)
        if doubtful and given == (None, None) and not wanted and not self.b.sealed:
            self.b.sites = "leaves"  # A may give what a part of B's block gives: before its activation, say
            leaves = self._sites(self.b)
            other = _paired(look_a, leaves, wanted, strict=False)
            if len(other[0]) - len(other[1]) > len(self.pairs) - len(doubtful):
                look_b, (self.pairs, doubtful, self.shuffled) = leaves, other
        seen_b, first_b = look_b
        self.caveats += fused(seen_a, seen_b, self.pairs)
        if doubtful:
            shown = listed([f"{pair.a} and {pair.b}" for pair in doubtful], 3)
            alike = OUTPUT in first_a and OUTPUT in first_b and near(first_a[OUTPUT], first_b[OUTPUT], NEAR)
            what = "while the outputs agree: they are not compared" if alike else "they are compared all the same"
            self.caveats.append(
                f"{shown} were matched by position and shape alone; their values differ, {what}. map= sets the pairs"
            )
            if alike:
                self.pairs = [pair for pair in self.pairs if pair not in doubtful]
        self.seen_a, self.seen_b = ([replace(site, activation=None) for site in seen] for seen in (seen_a, seen_b))

    def _sites_of_b(self, seen_a: Sequence[Seen], wanted: Mapping[str, str]) -> Any:
        """B's sites: those asked for, else modules with the names of A's sites, else its own default."""
        root = unwrap(self.b.model)
        if self.b.sites is not None or self.b.sealed:
            return self.b.sites
        names = Names.of(root)
        # Without the number of a call, which B may lack: a name stands for all calls.
        labels = list(dict.fromkeys(wanted.get(site.label, split_call(site.label)[0]) for site in seen_a))
        found = {label: place[0] for label in labels if (place := find_name(names, label)) is not None and place[0]}
        there = [label for label, name in found.items() if not isinstance(names.by_name[name], Part)]
        if there and len(there) * 2 >= len(labels):
            return there
        return [*wanted.values(), *select(names, None)] if wanted else None

    def _sites(self, subject: Reference) -> Look:
        try:
            found = subject.look_at(self.look)
        except SilentSite as error:
            if subject.sites is not None:
                raise
            self.caveats.append(f"{subject.name}: {error}. Only its output is compared")
            return [], {}
        self.caveats += [f"{subject.name}: {site} {why}, and is left out" for site, why in subject.silent.items()]
        if isinstance(subject, Subject) and isinstance(unwrap(subject.model), AsExported):
            self.caveats.append(
                f"the layers of {subject.name} cannot be watched: give the ExportedProgram itself, whose layers have "
                "names"
            )
        return found

    # The pass

    def _chunks(self) -> Iterator[Chunk]:
        """The loader's batches, cut so that A's activations at all sites fit the memory, and a CPU's cache."""
        bytes_ = [math.prod(site.shape) * site.dtype.itemsize // self.look.count for site in self.seen_a] or [1]
        most = max(1, self.memory // (2 * sum(bytes_)))
        if self.a.on_cpu():
            most = max(1, min(most, CACHE // 2 // max(bytes_)))  # B's stand beside them
        most = self.batch_size or most
        for chunk in self.stream.chunks(block=None):
            for start in range(0, chunk.count, most):
                count = min(most, chunk.count - start)
                if self.batch_size and count < most:
                    self.caveats.append(f"the last {counted(count, 'input')} do not fill a batch of {most}: left out")
                    continue
                yield Chunk(cut(chunk.batch, start, start + count), chunk.start + start, count)

    def result(self, *, replay: bool, rtol: float | None, atol: float | None, data: Any) -> Diff:
        runs = replay and not isinstance(self.b, Saved)
        run = Replay(self.a, self.b, self.pairs, replay=runs, as_called=True, rtol=rtol, atol=atol)
        worst, most, inputs = self.look, -1.0, 0
        title = f"comparing {self.a.name} and {self.b.name}"
        first = count_inputs(self.stream.first)
        tenth = (self.stream.expected or first) // 10
        for_floor = min(first, self.stream.max_rows or first, FLOOR_INPUTS, max(LOOK, tenth))
        with Progress(title, self.stream.expected, "inputs") as bar:
            for chunk in self._chunks():
                run.read(chunk)
                self._add_answers(run, chunk)
                inputs += chunk.count
                bar.advance(chunk.count)
                if (error := run.last_error) > most:
                    most = error
                    worst = chunk if self.batch_size else _input(chunk, run.last_worst)
        levels = self.floor.at(self.pairs, [self._first(self.batch_size or for_floor)])
        chunks = [self.look, worst] if worst is not self.look else [self.look]
        search = _Search(self.a, self.b, self.floor, chunks, self.pairs)
        return self._summed_up(run, levels, search, inputs, replay=replay, data=data)

    def _add_answers(self, run: Replay, chunk: Chunk) -> None:
        """What both models answered, if these are logits of the same classes or tokens."""
        model = unwrap(self.b.model)
        ids = ids_in(named_arguments(model, *self.b.arguments(chunk)))
        a, b = (logits_in(answer, ids) for answer in run.answers)
        if a is None or b is None or a.shape != b.shape or len(b) != chunk.count:
            return
        keep = run.masks.of_output()
        keep = keep if keep is not None and keep.shape == b.shape[:2] and b.ndim == 3 else None
        self.answers.add(a, b.to(a.device), keep, right_answers(model, chunk.batch, ids, b, keep), chunk.start)

    # After the pass

    def _summed_up(
        self, run: Replay, levels: Mapping[str, Level], search: _Search, inputs: int, *, replay: bool, data: Any
    ) -> Diff:
        factor = self.floor.factor
        rows = [
            self._row(run, pair, levels[pair.a])
            for pair in [*self.pairs, WHOLE]
            if pair.a in run.entries or pair.a in run.other_shapes
        ]
        if not rows:
            raise TypeError(
                f"nothing can be compared: no site gives numbers in both models, and no numbers, tensors or text are "
                f"found in their answers{f' ({run.unread})' if run.unread else ''}"
            )
        if not any(each.entries for each in run.entries.values()) and not run.other_shapes:
            raise ValueError(
                "no number was compared: the attention_mask marks every token as padding (it has 1 at tokens), or the "
                "activations are empty"
            )
        by_site = {row.site_a: row for row in rows}
        at_end = by_site.get(OUTPUT)
        guilty = list(search.guilty(run, levels, by_site))
        if guilty and self.b.values is not None:
            guilty = search.guilty_between() or guilty
        differs = bool(guilty) or (at_end.beyond if at_end is not None else any(row.beyond for row in rows))
        first: str | None = None
        opened: list[list[SiteDiff]] = []
        words = ""
        if guilty:
            first, opened, words = search.innermost(guilty[0])
            others = [search.innermost(guilt) for guilt in guilty[1:OPENED] if guilt.inside]
            opened += [rows for _, found, _ in others for rows in found]
            names = [name for name, _, _ in others if name != first]
            more = len([guilt for guilt in guilty[OPENED:] if guilt.inside])
            words += f"; errors of their own: {listed(names)}{f' and {more} more' if more else ''}" if names else ""
        elif differs:
            first, words = self._unexplained(rows, replay=replay)
        rows = _with_opened(rows, opened)
        caveats = [*self.caveats, *self.floor.caveats, *self._lost(run)]
        settings = {"factor": factor, "floor": self.floor.words}
        if self.stream.max_rows is not None:
            settings["max_rows"] = self.stream.max_rows
        paired_a, paired_b = {pair.a for pair in self.pairs}, {pair.b for pair in self.pairs}
        models = [self.a.describe(), self.b.describe()]
        return Diff(
            name_a=self.a.name,
            name_b=self.b.name,
            same=not differs,
            verdict=self._verdict(rows, words, differs=differs, found=bool(guilty)),
            first=first,
            sites=tuple(rows),
            outputs=self.answers.result(),
            floor=self.floor.words,
            factor=factor,
            unpaired_a=tuple(site.label for site in self.seen_a if site.label not in paired_a and not self.of_record),
            unpaired_b=tuple(site.label for site in self.seen_b if site.label not in paired_b),
            caveats=tuple(caveats),
            provenance=provenance(settings=settings, models=models, data=data, inputs=inputs),
        )

    def _row(self, run: Replay, pair: Pair, level: Level) -> SiteDiff:
        a, b = (
            next((site.dtype for site in seen if site.label == label), None) or subject.dtype
            for subject, seen, label in ((self.a, self.seen_a, pair.a), (self.b, self.seen_b, pair.b))
        )
        types = str(a).removeprefix("torch."), str(b).removeprefix("torch.")
        row = row_of(run, pair, level, self.floor.factor, types)
        return replace(row, notes=(*row.notes, "features in another order")) if pair.a in self.shuffled else row

    def _unexplained(self, rows: Sequence[SiteDiff], *, replay: bool) -> tuple[str | None, str]:
        """Where an error that no module makes shows first."""
        beyond = next(row for row in rows if row.beyond)
        compiled = [each.name for each in (self.a, self.b) if isinstance(each, Subject) and each.is_compiled]
        if beyond.site_a == OUTPUT and compiled:
            return OUTPUT, f"at the output alone: the compiled code of {listed(compiled)} makes it"
        if not replay:
            return None, f"from {beyond.site_b} on; which module makes it was not sought"
        if all(row.made is None for row in rows):
            return beyond.site_b, f"from {beyond.site_b} on; whether it makes that error or inherits it is not known"
        return beyond.site_b, f"from {beyond.site_b} on"

    def _lost(self, run: Replay) -> list[str]:
        texts = [f"{site}: shape {list(a)} in A and {list(b)} in B" for site, (a, b) in run.other_shapes.items()]
        lost = [f"activations of other shapes are different: {listed(texts, 3, '; ')}"] if texts else []
        nowhere = [site for site, each in run.entries.items() if each.entries and int(each.alike) == each.entries]
        if nowhere:
            lost.append(f"no number is compared at {listed(nowhere, 3)}: all are NaN or infinite in both models alike")
        if run.unread:
            lost.append(f"the answers are not compared: no numbers, tensors or text are found in {run.unread}")
        of_a, of_b = run.other_shapes.get(OUTPUT, ((), ()))
        if of_a[-1:] != of_b[-1:] and hasattr(unwrap(self.b.model), "base_model_prefix"):
            lost.append(
                f"{self.a.describe()}; {self.b.describe()}: a model of transformers is opened with the head that was "
                "saved, hf:folder(head=False) leaves it out"
            )
        lone = [f"{'.'.join(map(str, place))} of {side}" for side, place in sorted(run.lone, key=repr)]
        return [*lost, f"answers that one model alone gives are not compared: {listed(lone, 3)}"] if lone else lost

    def _verdict(self, rows: Sequence[SiteDiff], words: str, *, differs: bool, found: bool) -> str:
        sites = [row for row in rows if not row.inside]
        if not differs:
            undone = [row.site_b for row in sites if row.beyond]
            alone = "the output" if sites[0].site_a == OUTPUT else sites[0].site_b
            count = f"all {len(sites)} sites" if len(sites) > 1 else alone
            if all(row.error == 0 for row in sites):
                return f"The same, bit for bit, at {count}."
            kind = self.floor.kind(self.a, self.b)
            if undone:
                return (
                    f"The same up to {kind} at the output, though not at {listed(undone, 3)}, whose difference later "
                    "layers undo."
                )
            return f"The same up to {kind} at {count}."
        beyond = next((row.site_b for row in sites if row.beyond), None)
        since = f" from {beyond} on" if beyond else ""
        return f"Different{since}: {words}." if found else f"Different {words}."


def _layers_of_script(b: Subject, seen: Sequence[Seen]) -> list[Seen]:
    """The layers of TorchScript that have the names of these modules, which are run alone, each on A's inputs."""
    names = dict(unwrap(b.model).named_modules())
    return [each for each in seen if each.label in names]


def _input(chunk: Chunk, number: int) -> Chunk:
    k = min(max(0, number - chunk.start), chunk.count - 1)
    return Chunk(cut(chunk.batch, k, k + 1), chunk.start + k, 1)


def _with_opened(rows: Sequence[SiteDiff], opened: Sequence[Sequence[SiteDiff]]) -> list[SiteDiff]:
    """The rows with what was found inside modules: each after the one before it there, or after its module."""
    result = list(rows)
    for inner in opened:
        known = [row.site_a for row in result]
        at = known.index(inner[0].inside) + 1 if inner[0].inside in known[:-1] else 0
        for row in inner:
            if row.site_a in known:
                at = known.index(row.site_a) + 1
                continue
            result.insert(at, row)
            known.insert(at, row.site_a)
            at += 1
    return result


def row_of(run: Replay, pair: Pair, level: Level, factor: float, types: tuple[str, str], inside: str = "") -> SiteDiff:
    """The numbers of one pair of sites."""
    label, entries = pair.a, run.entries.get(pair.a)
    made = run.made[label].value() if label in run.made and pair.b not in run.unfit else None
    notes = [f"not run on A's inputs: {run.unfit[pair.b]}"] if pair.b in run.unfit else []
    if made == math.inf:
        notes.append("on A's inputs it answers with another shape, with NaN, or where A gives zeros")
    about: dict[str, Any] = {
        "site_a": pair.a,
        "site_b": pair.b,
        "paired": pair.how,
        "dtype_a": types[0],
        "dtype_b": types[1],
        "made": None if made == math.inf else made,
        "floor": level.error,
        "made_floor": level.made,
        "inside": inside,
    }
    if entries is None or label in run.other_shapes:
        a, b = run.other_shapes[label]
        notes.append(f"{list(a)} in A, {list(b)} in B")
        return SiteDiff(shape=a[1:], error=math.nan, beyond=True, notes=tuple(notes), **about)
    size, apart = float(entries.aa.sum()), float(entries.dd.sum())
    # Squares of numbers below 1e-154 are 0.
    equal = apart == 0 and float(entries.largest) == 0
    lone = int(entries.lone) > 0
    error = math.nan if lone else 0.0 if equal else math.nan if size == 0 else float(relative_error(entries))
    low, high = (None, None) if lone else jackknife(entries) or (None, None)
    at = entries.lone_at if lone else entries.at
    shape = run.shapes[label]
    rest = run.rest[label].value() if label in run.rest else None
    if rest is not None and rest > factor * level.error:
        notes.append(f"other tensors that it returns differ{f' by {rest:.2g}' if math.isfinite(rest) else ''}")
    return SiteDiff(
        shape=shape,
        error=error,
        low=low,
        high=high,
        beyond=math.isnan(error) or max(error, rest or 0.0) > factor * level.error,
        sqnr=None if apart == 0 or size == 0 else 10 * math.log10(size / apart),
        largest=float(largest_difference(entries)),
        at=_place(at.tolist(), shape) if lone or apart else None,
        cosine=float(row_cosine(entries)),
        least_cosine=float(least_row_cosine(entries)),
        mismatched=float(mismatched_share(entries)),
        quantiles=tuple(float(entries.quantile(share)) for share in QUANTILES),
        shift=-float(entries.d.sum()) / max(1, entries.entries),
        slope=None if size == 0 else 1 - float(entries.ad.sum()) / size,
        inputs=entries.inputs,
        notes=(*notes, *notes_of(entries)),
        **about,
    )


def _place(at: Sequence[int], shape: Sequence[int]) -> Place:
    index, rest = [], at[1]
    for size in reversed(shape):
        index.append(rest % size)
        rest //= size
    return Place(at[0], tuple(reversed(index)))


class _Search:
    """Follows an error into the module that makes it, one level at a time."""

    def __init__(self, a: Reference, b: Subject, floor: Floor, chunks: Sequence[Chunk], pairs: Sequence[Pair]) -> None:
        self.a, self.b, self.floor, self.chunks, self.pairs = a, b, floor, chunks, list(pairs)

    def guilty(self, run: Replay, levels: Mapping[str, Level], rows: Mapping[str, SiteDiff]) -> Iterator[_Guilt]:
        """The modules that make an error beyond their floor in execution order, and the code before or after them.

        A site whose error a later one makes good is not guilty: layers that are fused, or features in another order.
        """
        factor = self.floor.factor

        def beyond(gap: Gap | None, floor: float) -> float | None:
            value = None if gap is None else gap.value()
            return value if value is not None and value > factor * floor else None

        made = {pair.a: beyond(run.made.get(pair.a), levels[pair.a].made) for pair in run.pairs}
        for pair in run.pairs:
            if pair.b in run.unfit:
                made[pair.a] = None
        if (error := beyond(run.inputs, levels[run.under.a].arrives)) is not None and run.under is WHOLE:
            yield _Guilt(INPUTS, error, levels[run.under.a].arrives, inside=False)
        for k, pair in enumerate(run.pairs):
            error = beyond(run.arrives.get(pair.a), levels[pair.a].arrives)
            # Other inputs may change nothing in what a module gives: rotary positions that count from 5, say.
            shows = pair.a not in rows or rows[pair.a].beyond
            if error is not None and (shows or error <= factor * levels[pair.a].error):
                yield _Guilt(pair, error, levels[pair.a].arrives, inside=False)
            if (error := made[pair.a]) is not None and not _is_undone(k, run.pairs, made, rows):
                yield _Guilt(pair, error, levels[pair.a].made, inside=True)
        if (error := beyond(run.leaves, levels[run.under.a].made)) is not None:
            yield _Guilt(run.under, error, levels[run.under.a].made, inside=False)

    def innermost(self, guilt: _Guilt) -> tuple[str, list[list[SiteDiff]], str]:
        """The innermost module of B that makes the error, the rows found on the way, and the finding in words."""
        opened: list[list[SiteDiff]] = []
        if guilt.pair == INPUTS:
            words = "the models are given different inputs, by their own preparation"
            return "input", [], words + (self._tokens_that_differ() or "")
        current, glue = (guilt.pair, None) if guilt.inside else (WHOLE, guilt)
        made = guilt.made
        while (step := self._open(current)) is not None:
            rows, inner = step
            opened.append(rows)
            if inner is None:
                break
            made = inner.made
            if not inner.inside:
                glue = inner
                break
            current, glue = inner.pair, None
        does = (
            f"makes an error of {made:.2g}"
            if math.isfinite(made)
            else "answers with another shape, with NaN, or where A gives zeros"
        )
        if glue is None:
            return current.b, opened, f"{current.b} {does}"
        if self.pairs and not isinstance(self.a, Subject):
            words = f"something {does} {_where(glue, current)}, where nothing was recorded"
            if any(self.b.has_parts(pair.b) for pair in self.pairs):
                words += '; a record with sites="leaves" tells what it is'
            return OUTPUT, [], words
        if any(pair.fused for pair in self.pairs) and current.b == OUTPUT:
            words = f"the layers {_where(glue, current)} make an error of {made:.2g}; which of them is not known, "
            return OUTPUT, [], f"{words}because some layers of {self.b.name} are fused"
        if not opened and next(unwrap(self.b.model).children(), None) is not None:
            return OUTPUT, [], f"the output {does}; which layer does is not known, since none can be watched in both"
        if current.b == OUTPUT:
            words = f"nothing inside makes it; the model's own forward {does}, {_where(glue, current)}"
        else:
            words = f"{current.b} {does} in its own forward, {_where(glue, current)}"
        return current.b, opened, words

    def _tokens_that_differ(self) -> str | None:
        """A text of which the models' own tokenisers make different tokens, in words."""
        of_a, of_b = (getattr(each, "prepare", None) for each in (self.a, self.b))
        if not isinstance(of_a, Tokenise) or not isinstance(of_b, Tokenise):
            return None
        for chunk in self.chunks:
            given = without_labels(chunk.batch)
            parts = list(given.values()) if isinstance(given, Mapping) else [given]
            for number, text in enumerate(next(filter(is_text, parts), ())):
                a, b = (each.tokenizer(text)["input_ids"] for each in (of_a, of_b))
                if a != b:
                    k = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                    ids = [str(x[k]) if k < len(x) else "missing" for x in (a, b)]
                    return f": token {k} of text {chunk.start + number} is {ids[0]} in A and {ids[1]} in B"
        return None

    def _open(self, pair: Pair) -> tuple[list[SiteDiff], _Guilt | None] | None:
        """What the modules inside a pair do to A's activations: their rows, and the guilty one; None for a leaf.

        None for a record as well, which has nothing of what is inside.
        """
        inner, seen = self._inside(pair)
        if not inner:
            return None
        under = pair if self.b.values is None else WHOLE
        run = Replay(self.a, self.b, [*self._beside(pair), *inner], under=under)
        for chunk in self.chunks:
            run.read(chunk)
        levels = self.floor.at(run.pairs, self.chunks, under)
        types = {site.label: str(site.dtype).removeprefix("torch.") for site in seen}
        rows = [
            row_of(run, each, levels[each.a], self.floor.factor, (types[each.a], types[each.b]), inside=pair.a)
            for each in inner
            if each.a in run.entries or each.a in run.other_shapes
        ]
        guilty = [
            guilt
            for guilt in self.guilty(run, levels, {row.site_a: row for row in rows})
            if guilt.pair in inner or under == pair
        ]
        made = {guilt.pair.b for guilt in guilty if guilt.inside}
        layers = {each.b for each in inner if self.b.has_weights(each.b)}
        if pair != WHOLE and len(layers) > 1 and layers <= made:
            return rows, None  # another module altogether: none of its layers is to blame alone
        return rows, next(iter(guilty), None)

    def _inside(self, pair: Pair) -> tuple[list[Pair], list[Seen]]:
        """The outermost modules inside a pair that belong together, and all of them; none in a record."""
        if not isinstance(self.a, Subject):
            return [], []
        seen = []
        for subject, label in ((self.a, pair.a), (self.b, pair.b)):
            with subject.undone():
                arguments = subject.arguments(self.chunks[0])
                seen.append([] if subject.sealed else calls_inside(subject.model, label, arguments))
        if isinstance(unwrap(self.b.model), torch.jit.ScriptModule):
            seen[1] = _layers_of_script(self.b, seen[0])
        homes = tuple("" if label == OUTPUT else label.partition("@")[0] for label in (pair.a, pair.b))
        return pair_sites(*seen, under=(homes[0], homes[1])), [*seen[0], *seen[1]]

    # A model of values, whose modules take no inputs: what one gives is computed from what the ones before it give

    def guilty_between(self) -> list[_Guilt]:
        """The guilty modules among the sites and what runs beside them, so that no site is blamed for those."""
        self.pairs += self._beside_sites(WHOLE)
        run = Replay(self.a, self.b, self.pairs)
        for chunk in self.chunks:
            run.read(chunk)
        levels = self.floor.at(run.pairs, self.chunks)
        order = list(run.entries)
        run.pairs.sort(key=lambda pair: order.index(pair.a) if pair.a in order else len(order))
        types = ("", "")
        rows = [row_of(run, pair, levels[pair.a], self.floor.factor, types) for pair in run.pairs if pair.a in order]
        return list(self.guilty(run, levels, {row.site_a: row for row in rows}))

    def _beside_sites(self, home: Pair) -> list[Pair]:
        sites = {split_call(pair.b)[0] for pair in self.pairs}
        above = {name for site in sites for name in ancestors(site)}
        found = []
        for pair in self._inside(home)[0]:
            name = split_call(pair.b)[0]
            if name in above:
                found += self._beside_sites(pair)
            elif name not in sites:
                found.append(pair)
        return found

    def _beside(self, pair: Pair) -> list[Pair]:
        """The other sites that are to give what A's gave, where this one cannot be given its inputs itself."""
        if self.b.values is None:
            return []
        own = split_call(pair.b)[0]
        around = {own, *ancestors(own)}
        names = {each: split_call(each.b)[0] for each in self.pairs}
        return [each for each, name in names.items() if name not in around and own not in ancestors(name)]


def _is_undone(k: int, pairs: Sequence[Pair], made: Mapping[str, float | None], rows: Mapping[str, SiteDiff]) -> bool:
    """Whether a later site makes good what this one does to A's activations, or this one what an earlier one did."""
    guilty = [(number, rows[p.a].beyond) for number, p in enumerate(pairs) if made[p.a] is not None and p.a in rows]
    own = next((beyond for number, beyond in guilty if number == k), True)
    if own:
        return any(number > k and not beyond for number, beyond in guilty)
    return any(number < k and beyond for number, beyond in guilty)


def _where(guilt: _Guilt, home: Pair) -> str:
    return "after its last layer" if guilt.pair == home else f"before {guilt.pair.b}"
