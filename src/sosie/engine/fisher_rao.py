"""The Fisher–Rao norm of a classifier: one number, from its logits alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import Chunk, SilentSite, watch
from ..stats import check_labels
from .answering import Labels
from .classifier import Classifier, chunks_of, drawn_labels, open_classifier

UNDER = ("labels", "expected", "drawn")
WEIGHT_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class FisherRao:
    """‖θ‖_fr of a model on data, and what it rests on."""

    name: str
    norm: float
    layers: int  # L, the hidden layers; the norm is (L + 1) √mean
    n: int
    under: str

    def distance(self, other: FisherRao) -> float:
        """|a − b| / √(a b) of the two norms; with the same L that factor cancels."""
        for each in (self, other):
            if not each.norm > 0:
                raise ValueError(f"{each.name}: the Fisher–Rao norm is {each.norm:g}, and the distance divides by it")
        # √(a/b) − √(b/a): the same, and no product of norms that could leave the range of floats.
        ratio = (self.norm / other.norm) ** 0.5
        return abs(ratio - 1 / ratio)


def fisher_rao_norm(
    model: Any,
    data: Any,
    layers: int | None = None,
    *,
    under: str = "labels",
    labels: Any = None,
    seed: int = 0,
    prepare: Callable[[Any], Any] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    device: str | torch.device | None = None,
    max_rows: int | None = None,
) -> FisherRao:
    """‖θ‖_fr with ‖θ‖_fr² = (L + 1)² E ⟨f, ∇_f ℓ⟩², f the logits and ℓ the cross-entropy (Liang et al. 2019).

    For layers without biases and activations like ReLU it is E ⟨θ, ∇_θ ℓ⟩², so it needs no gradient at parameters.
    `layers` is L, the number of hidden layers. None counts the calls of Linear and convolutional layers in a forward
    and takes one less, which makes L + 1 the number of weight layers; shortcuts with a convolution count too.

    `under` says what E runs over beside the inputs: "labels" that come with the data (or `labels`, as in
    `compare_outputs`), labels "expected" under the model's own p(y|x), or "drawn" from it with `seed`, one an input.
    """
    if under not in UNDER:
        raise ValueError(f"under is one of {', '.join(UNDER)}, got {under!r}")
    if layers is not None and layers < 0:
        raise ValueError(f"layers is the number of hidden layers, got {layers}")
    if labels is not None and under != "labels":
        raise ValueError(f"labels were given, but under={under!r} does not read them")
    source = open_classifier(model, prepare=prepare, inputs=inputs, device=device)
    given = Labels(labels)
    total, n = 0.0, 0
    with chunks_of(source, data, max_rows, "Fisher–Rao norm") as chunks:
        for chunk in chunks:
            if layers is None:
                layers = _hidden_layers(source, chunk)
            scores, log_p = source.log_p(source.outputs(chunk))
            total += float(_squares(scores, log_p, chunk, under=under, labels=given, seed=seed).sum())
            n += chunk.count
    assert layers is not None
    return FisherRao(source.name, (layers + 1) * (total / n) ** 0.5, layers, n, under)


def _squares(f: Tensor, log_p: Tensor, chunk: Chunk, *, under: str, labels: Labels, seed: int) -> Tensor:
    """(n,) ⟨f, ∇_f ℓ⟩², where ∇_f ℓ = p − onehot(y): the mean logit under p less the logit of y."""
    p = log_p.exp()
    # About the largest logit: p − onehot sums to 0, so a shift changes nothing but the rounding.
    f = f - f.amax(1, keepdim=True)
    mean = (f * p).sum(1)
    if under == "expected":
        return (p * (f - mean[:, None]).square()).sum(1)
    if under == "drawn":
        y = drawn_labels(log_p, chunk.start, seed=seed, draw=0)
    else:
        found = labels.of(chunk)
        if found is None:
            raise ValueError(
                "the data hold no labels: give (x, y) batches or labels=, or take the model's own answers with "
                "under='expected'"
            )
        if len(found) != chunk.count:
            raise ValueError(f"{chunk.count} inputs, but {len(found)} labels")
        y = check_labels(found, "labels", f.shape[1]).to(f.device)
    return (mean - f.gather(1, y[:, None])[:, 0]).square()


def _hidden_layers(source: Classifier, chunk: Chunk) -> int:
    """Calls of weight layers in one forward, less the last."""
    kinds = {type(module) for module in source.model.modules() if isinstance(module, WEIGHT_LAYERS)}
    try:
        if not kinds:
            raise SilentSite("there are none")
        with watch(source.model, list(kinds), sink=lambda *_: None) as seen:
            source.outputs(chunk)
    except SilentSite as error:
        raise ValueError(
            f"{source.name}: no Linear or convolutional layer fired ({error}); say layers=, the number of hidden layers"
        ) from error
    return len(seen.sites) - 1
