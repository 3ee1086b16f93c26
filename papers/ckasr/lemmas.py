"""Lemmas, theorems and equations, in numbers: all on a CPU, in float64."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

import sosie
from sosie.models import build_model, cifar_resnet
from sosie.models.vit import mean_of_others, token_cka
from sosie.train import Penalty

if TYPE_CHECKING:
    from run import Settings


STRONG, WEAK = 0.8, 1e-6  # ρ² of the wide direction at the start; 1 − ρ² of the narrow one at the end
NARROW = math.sqrt(1e-3)  # variance of the narrow direction, the wide one has 1


def lemmas(settings: Settings) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    found = {
        "lemma_2": lemma_2(settings, generator),
        "equation_2": equation_2(settings, generator),
        "equation_7": equation_7(generator),
        "equation_13": equation_13(settings, generator),
        "equation_14": equation_14(),
        "theorem_1": theorem_1(generator),
        "theorem_2": theorem_2(generator),
    }
    numbers = {key: value for part in found.values() for key, value in part.items() if not isinstance(value, list)}
    return {"numbers": numbers, **found}


# CKA and information


def population(wide: float, narrow: float) -> tuple[float, float]:
    """CKA and information (nats) of Gaussians in two dimensions of variance 1 and NARROW, by squared correlations."""
    norm = 1 + NARROW**2
    return (wide + narrow * NARROW**2) / norm, -0.5 * (math.log1p(-wide) + math.log1p(-narrow))


def lemma_2(settings: Settings, generator: torch.Generator) -> dict[str, Any]:
    """A path on which CKA falls at every step while information rises; and paths on which both go together."""
    steps = [k / 20 for k in range(21)]
    path = [population(STRONG * (1 - t), 1 - WEAK**t) for t in steps]
    cka, information = zip(*path, strict=True)
    together = [population(0.9 * t, 0.9 * t) for t in steps]
    drawn = [of_rows(settings, *ends, generator) for ends in ((STRONG, 0.0), (0.0, 1 - WEAK))]
    return {
        "cka_start": cka[0],
        "cka_end": cka[-1],
        "information_start": information[0],
        "information_end": information[-1],
        "rank_correlation_against": float(stats.spearmanr(cka, information).statistic),
        "rank_correlation_together": float(stats.spearmanr(*zip(*together, strict=True)).statistic),
        "sampled_deviation": max(abs(a - b) for row, ends in zip(drawn, (path[0], path[-1]), strict=True)
                                 for a, b in zip(row, ends, strict=True)),
        "path": [list(point) for point in path],
        "together": [list(point) for point in together],
    }  # fmt: skip


def of_rows(settings: Settings, wide: float, narrow: float, generator: torch.Generator) -> tuple[float, float]:
    """What sosie measures on rows drawn from the same Gaussians."""
    x, noise = (torch.randn(settings.draws, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    squared = torch.tensor([wide, narrow], dtype=torch.float64)
    scale = torch.tensor([1.0, math.sqrt(NARROW)], dtype=torch.float64)
    y = (squared.sqrt() * x + (1 - squared).sqrt() * noise) * scale
    return float(sosie.measure("linear_cka", x * scale, y)), float(sosie.measure("gaussian_information", x * scale, y))


def equation_2(settings: Settings, generator: torch.Generator) -> dict[str, Any]:
    """The printed information over what it is: entropies have a ½ in front."""
    x, noise = (torch.randn(settings.draws, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    y = 0.8 * x + 0.6 * noise
    both = torch.cat([x, y], 1).T
    printed = x.T.cov().log() + y.T.cov().log() - both.cov().logdet()
    return {"printed_over_true": float(printed) / float(sosie.measure("gaussian_information", x, y))}


def equation_7(generator: torch.Generator) -> dict[str, Any]:
    """Entries of XᵀY as printed, a product of two sums: 0 for features that are centred, as CKA has them."""
    x, y = (torch.randn(64, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    x, y = x - x.mean(0), y + x
    y = y - y.mean(0)
    printed = x.sum(0)[:, None] * y.sum(0)[None, :]
    return {"printed_share": float(printed.norm() / (x.T @ y).norm())}


# Equations 13 and 14


def equation_13(settings: Settings, generator: torch.Generator) -> dict[str, Any]:
    """The keeping probability as printed, of tokens of an untrained transformer and of independent ones."""
    tokens, width, images = settings.tokens_of_paper, 64, 64
    side = 4 * math.isqrt(tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model("vit", {"size": side, "depth": 2, "width": width}).eval()
    seen: list[Tensor] = []
    handle = model.get_submodule("blocks.1").register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        for _ in range(2):  # two batches
            model(torch.rand(images, 3, side, side, generator=generator))
    handle.remove()
    first, second = ((tokens - 1) * mean_of_others(token_cka(batch[:, 1:], debiased=False)) for batch in seen)
    independent = torch.randn(8, tokens, width, generator=generator)
    return {
        "largest_keep": 1 - float(first.min()),  # π is at most 1
        "lowest_keep": -float(first.max()),
        "of_independent_tokens_at_8_images": float(mean_of_others(token_cka(independent, debiased=False)).mean()),
        "debiased_of_independent_tokens": float(mean_of_others(token_cka(independent, debiased=True)).mean()),
        "change_with_the_batch": float((first - second).abs().max()),
        "span_over_pi": float(first.max() - first.min()),
        "sums": first.tolist(),
    }


def equation_14() -> dict[str, Any]:
    """The mean over all pairs of layers: the listing's, equation 14's, and what sosie's penalty gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cifar_resnet(depth=20, width=0.5).double().train()
        x = torch.rand(16, 3, 32, 32, dtype=torch.float64)
    blocks = [f"layer{i}.{j}" for i in (1, 2, 3) for j in range(3)]
    seen: dict[str, Tensor] = {}
    handles = [model.get_submodule(name).register_forward_hook(lambda m, i, out, name=name: seen.update({name: out}))
               for name in blocks]  # fmt: skip
    with torch.no_grad(), Penalty(model, weight=1.0, pairs="all", reduce="mean", rows=None, every=1) as penalty:
        model(x)
        ours = float(penalty())
    for handle in handles:
        handle.remove()
    rows = [seen[name].flatten(1) for name in blocks]
    total = sum(float(centred_cka_of_grams(a, b)) for a, b in combinations(rows, 2))
    count = len(rows)
    n = count - 1  # equation 14 runs from layer 0 to layer N
    return {
        "listing_deviation": abs(ours - 2 * total / count / (count - 1)),
        "equation_over_listing": (count - 1) * count / (n * (n - 1)),  # of layers that are all the same: a mean is 1
    }


