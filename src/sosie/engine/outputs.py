"""`compare_outputs`: the outputs of models for the same inputs, unchanged or under shifts, in one pass."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.batches import (
    Chunk,
    copied,
    is_mask,
    labels_of,
    model_arguments,
    named_arguments,
    with_tensors,
    without_labels,
)
from ..capture.restore import borrowed
from ..capture.saved import read_npz, read_safetensors
from ..capture.sites import answer_in, unwrap
from ..data.shifts import Shift, open_shifts
from ..measures import MEASURES, Measure, chance_of, snap_to_bounds
from ..models import open_model
from ..process_state import products
from ..progress import Progress
from ..results import ARRAYS, Caveat, Chance, Comparison, Comparisons, Estimate, Interval, Side
from ..stats import IGNORED, Answers, MarkedPredictions, OutputSums, Predictions, Reader, moved, on_device
from . import caveats
from .distributed import SingleProcess, together
from .network import (
    OUTPUT,
    Network,
    for_each,
    is_array_file,
    meeting_place,
    models_and_data,
    names_of,
    notes_of_pass,
    number_duplicates,
)
from .one_shot import as_outputs
from .plan import find_measures
from .provenance import digest_of, provenance
from .stream import Stream
from .uncertainty import FEWEST_GROUPS, around, by_jackknife, of_clustered_share, of_share

SAVED_CHUNK = 8192  # saved outputs that are read at a time
CAUSAL = ("CausalLM", "LMHeadModel", "DoubleHeadsModel")  # in the names of classes whose logits are of the next token
DECODER_IDS = "decoder_input_ids"
NOT_TOKENS = ("position_ids", "token_type_ids")  # whole numbers (inputs, tokens) that are no tokens

Pair = tuple[int, int]
Grid = dict[tuple[str, str], OutputSums]  # by the sites of A and of B
Key = tuple[str, int | None]  # a shift, and the model that it attacks


def compare_outputs(
    model_a: Any,
    model_b: Any = None,
    data: Any = None,
    measures: str | Measure | Sequence[str | Measure] | None = None,
    *,
    names: Sequence[str | None] | None = None,
    labels: Any = None,
    kind: str = "auto",
    shifts: str | Sequence[str] | Sequence[Shift] | None = None,
    prepare_a: Callable[[Any], Any] | None = None,
    prepare_b: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    max_rows: int | None = None,
) -> Comparison | Comparisons:
    """Compare the outputs of models for the same inputs in one pass: agreement, common errors, divergence.

    `model_a`, `model_b`: modules, model specifications, or saved predictions (an array, {name: array}, a .npz or
    .safetensors file with one array). `compare_outputs([m1, m2, m3], data)` and `compare_outputs({name: array or model,
    …})` compare all pairs; `names` gives a list of models names. `data`: as in `compare`; predictions alone need none.
    `measures`: by default all that the outputs and labels support, except `churn`, which is `disagreement` by another
    name.

    `labels`: (n,) class numbers, for tokens (inputs, tokens), or a function from a batch to labels; by default whole
    numbers y of (x, y) batches, or `labels` of dicts. `kind`: the kind of outputs, see `sosie.measure`. Of tuples,
    dicts and ModelOutputs, `logits` are compared, or else the first tensor. Each side has one site, "output".
    Intervals leave out each of 32 groups of inputs in turn; `null` is the mean over shuffled pairings where a closed
    form is known.

    Logits of language models (inputs, tokens, vocabulary) count token by token, without padding. The right answers of
    causal models are the next tokens; `labels` of a dict, which as in transformers stand at the tokens themselves, say
    which of them count. Tokens without a label (-100) are left out. The vocabulary is reduced in slices.

    `shifts`: changes of the images, in [0, 1] before `prepare`: "clean", a corruption ("fog", "fog(severity=5)"), an
    attack ("pgd(epsilon=0.1)") or "gaussian" noise; "corruptions" and "attacks" name all of them. Each shift is a site,
    and an attack is two, on A and on B; all pairs of sites are compared on the same inputs. Attacks lead away from the
    labels, or without labels from the output of the attacked model. `sosie.data.shifts.open_shifts("fog", seed=1)`
    draws new random numbers.
    """
    with together() as ranks:
        if isinstance(model_a, Mapping) and len(model_a) > 1:  # here arrays are models too: their predictions
            model_a, names = names_of(model_a, names)
        things, names, data = models_and_data(model_a, model_b, data, names)
        chosen = None if measures is None else find_measures(measures, of="outputs")
        prepares = for_each("prepare", len(things), prepare_a, prepare_b)
        sources = [
            _open(thing, name, prepare=prepare, inputs=inputs if shifts is None else None, device=device)
            for thing, name, prepare in zip(things, names, prepares, strict=True)
        ]
        number_duplicates(sources)
        if shifts is not None and (saved := [s.name for s in sources if isinstance(s, SavedOutputs)]):
            raise TypeError(f"shifts need models to run on changed inputs, but {saved[0]} is saved predictions")
        opened = () if shifts is None else open_shifts(shifts)
        run = OutputPass(sources, kind, chosen, Labels(labels), opened, inputs, ranks)
        sums = run.run(data, max_rows)

        def result() -> Comparison | Comparisons:
            notes = run.check_end(sums, max_rows)
            settings = {"kind": kind, "device": str(device or "each model's own"), **run.about_shifts()}
            if max_rows is not None:
                settings["max_rows"] = str(max_rows)
            models = [source.describe() for source in sources]
            about = provenance(settings=settings, models=models, data=data, processes=ranks.several)
            pairs = {
                pair: comparison_of(grid, run.sides_of(*pair), chosen, [*notes, *run.mixing_of(*pair)], about)
                for pair, grid in sums.items()
            }
            return pairs[0, 1] if len(sources) == 2 else Comparisons(tuple(source.name for source in sources), pairs)

        return ranks.once(result)


# The sources of outputs: networks, or saved predictions


@dataclass
class SavedOutputs:
    """Saved predictions; row i belongs to input i."""

    saved: Tensor
    name: str
    device: str | torch.device | None = None

    def describe(self) -> str:
        return f"{self.name}: saved outputs, {len(self.saved)} inputs"

    @property
    def count(self) -> int:
        return len(self.saved)

    def outputs(self, chunk: Chunk) -> Tensor:
        stop = chunk.start + chunk.count
        if stop > len(self.saved):
            raise ValueError(
                f"need outputs of the same inputs: {self.name} has {len(self.saved)} saved, but the data goes on to "
                f"input {stop}"
            )
        some = self.saved[chunk.start : stop]
        return some if self.device is None else some.to(self.device)


def _open(thing: Any, name: str | None, *, prepare: Any, inputs: Any, device: Any) -> Network | SavedOutputs:
    """Open a module, a specification, an array, {name: array}, or a .npz or .safetensors file with one array."""
    if isinstance(thing, Mapping):
        if len(thing) != 1:
            raise ValueError(f"one side is one model: {{name: array}} with one entry, got {len(thing)}")
        ((name, thing),) = ((str(key), value) for key, value in thing.items())
    if isinstance(thing, (str, os.PathLike)) and is_array_file(thing):
        name, thing = name or Path(thing).stem, _only_array(Path(thing))
    if isinstance(thing, (np.ndarray, Tensor)):
        name = name or "predictions"
        return SavedOutputs(as_outputs(thing, name), name, device)
    if isinstance(thing, (str, os.PathLike)):
        thing = open_model(str(thing), head=True)
    otherwise = ", or predictions (an array, {name: array}, .npz, .safetensors)"
    return Network.of(thing, name=name, prepare=prepare, inputs=inputs, device=device, otherwise=otherwise)


def _only_array(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    stored = (read_npz if path.suffix == ".npz" else read_safetensors)(path)
    if len(stored) != 1:
        raise ValueError(
            f"{path} holds {len(stored)} arrays ({', '.join(list(stored)[:5])}): one side is one array of predictions; "
            "in Python {name: array, …} compares several"
        )
    ((_, array),) = stored.items()
    if array.dtype == "object":
        raise ValueError(f"{path} holds objects, which only unpickling could read; save numbers")
    return array.read(0, array.shape[0])


@dataclass
class Labels:
    """The right classes: an array, a function of the batch, or (None) what the batches themselves hold."""

    given: Any = None

    def __post_init__(self) -> None:
        if self.given is not None and not callable(self.given):
            self.given = as_outputs(self.given, "labels")

    def of(self, chunk: Chunk) -> Tensor | None:
        if isinstance(self.given, Tensor):
            stop = chunk.start + chunk.count
            if stop > len(self.given):
                raise ValueError(f"need a label per input: {len(self.given)} labels, but the data goes on to {stop}")
            return self.given[chunk.start : stop]
        if self.given is None:
            return labels_of(chunk.batch)
        labels = self.given(chunk.batch)
        return None if labels is None else as_outputs(labels, "labels")


# Logits of tokens


def next_tokens(input_ids: Tensor, keep: Tensor | None = None) -> Tensor:
    """(inputs, tokens): the right answers of a causal model, the next token of each, else `IGNORED`."""
    labels = torch.full_like(input_ids, IGNORED, dtype=torch.int64)
    labels[:, :-1] = input_ids[:, 1:]
    if keep is not None:
        kept = (keep != 0).to(labels.device)
        labels[:, :-1][~(kept[:, 1:] & kept[:, :-1])] = IGNORED
    return labels


def right_answers(
    model: nn.Module, batch: Any, ids: Tensor | None, logits: Tensor, keep: Tensor | None
) -> Tensor | None:
    """The labels of a batch, or for a causal language model the next token of each; None if they are not known.

    Labels of tokens belong to the prediction at their place; those of a causal model, which moves them itself, to the
    one before.
    """
    if logits.ndim == 2:
        labels = labels_of(batch)
    else:
        parts = batch if isinstance(batch, Mapping) else {}
        labels = with_tensors(parts.get("labels"))
        labels = torch.as_tensor(labels) if isinstance(labels, list) else labels
        if _is_causal(model, inside=ids is not None) and DECODER_IDS not in parts:
            tokens = ids if labels is None else labels
            labels = None if tokens is None or tokens.shape != logits.shape[:-1] else next_tokens(tokens, keep)
    if labels is None or labels.shape != logits.shape[:-1]:
        return None
    known = labels[labels != IGNORED]
    return labels if not known.numel() or 0 <= int(known.min()) <= int(known.max()) < logits.shape[-1] else None


def _is_causal(model: nn.Module, *, inside: bool) -> bool:
    """Whether the logits of a model are of the next token; `inside`: also if a module in it says so."""
    modules = model.modules() if inside else [unwrap(model)]
    return any(name in type(module).__name__ for module in modules for name in CAUSAL)


def ids_in(named: Mapping[Any, Any]) -> Tensor | None:
    """The tokens (inputs, tokens) that the logits of a model belong to, among its arguments; None if there are none."""
    names = [name for name in (DECODER_IDS, "input_ids") if named.get(name) is not None]
    names = names or [name for name in named if not is_mask(str(name)) and name not in NOT_TOKENS]
    tensors = (leaf for leaf in map(named.get, names) if isinstance(leaf, Tensor) and leaf.ndim == 2)
    return next((leaf for leaf in tensors if leaf.dtype in (torch.int64, torch.int32)), None)


# The pass


class OutputPass:
    """One pass over the data: every source is run on each chunk once, and each pair's sums grow.

    Without shifts each model has one site, "output"; with shifts a site for each, and two for an attack, on A and on B.
    """

    def __init__(
        self,
        sources: Sequence[Network | SavedOutputs],
        kind: str,
        measures: tuple[Measure, ...] | None,
        labels: Labels,
        shifts: tuple[Shift, ...],
        inputs: Callable[[Any], Any] | None,
        ranks: SingleProcess,
    ) -> None:
        self.sources, self.measures, self.labels, self.ranks = sources, measures, labels, ranks
        self.shifts, self.inputs = shifts, inputs
        identities: list[Any] = [
            (id(s.model), id(s.prepare)) if isinstance(s, Network) else id(s.saved) for s in sources
        ]
        self.twins = [identities.index(identity) for identity in identities]
        self.unique = {k: sources[k] for k in dict.fromkeys(self.twins)}
        self.networks = {k: source for k, source in self.unique.items() if isinstance(source, Network)}
        self._readers = [Reader(source.name, kind) for source in sources]
        self._attacks_need_labels = any(s.attack is not None and s.attack.needs_labels for s in shifts)
        self._sides: dict[int, Side] = {}  # known after the first chunk
        self._labelled = self._need_labels = False
        self._of_tokens: Tensor | None = None  # the right answers of the last chunk, if outputs are logits of tokens
        self._tokens: tuple[int, Tensor] | None = None  # those of the last chunk, 0 at padding, and who was given them
        self._place: torch.device | None = None

    def run(self, data: Any, max_rows: int | None) -> dict[Pair, Grid]:
        """The sums of each pair; with several processes, in the first one only."""
        need = self.measures is None or any("labels" in measure.needs for measure in self.measures)
        need = self._need_labels = need or self._attacks_need_labels
        names = " and ".join(dict.fromkeys(source.name for source in self.sources))
        totals: dict[Pair, Grid] = {}
        with ExitStack() as stack:
            stack.enter_context(borrowed([network.model for network in self.networks.values()]))
            for network in self.networks.values():
                stack.enter_context(network.borrowed())
            stream = Stream.of(data, self.sources, max_rows)
            if data is not None:
                self.ranks.agree(lambda: self._about_parts(stream))
                first = self._images(stream.first)
                for network in self.networks.values():
                    network.look_at_output(first)
                    network.mixing(first)
            share = 1 if data is None else self.ranks.share.of
            expected = None if stream.expected is None else -(-stream.expected // share)
            task = f"comparing the outputs of {names}"
            bar = stack.enter_context(Progress(task, expected, "inputs", shown=self.ranks.first))
            chunks = stream.chunks(block=None, share=self.ranks.share, saved_chunk=SAVED_CHUNK)
            for chunk in self.ranks.deal(chunks, self):
                parts = self._read_chunk(chunk, self.labels.of(chunk) if need else None)
                if not totals and self.measures is not None:
                    _check_measures(self.measures, parts)
                _add(totals, parts)
                bar.advance(chunk.count)
            for network in self.networks.values():
                network.note_after_pass()
        self.ranks.collect(on_device(totals, torch.device("cpu")), lambda parts: _add(totals, parts))
        self.ranks.collect([reader.small for reader in self._readers], self._add_guesses)
        if self.ranks.first:
            for k in self.unique:
                self._readers[k].check_guess()
        return totals

    def _add_guesses(self, small: list[int | None]) -> None:
        """What the outputs that another process read say about the kind that was guessed."""
        for reader, theirs in zip(self._readers, small, strict=True):
            reader.small = None if reader.small is None or theirs is None else reader.small + theirs

    def _read_chunk(self, chunk: Chunk, labels: Tensor | None) -> dict[Pair, Grid]:
        self._of_tokens = self._tokens = None
        answers: dict[tuple[int, Key], Answers] = {}
        for k, (key, shifted) in itertools.product(self.unique, self._shifted(chunk, labels).items()):
            answers[k, key] = self._read(k, shifted)
        labels = self._of_tokens if labels is None and self._need_labels else labels
        self._labelled = labels is not None
        return self._join(answers, labels, chunk.start)

    def _shifted(self, chunk: Chunk, labels: Tensor | None) -> dict[Key, Chunk]:
        """The chunk under every shift, and under each attack on every model."""
        if not self.shifts:
            return {(OUTPUT, None): chunk}
        images = self._images(chunk.batch)
        index = torch.arange(chunk.start, chunk.start + chunk.count)
        chunks: dict[Key, Chunk] = {}
        for shift in self.shifts:
            if shift.attack is None or not shift.is_against_a_model:
                chunks[shift.label, None] = replace(chunk, batch=shift.of_any_model(images, index=index))
                continue
            for k, network in self.networks.items():
                local = images.to(network.home)
                attacked = shift.attack(self._logits(k, chunk), local, labels, seed=shift.seed, index=index)
                chunks[shift.label, k] = replace(chunk, batch=attacked)
        return chunks

    def _images(self, batch: Any) -> Any:
        """The images of a batch under shifts; without shifts the batch itself."""
        if not self.shifts:
            return batch
        images = without_labels(batch) if self.inputs is None else self.inputs(copied(batch))
        if isinstance(images, (tuple, list)) and len(images) == 1:
            images = images[0]
        if not isinstance(images, Tensor) or not images.is_floating_point():
            what = str(images.dtype) if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"shifts change images, a tensor of floats in [0, 1], but a batch gives {what}")
        return images

    def _read(self, k: int, chunk: Chunk) -> Answers:
        """One source's outputs for the inputs of a chunk, on the device where outputs meet."""
        source = self.sources[k]
        outputs = source.outputs(chunk)
        if not outputs.ndim or len(outputs) != chunk.count:
            raise ValueError(
                f"{source.name}: {chunk.count} inputs gave outputs of shape {tuple(outputs.shape)}; "
                "their first dimension must count the inputs"
            )
        if k not in self._sides:
            shape, dtype = tuple(outputs.shape[1:]), str(outputs.dtype).removeprefix("torch.")
            self._sides[k] = Side(source.name, (OUTPUT,), (int(np.prod(shape)),), (shape,), (dtype,))
        if self._place is None:
            self._place = meeting_place(outputs.device)
        keep = self._kept_tokens(k, chunk, outputs) if outputs.ndim == 3 else None
        with products():
            return self._readers[k].read(outputs.to(self._place), keep)

    def _kept_tokens(self, k: int, chunk: Chunk, outputs: Tensor) -> Tensor | None:
        """(inputs, tokens) 0 at padding, None without; and the right answers, if these outputs are logits of tokens.

        They may be hidden states, but not if every token of the input has a number among the last dimension.
        """
        source, reader = self.sources[k], self._readers[k]
        if not isinstance(source, Network) or reader.kind not in ("auto", "logits", "probabilities"):
            return None
        args, kwargs = source.arguments(chunk)
        ids = ids_in(named_arguments(source.model, args, kwargs))
        if ids is None or ids.shape != outputs.shape[:2] or int(ids.max()) >= outputs.shape[-1]:
            ids = None
        keep = source.masks(chunk.batch, args, kwargs).of_output()
        keep = keep if keep is not None and keep.shape == outputs.shape[:2] else None
        if ids is not None:
            reader.guess_of_tokens(outputs, keep)
            self._check_tokens(k, ids.cpu() if keep is None else ids.cpu() * keep)
        if self.labels.given is None and self._of_tokens is None:
            self._of_tokens = right_answers(source.model, chunk.batch, ids, outputs, keep)
        return keep

    def _check_tokens(self, k: int, tokens: Tensor) -> None:
        """Raise unless all models were given the same tokens: the predictions for them are compared one by one."""
        first, expected = self._tokens = self._tokens or (k, tokens)
        if expected.shape == tokens.shape and not torch.equal(expected, tokens):
            raise ValueError(
                f"{self.sources[first].name} and {self.sources[k].name} tokenise the same text differently, into "
                "equally many tokens: their predictions cannot be compared token by token"
            )

    def _logits(self, k: int, chunk: Chunk) -> Callable[[Tensor], Tensor]:
        """The function from images to a model's logits, numbers whose softmax is its prediction."""
        source, reader = self.sources[k], self._readers[k]
        assert isinstance(source, Network)
        model, prepare = source.model, source.prepare

        def logits(images: Tensor) -> Tensor:
            args, kwargs = model_arguments(images, prepare=prepare)
            answer = answer_in(model(*args, **kwargs))
            assert answer is not None
            return answer.log() if reader.kind == "probabilities" else answer

        if reader.kind == "auto":
            self._read(k, chunk)  # the first outputs decide their kind
        if reader.kind not in ("logits", "probabilities"):
            raise ValueError(f"{source.name}: attacks need logits or probabilities over classes, not {reader.kind}")
        return logits

    @products()
    def _join(self, answers: dict[tuple[int, Key], Answers], labels: Tensor | None, start: int) -> dict[Pair, Grid]:
        parts: dict[Pair, Grid] = {}
        for i, j in itertools.combinations(range(len(self.sources)), 2):
            a, b = self.twins[i], self.twins[j]
            sites = self._sites((a, b)).items()
            try:
                parts[i, j] = {
                    (site_a, site_b): OutputSums.join(answers[a, s], answers[b, t], labels, start=start)
                    for (site_a, s), (site_b, t) in itertools.product(sites, sites)
                }
            except ValueError as error:
                names = f"{self.sources[i].name} and {self.sources[j].name}"
                raise ValueError(f"{names}, inputs from {start} on: {error}") from error
        return parts

    def _sites(self, pair: Pair) -> dict[str, Key]:
        """The sites of a pair of models, by name."""
        sites: dict[str, Key] = {} if self.shifts else {OUTPUT: (OUTPUT, None)}
        for shift in self.shifts:
            if shift.is_against_a_model:
                sites |= {f"{shift.label} on {side}": (shift.label, k) for side, k in zip("AB", pair, strict=True)}
            else:
                sites[shift.label] = (shift.label, None)
        return sites

    # Facts beside the sums

    def mixing_of(self, *pair: int) -> tuple[str, ...]:
        """Notes on the models of a pair that mix the inputs of a batch."""
        return notes_of_pass(self.sources[self.twins[i]] for i in pair)

    def about_shifts(self) -> dict[str, str]:
        if not self.shifts:
            return {}
        facts = {"shifts": ", ".join(shift.label for shift in self.shifts), "seed": str(self.shifts[0].seed)}
        if self._attacks_need_labels:
            facts["attacks"] = f"away from {'the labels' if self._labelled else 'the output of the attacked model'}"
        return facts

    def check_end(self, sums: dict[Pair, Grid], max_rows: int | None) -> list[str]:
        """A note if the data ended early; raise if predictions or labels are of more inputs than the data."""
        first = next(iter(next(iter(sums.values())).values()))
        done = first.inputs
        if not first.n:
            raise ValueError(f"none of the tokens of {done} inputs has a label: every label is {IGNORED} or at padding")
        if max_rows is not None:
            return [f"max_rows={max_rows}, but the data had {done} inputs"] if done < max_rows else []
        lengths = {source.name: source.count for source in self.sources if isinstance(source, SavedOutputs)}
        if isinstance(self.labels.given, Tensor):
            lengths["labels"] = len(self.labels.given)
        for name, length in lengths.items():
            if length != done:
                raise ValueError(f"need outputs of the same inputs: {name} has {length}, the data {done}")
        return []

    def sides_of(self, i: int, j: int) -> tuple[Side, Side]:
        sites = tuple(self._sites((i, j)))

        def side_of(k: int) -> Side:
            side = self._sides[self.twins[k]]
            repeated = {name: getattr(side, name) * len(sites) for name in ("widths", "shapes", "dtypes")}
            return replace(side, name=self.sources[k].name, sites=sites, **repeated)

        return side_of(i), side_of(j)

    # Several processes

    def learnt(self) -> list[tuple[str, int | None]]:
        """What the readers have learned from the first outputs: classes, probabilities, numbers."""
        return [(reader.kind, reader.width) for reader in self._readers]

    def learn(self, learnt: list[tuple[str, int | None]]) -> None:
        for reader, of_first in zip(self._readers, learnt, strict=True):
            reader.kind, reader.width = of_first

    def _about_parts(self, stream: Stream) -> dict[str, str]:
        """The facts that processes which share the work must have in common."""
        weights = [source.model.state_dict() for source in self.sources if isinstance(source, Network)]
        return {
            "models": digest_of(weights),
            "the first batch": digest_of(stream.first),
            "the number of inputs": str(stream.total),
            "the request": repr((self.measures, stream.max_rows, [source.name for source in self.sources])),
        }


