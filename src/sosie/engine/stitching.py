"""Stitching: the lower part of one network, an affine layer, the upper part of another (Csiszárik et al. 2021)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..capture import Batches, Chunk, Cut, answer_in, as_found, labels_of, model_arguments, recut
from ..data import open_data
from ..linalg import Affine, find_fit
from ..models import NamedModel, open_model
from ..models.joint import Form, Joint, Resize
from ..progress import Progress
from ..stats import MomentMaker, Moments

CHUNK = 128  # inputs that both networks are run on at a time


@dataclass
class Half:
    """One of the two networks: cut at a site, with the normalisation of its own."""

    name: str
    model: nn.Module
    cut: Cut
    prepare: Callable[[Any], Any] | None
    inputs: Callable[[Any], Any] | None

    def call(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = next(self.model.parameters(), None)
        device = None if first is None else first.device
        return model_arguments(batch, inputs=self.inputs, prepare=self.prepare, device=device)

    def representation(self, batch: Any) -> Tensor:
        args, kwargs = self.call(batch)
        return self.cut.representation(*args, **kwargs)

    def answer(self, batch: Any) -> Tensor:
        args, kwargs = self.call(batch)
        return _answer(self.model(*args, **kwargs))


class Stitched(nn.Module):
    """A network whose lower part is A's and whose upper part is B's; only the joint between them is its own."""

    def __init__(self, lower: Half, joint: Joint, upper: Half) -> None:
        super().__init__()
        self._lower, self.joint, self._upper = lower, joint, upper
        self.a, self.b = lower.model, upper.model

    def forward(self, batch: Any) -> Tensor:
        """The answer to a batch as the data give it: each half prepares it in its own way."""
        activation = self.joint(self._lower.representation(batch))
        if not self._upper.cut.needs_input:
            return _answer(self._upper.cut.task(activation))
        args, kwargs = self._upper.call(batch)
        return _answer(self._upper.cut.task(activation, *args, **kwargs))


@dataclass(frozen=True)
class Stitch:
    """A stitched network, and how its joint was found."""

    model: Stitched
    fit: str
    report: dict[str, Any] = field(repr=False)
    n: int  # rows that the fit rests on

    def evaluate(self, data: Any, *, max_rows: int | None = None) -> dict[str, float]:
        """How well B does its job with A's representation, on data that should not be those of the fit.

        agreement_a, agreement_b: share of inputs that get the same answer as from A, from B. cross_entropy: to B's
        soft answers, in nats. With labels also accuracy, accuracy_a, accuracy_b, and relative_accuracy, which is the
        accuracy over B's (left out where B gets nothing right).
        """
        halves = self.model._lower, self.model._upper
        sums: dict[str, float] = {}
        n = 0
        with as_found(self.model), Progress("evaluating the stitched network", None, "inputs") as bar:
            for chunk in _chunks(data, max_rows):
                answers = [self.model(chunk.batch), *(half.answer(chunk.batch) for half in halves)]
                for key, value in _counts(answers, labels_of(chunk.batch)).items():
                    sums[key] = sums.get(key, 0.0) + value
                n += chunk.count
                bar.advance(chunk.count)
        found = {key: value / n for key, value in sums.items()}
        if found.get("accuracy_b"):
            found["relative_accuracy"] = found["accuracy"] / found["accuracy_b"]
        return {**found, "n": float(n)}


def stitch(
    model_a: Any,
    site_a: str,
    model_b: Any,
    site_b: str,
    data: Any,
    *,
    fit: str = "least_squares",
    resize: Resize = "interpolate",
    prepare_a: Callable[[Any], Any] | None = None,
    prepare_b: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    max_rows: int | None = None,
) -> Stitch:
    """Can B do its job with A's representation? Join A up to `site_a` to B from `site_b` on, by an affine layer.

    The layer is found from the activations of both networks on `data`, in one pass and exactly, whatever the batch
    size: `fit` is least_squares, ridge(strength=…), procrustes, reduced_rank(k=…), permutation, lasso(alpha=…) or
    identity. It acts on channels: every pixel or token of a map is a row. Where the sites differ in shape, A's
    activation is brought into B's first, see `resize` and sosie.models.joint. A cut that something goes around, a
    skip connection say, is refused. `result.model(x)` is the stitched network; `result.evaluate(data)` says how well it
    does.
    """
    chosen = find_fit(fit)
    batches = Batches(open_data(data) if isinstance(data, str) else data)
    first = next(iter(batches))
    lower, upper = (
        _half(model, site, prepare, inputs, first)
        for model, site, prepare in ((model_a, site_a, prepare_a), (model_b, site_b, prepare_b))
    )
    args, kwargs = upper.call(first)
    upper.cut.check(*args, **kwargs)
    source, target = (Form.of(half.cut.site.shape, half.cut.site.channels_last) for half in (lower, upper))
    joint = Joint(source, target, resize)
    moments = _moments(lower, upper, joint, data, max_rows)
    affine = chosen(moments.joint(0, 0))
    _fill(joint, affine, like=upper.model)
    return Stitch(Stitched(lower, joint, upper), chosen.name, dict(affine.report), moments.n)


def _answer(output: Any) -> Tensor:
    found = answer_in(output)
    if found is None:
        raise TypeError(f"the network answered with no tensor but {type(output).__name__}")
    return found


def _half(model: Any, site: str, prepare: Any, inputs: Any, batch: Any) -> Half:
    if isinstance(model, (str, os.PathLike)):
        model = open_model(str(model))
    name = type(model).__name__
    if isinstance(model, NamedModel):
        model, name, prepare = model.model, model.name, prepare or model.prepare
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"cannot stitch {name}: give a torch.nn.Module or a specification like 'tiny10@weights.safetensors'"
        )
    half = Half(name, model, None, prepare, inputs)  # type: ignore[arg-type]
    args, kwargs = half.call(batch)
    half.cut = Cut(model, site, *args, **kwargs)
    return half


def _chunks(data: Any, max_rows: int | None) -> Iterator[Chunk]:
    source = open_data(data) if isinstance(data, str) else data
    yield from recut(Batches(source), block=None, skip=0, max_rows=max_rows, largest=CHUNK)


def _moments(lower: Half, upper: Half, joint: Joint, data: Any, max_rows: int | None) -> Moments:
    """Of both sites' rows, A's in the shape of B's; merged chunk by chunk, so that memory does not grow."""
    makers = MomentMaker(), MomentMaker()
    total: Moments | None = None
    with (
        as_found([lower.model, upper.model]),
        Progress(f"stitching {lower.name} to {upper.name}", None, "inputs") as bar,
    ):
        for chunk in _chunks(data, max_rows):
            activations = joint.shaped(lower.representation(chunk.batch)), upper.representation(chunk.batch)
            sides = [
                maker.side([maker.part(half.cut.site.label, _rows(activation, joint.target))])
                for maker, half, activation in zip(makers, (lower, upper), activations, strict=True)
            ]
            part = Moments.join(*sides)
            total = part if total is None else total.merge(part)
            bar.advance(chunk.count)
    if total is None:
        raise ValueError("the data yielded no inputs")
    return total


