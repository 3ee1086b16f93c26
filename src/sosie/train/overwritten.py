"""Activations that a model overwrites after they were read: copied once that is known, refused where it comes late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..capture import SiteError

Key = tuple[int, bool]  # which site, and whether it is what goes into it
AGAIN = "run the step again (it will be copied)"


class Overwritten:
    """Which of a model's activations are overwritten, by training mode (dropout in place, say); learnt as it runs."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._known: dict[bool, set[Key]] = {}
        self.forget()

    def forget(self) -> None:
        """Drop what the last forward left."""
        self._live: list[tuple[Key, Tensor, int]] = []

    def may_be(self, key: Key, training: bool) -> bool:
        """Whether to copy: it was overwritten before, or this is the first forward."""
        return training not in self._known or key in self._known[training]

    def look_at(self, key: Key, activation: Tensor) -> None:
        self._live.append((key, activation, activation._version))

    def check(self, training: bool) -> None:
        """After a forward: learn what it overwrote, and refuse it where it was read without a copy."""
        changed = {key for key, live, version in self._live if live._version != version}
        known = self._known.get(training)
        new = set() if known is None else changed - known
        self._known.setdefault(training, set()).update(changed)  # not anew: graphs add to it
        self._live.clear()
        if new:
            raise SiteError(
                f"{self._named(min(new))} was changed in place, which it was not in the first forward; {AGAIN}"
            )

    @contextmanager
    def noticed(self, key: Key, training: bool) -> Iterator[None]:
        """What is computed inside saves tensors whose changes the backward refuses.

        Torch looks at versions of saved tensors only where there are no hooks; hooks of our own keep out what
        checkpointing does to saved tensors, since its second forward passes by the taps. The graph holds these hooks
        and must not hold the taps, which hold the graph.
        """
        unpack = partial(_unchanged, self._named(key), key, self._known.get(training, set()))
        with torch.autograd.graph.saved_tensors_hooks(_with_version, unpack):
            yield

    def _named(self, key: Key) -> str:
        k, is_input = key
        return f"the {'input' if is_input else 'output'} of site {self._labels[k]!r}"


def _with_version(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _unchanged(name: str, key: Key, overwritten: set[Key], saved: Any) -> Tensor:
    tensor: Tensor
    tensor, version = saved
    if tensor._version != version:
        overwritten.add(key)
        raise SiteError(
            f"{name} was changed in place after penalty() had read it, so that its gradient is lost; {AGAIN}"
        )
    return tensor