def _check_measures(measures: Sequence[Measure], parts: Mapping[Pair, Grid]) -> None:
    """Raise after the first chunk if a measure reads something that the outputs do not supply."""
    every = itertools.chain.from_iterable(grid.values() for grid in parts.values())
    for sums, measure in itertools.product(every, measures):
        if measure.reads not in sums.supplies:
            raise ValueError(f"{measure.name}: {sums.why_not(measure.reads)}")


def _add(totals: dict[Pair, Grid], parts: Mapping[Pair, Grid]) -> None:
    for pair, part in parts.items():
        grid = totals.get(pair)
        totals[pair] = part if grid is None else {s: sums.merge(moved(part[s], like=sums)) for s, sums in grid.items()}


# From sums over outputs to values


@products()
def comparison_of(
    grid: Grid,
    sides: tuple[Side, Side],
    measures: tuple[Measure, ...] | None,
    notes: list[str],
    about: dict[str, Any],
) -> Comparison:
    sums = next(iter(grid.values()))
    if measures is None:
        # Churn is disagreement by another name: one of them is enough.
        measures = tuple(
            m for m in MEASURES.values() if m.reads_outputs and m.reads in sums.supplies and m.name != "churn"
        )
    about = {**about, "inputs": sums.inputs, "outputs": list(sums.kinds)}
    if sums.inputs != sums.n:
        about["tokens"] = sums.n
    if all(MarkedPredictions in each.supplies for each in grid.values()):
        right = {
            site: [float(grid[site, site].sums[name].sum()) / sums.n for name in ("right_a", "right_b")]
            for site in sides[0].sites
        }
        about["accuracy"] = right if len(right) > 1 else next(iter(right.values()))
    values = {measure.name: _over_sites(measure, grid, sides, notes) for measure in measures}
    return Comparison(*sides, values, "outputs", about, kind="shifts" if len(grid) > 1 else "outputs")


