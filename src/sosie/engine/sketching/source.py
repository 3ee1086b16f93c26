"""A model under watch that is also run backwards: features of every site on the way up, gradients on the way down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...capture import (
    Chunk,
    Keep,
    Masks,
    NoGradient,
    Predictive,
    Rule,
    Site,
    as_found,
    fresh_leaf,
    model_arguments,
    needs_axes,
    restored_after_errors,
    select,
    to_rows,
    unshared,
    watch,
)
from ...models import open_model, weights_of, with_name
from ...process_state import matmul_precision, without_autocast
from ...progress import Progress
from ..sources import ModelSource
from ..stream import Stream

Rows = Callable[[str, Tensor], None]
NOTED = 4096  # flags of numbers that were not finite that a GPU may keep until it is waited for


@dataclass
class GradientSource(ModelSource):
    """Hands over rows of features and rows of gradients, from one forward and one backward pass for all sites."""

    predictive: Predictive = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._leaves: list[Tensor] = []
        self._backward: Rows | None = None
        self._keep = Keep()
        self._pulled: set[str] = set()
        self._checked = False
        self._noted: list[tuple[str, int, int, Tensor]] = []

    @contextmanager
    def opened(self) -> Iterator[GradientSource]:
        with ExitStack() as stack:
            stack.enter_context(restored_after_errors(self.model))
            stack.enter_context(as_found(self.model, self.device))
            for parameter in self.model.parameters():
                parameter.requires_grad_(False)  # no gradients but those of the sites; as_found puts it back
            for wanted in select(self.model, self.sites).values():
                stack.callback(wanted.module.register_forward_hook(self._begin_graph).remove)
            self._seen = stack.enter_context(
                watch(self.model, self.sites, sink=self._receive, axes=needs_axes(self.rows))
            )
            try:
                yield self
            finally:
                self._seen = None

    def _begin_graph(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The graph begins at the first sites: nothing below them is kept for the backward pass."""
        if self._backward is None:
            return None
        found = fresh_leaf(output, anew=not self._leaves)
        if found is None:
            return unshared(output)  # an operation in place on a view would lead the gradient past the hook on it
        leaf, replaced = found
        self._leaves.append(leaf)
        return replaced

    def _receive(self, site: Site, activation: Tensor) -> Any:
        # Rows may be a view of the activation, which the model may overwrite before its gradient arrives.
        kept = self._keep(site, activation.detach())
        if self._backward is not None and activation.requires_grad:
            activation.register_hook(lambda gradient: self._take(site, kept, gradient))
        return super()._receive(site, kept)

    def _take(self, site: Site, kept: Tensor, gradient: Tensor) -> None:
        assert self._backward is not None
        assert self._chunk is not None
        self._keep.check(site.label, kept)
        mask = self._masks.at(site, gradient)
        rows = to_rows(gradient, self.rows, site=site, inputs=self._chunk.count, mask=mask)
        self._pulled.add(site.label)
        self._backward(site.label, rows)

    def look(self, batch: Any) -> Any:
        self._keep.start()
        with torch.inference_mode(False):  # in which changes in place leave no trace
            side = super().look(batch)
        self._keep.learn()
        return side

    def read_rows(self, chunk: Chunk, features: Rows, gradients: Rows | None) -> None:
        """Every site's rows of features and, unless there is no need of them, of gradients."""
        with matmul_precision("ieee"):
            if gradients is None:
                self.read(chunk, features)
            else:
                self.read_both(chunk, features, gradients)

    def read_both(self, chunk: Chunk, features: Rows, gradients: Rows) -> None:
        """One forward pass and one backward pass; each site's rows of features come before its rows of gradients."""
        seen = self._watched()
        self._sink, self._chunk, self._backward = features, chunk, gradients
        self._leaves, self._pulled, self._counts = [], set(), {}
        self._keep.start()
        try:
            with torch.inference_mode(False):  # where the caller has it on, nothing could be differentiated
                with torch.no_grad():
                    args, kwargs = model_arguments(
                        chunk.batch, model=self.model, inputs=self.inputs, prepare=self.prepare, device=self._home()
                    )
                self._masks = Masks.of(*((kwargs, chunk.batch) if self.inputs else (chunk.batch, kwargs)))
                with torch.enable_grad():
                    answer = self.model(*args, **kwargs)
                    seen.values()  # complains if a site did not fire
                    self._pull(answer, chunk)
        except Exception as error:
            error.add_note(f"while running {self.name} on inputs {chunk.start} to {chunk.start + chunk.count - 1}")
            raise
        finally:
            self._keep.learn()
            self._sink = self._chunk = self._backward = None
            self._leaves = []

    def _pull(self, answer: Any, chunk: Chunk) -> None:
        if not self._checked:
            self.predictive.check(answer, chunk.count)
            self._checked = True
        mask = self._masks.decoder if self._masks.halves else self._masks.tokens
        home = self._home()
        # Under autocast what is made of the gradients would come out in half precision.
        with without_autocast("cpu" if home is None else home.type):
            pulls = self.predictive.pull(answer, chunk.batch, mask)
            for part, _ in pulls:
                if not part.requires_grad or not self._leaves:
                    raise NoGradient(
                        f"the answer of {self.name} does not depend on any of the sites in a way that can be "
                        "differentiated: choose sites that the answer is made from, and a forward without "
                        "torch.no_grad()"
                    )
                self.note_finite("the answer or the loss is", part)
            parts, cotangents = zip(*pulls, strict=True)
            torch.autograd.grad(parts, self._leaves, cotangents, allow_unused=True)
        silent = [site.label for site in self._watched().sites if site.label not in self._pulled]
        if silent:
            raise NoGradient(
                f"no gradient reaches {', '.join(silent)}: the answer does not depend on "
                f"{'it' if len(silent) == 1 else 'them'}; choose other sites"
            )

    def note_finite(self, what: str, numbers: Tensor) -> None:
        """Remember whether these numbers of the chunk were finite; looked at later, so that a GPU need not wait."""
        assert self._chunk is not None
        flag = (numbers.detach() * 0).sum(dtype=torch.float64)  # NaN if one of them is not finite, else 0
        self._noted.append((what, self._chunk.start, self._chunk.count, flag))
        if not flag.is_cuda or len(self._noted) >= NOTED:
            self.check_finite()

    def check_finite(self) -> None:
        """Raise if a number was not finite, and name where and the inputs."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        flags = torch.stack([flag.to(noted[0][-1].device) for *_, flag in noted])
        for k in flags.isnan().cpu().nonzero().flatten().tolist()[:1]:
            what, start, count, _ = noted[k]
            raise ValueError(
                f"{self.name}: {what} NaN or infinite for some of the inputs {start} to {start + count - 1}, or too "
                "large to be squared; look at those inputs, or at the weights"
            )


def source_of(
    model: Any,
    sites: Any,
    rows: Rule,
    *,
    prepare: Callable[[Any], Any] | None,
    inputs: Callable[[Any], Any] | None,
    device: str | torch.device | None,
    predictive: Predictive,
) -> GradientSource:
    """A model, or what the specification of one opens, as a source."""
    if isinstance(model, str):
        model = open_model(model)
    weights = weights_of(model)
    model, name, prepare = with_name(model, prepare)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"cannot sketch {name}: give a torch.nn.Module or a specification like 'tiny10@weights.safetensors'"
        )
    return GradientSource(model, name, sites, rows, prepare, inputs, device, weights, predictive=predictive)


def read_through(
    source: GradientSource, stream: Stream, take: Callable[[Chunk], None], *, task: str, max_rows: int | None
) -> None:
    """One pass: every chunk of the data is taken, and losses that are not finite are an error at its end."""
    known = None if stream.total is None else min(stream.total, max_rows or stream.total)
    with Progress(task, known, "inputs") as bar:
        for chunk in stream.chunks(block=None, skip=0, max_rows=max_rows):
            take(chunk)
            bar.advance(chunk.count)
    source.check_finite()
