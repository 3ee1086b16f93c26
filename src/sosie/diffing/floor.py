"""The floor: what A differs from itself by under changes that must not matter, measured like any difference."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..capture import Chunk, unwrap
from ..checks import one_of, positive
from ..engine.mixing import MIXES, UNKNOWN
from ..engine.plan import size_text
from ..measures import relative_error
from ..models.exported import copy_in
from ..models.onnx_file import OnnxModel
from ..process_state import matmul_precision, switched
from ..stats import coarser
from .pairing import Pair
from .replay import WHOLE, Gap, Reference, Replay, Subject

FACTOR = 8.0  # an error beyond the floor is larger than the floor by this factor
TYPE_ALONE = "the rounding of the type alone"
NAMES = ("batch", "bfloat16", "float16", "tf32")
HIGHER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
BITS = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Level(NamedTuple):
    """The floor at one site: of its error, of the error that its module makes, and of what arrives at it."""

    error: float
    made: float
    arrives: float

    def at_least(self, other: Level) -> Level:
        """The larger of both, number by number."""
        return Level(*map(max, self, other))


@dataclass
class Variant:
    """A as it must not differ from itself."""

    subject: Subject
    words: str
    share: float = 1.0  # of each chunk
    threads: int | None = None
    tf32: bool = False


def _as_run(subject: Subject, dtype: torch.dtype) -> torch.dtype:
    """The type, or that of the caller's autocast if it is coarser."""
    device = subject.home.type
    return coarser(dtype, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else dtype


@dataclass
class Floor:
    """What must not matter. A tolerance is a floor of its own, the same everywhere."""

    a: Subject
    variants: list[Variant]
    least: float  # the rounding of the coarser type at hand, or the tolerance
    factor: float
    words: str
    given: Any = None
    caveats: list[str] = field(default_factory=list)
    known: Mapping[str, Level] = field(default_factory=dict)  # at these sites it was measured before
    of_b: bool = False  # what is measured is B against itself, since A cannot be changed

    @classmethod
    def of(cls, given: Any, a: Subject, b: Subject, memory: int, first: Any) -> Floor:
        """`first`: the first batch, on which it is seen whether A answers each input by itself."""
        dtype = coarser(a.dtype, b.dtype)
        if a.values is not None and b.values is None:
            return cls.of(given, b, a, memory, first)._of_b()
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            tolerance = positive(given, "floor")
            return cls(a, [], tolerance, 1.0, f"a relative error of {tolerance:g}, as given", given)
        if isinstance(given, nn.Module) or (isinstance(given, str) and given not in NAMES and os.path.exists(given)):
            other = Subject.of(given, name="the floor", prepare=a.prepare, inputs=a.inputs, device=a.device)
            least = torch.finfo(coarser(dtype, other.dtype)).eps
            return cls(a, [Variant(other, "the model given")], least, FACTOR, f"A against {other.describe()}", given)
        one_of(given, "floor", NAMES)
        self = cls(a, [], torch.finfo(_as_run(a, dtype)).eps, FACTOR, "", given)
        if given == "tf32":
            if a.home.type != "cuda":
                raise ValueError('floor="tf32" needs a model on a GPU: TF32 is how GPUs multiply float32')
            self.variants.append(Variant(a, "A with TF32 products", tf32=True))
        elif given != "batch":
            dtype = getattr(torch, given)
            self.least = torch.finfo(dtype).eps
            self._add_copy(dtype, memory, f"A in {given}")
        else:
            self._add_own(dtype, memory, first)
        self.words = "; ".join(variant.words for variant in self.variants) or TYPE_ALONE
        return self

    def _add_own(self, dtype: torch.dtype, memory: int, first: Any) -> None:
        """What A differs from itself by: rounding, and not what other inputs or random numbers make."""
        if self.a.values is not None and not isinstance(self.a.model, OnnxModel):
            return  # what is saved does not change
        note = self.a.mixing(first)
        if note is None or UNKNOWN in note:
            fewer = 1 if self.a.on_cpu() and torch.get_num_threads() > 1 else None
            words = "A with half as many inputs at a time" + (" and one thread" if fewer else "")
            self.variants.append(Variant(self.a, words, share=0.5, threads=fewer))
        else:
            self.caveats.append(f"{note}; the floor leaves this out")
        if note is not None and UNKNOWN not in note and MIXES not in note:
            return  # a copy in another type may draw other numbers
        if self.a.dtype != dtype:
            self._add_copy(dtype, memory, f"A in {BITS.get(dtype, dtype)}, the type of B")
        elif dtype in HIGHER:
            self._add_copy(HIGHER[dtype], memory, f"A in {BITS[HIGHER[dtype]]}")

    def _add_copy(self, dtype: torch.dtype, memory: int, words: str) -> None:
        """A copy of A in another type, or what comes near it."""
        if self.a.values is not None:
            if isinstance(self.a.model, OnnxModel):
                jittered = replace(self.a, model=self.a.model.jittered())
                self.variants.append(Variant(jittered, "A with other last digits at its sites"))
            return
        size = sum(t.numel() for t in self.a.model.parameters()) * torch.finfo(dtype).bits // 8
        if size > memory:
            self.caveats.append(
                f"the floor lacks the rounding of A measured layer by layer: a copy in {BITS.get(dtype, dtype)} takes "
                f"{size_text(size)}, more than the budget of {size_text(memory)}; raise memory="
            )
            return
        try:
            model = copy_in(dtype, unwrap(self.a.model), self.a.dtype)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:  # not every model can be copied
            self.caveats.append(
                f"the floor lacks the rounding of A, of which no copy could be made: {_first_sentence(error)}"
            )
            return
        variant = replace(self.a, model=model, cast=dtype)
        variant.changes = self.a.changes
        self.variants.append(Variant(variant, words))

    def _of_b(self) -> Floor:
        """The same where the model that is measured is B, and what cannot be changed is A."""

        def as_b(words: str) -> str:
            return re.sub(r"\bA\b", "B", words)

        variants = [replace(variant, words=as_b(variant.words)) for variant in self.variants]
        return replace(self, variants=variants, words=as_b(self.words), of_b=True)

    def kind(self, a: Reference, b: Subject) -> str:
        """What it allows, in a few words."""
        if not self.variants and self.factor == 1:
            return f"a relative error of {self.least:g}"
        if self.given in ("bfloat16", "float16", "tf32"):
            return f"{self.given} rounding"
        if isinstance(self.given, str) and self.given == "batch":
            dtype = _as_run(self.a, coarser(a.dtype, b.dtype))
            return f"{BITS.get(dtype, dtype)} rounding"
        return "what the given model differs by"

    def at(self, pairs: Sequence[Pair], chunks: Sequence[Chunk], under: Pair = WHOLE) -> dict[str, Level]:
        """The floor at the sites of A in these pairs, measured on a few inputs."""
        labels = {pair.a: pair.b if self.of_b else pair.a for pair in [*pairs, under]}  # of A, and where it is measured
        rounding = Level(self.least, self.least, self.least)
        levels = {label: rounding.at_least(self.known.get(label, rounding)) for label in labels}
        for variant in list(self.variants):
            try:
                run = self._replayed(variant, list(labels.values()), labels[under.a], chunks)
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                # Code with a fixed type does not run in another.
                self.variants.remove(variant)
                self.caveats.append(f"the floor lacks {variant.words}, which does not run: {_first_sentence(error)}")
                self.words = "; ".join(each.words for each in self.variants) or TYPE_ALONE
                continue
            levels = {label: level.at_least(_level_of(run, labels[label])) for label, level in levels.items()}
        return levels

    def _replayed(self, variant: Variant, labels: Sequence[str], home: str, chunks: Sequence[Chunk]) -> Replay:
        """A against a variant of itself at these sites, which lie inside `home`."""
        pairs, under = [Pair(label, label, "") for label in labels], Pair(home, home, "")
        around = partial(_conditions, variant)
        run = Replay(self.a, variant.subject, pairs, under=under, share=variant.share, around=around)
        for chunk in chunks:
            run.read(chunk)
        return run


def _level_of(run: Replay, label: str) -> Level:
    """What A differs from itself by; 0 where it could not be measured."""
    entries = run.entries.get(label)
    error = 0.0
    if entries is not None and float(entries.aa.sum()) and not float(entries.lone):
        error = float(relative_error(entries))
    at_end = label == run.under.a
    made = run.leaves if at_end else run.made.get(label)
    arrives = run.inputs if at_end else run.arrives.get(label)
    return Level(error, _finite(made), _finite(arrives))


def _finite(gap: Gap | None) -> float:
    value = None if gap is None else gap.value()
    return 0.0 if value is None or value == float("inf") else value


def _first_sentence(error: Exception) -> str:
    return re.split(r"\n|\. ", str(error).strip())[0]


@contextmanager
def _conditions(variant: Variant) -> Iterator[None]:
    before = torch.get_num_threads()
    with ExitStack() as stack:
        if variant.tf32:
            stack.enter_context(matmul_precision("tf32"))
            stack.enter_context(switched(torch.backends.cudnn, "allow_tf32", True))
        if variant.threads is not None:
            torch.set_num_threads(variant.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
