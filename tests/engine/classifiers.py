"""Small classifiers for the tests of outputs."""

from __future__ import annotations

import torch
from nets import inputs
from torch import Tensor, nn

X = inputs(150)
LABELS = torch.randint(3, (150,), generator=torch.Generator().manual_seed(4))


def net(seed: int) -> nn.Module:
    """A classifier that names every class now and then."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))


def logits(model: nn.Module, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return model.eval()(x)
