"""The sources of rows: a model with its inputs, or saved activations. Both give rows chunk by chunk."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.batches import (
    Chunk,
    count_inputs,
    cut,
    explain_images,
    explain_types,
    join,
    model_arguments,
    named_arguments,
    rebuild_named,
    types_of,
    unread_mask,
    with_tensors,
    without_labels,
)
from ..capture.restore import as_found, kept_attributes, restored_after_errors
from ..capture.rows import ONE_ROW, Rule, TokenMasks, gives_several_rows, needs_axes, rows_per_input, rule_name, to_rows
from ..capture.saved import ActivationFile, open_activations
from ..capture.sites import NoRows, SilentSite, Site, SiteError, Watch, answer_in, select, tensors_in, unwrap, watch
from ..checks import listed
from ..files import OtherFile
from ..models import NamedModel, open_model, weights_of, with_name
from ..models.exported import AsExported, with_layers
from ..models.values import value_model_in
from ..process_state import kept_random_state, without_autocast
from ..results import Side, counted
from ..stats import is_statistics as is_statistics_file
from .mixing import TRIED, MixingTest, by_input, tried_of
from .provenance import begin_digest, describe_model, digest_of

T = TypeVar("T")
Sink = Callable[[str, Tensor], Any]
RowSample = dict[str, list[list[float]]]  # by site, for each of the first few inputs: its size, and a weighted sum
# Share of their size by which the rows of one input may differ on another machine, by the type of the weights. Measured
# for networks of 11 to 56 layers: in float32 the threads, the number of inputs and the kernels of a CPU change 2e-6,
# and TF32, which a GPU may use, 3e-3; in bfloat16 the kernels of a CPU change up to 0.021.
TOLERATED = {torch.float64: 1e-9, torch.float32: 0.01}
TOLERATED_COARSE = 0.05
OUTPUT = "output"  # the site of a model's output


@dataclass
class Network:
    """A model with its watched sites, how its inputs are prepared, and how its activations become rows."""

    with_head: ClassVar[bool] = False  # whether `hf:folder` opens the model as it was saved

    model: nn.Module
    name: str
    sites: Any = None
    rows: Rule = "flatten"
    prepare: Callable[[Any], Any] | None = None
    inputs: Callable[[Any], Any] | None = None
    device: str | torch.device | None = None
    weights: str = ""  # their origin, if known
    known_as: str = ""  # the name before it was given another

    def __post_init__(self) -> None:
        self._seen: Watch | None = None
        self._sink: Sink | None = None
        self._chunk: Chunk | None = None
        self._masks = TokenMasks(None)
        self._counts: dict[str, Tensor] = {}
        self._widths: dict[str, int] = {}
        self._mixing = MixingTest()
        self.batch_size: int | None = None  # the only one that the model takes; None: any
        self.largest: dict[str, float] = {}  # by site, the largest number among the first few inputs
        self.tokens: Tensor | None = None  # of the last chunk, if this model's own `prepare` made them of text

    @classmethod
    def of(
        cls, thing: Any, *, name: str | None = None, prepare: Any = None, otherwise: str = "", **options: Any
    ) -> Self:
        """Make a network from a module, or from a specification, which has a name and a normalisation.

        `otherwise` ends the error for anything else: the other things that are accepted.
        """
        if isinstance(thing, (str, os.PathLike)):
            thing = open_model(str(thing), head=cls.with_head)
        weights = weights_of(thing)
        model, known_as, prepare = with_name(thing, prepare)
        model = with_layers(model)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{known_as} is not a model: give a torch.nn.Module, a specification like 'tiny10@weights.safetensors'"
                + otherwise
            )
        return cls(model, name or known_as, prepare=prepare, weights=weights, known_as=known_as, **options)

    def identity(self) -> object:
        """A value that is equal for networks that give the same rows."""
        sites = [(name, sorted(site.calls or ())) for name, site in select(self.model, self.sites).items()]
        return id(self.model), repr(sites), id(self.prepare), self.rows

    def describe(self) -> str:
        inputs = "inputs as given" if self.prepare is None else f"inputs prepared by {self.prepare!r}"
        return describe_model(self.model, self.name, self.weights, inputs, self.known_as)

    @property
    def rule(self) -> str:
        """The name of the row rule."""
        return rule_name(self.rows)

    def digest(self) -> str:
        """The digest of the weights and of how inputs are prepared."""
        return self.begin_digest()()

    def begin_digest(self) -> Callable[[], str]:
        """Begin the digest; the function that is returned waits for a GPU."""
        return begin_digest({**self.model.state_dict(), "prepare": _stable_name(self.prepare)})

    @property
    def home(self) -> torch.device:
        """The device of the model's first parameter or buffer; the CPU for a model without any."""
        return self._device() or torch.device("cpu")

    def _device(self) -> torch.device | None:
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        first = next((tensor for tensor in tensors if not tensor.is_meta), None)  # accelerate's hooks fetch those
        return None if first is None else first.device

    def on_cpu(self) -> bool:
        return self.home.type == "cpu"

    # Running the model

    @contextmanager
    def borrowed(self) -> Iterator[Network]:
        """Put the model in eval mode and on its device, without gradients; restore it afterwards."""
        getattr(self.prepare, "cut", set()).clear()  # what another pass has cut
        with restored_after_errors(self.model), as_found(self.model, self.device):
            yield self

    @contextmanager
    def opened(self) -> Iterator[Network]:
        """As `borrowed`, with the sites watched."""
        axes = needs_axes(self.rows)
        with self.borrowed(), watch(self.model, self.sites, sink=self._receive, axes=axes) as self._seen:
            try:
                yield self
            finally:
                self._seen = None

    def arguments(self, chunk: Chunk) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call: copies on the model's device, or on that of the data if the model has none."""
        return model_arguments(
            chunk.batch, model=self.model, inputs=self.inputs, prepare=self.prepare, device=self._device()
        )

    def masks(self, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenMasks:
        """The masks of padded tokens, from the arguments of a call and the batch that they came from."""
        named = named_arguments(self.model, args, kwargs)
        # The result of `inputs` comes first; without it the mask of the batch, which is on the CPU already.
        return TokenMasks.of(
            *((named, batch) if self.inputs else (batch, named)),
            unread=lambda: None if callable(self.rows) else unread_mask(self.model, named),
        )

    def outputs(self, chunk: Chunk) -> Tensor:
        """The model's output for the inputs of a chunk, as a dense tensor."""
        if self.batch_size not in (None, chunk.count):
            return torch.cat([self.outputs(few)[:real] for few, real in self._slices(chunk)])
        with self._named_in_errors(chunk):
            args, kwargs = self.arguments(chunk)
            output = self.model(*args, **kwargs)
        answer = answer_in(output)
        if answer is None:
            raise ValueError(f"{self.name} returned no tensor but {type(output).__name__}")
        answer = answer if answer.layout == torch.strided else answer.to_dense()
        if self._mixing.usual and self._seen is None and answer.ndim and len(answer) == chunk.count:
            self._mixing.keep(chunk, OUTPUT, answer, None)
        return answer

    def read(self, chunk: Chunk, sink: Sink) -> list[Any]:
        """Run a chunk and return the sink's result for the rows of each site, in execution order."""
        watched = self._watched()
        if self.batch_size not in (None, chunk.count):
            return self._read_in_slices(chunk, sink)
        self._sink, self._chunk = sink, chunk
        try:
            with self._named_in_errors(chunk):
                args, kwargs = self.arguments(chunk)
                self._masks = self.masks(chunk.batch, args, kwargs)
                self._counts, self.tokens = {}, None if self.prepare is None else kwargs.get("input_ids")
                watched.run(*args, **kwargs)
        finally:
            self._sink = self._chunk = None
        return watched.values()

    def _read_in_slices(self, chunk: Chunk, sink: Sink) -> list[Any]:
        """As `read`, of a model that takes another batch size."""
        rows: dict[str, list[Tensor]] = {}
        counts: dict[str, list[Tensor]] = {}
        tokens: list[Tensor] = []
        for few, real in self._slices(chunk):
            made = self.read(few, lambda _, rows: rows.clone())  # a module may change its activation in place
            for site, each in zip(self._watched().sites, made, strict=True):
                end = real
                if site.label in self._counts:
                    counts.setdefault(site.label, []).append(count := self._counts[site.label][:real])
                    end = int(count.sum())
                rows.setdefault(site.label, []).append(each[:end])
            tokens += [] if self.tokens is None else [self.tokens[:real]]
        self._counts = {label: torch.cat(of_site) for label, of_site in counts.items()}
        self.tokens = torch.cat(tokens) if tokens else None
        with without_autocast(self.home.type):
            return [sink(label, torch.cat(of_site)) for label, of_site in rows.items()]

    def _slices(self, chunk: Chunk) -> Iterator[tuple[Chunk, int]]:
        """The chunk as batches of the size that the model takes, each with its number of inputs.

        The last is filled with copies of its last input.
        """
        size = self.batch_size
        assert size is not None
        for start in range(0, chunk.count, size):
            real = min(size, chunk.count - start)
            part = cut(chunk.batch, start, start + real)
            yield Chunk(join([part, *[cut(part, real - 1, real)] * (size - real)]), chunk.start + start, size), real

    def learn_batch_size(self, few: Chunk, whole: int, run: Callable[[], T]) -> T:
        """Run, and set `batch_size`: what the model was exported for, or the loader's if a few inputs alone fail."""
        self.batch_size = self._exported_for(few)
        try:
            return run()
        except SiteError:
            raise
        except Exception:  # a model may raise anything about a batch of another size
            if self.batch_size is not None or whole == few.count:
                raise
            self.batch_size = whole
            with suppress(Exception):  # the first error is the one to report
                return run()
            self.batch_size = None
            raise

    def _first(self, batch: Any, run: Callable[[Chunk], T]) -> T:
        """Run a few inputs of the first batch."""
        start, stop = tried_of(batch)
        few = Chunk(cut(batch, start, stop), start, stop - start)
        return self.learn_batch_size(few, count_inputs(batch), lambda: run(few))

    def _exported_for(self, chunk: Chunk) -> int | None:
        """The batch size that an exported program or an ONNX file was made for; None if it takes any."""
        model, size = unwrap(self.model), None
        if (values := value_model_in(model)) is not None:
            size = values.batch_size
        elif isinstance(graph := getattr(getattr(model, "program", model), "graph", None), torch.fx.Graph):
            given = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
            size = next((x.shape[0] for x in given if isinstance(x, Tensor) and x.ndim), None)
        if not isinstance(size, int):  # of any length it is a symbol
            return None
        first = next(iter(tensors_in(self.arguments(chunk))), None)
        return size if first is not None and first.shape[:1] == (chunk.count,) else None

    @contextmanager
    def _named_in_errors(self, chunk: Chunk) -> Iterator[None]:
        try:
            try:
                yield
            except (RuntimeError, ValueError, TypeError) as error:
                if self.inputs is None:
                    explain_images(error, self.model, chunk.batch)
                if self.prepare is None and self.inputs is None and isinstance(error, RuntimeError):
                    explain_types(error, self.model, without_labels(chunk.batch), "inputs")
                raise
        except Exception as error:
            error.add_note(f"while running {self.name} on inputs {chunk.start} to {chunk.start + chunk.count - 1}")
            raise

    def _receive(self, site: Site, activation: Tensor) -> Any:
        """Called by the watch inside the forward pass, once for each site."""
        chunk, label, mask = self._chunk, site.label, self._masks.at(site, activation)
        assert chunk is not None and self._sink is not None  # noqa: PT018
        if torch._C._functorch.is_batchedtensor(activation):
            raise NoRows(
                label,
                "is called inside torch.vmap, where its activation cannot be read",
                "Choose a site outside, or compare the members one by one",
            )
        rows = to_rows(activation.detach(), self.rows, site=site, inputs=chunk.count, mask=mask)
        width = rows.shape[1]
        if self._widths.setdefault(label, width) != width:
            raise ValueError(
                f"site {label!r} gave rows of {self._widths[label]} features at first and of {width} now: inputs that "
                f"differ in length or size have no common features flattened. Use {ONE_ROW}"
            )
        if gives_several_rows(self.rows):
            whole = torch.full((chunk.count,), len(rows) // chunk.count)
            self._counts[label] = whole if mask is None or activation.ndim != 3 else (mask != 0).sum(1)
        if self._mixing.usual:
            self._mixing.keep(chunk, label, rows, self._counts.get(label))
        return self._sink(label, rows)

    def _watched(self) -> Watch:
        if self._seen is None:
            raise RuntimeError(f"{self.name} is not being watched")
        return self._seen

    # Before the pass

    def look(self, batch: Any) -> Side:
        """Run a few inputs of the first batch to learn the sites; the model is restored afterwards."""

        def first_rows(site: str, rows: Tensor) -> tuple[tuple[int, str], Tensor, Tensor]:
            # There are no rows if all tokens of these inputs are padding.
            largest = torch.linalg.vector_norm(rows if rows.numel() else rows.new_zeros(1), torch.inf).double()
            return _form(rows), by_input(rows, self._counts.get(site)), largest

        with kept_random_state(), kept_attributes(self.model):
            try:
                looks = self._first(batch, lambda few: self.read(few, first_rows))
            except SilentSite as error:
                if isinstance(self.model, AsExported):
                    raise SilentSite(f"{error}. Or give the ExportedProgram itself, whose layers have names") from error
                raise
        labels = [site.label for site in self._watched().sites]
        self._mixing.usual = {label: rows for label, (_, rows, _) in zip(labels, looks, strict=True)}
        largest = torch.stack([most.to(looks[0][2].device) for _, _, most in looks])  # one read from the device
        self.largest = dict(zip(labels, largest.tolist(), strict=True))
        side = _side(self.name, self._watched().sites, [form for form, _, _ in looks])
        return replace(side, left_out=tuple(self.left_out.items()))

    def sampled_rows(self, batch: Any) -> RowSample:
        """A few numbers of the rows of the first few inputs; none at sites where two forwards differ."""
        count = min(TRIED, count_inputs(batch))
        few, labels = Chunk(cut(batch, 0, count), 0, count), [site.label for site in self._watched().sites]

        def run() -> RowSample:
            with kept_attributes(self.model):
                numbers = self.read(few, lambda site, rows: _numbers(rows, count, self._counts.get(site)))
            return dict(zip(labels, (sample.tolist() for sample in numbers), strict=True))

        with kept_random_state():
            first, second = run(), run()
        return {label: first[label] for label in labels if not unlike(first, second, label, self.tolerated())}

    def tolerated(self) -> float:
        """The share of their size by which rows may differ on another machine."""
        if torch.is_autocast_enabled(self.home.type):
            return TOLERATED_COARSE
        types = types_of(self.model) or {torch.float32}
        return max(TOLERATED.get(dtype, TOLERATED_COARSE) for dtype in types)

    @property
    def left_out(self) -> dict[str, str]:
        """Sites of a watched model that were not named one by one and gave no rows, with the reason."""
        return self._watched().left_out

    def first_inputs(self, batch: Any) -> str | None:
        """The digest of the first few inputs of the first batch."""
        return digest_of_first(batch)

    def look_at_output(self, batch: Any) -> None:
        """Run a few inputs of the first batch; the model is restored afterwards."""
        with kept_random_state(), kept_attributes(self.model):
            self._mixing.usual = self._first(batch, self._read_by_input)

    def mixing(self, batch: Any) -> str | None:
        """A note if the model mixes the inputs of a batch, at its watched sites or else at its output; None if not."""
        return self._mixing.before(self.name, self.model, batch, self._read_by_input)

    def mixing_in_pass(self) -> str | None:
        """The note of `mixing`, or once the pass has read the same inputs, one on models that mix only many inputs."""
        return self._mixing.after(self.name, self.model, self._read_by_input)

    def note_after_pass(self) -> str | None:
        """The note after the last chunk: that of `mixing_in_pass`, or on a model that keeps state between batches."""
        return self.mixing_in_pass() or self._mixing.state_after(self.name, self.model, self._read_by_input)

    def _read_by_input(self, chunk: Chunk) -> dict[str, Tensor]:
        if self._seen is None:
            return {OUTPUT: by_input(self.outputs(chunk))}
        values = self.read(chunk, lambda site, rows: by_input(rows, self._counts.get(site)))
        return dict(zip((site.label for site in self._watched().sites), values, strict=True))

    def per_input(self) -> dict[str, int]:
        """The number of rows per input, by site."""
        return {site.label: rows_per_input(site, self.rows) for site in self._watched().sites}

    def counts(self) -> dict[str, Tensor]:
        """If an input gives several rows: the number for each input of the last chunk, by site; else empty."""
        return self._counts


@dataclass
class SavedActivations:
    """Activations saved earlier; row i belongs to input i."""

    saved: ActivationFile
    name: str
    sites: Any = None  # names and globs; None: all of them
    rows: Rule = "flatten"
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        self._sites = self.saved.select(self.sites)
        self.rule = rule_name(self.rows)
        if made_by := self.saved.about.get("rows"):
            if self.rule not in ("flatten", made_by):
                raise ValueError(
                    f"{self.saved.name} holds rows made by {made_by!r}, from which rows={self.rule!r} cannot be made: "
                    "leave rows= out for it, or extract the activations again"
                )
            self.rule, self.rows = made_by, "positions" if gives_several_rows(made_by) else "flatten"
        self.largest: dict[str, float] = {}  # not known

    def identity(self) -> object:
        return id(self.saved), self._sites, self.rows

    @property
    def count(self) -> int:
        return self.saved.n

    def describe(self) -> str:
        of = f" of {self.saved.about['model']}" if self.saved.about else ""
        return f"{self.name}: saved activations{of}, {self.saved.n} inputs"

    def digest(self) -> str:
        return digest_of([site.label for site in self._sites])

    def on_cpu(self) -> bool:
        return self.device is None or torch.device(self.device).type == "cpu"

    @contextmanager
    def opened(self) -> Iterator[SavedActivations]:
        yield self

    def look(self, batch: Any) -> Side:
        few = Chunk(None, 0, min(TRIED, self.saved.n))
        side = _side(self.name, self._sites, self.read(few, lambda _, rows: _form(rows)))
        left_out = self.saved.about.get("left_out", ()) if self.sites is None else ()
        return replace(side, left_out=tuple((site, why) for site, why in left_out))

    def first_inputs(self, batch: Any) -> str | None:
        """The digest of the first few inputs that the activations were extracted from, if known."""
        return self.saved.about.get("first_inputs")

    def mixing_in_pass(self) -> str | None:
        """The note of the pass that extracted the activations, if their model mixed the inputs of a batch."""
        return self.saved.about.get("mixing")

    def sampled_rows(self, batch: Any) -> RowSample:
        """A few numbers of the rows of the first few inputs."""
        few = Chunk(None, 0, min(TRIED, self.saved.n))
        numbers = self.read(few, lambda _, rows: _numbers(rows, few.count).tolist())
        return dict(zip((site.label for site in self._sites), numbers, strict=True))

    def tolerated(self) -> float:
        return TOLERATED[torch.float32]

    def per_input(self) -> dict[str, int]:
        return {site.label: rows_per_input(site, self.rows) for site in self._sites}

    def counts(self) -> dict[str, Tensor]:
        return {}  # every input gives as many rows as `per_input` says

    def row_bytes(self) -> dict[str, int]:
        """Bytes per input in double precision, by site."""
        return {site.label: 8 * math.prod(site.shape) for site in self._sites}

    def activations(self, start: int, stop: int) -> dict[str, Tensor]:
        """The saved activations of some inputs, by site."""
        return {site.label: self.saved.activation(site.label, start, stop) for site in self._sites}

    def read(self, chunk: Chunk, sink: Sink) -> list[Any]:
        stop = chunk.start + chunk.count
        if stop > self.saved.n:
            raise ValueError(f"need paired rows: {self.name} has {self.saved.n} saved, but the data goes on to {stop}")
        values = []
        for site in self._sites:
            rows = self.saved.rows(site.label, chunk.start, stop, rule=self.rows)
            values.append(sink(site.label, rows if self.device is None else rows.to(self.device)))
        return values


Source = Network | SavedActivations


def meeting_place(device: torch.device) -> torch.device:
    """The device where rows of all sources meet: that of the first ones, or the CPU if it has no float64."""
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


def _form(rows: Tensor) -> tuple[int, str]:
    return rows.shape[1], str(rows.dtype).removeprefix("torch.")


def _side(name: str, sites: Sequence[Site], forms: Sequence[tuple[int, str]]) -> Side:
    widths, dtypes = zip(*forms, strict=True)
    return Side(name, tuple(s.label for s in sites), widths, tuple(s.shape for s in sites), dtypes)


def _numbers(rows: Tensor, inputs: int, counts: Tensor | None = None) -> Tensor:
    """(inputs, 2): the norm of all numbers of an input, and their sum with weights that depend on their order."""
    parts = rows.detach().cpu().double().split(len(rows) // inputs if counts is None else counts.tolist())
    flat = [part.flatten() for part in parts]
    weights = (torch.arange(len(numbers), dtype=torch.float64, device="cpu").cos() for numbers in flat)
    return torch.stack([torch.stack([x.norm(), x @ w]) for x, w in zip(flat, weights, strict=True)])


def unlike(first: RowSample, second: RowSample, site: str, tolerated: float) -> bool:
    """Whether the rows of the same inputs differ at a site by more than rounding; False for a site that one lacks."""
    pairs = zip(first.get(site, ()), second.get(site, ()), strict=False)  # a first batch may hold fewer inputs
    return any(abs(x - y) > tolerated * max(a[0], b[0]) for a, b in pairs for x, y in zip(a, b, strict=False))


def made_up_inputs(batch: Any) -> tuple[Any, str]:
    """Inputs in the structure of a batch that do not depend on its content, and their shapes in words."""
    shapes: list[str] = []

    def made_up(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            shapes.append(f"{name} {len(leaf)}")
            return ["a" if isinstance(item, str) else item for item in leaf]
        shapes.append(f"{name} {leaf.dtype} {tuple(leaf.shape)}")
        if leaf.is_floating_point():  # between 0 and 1, as images are
            random = torch.Generator().manual_seed(0)
            return torch.rand(leaf.shape, generator=random, dtype=torch.float64).to(leaf.device, leaf.dtype)
        # Any table of embeddings has a row 0; a mask of ones leaves nothing out.
        return torch.ones_like(leaf) if "mask" in name else torch.zeros_like(leaf)

    return rebuild_named(made_up, with_tensors(batch)), "; ".join(shapes)


def _stable_name(function: Callable[[Any], Any] | None) -> str:
    """A name that is the same in every process, where a plain repr may hold an address in memory."""
    name = getattr(function, "__qualname__", None) or repr(function)
    return type(function).__qualname__ if " at 0x" in name else name


# From the arguments of `compare` to sources


def notes_of_pass(sources: Iterable[Any]) -> tuple[str, ...]:
    """The notes on networks that mix the inputs of a batch, or whose tokeniser has cut texts, each once."""
    notes = [
        note for source in sources if isinstance(source, Source) for note in (source.mixing_in_pass(), _cut(source))
    ]
    return tuple(dict.fromkeys(filter(None, notes)))


def _cut(source: Source) -> str | None:
    prepare = getattr(source, "prepare", None)
    count = len(getattr(prepare, "cut", ()))
    if prepare is None or not count:
        return None
    limit = f"{prepare.tokenizer.model_max_length:,} tokens"
    return f"{counted(count, 'text')} longer than the {limit} that {source.name} reads: the rest was cut off"


def pairing_notes(a: Any, b: Any, first: Any) -> tuple[str, ...]:
    """A note if activations were extracted from other inputs than what they are compared with; `first`: a batch."""
    if type(a) is type(b) is Network:
        return ()
    digests = [source.first_inputs(first) for source in (a, b)]
    if None in digests or digests[0] == digests[1]:
        return ()
    return (
        f"the rows of {a.name} and {b.name} are paired by position, but their first inputs differ: they may be "
        "shuffled, prepared differently, or from other data",
    )


def digest_of_first(batch: Any) -> str:
    """The digest of the first few inputs of a batch, without labels."""
    return digest_of(without_labels(cut(batch, 0, min(TRIED, count_inputs(batch)))))


def number_duplicates(sources: Sequence[Any]) -> None:
    """Number the sources that have the same name."""
    names = [source.name for source in sources]
    for k, source in enumerate(sources):
        if names.count(names[k]) > 1:
            source.name = f"{names[k]} ({'AB'[k] if len(names) == 2 else k + 1})"


def models_and_data(
    model_a: Any, model_b: Any, data: Any, names: Sequence[str | None] | None = None
) -> tuple[list[Any], list[str | None], Any]:
    """The things to compare, their names (None: their own) and the data.

    From (a, b, data), ([a, b, c], data) or ({"base": a, "tuned": b}, data), as the caller was given them.
    """
    if isinstance(model_a, (list, tuple)) or is_named(model_a):
        if data is not None and model_b is not None:
            raise TypeError("several models are one argument, a list: ([m1, m2, m3], data)")
        if len(model_a) < 2 and not (model_a and is_statistics(next(iter(model_a)))):
            raise ValueError(f"need at least two models to compare, got {len(model_a)}")
        return *names_of(model_a, names), model_b if data is None else data
    if model_b is None:
        if is_statistics(model_a):
            return [model_a], [None], data
        two = "need two models to compare (the same one twice is fine), or a list of them and data"
        if isinstance(model_a, (str, os.PathLike)) and Path(model_a).is_file():
            raise OtherFile(f"{model_a} is not a file of statistics, so it is not enough: {two}")
        raise TypeError(two)
    return *names_of([model_a, model_b], names), data


def names_of(models: Any, names: Sequence[str | None] | None = None) -> tuple[list[Any], list[str | None]]:
    """The models of a list or of {name: model}, and their names; None for those that keep their own."""
    if isinstance(models, Mapping):
        if names is not None:
            raise TypeError("the models have names already, the keys of the dict: leave names= out")
        models, names = list(models.values()), [str(name) for name in models]
    if names is None:
        return list(models), [None] * len(models)
    if isinstance(names, str) or not all(name is None or isinstance(name, str) for name in names):
        raise TypeError(f"names= is a list of texts, one for each model, got {names!r}")
    if len(names) != len(models):
        raise ValueError(f"need a name for each model, got {len(names)} names ({listed(names)}) for {len(models)}")
    given = [name for name in names if name is not None]
    if "" in given or len(set(given)) < len(given):
        raise ValueError(f"names of models must differ, and not be empty, got {listed(map(repr, given))}")
    return list(models), list(names)


def is_named(thing: Any) -> bool:
    """Whether this is {name: model}: a dict of arrays is {site: activations}, and neither holds the other."""
    if not isinstance(thing, Mapping):
        return False
    arrays = [str(key) for key, value in thing.items() if isinstance(value, (np.ndarray, Tensor))]
    models = [str(key) for key, value in thing.items() if _is_source(value)]
    if arrays and models:
        raise TypeError(
            f"a dict holds models or arrays, not both: {listed(map(repr, models))} are models (or files of them) and "
            f"{listed(map(repr, arrays))} arrays. Write {{name: {{site: array}}}} for saved activations with a name"
        )
    return bool(models)


def _is_source(thing: Any) -> bool:
    kinds = (nn.Module, NamedModel, ActivationFile, Mapping, str, os.PathLike)
    return isinstance(thing, kinds) or is_sketch(thing)


def for_each(names: str, count: int, a: Any, b: Any, both: Any = None) -> list[Any]:
    """An option of every model, from that of A, of B and of both; with more than two models, A's is for all."""
    if count != 2 and b is not None:
        raise ValueError(f"with more than two models, {names}_a is for all of them; leave {names}_b out")
    a, b = (both if option is None else option for option in (a, b))
    return [a, b] if count == 2 else [a] * count


def is_sketch(thing: Any) -> bool:
    """Whether this is a sketch, or a file that holds one."""
    if isinstance(thing, (str, os.PathLike)):
        return Path(thing).suffix == ".safetensors" and is_statistics_file(thing, kind="sketch")
    return getattr(type(thing), "kind", None) == "sketch"


def package_of(thing: Any) -> Any:
    """The package that compares a sketch, or a file of one; None for models, activations and statistics."""
    return import_module("sosie.sketching") if is_sketch(thing) else None  # by name: the engine imports no room


def is_statistics(thing: Any) -> bool:
    return isinstance(thing, (str, os.PathLike)) and Path(thing).suffix == ".safetensors" and is_statistics_file(thing)


def is_array_file(text: str | os.PathLike[str]) -> bool:
    """Whether a text names a file of arrays rather than a model with weights from such a file."""
    path = Path(text)
    return path.suffix in (".npz", ".safetensors") and ("@" not in str(text) or path.is_file())


def open_source(text: str | os.PathLike[str], *, seed: int = 0) -> NamedModel | ActivationFile | str:
    """The model or saved activations that a text names; a file of statistics or a sketch is returned as a text."""
    if is_statistics(text) or is_sketch(text):
        return str(text)
    return open_activations(text) if is_array_file(text) else open_model(str(text), seed=seed)


def open_network(
    thing: Any, *, name: str | None = None, sites: Any, rows: Rule, prepare: Any, inputs: Any, device: Any
) -> Source:
    """A network from a module or specification, or saved activations from {site: array} or a file of arrays."""
    if isinstance(thing, (str, os.PathLike)):
        thing = open_source(thing)
    if isinstance(thing, Mapping):
        thing = open_activations(thing)
    if isinstance(thing, ActivationFile):
        own_name = thing.about.get("name") or Path(thing.name).stem
        return SavedActivations(thing, name or own_name, sites, rows, device)
    otherwise = (
        ", or saved activations ({site: array}, .npz, .safetensors). Data come third: compare(model, model, data) "
        "compares the layers of one network"
    )
    return Network.of(
        thing, name=name, prepare=prepare, otherwise=otherwise, sites=sites, rows=rows, inputs=inputs, device=device
    )