# Theorems


def theorem_1(generator: torch.Generator) -> dict[str, Any]:
    """Outputs approach as ε does, at any sparsity; but ε-sparsity at one ε says nothing: batch norm undoes scaling."""
    weight = torch.randn(50, 40, generator=generator, dtype=torch.float64)
    weight[torch.rand(weight.shape, generator=generator) < 0.9] = 0
    x = torch.randn(40, 30, generator=generator, dtype=torch.float64)
    signs = torch.rand(weight.shape, generator=generator, dtype=torch.float64) * 2 - 1
    epsilons = [10.0**-k for k in range(1, 7)]
    moved = [float(((weight == 0) * signs * epsilon @ x).norm() / (weight @ x).norm()) for epsilon in epsilons]
    slope = float(np.polyfit(np.log(epsilons), np.log(moved), 1)[0])
    before, after, deviation = scaled_down(generator)
    return {
        "slope": slope,
        "moved_at_1e-3": moved[2],
        "epsilon_sparsity_before": before,
        "epsilon_sparsity_after_scaling": after,
        "outputs_moved_by_scaling": deviation,
        "points": [list(point) for point in zip(epsilons, moved, strict=True)],
    }


def scaled_down(generator: torch.Generator) -> tuple[float, float, float]:
    """ε-sparsity (ε = 1e-3) before and after all convolutions are divided by 1000, and by how much outputs change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cifar_resnet(depth=8).double().train()  # norms of the batch itself
    x = torch.rand(16, 3, 32, 32, generator=generator, dtype=torch.float64)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-15

    def look() -> tuple[float, Tensor]:
        flat = torch.cat([module.weight.flatten() for module in convolutions])
        return float((flat.abs() < 1e-3).double().mean()), model(x)

    with torch.no_grad():
        before, answer = look()
        for module in convolutions:
            module.weight.div_(1000)
        after, again = look()
    return before, after, float((again - answer).norm() / answer.norm())


def theorem_2(generator: torch.Generator) -> dict[str, Any]:
    """The derivative is there, but not the continuity where a layer becomes constant: the limit hangs on the way."""
    y, a, b = (torch.randn(12, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    a = a + 2 * y
    x = a.clone().requires_grad_()
    value = centred_cka(x, y)
    value.backward()
    assert x.grad is not None
    step = torch.zeros_like(a)
    step[3, 2] = 1e-6
    slope = (float(sosie.measure("linear_cka", a + step, y)) - float(sosie.measure("linear_cka", a - step, y))) / 2e-6
    ends = [float(sosie.measure("linear_cka", 1e-9 * side, y)) for side in (a, b)]
    return {
        "derivative_deviation": abs(slope - float(x.grad[3, 2])),
        "jump_at_constant": abs(ends[0] - ends[1]),
    }


def centred_cka(x: Tensor, y: Tensor) -> Tensor:
    """Equation 6, of centred features."""
    x, y = x - x.mean(0), y - y.mean(0)
    return (x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())


def centred_cka_of_grams(x: Tensor, y: Tensor) -> Tensor:
    """The same from Gram matrices, for more neurons than rows."""
    x, y = x - x.mean(0), y - y.mean(0)
    k, m = x @ x.T, y @ y.T
    return (k * m).sum() / (k.norm() * m.norm())
