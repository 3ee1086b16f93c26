"""A term of the loss that is made of activations: hooks borrowed for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from ..capture import Seen, Site, watch

Term = Callable[[Mapping[Site, Tensor]], Tensor]


class Attached(AbstractContextManager["Attached"]):
    """`with Attached(model, sites, term) as penalty`: `penalty()` is `term` of the last forward's activations.

    `sites` as everywhere (names, globs, types; see `select`). `term` gets the activation of each site, in execution
    order, and gives a single number; gradients flow. What the model overwrites later (a ReLU in place) is seen as it
    was. After the block the model is as it was, also when an error ended it.
    """

    def __init__(self, model: nn.Module, sites: Any, term: Term) -> None:
        self._model, self._sites, self._term = model, sites, term
        self._block = ExitStack()
        self._seen: Seen | None = None

    def __enter__(self) -> Self:
        if self._seen is not None:
            raise RuntimeError("this penalty is attached already")
        # Copies, since a layer that works in place may do so in one mode and not in the other (dropout).
        self._seen = self._block.enter_context(watch(self._model, self._sites, sink=lambda _, seen: seen.clone()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seen = None
        self._block.close()

    def __call__(self) -> Tensor:
        if self._seen is None:
            raise RuntimeError("this penalty is not attached to the model: use it inside its with block")
        return self._term(dict(zip(self._seen.sites, self._seen.values(), strict=True)))
