"""The measures under test, as the benchmark takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import sosie
from sosie.benchmark import Scale
from sosie.benchmark.candidates import Candidate, open_candidates
from sosie.benchmark.population import Images
from sosie.measures import find
from sosie.weights import match_weights


def factors(model: nn.Sequential) -> list[Tensor]:
    """Of a chain of layers: (inputs, width), (width, width) …"""
    return [part.weight.detach().T for part in model if isinstance(part, nn.Linear)]


def wcka_lit(lit: Tensor) -> Callable[[Any, Any], float]:
    """wCKA of the inputs in `lit` alone: weights on the others never met a gradient, and are as they were drawn."""

    def value(a: nn.Sequential, b: nn.Sequential) -> float:
        first, second = (
            [part[lit.to(part.device)] if k == 0 else part for k, part in enumerate(factors(m))] for m in (a, b)
        )
        return sosie.measure("wcka", first, second)

    value.__name__ = "wcka_lit"
    value.of, value.closer = "models", "up"  # type: ignore[attr-defined]
    return value


def weight_cosine_matched(a: nn.Module, b: nn.Module) -> float:
    """Cosine of all parameters, once the neurons of B are in the order that fits those of A best."""
    if [p.shape for p in a.parameters()] != [p.shape for p in b.parameters()]:
        raise ValueError("networks of different shapes have no parameters to match")
    first, second = (parameters_to_vector(m.parameters()).double() for m in (a, match_weights(a, b).model_b))
    return float(torch.dot(first, second) / (first.norm() * second.norm()))


weight_cosine_matched.of, weight_cosine_matched.closer = "models", "up"  # type: ignore[attr-defined]


def candidate(
    name: str, scale: Scale, images: Images, *, paired_rows: int | None = None, rows: int | None = None
) -> Candidate:
    """`images`: what the first layer of the weights reads. `rows`, `paired_rows` (of measures of pairs): at most."""
    scale = replace(scale, paired_rows=paired_rows or scale.paired_rows)
    given: Any = name
    if name == "wcka_lit":
        given = wcka_lit((images.train.flatten(1) != 0).any(0))
    elif name == "weight_cosine_matched":
        given = weight_cosine_matched
    (found,) = open_candidates([given], scale)
    return replace(found, rows=min(found.rows or scale.test, rows or scale.test))


def reads_weights(name: str) -> bool:
    return name in ("wcka_lit", "weight_cosine_matched") or find(name).reads_weights


def mixed(kinds: dict[str, Tensor], seed: int) -> Tensor:
    """Every image once, clean or corrupted, as drawn."""
    stacked = torch.stack(list(kinds.values()))
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(stacked), (stacked.shape[1],), generator=random).to(stacked.device)
    return stacked[drawn, torch.arange(stacked.shape[1], device=stacked.device)]
