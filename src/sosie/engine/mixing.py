"""Whether a model's activations for an input depend on more than the input.

They may depend on the rest of its batch, on the batches before, or on random numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from ..capture import Chunk, count_inputs, cut, join, kept_attributes
from ..capture.batches import rebuild
from ..process_state import kept_random_state, other_random_state, random_state

Numbers = dict[str, Tensor]  # by site, in execution order: some numbers of each input, (inputs, numbers)

TRIED = 4  # inputs of the first batch that a model is run on before all others
STATES = 16  # random states that a model is run from if it draws numbers: stochastic depth may rarely change anything
AMONG = 64  # they are the last of so many: a model may mix an input with one far before it
FEWEST = 3  # the input under test, one before it and one behind it
UNKNOWN, MIXES = "not known whether inputs of a batch are mixed", "mixes the inputs of a batch"  # in the notes
NUMBERS = 4096  # of each input and site that are compared
# By how much an activation may change without mixing: a share of the difference between two inputs, or of its own size,
# whichever is more. The latter is ten times what a product loses, in TF32 on a GPU. Batches of one shape take the same
# kernels and hardly differ at all, but tokens, say, may be padded to another length.
OF_DIFFERENCE = {torch.float64: 1e-6, torch.float32: 1e-2}
OF_SIZE = {("cpu", torch.float64): 1e-12, ("cpu", torch.float32): 1e-5, ("cuda", torch.float64): 1e-12}
COARSE_DIFFERENCE, COARSE_SIZE = 0.1, 1e-2


class MixingTest:
    """Tests a few inputs before the pass, one of them again within a chunk of the pass, and all once more after it."""

    def __init__(self) -> None:
        self.note: str | None = None  # the result: a sentence if the model mixes inputs
        self.usual: Numbers | None = None  # of the few inputs in a batch of their own
        self._before: tuple[object, Numbers] | None = None  # the few inputs, copied, and these numbers
        self._second = 0  # the index of the second of them, which is under test
        self._chunk: Chunk | None = None  # the chunk of the pass that has it
        self._in_chunk: Numbers = {}  # its numbers there

    def before(self, name: str, model: nn.Module, batch: object, read: Callable[[Chunk], Numbers]) -> str | None:
        """Test a few inputs of the first batch; see `mixing_note`."""

        def keep_first(chunk: Chunk) -> Numbers:
            numbers = read(chunk)
            self.usual = self.usual or numbers  # the first run is of the inputs as they are
            return numbers

        start, stop = tried_of(batch)
        self._second = start + 1
        self.note = mixing_note(name, model, batch, keep_first, self.usual)
        if self.note is None and self.usual is not None:  # copied, since a loader may fill the same memory again
            few = rebuild(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, cut(batch, start, stop))
            self._before = few, self.usual
        return self.note

    def keep(self, chunk: Chunk, site: str, rows: Tensor, counts: Tensor | None) -> None:
        """Keep the numbers of the input under test if the chunk has it and is larger than what was tried before."""
        at = self._second - chunk.start
        if self._chunk is None and chunk.count > TRIED and 0 <= at < chunk.count:
            self._chunk = chunk
        if chunk is self._chunk:
            self._in_chunk[site] = of_input(rows, at, counts)

    def after(self, name: str, model: nn.Module, read: Callable[[Chunk], Numbers]) -> str | None:
        """Detect models that mix many inputs but not a few, once the pass has read the input under test.

        If its numbers differ from those before, which may be rounding or chance, the whole chunk is tested.
        """
        if self.note or self.usual is None or self._chunk is None:
            return self.note
        usual = {site: numbers for site, numbers in self.usual.items() if site in self._in_chunk}
        in_chunk, self.usual = {site: self._in_chunk[site] for site in usual}, None
        if differ(model, usual, in_chunk, (1, 0)):
            self.note = mixing_note(name, model, self._chunk.batch, read, at=self._second - self._chunk.start)
            self.note = self.note or self._number_note(name, model, read)
        return self.note

    def _number_note(self, name: str, model: nn.Module, read: Callable[[Chunk], Numbers]) -> str | None:
        """A note if the second of the few inputs changes when all of them come twice."""
        assert self._before is not None
        few, usual = self._before
        twice = join([few, few])
        with kept_random_state(), kept_attributes(model):
            found = read(Chunk(twice, 0, count_inputs(twice)))
        changed = differ(model, usual, found, (1, 1))
        if not changed:
            return None
        return f"the activations of {name} depend on the batch size, from {changed[0]!r} on, and so does every value"

    def state_after(self, name: str, model: nn.Module, read: Callable[[Chunk], Numbers]) -> str | None:
        """Detect models that keep state from batch to batch: the first few inputs must give what they gave before."""
        if self.note or self._before is None:
            return self.note
        (few, usual), self._before = self._before, None
        try:
            with kept_random_state(), kept_attributes(model):
                found = read(Chunk(few, 0, count_inputs(few)))
        except Exception as error:
            self.note = f"{name} keeps state from one batch to the next: after the last, the first fails ({error})"
            return self.note
        if changed := differ(model, usual, found):
            self.note = (
                f"{name} keeps state from one batch to the next, which shows first at {changed[0]!r}: its activations "
                "for an input, and so every value, depend on the loader's batches and their order"
            )
        return self.note


def mixing_note(
    name: str,
    model: nn.Module,
    batch: object,
    read: Callable[[Chunk], Numbers],
    usual: Numbers | None = None,
    *,
    at: int | None = None,
) -> str | None:
    """A sentence that names the first site where an activation changes with the rest of the batch; None without one.

    A few inputs of the batch are run as they are, and once more with all others replaced by copies of the second: the
    second stays where it was, and its activations must not change. `read` runs the model and returns `by_input` of
    every site, in execution order. Each run starts from the same random state and the same attributes of the model,
    which are put back. `usual`: the numbers of the first run, if there was one. With `at` the whole batch is run
    instead of a few inputs, and the input `at` is tested instead of the second.
    """
    start, stop = tried_of(batch) if at is None else (0, count_inputs(batch))
    count, at = stop - start, 1 if at is None else at
    unknown = f"{name}: {UNKNOWN}"
    if count < FEWEST:
        return f"{unknown}: the first batch has {count} of them, and the test needs {FEWEST}"

    drew = False

    def run(inputs: object, state: AbstractContextManager[None] | None = None) -> Numbers:
        nonlocal drew
        with state or kept_random_state(), kept_attributes(model):
            before = random_state()
            numbers = read(Chunk(inputs, 0, count))
            drew = drew or random_state() != before
        return numbers

    try:
        few = cut(batch, start, stop)
        usual = usual or run(few)
        changed = differ(model, usual, run(join([cut(few, at, at + 1)] * count)), (at, at))
        unsteady = differ(model, usual, run(few), (at, at)) if changed else []
        # Some models draw numbers that they do not use, others use them seldom: any of the inputs may change.
        states = range(STATES if drew and not changed else 0)
        drawn = next(filter(None, (differ(model, usual, run(few, other_random_state(k))) for k in states)), [])
    except Exception as error:  # a model may take batches of one size only; if it takes none, the pass itself will fail
        return f"{unknown}: it could not be run on {count} of them ({error})"
    mixed = [site for site in changed if site not in unsteady]
    if mixed:
        return (
            f"{name} {MIXES}, at first at {mixed[0]!r}: its activations for an input, and so every "
            "value, depend on the other inputs of the batch"
        )
    if unsteady:
        return (
            f"{name}: two forwards of the same inputs differ at {unsteady[0]!r}: it draws random numbers, or keeps "
            "state that could not be put back, so its values may differ from run to run"
        )
    if drawn:
        return (
            f"{name} draws random numbers in evaluation mode, at first at {drawn[0]!r} (dropout that stays on, say): "
            "its values depend on them, and differ with another random state"
        )
    return None


def tried_of(batch: object) -> tuple[int, int]:
    """The range of inputs of a first batch that a model is run on before all others."""
    stop = min(AMONG, count_inputs(batch))
    return max(0, stop - TRIED), stop


def by_input(rows: Tensor, counts: Tensor | None = None) -> Tensor:
    """Some of the numbers of each input, (inputs, numbers); `counts`: how many rows each input has, if not one."""
    rows = rows.detach()
    if counts is None or bool((counts == counts[0]).all()):
        inputs = rows.reshape(len(rows) if counts is None else len(counts), -1)
        return inputs[:, :: inputs.shape[1] // NUMBERS | 1].clone()  # an odd step, or it might stay within one channel
    parts = [part.flatten()[:: part.numel() // NUMBERS | 1] for part in rows.split(counts.tolist())]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def of_input(rows: Tensor, at: int, counts: Tensor | None = None) -> Tensor:
    """The numbers of one input, (1, numbers), as in `by_input`."""
    if counts is None:
        return by_input(rows[at : at + 1])
    start = int(counts[:at].sum())
    return by_input(rows[start : start + int(counts[at])], counts[at : at + 1])


@np.errstate(all="ignore")
def differ(model: nn.Module, first: Numbers, second: Numbers, at: tuple[int, int] | None = None) -> list[str]:
    """The sites where an input, which is number `at` in either run, differs by more than rounding; None: any input."""
    sites = []
    dtypes = {parameter.dtype for parameter in model.parameters()}
    for site, a, b in zip(first, _on_cpu(first), _on_cpu(second), strict=True):
        numbers = min(a.shape[1], b.shape[1])  # inputs of several lengths are padded to the longest
        of_difference, of_size = _rounding(dtypes, first[site])
        for i, j in [(k, k) for k in range(len(a))] if at is None else [at]:
            tested, neighbour = a[i], a[i + 1 if i + 1 < len(a) else i - 1]
            difference = _norm(tested[:numbers] - b[j, :numbers])
            allowed = max(of_difference * _norm(tested - neighbour), of_size * _norm(tested))
            if difference > allowed or (math.isfinite(allowed) and not math.isfinite(difference)):  # 0 / 0, say
                sites.append(site)
                break
    return sites


def _norm(numbers: np.ndarray) -> float:
    return math.sqrt(numbers @ numbers)


def _rounding(of_model: set[torch.dtype], numbers: Tensor) -> tuple[float, float]:
    device = numbers.device.type
    if torch.is_autocast_enabled(device):
        return COARSE_DIFFERENCE, 10 * COARSE_SIZE
    dtypes = {numbers.dtype, *of_model} if numbers.is_floating_point() else set()
    of_difference = max((OF_DIFFERENCE.get(dtype, COARSE_DIFFERENCE) for dtype in dtypes), default=COARSE_DIFFERENCE)
    return of_difference, max((OF_SIZE.get((device, dtype), COARSE_SIZE) for dtype in dtypes), default=COARSE_SIZE)


def _on_cpu(run: Numbers) -> list[np.ndarray]:
    """The numbers of all sites, brought over in one copy, for which a GPU is waited for once."""
    device = next(iter(run.values())).device
    flat = torch.cat([numbers.to(device).flatten() for numbers in run.values()]).to("cpu", torch.float64).numpy()
    ends = itertools.accumulate(numbers.numel() for numbers in run.values())
    return [flat[end - n.numel() : end].reshape(n.shape) for end, n in zip(ends, run.values(), strict=True)]
