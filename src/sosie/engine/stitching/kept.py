"""The inputs of a stitch, read once, and what the frozen networks make of them, kept where that fits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...capture import cut, labels_of
from ...capture.structure import count_inputs, join, rebuild
from ...models.joint import Form, Joint
from ...process_state import kept_random_state
from ...progress import Progress
from .halves import CHUNK, Half, chunks_of

BUDGET = 2 * 2**30  # bytes that are kept of activations, and again of inputs; on a GPU a quarter of what is free


def read_inputs(data: Any, max_rows: int | None) -> Any:
    """All inputs as one batch, in the structure of the data's own."""
    with kept_random_state():
        return join([chunk.batch for chunk in chunks_of(data, max_rows)])


def in_chunks(inputs: Any) -> list[Any]:
    """The same inputs a chunk at a time, without a copy."""
    n = count_inputs(inputs)
    return [cut(inputs, start, min(start + CHUNK, n)) for start in range(0, n, CHUNK)]


class Kept:
    """What training asks for over and over: A's rows at the site, B's, B's answers, labels and inputs, by index.

    An index is (J, m): m inputs each for J joints; J = 1: the same for all. Activations that do not fit are made anew
    for each batch.
    """

    def __init__(self, lower: Half, upper: Half, joint: Joint, inputs: Any, *, rows_of_b: bool, like: Tensor) -> None:
        self.lower, self.upper, self.joint = lower, upper, joint
        self.n = count_inputs(inputs)
        self._budget = max(BUDGET, torch.cuda.mem_get_info(like.device)[0] // 4 if like.is_cuda else 0)
        self._device = like.device
        self._inputs = self._placed(inputs)
        labels = labels_of(inputs)
        self.labels = None if labels is None else labels.to(like.device).long()
        self._a: Tensor | None = None
        self._b: Tensor | None = None
        self._fill(rows_of_b)

    @torch.no_grad()
    def _fill(self, rows_of_b: bool) -> None:
        answers, a, b = _Pieces(self._budget), _Pieces(self._budget // (1 + rows_of_b)), _Pieces(self._budget // 2)
        with Progress("running both networks once", self.n, "inputs") as bar:
            for batch in in_chunks(self._inputs):
                answers.add(self.upper.answer(batch), self.n)
                if a.wanted:
                    a.add(self._rows_a(batch), self.n)
                if rows_of_b and b.wanted:
                    b.add(self._rows_b(batch), self.n)
                bar.advance(count_inputs(batch))
        self._a, self._b, found = a.whole(), b.whole(), answers.whole()
        # Soft answers are kept where B is a classifier: one answer (classes,) an input.
        self.soft = None
        if found is not None and found.ndim == 2 and found.is_floating_point():
            self.soft = found.to(torch.promote_types(found.dtype, torch.float32)).softmax(1)

    def rows_a(self, index: Tensor) -> Tensor:
        """(J, m, positions, p): A's rows at the joint, in B's shape."""
        flat = self._a[index.flatten()] if self._a is not None else self._rows_a(self.inputs(index))
        return flat.view(*index.shape, *flat.shape[1:])

    def rows_b(self, index: Tensor) -> Tensor:
        """(J, m, positions, q)."""
        flat = self._b[index.flatten()] if self._b is not None else self._rows_b(self.inputs(index))
        return flat.view(*index.shape, *flat.shape[1:])

    def inputs(self, index: Tensor) -> Any:
        """The batch of these J m inputs, as the data give it."""
        return rebuild(lambda leaf: _taken(leaf, index.flatten()), self._inputs)

    @torch.no_grad()
    def _rows_a(self, batch: Any) -> Tensor:
        return rows_of(self.joint.shaped(self.lower.representation(batch)), self.joint.target).to(self._device)

    @torch.no_grad()
    def _rows_b(self, batch: Any) -> Tensor:
        activation, keep = self.upper.tokens(batch)
        if keep is not None:
            raise ValueError("cka= compares the tokens of a batch, and padding would count: give inputs of one length")
        return rows_of(activation, self.joint.target).to(self._device)

    def _placed(self, inputs: Any) -> Any:
        """On the device if they fit, else where they are."""
        sizes: list[int] = []
        rebuild(lambda leaf: sizes.append(leaf.nbytes if isinstance(leaf, Tensor) else 0), inputs)
        if sum(sizes) > self._budget:
            return inputs
        return rebuild(lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf, inputs)


def rows_of(activation: Tensor, form: Form) -> Tensor:
    """(inputs, positions, channels)."""
    last = activation if form.tokens or not form.space else activation.movedim(1, -1)
    return last.reshape(len(last), -1, last.shape[-1])


class _Pieces:
    """Parts of one tensor, as long as all of them have one shape and will fit."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._parts: list[Tensor] = []
        self.wanted = True

    def add(self, part: Tensor, n: int) -> None:
        fits = part.nbytes / len(part) * n <= self._budget
        same = not self._parts or part.shape[1:] == self._parts[0].shape[1:]
        self.wanted = self.wanted and fits and same
        if self.wanted:
            self._parts.append(part.detach())
        else:
            self._parts.clear()

    def whole(self) -> Tensor | None:
        return torch.cat(self._parts) if self._parts else None


def _taken(leaf: Any, index: Tensor) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[index.to(leaf.device)]
    return [leaf[i] for i in index.tolist()]
