"""Hooks that belong to nobody else: a copy of a model they are attached to has none that do anything."""

from __future__ import annotations

from typing import Any, Protocol, Self

from torch import nn


class Listens(Protocol):
    """What hooks report to."""

    def begins(self, args: Any, kwargs: Any) -> None: ...

    def enters(self, site: int, args: Any, kwargs: Any) -> None: ...

    def fires(self, site: int, output: Any) -> None: ...

    def finishes(self) -> None: ...


class Hooks:
    """The hooks of one site, or of the whole model. Those of a copy, and of a pickled model, report to nobody.

    Copies are made while a penalty is attached (an average of the weights, a file of the best model so far), and what
    they show is no business of the penalty's.
    """

    def __init__(self, listener: Listens | None = None, site: int = -1) -> None:
        self.listener, self.site = listener, site

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.listener is not None:
            self.listener.begins(args, kwargs)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.listener is not None:
            self.listener.enters(self.site, args, kwargs)

    def fire(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.listener is not None:
            self.listener.fires(self.site, output)

    def finish(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.listener is not None:
            self.listener.finishes()
