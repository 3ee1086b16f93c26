"""Copies of a model whose weights are in no order: what the architecture alone makes alike."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from .sources import WeightSource


def shuffled(source: WeightSource, seed: int, draw: int) -> WeightSource:
    """A copy whose tensors of weights have the same numbers in another order; biases and norms as they are."""
    model = copy.deepcopy(source.model)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                order = torch.randperm(weights.numel(), generator=generator).to(weights.device)
                weights.copy_(weights.flatten()[order].view_as(weights))
    return replace(source, model=model)
