"""What is known of a network: how alike its layers are, how its weights lie, and how hard a penalty pulls at it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from data import images, prepare, probes
from settings import Arm, Settings
from torch import Tensor, nn
from torch.nn import functional

from sosie.train import Penalty
from sosie.train.sparse import epsilon_sparsity, weight_histogram

Rows = list[dict[str, Any]]


def penalty_of(model: nn.Module, arm: Arm) -> Penalty | None:
    if arm.weight == 0:
        return None
    return Penalty(
        model,
        arm.measure,
        weight=arm.weight,
        pairs=arm.pairs,
        reduce=arm.reduce,
        rows=arm.rows,
        every=arm.every,
        rule=arm.rule,  # type: ignore[arg-type]
    )


@torch.no_grad()
def pairs_of(
    model: nn.Module, x: Tensor, measure: str, *, pairs: Any = "stage", sites: Any = None, rule: Any = "flatten"
) -> Rows:
    """What a penalty would see, of all rows at once: `site_a`, `site_b`, `value`; in the network's own mode."""
    look = Penalty(model, measure, sites, weight=1.0, pairs=pairs, reduce="mean", rows=None, every=1, rule=rule)
    look.__enter__()
    try:
        model(x)
        look()
        return look.last
    finally:
        look.__exit__(ValueError, None, None)  # as after an error: constant layers are in the rows, and need no warning


def mean_of(rows: Rows) -> float | None:
    """Of the pairs that have a value: a constant layer has none."""
    each = [row["value"] for row in rows if row["value"] is not None]
    return sum(each) / len(each) if each else None


def similarity(settings: Settings, model: nn.Module, dataset: str) -> dict[str, float | None]:
    """Mean over pairs of blocks within a stage, its input among them: what CKA-SR lowers.

    `penalised`: CKA of as many test images as a batch has, as the penalty has it; the others of all probes.
    """
    x = probes(settings, dataset, settings.probes)
    return {
        "penalised": mean_of(pairs_of(model, x[: settings.few], "linear_cka")),
        "biased": mean_of(pairs_of(model, x, "linear_cka")),
        "debiased": mean_of(pairs_of(model, x, "debiased_cka")),
        "all_pairs": mean_of(pairs_of(model, x, "debiased_cka", pairs="all")),
    }


def layer_map(settings: Settings, model: nn.Module, dataset: str) -> dict[str, Any]:
    """Every convolution with every other, biased and debiased."""
    x = probes(settings, dataset, settings.probes)
    found: dict[str, Any] = {}
    for measure in ("linear_cka", "debiased_cka"):
        rows = pairs_of(model, x, measure, pairs="all", sites=nn.Conv2d)
        names = list(dict.fromkeys(name for row in rows for name in (row["site_a"], row["site_b"])))
        value = {frozenset((row["site_a"], row["site_b"])): row["value"] for row in rows}
        found["sites"] = names
        found[measure] = [[1.0 if a == b else rounded(value[frozenset((a, b))]) for b in names] for a in names]
    return found


def information(settings: Settings, model: nn.Module, dataset: str) -> dict[str, Any]:
    """Gaussian information in nats between blocks of a stage, channels averaged over space, beside their CKA.

    Infinite where a channel of one block is a linear function of the other's: such pairs are counted, and left out.
    """
    x = probes(settings, dataset, settings.probes)
    within = [row for row in pairs_of(model, x, "linear_cka") if not row["site_a"].startswith("input of ")]
    found: list[tuple[float, float]] = []
    for row in within:
        pair = [(row["site_a"], row["site_b"])]
        try:
            nats = pairs_of(model, x, "gaussian_information", pairs=pair, rule="mean")[0]["value"]
        except ValueError:  # infinite, or too few rows for so many channels
            nats = None
        if nats is not None and row["value"] is not None:
            found.append((row["value"], nats))
    mean = sum(nats for _, nats in found) / len(found) if found else None
    return {"nats": mean, "pairs": len(within), "finite": len(found), "points": found}


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


# Weights


def layers(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Weights of convolutions and linear layers, flat, and which of them are kept."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight.detach().flatten()
            mask = getattr(module, "weight_mask", None)
            found[name] = weight, torch.ones_like(weight, dtype=torch.bool) if mask is None else mask.flatten().bool()
    return found


def weights(settings: Settings, model: nn.Module) -> dict[str, Any]:
    """ε-sparsity of all weights and of those that are kept, in numbers and in units of each layer, and a histogram."""
    every = list(layers(model).values())
    kept = [own for weight, mask in every if len(own := weight[mask])]
    together = torch.cat(kept)
    scaled = torch.cat([own / own.square().mean().sqrt() for own in kept]).abs()
    return {
        "all": {f"{epsilon:g}": epsilon_sparsity(model, epsilon) for epsilon in settings.epsilons},
        "kept": {f"{epsilon:g}": share(together.abs() <= epsilon) for epsilon in settings.epsilons},
        "relative": share(scaled <= settings.relative_epsilon),
        "rms": float(together.square().mean().sqrt()),
        "density": len(together) / sum(len(weight) for weight, _ in every),
        "limit": settings.limit,
        "histogram": weight_histogram(model, settings.bins, settings.limit).counts.tolist(),
    }


def share(chosen: Tensor) -> float:
    return float(chosen.float().mean())


# How hard it pulls


def gradient_share(settings: Settings, model: nn.Module, dataset: str, arm: Arm) -> float | None:
    """Length of the penalty's gradient over that of the task's, of kept weights, in a step of training that is due."""
    if arm.weight == 0:
        return None
    model = copy.deepcopy(model).train()  # whose batch norms may count the step
    bytes_, labels = (side[: settings.few] for side in images(settings, dataset, "train"))
    x = prepare(settings, dataset)(bytes_.float() / 255)
    chosen = {f"{name}.weight": mask for name, (_, mask) in layers(model).items()}
    own = [parameter for name, parameter in model.named_parameters() if name in chosen]
    masks = [chosen[name] for name, _ in model.named_parameters() if name in chosen]
    look = penalty_of(model, arm)
    assert look is not None
    look.__enter__()
    try:
        loss = functional.cross_entropy(model(x), labels)
        term = look()
        if not term.requires_grad:  # all layers are constant
            return None
        lengths = [_length(torch.autograd.grad(each, own, retain_graph=True, allow_unused=True), masks)
                   for each in (term, loss)]  # fmt: skip
    finally:
        look.__exit__(ValueError, None, None)
    return lengths[0] / lengths[1] if lengths[1] else None


def _length(grads: tuple[Tensor | None, ...], masks: list[Tensor]) -> float:
    squares = [g.flatten()[mask].double().square().sum() for g, mask in zip(grads, masks, strict=True) if g is not None]
    return float(torch.stack(squares).sum().sqrt())
