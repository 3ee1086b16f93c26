"""Two models on the same inputs: how B differs from A at each pair of sites, and what B makes of A's activations.

The second is the replay: one forward of B in which every paired module is given what its counterpart in A was given,
and answers with what that answered. So each module is judged by itself (`made`), and so is the code between them: what
arrives at a module where nothing but A's activations went in before (`arrives`), and what leaves the whole (`leaves`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import Chunk, TokenMasks, cut, kept_attributes, types_of, unwrap, watch
from ..capture.calls import (
    Argument,
    Arguments,
    Call,
    Seen,
    answering_as,
    fed,
    like_own,
    matched,
    record_calls,
    run_around,
    some_inputs,
    with_output_reserved,
)
from ..capture.restore import is_compiled, modules_of, state_of
from ..capture.sites import (
    Names,
    ancestors,
    at_path,
    find_name,
    parts_of,
    path_to_tensor,
    replaced,
    split_call,
    tensors_at,
)
from ..engine.network import OUTPUT, Network
from ..models.exported import AsExported
from ..models.values import NotSaved, ValueModel, value_model_in
from ..process_state import kept_random_state, products
from ..stats import Entries, real_numbers, squared_error
from .explain import axes_of
from .pairing import Pair

WHOLE = Pair(OUTPUT, OUTPUT, "the output")


@dataclass
class Subject(Network):
    """A model that is diffed: as found if it is in evaluation mode, its inputs cast to its own type if that differs."""

    with_head = True

    cast: torch.dtype | None = None  # the type that floating-point inputs are converted to

    def __post_init__(self) -> None:
        super().__post_init__()
        self.changes = True  # whether a forward changes the model's state; known after `settle`
        self.silent: dict[str, str] = {}  # sites that a look has left out, and why

    @property
    def dtype(self) -> torch.dtype:
        """The type of most of its floating-point numbers."""
        types = types_of(self.model)
        if not types and self.values is not None:
            return self.values.own_dtype
        counts = {dtype: sum(p.numel() for p in self.model.parameters() if p.dtype == dtype) for dtype in types}
        return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32

    @property
    def sealed(self) -> bool:
        """Whether its layers cannot be watched: of TorchScript, and of the module of an exported program."""
        return isinstance(unwrap(self.model), (torch.jit.ScriptModule, AsExported))

    @property
    def values(self) -> ValueModel | None:
        """The model of values that this is (an ONNX graph), whose layers take no inputs: what they give is computed
        from what others give.
        """
        return value_model_in(self.model)

    def has_weights(self, label: str) -> bool:
        """Whether the module at a site has weights, in it or inside it."""
        return next(self._module(label).parameters(), None) is not None

    def has_parts(self, label: str) -> bool:
        return next(self._module(label).children(), None) is not None

    def _module(self, label: str) -> nn.Module:
        return dict(unwrap(self.model).named_modules())[split_call(label)[0]]

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile stands between a call and the code, which hooks need; `compiled_answer` calls that."""
        return any(map(is_compiled, modules_of(self.model)))

    def compiled_answer(self, chunk: Chunk) -> Any:
        """What the model answers as it is called by others, without hooks."""
        with self.undone(), self._named_in_errors(chunk):
            args, kwargs = self.arguments(chunk)
            return self.model(*args, **kwargs)

    def in_training(self) -> list[str]:
        """Modules in training mode inside a model that is in evaluation mode: BatchNorm there mixes its inputs."""
        if not self._is_mixed():
            return []
        names = Names.of(unwrap(self.model))
        modules = {name: names.by_name[name] for name in names.leaves()}
        return [name for name, module in modules.items() if module.training and not _is_quantised(module)]

    def _is_mixed(self) -> bool:
        """Whether the model is in evaluation mode, but perhaps not all of its modules."""
        return not self.sealed and not self.model.training

    @contextmanager
    def borrowed(self) -> Iterator[Network]:
        """As `Network.borrowed`, but modules in training mode inside a model in evaluation mode stay there."""
        left = [module for module in modules_of(self.model) if module.training] if self._is_mixed() else []
        with super().borrowed():
            for module in left:
                module.training = True
            yield self

    def arguments(self, chunk: Chunk) -> Arguments:
        given = super().arguments(chunk)
        for path, tensor in tensors_at(given) if self.cast is not None else ():
            if tensor.is_floating_point():
                given = replaced(given, path, tensor.to(self.cast))
        return given

    def settle(self, chunk: Chunk) -> None:
        """Find out whether a forward changes the model's state, from one."""
        modules = modules_of(self.model)
        with self.undone(), self._named_in_errors(chunk):
            before = None if self.sealed else state_of(modules)
            args, kwargs = self.arguments(chunk)
            unwrap(self.model)(*args, **kwargs)
            self.changes = self.sealed or state_of(modules) != before  # what is sealed does not show its state

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Forwards in this block draw the same random numbers as others, and leave nothing behind on the model."""
        with kept_random_state(), kept_attributes(self.model) if self.changes else nullcontext():
            yield

    def look_at(self, chunk: Chunk) -> tuple[list[Seen], dict[str, Tensor]]:
        """The sites in execution order, and for some inputs the activations of all of them and the output."""
        root, sites = unwrap(self.model), self.sites
        if self.sealed:
            return [], {}
        if sites is not None and not isinstance(sites, str) and isinstance(sites, Sequence):
            sites = [site for site in sites if not isinstance(site, str) or _exists(root, site)] or sites
        with self.undone(), watch(self.model, sites, sink=lambda _, x: x.clone(), axes=False) as seen:
            args, kwargs = self.arguments(chunk)
            with self._named_in_errors(chunk):
                answer = seen.run(*args, **kwargs)
        self.silent = {site: why for site, why in seen.left_out.items() if "never called" not in why}
        names = Names.of(root)
        self.silent = {with_output_reserved(names, site): why for site, why in self.silent.items()}
        numbers = {with_output_reserved(names, site): x for site, x in seen.items()}
        if (path := path_to_tensor(answer)) is not None:
            numbers[OUTPUT] = at_path(answer, path)
        eight = [site for site in numbers if _is_quantised(names.by_name.get(split_call(site)[0]))]
        kinds = {site: torch.quint8 if site in eight else x.dtype for site, x in numbers.items()}
        return [Seen(site, tuple(x.shape), kinds[site], x) for site, x in numbers.items() if site != OUTPUT], numbers

    def recorder(self, labels: Sequence[str]) -> Callable[[Chunk], tuple[dict[str, Call], Any, TokenMasks]]:
        """A function from inputs to the calls of these modules, the answer, and the masks of padded tokens."""
        overwritten: set[Any] = set()  # the tensors that the model overwrites, known after the first forward

        def run(chunk: Chunk) -> tuple[dict[str, Call], Any, TokenMasks]:
            with self.undone(), self._named_in_errors(chunk):
                masks = self.masks(chunk.batch, *self.arguments(chunk))
                return *record_calls(self.model, labels, lambda: self.arguments(chunk), overwritten), masks

        return run

    def run_around(self, labels: Sequence[str], chunk: Chunk, enter: Any = None, leave: Any = None) -> Any:
        with self.undone(), self._named_in_errors(chunk):
            return run_around(self.model, labels, self.arguments(chunk), enter=enter, leave=leave)


class Reference(Protocol):
    """What a diff asks of A: a model, or a record of one."""

    name: str
    sites: Any
    silent: dict[str, str]

    @property
    def dtype(self) -> torch.dtype: ...
    def describe(self) -> str: ...
    def borrowed(self) -> AbstractContextManager[Any]: ...
    def in_training(self) -> list[str]: ...
    def on_cpu(self) -> bool: ...
    def look_at(self, chunk: Chunk) -> tuple[list[Seen], dict[str, Tensor]]: ...
    def recorder(self, labels: Sequence[str]) -> Callable[[Chunk], tuple[dict[str, Call], Any, TokenMasks]]: ...


def _is_quantised(module: nn.Module | None) -> bool:
    """Whether this is a layer of torch.ao in 8 bits, whose mode has no effect."""
    return type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized"))


def _exists(root: nn.Module, label: str) -> bool:
    return (
        any(sign in label for sign in "*?[")
        or label in ("leaves", "blocks", ".")
        or bool(find_name(Names.of(root), label))
    )


class Gap:
    """The relative error of a few tensors over all inputs, each by itself: the largest counts."""

    def __init__(self) -> None:
        self._squares: dict[Any, list[Any]] = {}  # Σ(a − b)² and Σa² by tensor

    def add(self, key: Any, a: Tensor | None, b: Tensor, keep: Tensor | None = None) -> None:
        assert a is not None
        sums = None if a.shape != b.shape else squared_error(a, b, keep)
        if sums is None:
            self.fail(key)
        else:
            self._squares[key] = [self._squares[key][0] + sums] if key in self._squares else [sums]

    def add_nothing(self, key: Any) -> None:
        """Add tensors that are the same."""
        self._squares.setdefault(key, [torch.zeros(2, dtype=torch.float64)])

    def fail(self, key: Any = None) -> None:
        """Another shape, or NaN on one side alone."""
        self._squares[key] = [torch.tensor([math.inf, 1.0], dtype=torch.float64)]

    def value(self) -> float | None:
        errors = []
        for (sums,) in self._squares.values():
            dd, aa = sums.tolist()
            errors.append(0.0 if dd == 0 else math.inf if aa == 0 else (dd / aa) ** 0.5)
        return max(errors, default=None)


class Replay:
    """The pass of two models over the same chunks; `under` is the pair of modules inside which the pairs lie."""

    def __init__(
        self,
        a: Reference,
        b: Subject,
        pairs: Sequence[Pair],
        *,
        under: Pair = WHOLE,
        replay: bool = True,
        share: float = 1.0,  # of each chunk that B is given
        as_called: bool = False,  # models that are compiled answer by their compiled code; what is inside is eager
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,  # forwards of B
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        self.a, self.b, self.under = a, b, under
        self.pairs = [pair for pair in pairs if pair.a != under.a]
        self._replay, self._share, self._around = replay, share, around
        self._compiled = [as_called and isinstance(each, Subject) and each.is_compiled for each in (a, b)]
        self._tolerances = {"rtol": rtol, "atol": atol}
        self._reference = a.recorder([*(pair.a for pair in self.pairs), under.a])
        self._levels = levels_of([pair for pair in self.pairs if not pair.fused])
        self.entries: dict[str, Entries] = {}  # by A's label, as everything here
        self.shapes: dict[str, tuple[int, ...]] = {}  # of one input's activation
        self.other_shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # of A and B, where they differ
        self.rest: dict[str, Gap] = {}  # the difference of other tensors that a module returns: the total
        self.unread = ""  # the type of answers in which no numbers are found
        self.lone: set[tuple[str, Any]] = set()  # other tensors that one model alone answers with: which, and the path
        self.made: dict[str, Gap] = {}
        self.unfit: dict[str, str] = {}  # why a module of B could not be run on A's inputs
        self.arrives: dict[str, Gap] = {}
        self.leaves, self.inputs = Gap(), Gap()
        self._axes: dict[tuple[str, Any], tuple[int, ...] | None] = {}  # of A's arguments, by B's label and place
        self.answers: tuple[Any, Any] = (None, None)  # what both models returned for the last chunk
        self.masks = TokenMasks(None)  # of the last chunk
        self.last_error, self.last_worst = 0.0, 0  # of the last chunk: the largest error, and the input where it is
        self._fresh: list[Entries] = []  # of the last chunk

    def read(self, chunk: Chunk) -> None:
        self.last_error, self.last_worst = 0.0, chunk.start
        calls, answer, masks = self._reference(chunk)
        if self._compiled[0] and isinstance(self.a, Subject):
            answer = self.a.compiled_answer(chunk)
            calls[OUTPUT] = replace(calls[OUTPUT], output=answer)
        if self._share < 1:
            count = max(1, int(chunk.count * self._share))
            calls = {label: some_inputs(call, 0, count, of=chunk.count) for label, call in calls.items()}
            tokens, decoder = (None if mask is None else mask[:count] for mask in (masks.tokens, masks.decoder))
            masks = replace(masks, tokens=tokens, decoder=decoder)
            chunk = Chunk(cut(chunk.batch, 0, count), chunk.start, count)
        self._total(chunk, calls, masks, answer)
        if self.b.sealed and self._replay:
            self._alone(chunk, calls, masks)
        for level, labels in enumerate(self._levels) if self._replay and not self.b.sealed else ():
            self._isolated(chunk, calls, masks, labels, outermost=level == 0)
        self._note_worst()

    def _total(self, chunk: Chunk, calls: dict[str, Call], masks: TokenMasks, answer: Any) -> None:
        counterparts = {pair.b: (pair, calls[pair.a]) for pair in [*self.pairs, self.under] if pair.a in calls}

        @products()  # B itself runs as A does, with autocast and the precision that the caller chose
        def enter(label: str, module: nn.Module, given: Arguments) -> Arguments | None:
            pair, call = counterparts[label]
            if pair != self.under:
                return None
            found = matched(call, module, given)
            if label == OUTPUT:
                for each in found:
                    if each.other is None or each.is_mask:
                        continue
                    other = each.other.to(each.own.device, each.own.dtype)
                    if each.own.is_floating_point() or torch.equal(other, each.own):
                        self.inputs.add(each.path, other, each.own)
                    else:
                        self.inputs.fail(each.path)  # token ids that are near each other are not alike
                return None
            return fed(given, found)

        @products()
        def leave(label: str, module: nn.Module, output: Any) -> None:
            pair, call = counterparts[label]
            if not (self._compiled[1] and label == OUTPUT):
                self._compare(pair, call, output, masks, chunk)

        with self._around():
            output = self.b.run_around(list(counterparts), chunk, enter, leave)
            if self._compiled[1]:
                output = self.b.compiled_answer(chunk)
        if self._compiled[1]:
            with products():
                self._compare(*counterparts[OUTPUT], output, masks, chunk)
        self.answers, self.masks = (answer, output), masks

    def _compare(self, pair: Pair, call: Call, output: Any, masks: TokenMasks, chunk: Chunk) -> None:
        if NotSaved in map(type, (call.output, output)):
            return
        label, located = pair.a, answers_at if pair.a == OUTPUT else tensors_at
        places, ours = dict(located(call.output)), dict(located(output))
        main, path = main_place(call.output, places), main_place(output, ours)
        if main is None and path is None and label == OUTPUT:
            self.unread = type(output).__name__
        if main is None or path is None:
            if label == OUTPUT and main != path:
                a, b = places.get(main), ours.get(path)
                self.other_shapes[label] = () if a is None else tuple(a.shape), () if b is None else tuple(b.shape)
            return
        theirs, mine = places.pop(main), ours.pop(path)
        if not self._counts_inputs(theirs, chunk):
            return
        a, b = real_numbers(theirs), pair.arranged(real_numbers(mine))
        if a.shape != b.shape and a.ndim > 1 < b.ndim and 2 in (a.ndim, b.ndim):
            a, b = a.flatten(1), b.flatten(1)
        if a.shape != b.shape:
            self.other_shapes[label] = tuple(a.shape), tuple(b.shape)
            return
        keep = kept_tokens(a, masks, label)
        rows_a, rows_b = (each if keep is not None else rows_of(each, chunk.count) for each in (a, b))
        self.shapes.setdefault(label, tuple((a if rows_a.shape[:1] == a.shape[:1] else rows_a).shape[1:]))
        found = Entries.of(rows_a, rows_b, keep=keep, start=chunk.start, **self._tolerances)
        self._fresh.append(found)
        self.entries[label] = self.entries[label].merge(found) if label in self.entries else found
        rest = self.rest.setdefault(label, Gap())
        for place in ours.keys() & places.keys():
            if places[place].shape == ours[place].shape:
                rest.add(place, places[place], ours[place])
            elif label == OUTPUT:
                rest.fail(place)
        if label == OUTPUT:
            self.lone |= {("A", place) for place in places.keys() - ours.keys()}
            self.lone |= {("B", place) for place in ours.keys() - places.keys()}

    def _counts_inputs(self, tensor: Tensor, chunk: Chunk) -> bool:
        """Whether it can be compared where B has fewer inputs: a mean over inputs is another one then."""
        return self._share == 1 or (tensor.ndim > 0 and len(tensor) == chunk.count)

    def _note_worst(self) -> None:
        """Read the sums of the chunk all at once: a GPU is waited for each time."""
        numbers = [(e.lone.sum(), e.dd.sum(), e.aa.sum(), e.lone_at[0], e.at[0]) for e in self._fresh]
        self._fresh = []
        rows = [torch.stack([number.double() for number in row]) for row in numbers]
        for lone, apart, size, lone_at, at in torch.stack(rows).tolist() if rows else ():
            error = math.inf if lone else apart / size if size else 0.0
            if error > self.last_error:
                self.last_error, self.last_worst = error, int(lone_at if lone else at)

    def _isolated(
        self, chunk: Chunk, calls: dict[str, Call], masks: TokenMasks, pairs: Sequence[Pair], *, outermost: bool
    ) -> None:
        """Run B with A's activations into and out of these modules."""
        counterparts = {pair.b: (pair, calls[pair.a]) for pair in [*pairs, self.under] if pair.a in calls}
        stand_ins: dict[int, tuple[Tensor, Tensor, int]] = {}  # by id, copies of A's activations: A's, and the version

        def is_stand_in(each: Argument) -> bool:
            """Whether B passes on what it was made to answer, and A did the same: there is nothing to compare."""
            copy, source, version = stand_ins.get(id(each.own), (None, None, 0))
            return copy is each.own and source is each.other and copy._version == version

        @products()
        def enter(label: str, module: nn.Module, given: Arguments) -> Arguments:
            pair, call = counterparts[label]
            every = matched(call, module, given)
            passed_on = [each for each in every if is_stand_in(each)]
            found = [self._arranged(pair, each) for each in every if not is_stand_in(each)]
            if pair != self.under:
                self._arrive(pair, found, outermost)
                for each in passed_on if outermost else ():
                    self.arrives[pair.a].add_nothing(each.path)
            return fed(given, found)

        @products()
        def leave(label: str, module: nn.Module, output: Any) -> Any:
            pair, call = counterparts[label]
            if type(call.output) is NotSaved:
                return None
            theirs = call.output
            if pair == self.under:  # of which a record holds arrays as tensors
                output, theirs = (torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in (output, theirs))
            result, tensors, fits = answering_as(output, theirs, pair.as_in_b, stand_in=pair != self.under)
            gap = Gap()
            if pair == self.under:
                if not outermost:
                    return None
                gap = self.leaves
            elif label not in self.unfit:
                gap = self.made.setdefault(pair.a, gap)
            if not fits:
                gap.fail()
            for k, (a, b, new) in enumerate(tensors):
                if not self._counts_inputs(a, chunk):
                    continue
                gap.add(k, a, b, kept_tokens(a, masks, pair.a))
                if not new.is_inference():
                    stand_ins[id(new)] = new, a, new._version
            return None if pair == self.under else result

        with self._around():
            self.b.run_around(list(counterparts), chunk, enter, leave)

    def _alone(self, chunk: Chunk, calls: dict[str, Call], masks: TokenMasks) -> None:
        """Run layers of TorchScript, which cannot be watched, one by one on A's inputs."""
        layers: dict[str, Any] = dict(unwrap(self.b.model).named_modules())
        for pair in self.pairs:
            if pair.a not in calls or pair.b in self.unfit:
                continue
            call, layer = calls[pair.a], layers[pair.b]
            if isinstance(layer, torch.jit.TracedModule):  # which refuses calls in Python
                layer = layer._c._get_method("forward")
            args, kwargs = call.arguments
            for path, tensor in tensors_at((args, kwargs)):
                if tensor.is_floating_point():
                    args, kwargs = replaced((args, kwargs), path, tensor.to(self.b.home, self.b.dtype))
            try:
                with self.b.undone(), self._around():
                    output = layer(*args, **kwargs)
            except (RuntimeError, TypeError, NotImplementedError, AttributeError) as error:
                self.unfit[pair.b] = f"it cannot be run by itself: {str(error).strip().splitlines()[0]}"
                continue
            with products():
                self._compare(pair, call, output, masks, chunk)
                _, tensors, fits = answering_as(output, call.output, stand_in=False)
                gap = self.made.setdefault(pair.a, Gap())
                if not fits:
                    gap.fail()
                for k, (a, b, _) in enumerate(tensors):
                    gap.add(k, a, b, kept_tokens(a, masks, pair.a))

    def _arranged(self, pair: Pair, each: Argument) -> Argument:
        """The argument with A's axes in the order in which B's module wants them, found once."""
        if each.other is None or each.is_mask or not each.own.is_floating_point():
            return each
        key = (pair.b, each.path)
        if key not in self._axes:
            self._axes[key] = axes_of(each.own, each.other)
        axes = self._axes[key]
        return each if axes is None else replace(each, other=each.other.permute(axes))

    def _arrive(self, pair: Pair, found: Sequence[Argument], outermost: bool) -> None:
        """Note whether A's inputs fit B's module, and by how much what B itself made of A's activations differs."""
        gap = self.arrives.setdefault(pair.a, Gap())
        for each in found:
            if each.is_mask:
                if each.fits and outermost:
                    gap.add(each.path, *(mask_numbers(m) for m in (each.other, each.own)))
            elif not each.fits:
                theirs = "nothing there" if each.other is None else f"{tuple(each.other.shape)} of {each.other.dtype}"
                self.unfit[pair.b] = (
                    f"{each.name} is {tuple(each.own.shape)} of {each.own.dtype} in B, {theirs} in A"
                ).replace("torch.", "")
            elif outermost:
                gap.add(each.path, like_own(each.other, each.own), each.own)