def _rows(activation: Tensor, form: Form) -> Tensor:
    """(positions of all inputs, channels)."""
    last = activation if form.tokens or not form.space else activation.movedim(1, -1)
    return last.reshape(-1, last.shape[-1])


@torch.no_grad()
def _fill(joint: Joint, affine: Affine, *, like: nn.Module) -> None:
    first = next(like.parameters(), None)
    if first is not None:
        joint.to(first.device, first.dtype)
    joint.weight.copy_(affine.weight)
    assert joint.bias is not None
    joint.bias.copy_(affine.bias)


def _counts(answers: list[Tensor], labels: Tensor | None) -> dict[str, float]:
    """Sums over one chunk: the stitched network's answers against A's, B's and the labels."""
    stitched, a, b = (answer.detach().double().cpu() for answer in answers)
    if stitched.ndim != 2 or b.shape != stitched.shape:
        raise ValueError(f"stitched networks are evaluated on (inputs, classes), got {tuple(stitched.shape)}")
    guess = stitched.argmax(1)
    found = {
        "cross_entropy": float(F.cross_entropy(stitched, b.softmax(1), reduction="sum")),
        "agreement_b": float((guess == b.argmax(1)).sum()),
    }
    if a.shape == stitched.shape:
        found["agreement_a"] = float((guess == a.argmax(1)).sum())
    if labels is not None:
        labels = labels.cpu()
        found["accuracy"] = float((guess == labels).sum())
        found["accuracy_b"] = float((b.argmax(1) == labels).sum())
        if a.shape == stitched.shape:
            found["accuracy_a"] = float((a.argmax(1) == labels).sum())
    return found
