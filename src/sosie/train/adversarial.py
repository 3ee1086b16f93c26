"""Adversarial training: every batch is changed against the model as it is, then learnt (Madry et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..data.attacks import Attack
from ..data.draws import derived
from ..data.images import to_float

Prepare = Callable[[Tensor], Tensor]


@dataclass
class Attacked:
    """Batches as an attack changes them; the random starts of each step come from the seed and the step alone."""

    model: nn.Module
    attack: Attack
    prepare: Prepare | None
    seed: int
    _steps: int = field(default=0, init=False)

    def __call__(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        seed = derived(self.seed, self._steps)
        self._steps += 1
        training = self.model.training
        self.model.eval()  # a training batch-norm would learn from the steps of the attack
        try:
            return self.attack(self._answer, floats(x), y, seed=seed, index=index)
        finally:
            self.model.train(training)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._steps = state["steps"]

    def _answer(self, x: Tensor) -> Tensor:
        found = self.model(x if self.prepare is None else self.prepare(x))
        assert isinstance(found, Tensor)
        return found


def floats(x: Tensor) -> Tensor:
    """uint8 as [0, 1]; floating point as it is."""
    return to_float(x) if x.dtype == torch.uint8 else x
