"""Whether a model mixes the inputs of a batch: then what it makes of an input depends on the batch that it came in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..process_state import kept_random_state
from .batches import Chunk
from .restore import kept_attributes
from .structure import count_inputs, cut, join

TRIED = 4  # inputs of the first batch that a model is run on before all others
FEWEST = 3  # the first and the last of them stay, so there must be one to change
NUMBERS = 4096  # of each site that are compared
# By how much of its size rounding may change an activation: ten times what TF32 and bfloat16 lose in a product. Batches
# of one shape take the same kernels and hardly differ at all, but tokens, say, may be padded to another length.
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-2}
COARSE = 0.1

Read = Callable[[Chunk], dict[str, Tensor]]


def mixing_note(
    name: str, model: nn.Module, batch: Any, read: Read, usual: dict[str, Tensor] | None = None
) -> str | None:
    """In words, the first site where an input's activation changes with the other inputs of its batch; None: nowhere.

    A few inputs of the batch are run as they are, and once more with copies of the first in place of all but the last:
    at these two nothing may change. `read` runs the model and gives `ends` of every site, in execution order. Each run
    starts from the same random state and the same attributes of the model, which are put back. `usual`: what the run
    as they are gave, if that was done in the same way already.
    """
    count = min(TRIED, count_inputs(batch))
    unknown = f"{name}: not known whether inputs of a batch are mixed"
    if count < FEWEST:
        return f"{unknown}: the first batch has {count} of them, and it takes {FEWEST} to tell"
    first, last = cut(batch, 0, 1), cut(batch, count - 1, count)

    def run(given: Any) -> dict[str, Tensor]:
        with kept_random_state(), kept_attributes(model):
            return read(Chunk(given, 0, count))

    try:
        usual = usual or run(cut(batch, 0, count))
        rounding = _rounding(model, usual)
        changed = _differ(usual, run(join([first] * (count - 1) + [last])), rounding)
        by_itself = _differ(usual, run(cut(batch, 0, count)), rounding) if changed else []
    except Exception as error:  # a model may take batches of one size only; if it takes none, the pass itself will tell
        return f"{unknown}: it could not be run on {count} of them ({error})"
    mixed = [site for site in changed if site not in by_itself]
    if mixed:
        return (
            f"{name} mixes the inputs of a batch, at first at {mixed[0]!r}: what it makes of an input, and so every "
            "value, depends on which others are in its batch"
        )
    if by_itself:
        return f"{unknown}: two forwards of the same inputs differ at {by_itself[0]!r}"
    return None


def ends(rows: Tensor, counts: Tensor | None = None) -> Tensor:
    """Some of the numbers in the rows of the first and of the last input; `counts`: how many rows each input has."""
    first, last = (1, 1) if counts is None else (int(counts[0]), int(counts[-1]))
    found = torch.cat([rows[:first], rows[len(rows) - last :]]).detach().flatten()
    return found[:: found.numel() // NUMBERS | 1].clone()  # an odd step, or it might stay within one channel


def _rounding(model: nn.Module, found: dict[str, Tensor]) -> float:
    dtypes = {tensor.dtype for tensor in (*found.values(), *model.parameters()) if tensor.is_floating_point()}
    if any(torch.is_autocast_enabled(device) for device in {tensor.device.type for tensor in found.values()}):
        return COARSE
    return max((ROUNDING.get(dtype, COARSE) for dtype in dtypes), default=COARSE)


def _differ(one: dict[str, Tensor], other: dict[str, Tensor], rounding: float) -> list[str]:
    """The sites where two runs differ by more than rounding."""
    lengths = [ends.numel() for ends in one.values()]
    first, second = (_on_cpu(run).split(lengths) for run in (one, other))
    shares = [float((a - b).norm() / a.norm()) for a, b in zip(first, second, strict=True)]
    # 0 / 0, and activations that are not finite, tell nothing.
    return [site for site, share in zip(one, shares, strict=True) if share > rounding]


def _on_cpu(run: dict[str, Tensor]) -> Tensor:
    """All sites in one vector: one copy, for which a GPU is waited for once."""
    home = next(iter(run.values())).device
    return torch.cat([ends.to(home) for ends in run.values()]).to("cpu", torch.float64)
