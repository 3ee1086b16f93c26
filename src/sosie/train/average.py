"""A running average of a model's numbers while it is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Average:
    """average ← decay × average + (1 − decay) × model after each step, starting with the model after the first.

    Of every number that is floating point: parameters, and the running statistics of batch norms with them. Counts and
    masks are not averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"average={decay!r}: how much of the average stays at a step, between 0 and 1, or None")
        self._live = _Floats(model)
        self._kept = AveragedModel(self._live, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)

    def update(self) -> None:
        self._kept.update_parameters(self._live)

    @torch.no_grad()
    def put_into(self, model: nn.Module, *, masked: bool = False) -> None:
        """Make the model the average; `masked`: a weight that its mask leaves out is 0, also if it was not always."""
        for live, kept in zip(self._live.buffers(), self._kept.module.buffers(), strict=True):
            live.copy_(kept)
        for module in model.modules() if masked else ():
            mask, weight = getattr(module, "weight_mask", None), module._parameters.get("weight")
            if isinstance(mask, Tensor) and weight is not None:
                weight.mul_(mask)

    def state_dict(self) -> dict[str, Any]:
        return self._kept.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept.load_state_dict(state)


class _Floats(nn.Module):
    """The floating-point numbers of a model, in the same memory: a copy of this has none of the model's hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for k, number in enumerate([*model.parameters(), *model.buffers()]):
            if number.is_floating_point():
                self.register_buffer(str(k), number.detach())