def main_place(output: Any, tensors: Mapping[Any, Tensor]) -> Any:
    """The keys that lead to the main one of the tensors in an output; None if there are none."""
    place = path_to_tensor(output)
    return next(iter(tensors), None) if place is None else place


def answers_at(answer: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in an answer and its numbers, arrays and text as tensors, with the keys that lead to each."""
    if isinstance(answer, Tensor):
        if answer.is_nested:
            raise TypeError(
                "the model answers with a nested tensor, which cannot be compared: let it return a padded one"
            )
        yield path, answer
    elif isinstance(answer, str):
        yield path, torch.tensor(list(answer.encode()), dtype=torch.float64)
    elif isinstance(answer, (int, float, np.generic, np.ndarray)):
        numbers = np.asarray(answer)
        if numbers.dtype.kind in "biufc":
            yield path, torch.from_numpy(numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64))
    else:
        for key, part in parts_of(answer, ()) or held_tensors(answer).items():
            yield from answers_at(part, (*path, key))


def held_tensors(answer: Any) -> dict[str, Tensor]:
    """The tensors that are attributes of an object."""
    return {key: part for key, part in getattr(answer, "__dict__", {}).items() if isinstance(part, Tensor)}


def mask_numbers(mask: Tensor | None) -> Tensor:
    assert mask is not None
    return mask.clamp(min=-1e3) if mask.is_floating_point() else mask


def levels_of(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The pairs by how many others contain them: those of one level can be replayed in one forward."""
    names = {split_call(pair.b)[0] for pair in pairs}
    levels: dict[int, list[Pair]] = {0: []}
    for pair in pairs:
        levels.setdefault(len(names.intersection(ancestors(split_call(pair.b)[0]))), []).append(pair)
    return [levels[depth] for depth in sorted(levels)]


def kept_tokens(activation: Tensor, masks: TokenMasks, label: str) -> Tensor | None:
    """(inputs, tokens) False at padding, where models may differ as they like; None if there is none."""
    if activation.ndim < 3:
        return None
    fits = [m for m in (masks.tokens, masks.decoder) if m is not None and m.shape == activation.shape[:2]]
    if not fits:
        return None
    keep = (fits[-1] if "decoder" in label.split(".") else fits[0]) != 0
    return None if bool(keep.all()) else keep


def rows_of(activation: Tensor, inputs: int) -> Tensor:
    """(inputs, entries); one row where the inputs cannot be told apart."""
    if activation.ndim and len(activation) and len(activation) % inputs == 0:
        return activation.reshape(inputs, -1)
    return activation.reshape(1, -1)
