"""What several networks are made of."""

from __future__ import annotations

from torch import nn


def initialise(model: nn.Module) -> None:
    """Set convolutions as He et al. 2015 (fan out), batch norms to the identity."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
