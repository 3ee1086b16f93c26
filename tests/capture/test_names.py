"""Modules of a model, without torch's own slow way through them."""

from __future__ import annotations

import torch
from torch import nn

from sosie.capture.names import modules_of


def test_modules_are_those_of_torch() -> None:
    """Shared ones once, and children that are None, of modules and of scripts."""
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), nn.ModuleList([shared]))
    model.register_module("none", None)
    for each in (model, torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())))):
        found = modules_of(each)
        assert len(found) == len(set(found))
        assert set(found) == set(each.modules())