def _over_sites(measure: Measure, grid: Grid, sides: tuple[Side, Side], notes: Sequence[str]) -> Estimate:
    """The values of a measure for every pair of sites in one matrix; NaN where a cell has none."""
    cells = {sites: _estimate(measure, sums, notes) for sites, sums in grid.items()}
    first = next(iter(cells.values()))
    if len(cells) == 1:
        return first
    known = {  # a note on all cells appears once
        caveat if caveat.text in notes else Caveat(caveat.text, *sites, caveat.undefined): None
        for sites, cell in cells.items()
        for caveat in cell.caveats
    }

    def joined(kind: str) -> np.ndarray | None:
        numbers = [[getattr(cells[a, b], kind) for b in sides[1].sites] for a in sides[0].sites]
        if all(number is None for row in numbers for number in row):
            return None
        return np.array([[np.nan if number is None else number.item() for number in row] for row in numbers])

    arrays: dict[str, Any] = {kind: joined(kind) for kind in ARRAYS}
    return replace(first, caveats=tuple(known), **arrays)


def _estimate(measure: Measure, sums: OutputSums, notes: Sequence[str]) -> Estimate:
    known = [Caveat(text) for text in notes]
    try:
        with torch.no_grad():
            value = np.array([[float(snap_to_bounds(measure.from_outputs(sums), measure))]])
    except ValueError as error:
        value = np.array([[np.nan]])
        known.append(Caveat(f"undefined: {error}", undefined=True))
    known += [*_ties(measure, sums), *_constant(measure, sums), *caveats.of_bounds(measure, value)]
    by_chance = None
    if not np.isnan(value).any() and (chance := chance_of(measure.base, sums)) is not None:
        known_spread = sums.inputs == sums.n  # the tokens of an input are no independent draws
        mean, *beside = chance
        spread, p = (np.array([[x]]) if known_spread and x is not None else None for x in beside)
        by_chance = Chance(np.array([[mean]]), spread, p)
    return Estimate.of(
        measure,
        value,
        n=sums.n,
        statistic=sums.describe(),
        interval=_interval(measure, sums, value),
        chance=by_chance,
        caveats=known,
    )


