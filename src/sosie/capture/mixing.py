"""Whether a model mixes the inputs of a batch: then what it makes of an input depends on the batch that it came in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..process_state import kept_random_state, other_random_state, random_state
from .batches import Chunk
from .restore import kept_attributes
from .structure import count_inputs, cut, join

TRIED = 4  # inputs of the first batch that a model is run on before all others
AMONG = 64  # they are the last of so many: a model may mix an input with one far before it
FEWEST = 3  # one that is looked at, one before and one behind it
NUMBERS = 4096  # of each input and site that are compared
# By how much an activation may change without mixing: a share of the difference between two inputs, or of its own size,
# whichever is more. The latter is ten times what a product loses, in TF32 on a GPU. Batches of one shape take the same
# kernels and hardly differ at all, but tokens, say, may be padded to another length.
OF_DIFFERENCE = {torch.float64: 1e-6, torch.float32: 1e-2}
OF_SIZE = {("cpu", torch.float64): 1e-12, ("cpu", torch.float32): 1e-5, ("cuda", torch.float64): 1e-12}
COARSE_DIFFERENCE, COARSE_SIZE = 0.1, 1e-2

Read = Callable[[Chunk], dict[str, Tensor]]


def mixing_note(
    name: str,
    model: nn.Module,
    batch: Any,
    read: Read,
    usual: dict[str, Tensor] | None = None,
    *,
    at: int | None = None,
) -> str | None:
    """In words, the first site where an input's activation changes with the other inputs of its batch; None: nowhere.

    A few inputs of the batch are run as they are, and once more with copies of the second in place of all others: the
    second stays where it was, and may not change. `read` runs the model and gives `by_input` of every site, in
    execution order. Each run starts from the same random state and the same attributes of the model, which are put
    back. `usual`: what the run as they are gave, if that was done in the same way already. `at`: the whole batch is
    run instead of a few, and this input of it takes the part of the second.
    """
    start, stop = tried_of(batch) if at is None else (0, count_inputs(batch))
    count, at = stop - start, 1 if at is None else at
    unknown = f"{name}: not known whether inputs of a batch are mixed"
    if count < FEWEST:
        return f"{unknown}: the first batch has {count} of them, and it takes {FEWEST} to tell"

    drew = False

    def run(given: Any, state: Callable[[], AbstractContextManager[None]] = kept_random_state) -> dict[str, Tensor]:
        nonlocal drew
        with state(), kept_attributes(model):
            before = random_state()
            numbers = read(Chunk(given, 0, count))
            drew = drew or random_state() != before
        return numbers

    try:
        few = cut(batch, start, stop)
        usual = usual or run(few)
        changed = differ(model, usual, run(join([cut(few, at, at + 1)] * count)), (at, at))
        itself = differ(model, usual, run(few), (at, at)) if changed else []
        # Some models draw numbers that they do not use.
        drawn = differ(model, usual, run(few, other_random_state), (at, at)) if drew and not changed else []
    except Exception as error:  # a model may take batches of one size only; if it takes none, the pass itself will tell
        return f"{unknown}: it could not be run on {count} of them ({error})"
    mixed = [site for site in changed if site not in itself]
    if mixed:
        return (
            f"{name} mixes the inputs of a batch, at first at {mixed[0]!r}: what it makes of an input, and so every "
            "value, depends on which others are in its batch"
        )
    if itself:
        return (
            f"{name}: two forwards of the same inputs differ at {itself[0]!r}: it draws random numbers, or keeps "
            "something that could not be put back, so that its values may differ from run to run"
        )
    if drawn:
        return (
            f"{name} draws random numbers in evaluation mode, at first at {drawn[0]!r} (dropout that stays on, say): "
            "its values depend on them, and differ with another random state"
        )
    return None


def tried_of(batch: Any) -> tuple[int, int]:
    """From which input to which of a first batch a model is run before all others."""
    stop = min(AMONG, count_inputs(batch))
    return max(0, stop - TRIED), stop


def by_input(rows: Tensor, counts: Tensor | None = None) -> Tensor:
    """Some of the numbers of each input, (inputs, numbers); `counts`: how many rows each input has, if not one."""
    rows = rows.detach()
    if counts is None or bool((counts == counts[0]).all()):
        each = rows.reshape(len(rows) if counts is None else len(counts), -1)
        return each[:, :: each.shape[1] // NUMBERS | 1].clone()  # an odd step, or it might stay within one channel
    parts = [part.flatten()[:: part.numel() // NUMBERS | 1] for part in rows.split(counts.tolist())]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def of_input(rows: Tensor, at: int, counts: Tensor | None = None) -> Tensor:
    """The same of one input alone, (1, numbers)."""
    if counts is None:
        return by_input(rows[at : at + 1])
    start = int(counts[:at].sum())
    return by_input(rows[start : start + int(counts[at])], counts[at : at + 1])


def differ(model: nn.Module, one: dict[str, Tensor], other: dict[str, Tensor], at: tuple[int, int]) -> list[str]:
    """The sites where an input, which has these numbers in two runs, differs by more than rounding."""
    found = []
    dtypes = {parameter.dtype for parameter in model.parameters()}
    for site, a, b in zip(one, _on_cpu(one), _on_cpu(other), strict=True):
        numbers = min(a.shape[1], b.shape[1])  # inputs of several lengths are padded to the longest
        own, neighbour = a[at[0]], a[at[0] + 1 if at[0] + 1 < len(a) else at[0] - 1]
        difference = (own[:numbers] - b[at[1], :numbers]).norm()
        of_difference, of_size = _rounding(dtypes, one[site])
        allowed = max(of_difference * (own - neighbour).norm(), of_size * own.norm())
        if difference > allowed or (allowed.isfinite() and not difference.isfinite()):  # 0 / 0, say
            found.append(site)
    return found


def _rounding(of_model: set[torch.dtype], numbers: Tensor) -> tuple[float, float]:
    device = numbers.device.type
    if torch.is_autocast_enabled(device):
        return COARSE_DIFFERENCE, 10 * COARSE_SIZE
    dtypes = {numbers.dtype, *of_model} if numbers.is_floating_point() else set()
    of_difference = max((OF_DIFFERENCE.get(dtype, COARSE_DIFFERENCE) for dtype in dtypes), default=COARSE_DIFFERENCE)
    return of_difference, max((OF_SIZE.get((device, dtype), COARSE_SIZE) for dtype in dtypes), default=COARSE_SIZE)


def _on_cpu(run: dict[str, Tensor]) -> list[Tensor]:
    """The numbers of all sites, brought over in one copy, for which a GPU is waited for once."""
    home = next(iter(run.values())).device
    flat = torch.cat([each.to(home).flatten() for each in run.values()]).to("cpu", torch.float64)
    shapes = [each.shape for each in run.values()]
    return [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
