"""Naming the site whose activations are not finite, without making a GPU wait at every site."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class NotFiniteActivations(ValueError):
    """Some activations are NaN or infinite, or too large to be squared."""


class Inspector:
    """Takes one number a site from each chunk and looks at it as soon as that costs no wait.

    On a CPU that is at once. On a GPU the numbers travel while the next chunk runs and are looked at then.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[str, list[str], Tensor, torch.cuda.Event | None]] = []
        self.offsets: dict[tuple[str, str], float] = {}

    def take(self, source: str, sites: list[str], numbers: Tensor) -> None:
        """`numbers` (2, sites): a sum that is finite if the activations are, and how far off the mean was."""
        if not numbers.is_cuda:
            self._look(source, sites, numbers)
            return
        self.finish(keep=1)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((source, sites, host, event))

    def finish(self, keep: int = 0) -> None:
        while len(self._waiting) > keep:
            source, sites, numbers, event = self._waiting.pop(0)
            if event is not None:
                event.synchronize()
            self._look(source, sites, numbers)

    def _look(self, source: str, sites: list[str], numbers: Tensor) -> None:
        sums, offsets = numbers.tolist()
        bad = [site for site, total in zip(sites, sums, strict=True) if not math.isfinite(total)]
        if bad:
            shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
            raise NotFiniteActivations(
                f"{source}: activations are NaN or infinite (or too large to square) at {shown}. "
                "Check the input's normalisation and the weights; the first site named is where it starts"
            )
        for site, offset in zip(sites, offsets, strict=True):
            key = (source, site)
            self.offsets[key] = max(self.offsets.get(key, 0.0), offset)