def _interval(measure: Measure, sums: OutputSums, value: np.ndarray) -> Interval:
    """Exact for a share of inputs, else the delete-one-group jackknife.

    None with few groups, if the value is undefined without one of them, or if it is the same without each: that shows
    no spread, not that there is none.
    """
    if np.isnan(value).any():
        return None, None
    if measure.share and sums.inputs == sums.n:
        return _as_cell(of_share(value.item(), sums.n))
    try:
        with torch.no_grad():
            without = measure.from_outputs(sums, jackknife=True)[sums.groups].detach().cpu().numpy()
    except ValueError:
        return None, None
    if measure.share:
        return _as_cell(of_clustered_share(value.item(), sums.n, sums.inputs, without))
    if len(without) < FEWEST_GROUPS or not (without != without[0]).any():
        return None, None
    return around(measure, value, by_jackknife(without[:, None, None]))


def _as_cell(interval: tuple[float, float]) -> Interval:
    low, high = (np.array([[end]]) for end in interval)
    return low, high


def _ties(measure: Measure, sums: OutputSums) -> Iterator[Caveat]:
    if issubclass(measure.reads, Predictions):
        for side, count in zip("AB", sums.ties, strict=True):
            if count:
                yield Caveat(f"{count} of {sums.n} outputs of {side} have several largest entries: the first counts")


def _constant(measure: Measure, sums: OutputSums) -> Iterator[Caveat]:
    if issubclass(measure.reads, Predictions) and sums.predicted is not None and sums.n > 1:
        for side, times in zip("AB", sums.predicted, strict=True):
            if int(times.count_nonzero()) == 1:
                yield Caveat(f"{side} predicts class {int(times.argmax())} for all {sums.n} inputs")
