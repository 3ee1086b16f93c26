"""A model as something whose weights are compared: its name, its sites, the shape of its input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...capture import (
    Linearised,
    NotLinear,
    Site,
    SiteError,
    as_found,
    check_linear,
    linearised,
    restored_after_errors,
    weighted_layers,
)
from ...capture.examples import shapes_for
from ...models import open_model, weights_of, with_name
from ...results import Side
from ..provenance import describe_model


@dataclass
class WeightSource:
    """A model under comparison; `look` learns its sites and the shape of its input."""

    model: nn.Module
    name: str
    prepare: Any = None
    sites: Any = None
    device: str | torch.device | None = None
    shape: tuple[int, ...] = ()
    guessed: bool = False  # whether nothing said the shape of the input
    side: Side | None = None
    notes: tuple[str, ...] = field(default=())
    weights: str = ""  # where they are from, if that is known

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    @property
    def known(self) -> Side:
        assert self.side is not None
        return self.side

    def describe(self) -> str:
        return describe_model(self.model, self.name, self.weights)

    def shaped(self, rows: Tensor) -> Tensor:
        """Rows of entries as inputs, where the model is."""
        first = next((t for t in (*self.model.parameters(), *self.model.buffers())), None)
        return rows.reshape(len(rows), *self.shape).to(None if first is None else first.device)

    @contextmanager
    def opened(self, sink: Any) -> Iterator[Linearised]:
        chosen = weighted_layers(self.model) if self.sites is None else self.sites
        with (
            restored_after_errors(self.model),
            as_found(self.model, self.device),
            linearised(self.model, chosen, sink, prepare=self.prepare) as run,
        ):
            yield run

    def look(self, input_shape: Sequence[int] | None) -> None:
        """Find an input that the model takes, learn its sites, and check that they are linear in it."""
        shapes, self.guessed = candidates(self.model, self.name, input_shape)
        failed = []
        for shape in shapes:
            self.shape = shape
            try:
                self._look()
                return
            except NotLinear as error:
                raise NotLinear(f"{self.name}: {error}") from error
            except SiteError as error:  # no other shape would help
                raise type(error)(f"{self.name}: {error}") from error
            except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
                failed.append(f"{_by(shape)}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        raise ValueError(
            f"{self.name} does not take an input of {' or '.join(map(_by, shapes))}; give input_shape=\n  "
            + "\n  ".join(failed)
        )

    def _look(self) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2, self.entries, generator=generator, dtype=torch.float64)
        rows = torch.cat([rows, rows[:1] + 2 * rows[1:]])

        def check(site: Site, found: Tensor, exponent: int) -> int:
            check_linear(site.label, found)
            return found.shape[1]

        with self.opened(check) as run:
            widths = run.run(self.shaped(rows))
            self.notes = tuple(sorted(run.notes))
            self.side = Side(
                self.name, tuple(s.label for s in run.sites), tuple(widths), tuple(s.shape for s in run.sites)
            )


def open_weights(thing: Any, name: str | None, sites: Any, device: Any) -> WeightSource:
    """A module, a named model or a specification."""
    if isinstance(thing, str):
        thing = open_model(thing)
    model, own, prepare = with_name(thing)
    name = own if name is None else name
    if not isinstance(model, nn.Module):
        hint = ""
        if isinstance(model, dict) and model and all(isinstance(value, Tensor) for value in model.values()):
            hint = " (a state dict does not say how its tensors are joined: load it into a model)"
        raise TypeError(
            f"cannot compare the weights of {name}: give a torch.nn.Module or a specification like "
            f"'tiny10@weights.safetensors', got {type(model).__name__}{hint}"
        )
    return WeightSource(model, name, prepare, sites, device, weights=weights_of(thing))


def check_weights(source: WeightSource) -> None:
    """Refuse weights that are no numbers, by name."""
    name = source.name
    for key, value in (*source.model.named_parameters(), *source.model.named_buffers()):
        if is_lazy(value):
            raise ValueError(f"{name}: {key} has no shape yet; run the model once before its weights are compared")
        if isinstance(value, nn.Parameter) and not value.numel():
            raise ValueError(f"{name}: {key} has shape {tuple(value.shape)}: a layer without neurons has no weights")
        if value.is_meta:
            raise ValueError(f"{name}: {key} is on the meta device, which holds no numbers")
        if value.is_complex():
            raise ValueError(f"{name}: {key} is complex ({value.dtype}), which is not supported")
        # A sum is finite only if all its terms are, and takes a fraction of the time.
        if not value.is_floating_point() or bool(torch.isfinite(value.detach().sum())):
            continue
        if bad := int((~torch.isfinite(value)).sum()):
            raise ValueError(f"{name}: {key} has {bad} of {value.numel()} values that are NaN or infinite")


def candidates(model: nn.Module, name: str, given: Sequence[int] | None) -> tuple[list[tuple[int, ...]], bool]:
    """Shapes of one input to try, in order; and whether they are guesses."""
    if given is not None:
        shape = tuple(int(size) for size in given)
        if not shape or min(shape) < 1:
            raise ValueError(f"input_shape is the shape of one input, as (3, 32, 32); got {tuple(given)}")
        return list(dict.fromkeys([shape, (math.prod(shape),)])), False
    first = next((m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))), None)
    if isinstance(first, nn.Linear):
        return [(first.in_features,)], False
    if first is not None and first.weight.ndim == 4 and not first.transposed:
        return shapes_for(first), True
    why = "no linear layer or convolution says" if first is None else f"{type(first).__name__} does not say"
    raise ValueError(f"{name}: {why} how large an input is; give input_shape=, as (3, 32, 32)")


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
