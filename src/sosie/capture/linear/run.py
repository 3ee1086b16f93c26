"""Running a model on linear parts: site by site, what it is a linear map of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..names import Names, unwrap
from ..sites import Site
from ..watch import Seen, watch
from .part import CLAIMED, NOTES, PLACES, LinearPart, NotLinear

Sink = Callable[
    [Site, Tensor, int], Any
]  # (site, (n, width) numbers, exponent): they stand for numbers × 2 ** exponent
AGREE = 1e-9  # of its size: how exactly a combination of inputs must give that combination of outputs


def weighted_layers(model: nn.Module) -> list[str]:
    """The layers that hold a matrix of weights, and the model's own output."""
    names = Names.of(unwrap(model))
    found = []
    for name in names.leaves():
        module = names.by_name[name]
        own = [*module._parameters.values(), *module._buffers.values()]
        if hasattr(module, "parametrizations") or any(p is not None and p.dim() > 1 for p in own):
            found.append(name)
    return [*(name for name in found if name), "."]


@contextmanager
def linearised(
    model: nn.Module, sites: Any, sink: Sink, *, prepare: Callable[[Any], Any] | None = None
) -> Iterator[Linearised]:
    """The model without its activation functions, as long as the block lasts; `sink` gets what each site makes.

    Elementwise activations become the identity, max pooling the mean, batch norm what it is with its running
    statistics; biases vanish. Whatever else is not linear is an error that names it, once a site behind it is read.
    """

    def receive(site: Site, activation: Tensor) -> Any:
        if not isinstance(activation, LinearPart):
            raise NotLinear(f"site {site.label!r} does not depend on the input")
        if activation.broken is not None:
            raise NotLinear(
                f"site {site.label!r} is no linear map of the input: {activation.broken}. Name sites before that"
            )
        if not activation.dim() or activation.shape[0] != run.count:
            raise NotLinear(
                f"site {site.label!r} gives {tuple(activation.shape)} for {run.count} inputs: no row an input"
            )
        rows = activation.part.reshape(run.count, -1)
        if not bool(torch.isfinite(rows).all()):
            raise NotLinear(f"site {site.label!r}: the product of the weights up to here leaves what float64 holds")
        return sink(site, rows, activation.exponent)

    with ExitStack() as stack:
        stack.enter_context(_placed(unwrap(model)))
        seen = stack.enter_context(watch(model, sites, sink=receive))
        run = Linearised(seen, prepare, _dtype(model))
        yield run


class Linearised:
    """A model that is run on linear parts."""

    def __init__(self, seen: Seen, prepare: Callable[[Any], Any] | None, dtype: torch.dtype) -> None:
        self._seen, self._prepare, self._dtype, self.count = seen, prepare, dtype, 0
        self.notes: set[str] = set()  # what was done to the model, in words

    def run(self, inputs: Tensor) -> list[Any]:
        """Give the inputs (n, …) to the model; what the sink returned, site by site."""
        self.count = len(inputs)
        place, claimed, notes = PLACES.set(()), CLAIMED.set(self._dtype), NOTES.set(self.notes)
        try:
            given: Any = LinearPart(inputs.double())
            self._seen.run(given if self._prepare is None else self._prepare(given))
        finally:
            PLACES.reset(place)
            CLAIMED.reset(claimed)
            NOTES.reset(notes)
        return self._seen.values()

    @property
    def sites(self) -> tuple[Site, ...]:
        return self._seen.sites


def _dtype(model: nn.Module) -> torch.dtype:
    """That of the weights."""
    every = (*model.parameters(), *model.buffers())
    return next((tensor.dtype for tensor in every if tensor.is_floating_point()), torch.float32)


def check_linear(name: str, rows: Tensor) -> None:
    """Whether the outputs for x, y and x + 2 y (3, width) are those of a linear map that sees each input alone."""
    expected = rows[0] + 2 * rows[1]
    if bool((rows[2] - expected).abs().max() > AGREE * rows.abs().max()):
        raise NotLinear(
            f"site {name!r}: x + 2 y does not give f(x) + 2 f(y), so inputs of a batch are mixed, or something in the "
            "model is not linear and does not look it"
        )


@contextmanager
def _placed(model: nn.Module) -> Iterator[None]:
    """Note which module is being called, so that errors can name it."""
    handles = []

    def enter(text: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            PLACES.set((*PLACES.get(), text))

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        PLACES.set(PLACES.get()[:-1])

    try:
        for name, module in Names.of(model).unique().items():
            text = (
                f"{name!r} ({type(module).__name__})" if name else f"the model's own forward ({type(module).__name__})"
            )
            handles.append(module.register_forward_pre_hook(enter(text), prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
