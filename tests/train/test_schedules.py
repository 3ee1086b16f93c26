"""Learning rates against torch's own schedulers."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from sosie.train import Recipe


def rates(name: str, steps: int, warmup: int = 0, **how: bool) -> list[float]:
    # An epoch is a step.
    recipe = Recipe(steps, rate=0.2, optimiser="sgd", schedule=name, warmup=warmup)  # type: ignore[arg-type]
    stepper = recipe.make_optimiser([torch.nn.Parameter(torch.ones(1))], **how)
    plan, found = recipe.make_schedule(stepper, 1), []
    for _ in range(steps):
        found.append(float(stepper.param_groups[0]["lr"]))
        stepper.step()
        plan.step()
    return found


def torchs_cosine(steps: int) -> list[float]:
    stepper = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.2)
    plan, found = CosineAnnealingLR(stepper, steps), []
    for _ in range(steps):
        found.append(stepper.param_groups[0]["lr"])
        stepper.step()
        plan.step()
    return found


def test_the_cosine_is_torchs() -> None:
    assert rates("cosine", 40) == pytest.approx(torchs_cosine(40), rel=1e-9)
    assert rates("cosine", 2) == pytest.approx([0.2, 0.1])


def test_a_warm_up_rises_in_equal_parts_and_the_rest_follows() -> None:
    rise = [0.05, 0.1, 0.15, 0.2]
    assert rates("cosine", 40, 4) == pytest.approx(rise + torchs_cosine(36), rel=1e-9)
    assert rates("constant", 6, 4) == pytest.approx([*rise, 0.2, 0.2])


def test_steps_are_a_tenth_from_the_middle_and_a_hundredth_in_the_last_quarter() -> None:
    assert rates("steps", 12) == pytest.approx([0.2] * 6 + [0.02] * 3 + [0.002] * 3)


def test_a_rate_that_is_a_tensor_is_written_in_place_and_goes_the_same_way() -> None:
    assert rates("cosine", 20, 3, capturable=True) == pytest.approx(rates("cosine", 20, 3), rel=1e-6)
    recipe = Recipe(10, rate=0.2, optimiser="sgd", schedule="cosine")
    stepper = recipe.make_optimiser([torch.nn.Parameter(torch.ones(1))], capturable=True)
    rate = stepper.param_groups[0]["lr"]
    plan = recipe.make_schedule(stepper, 1)
    assert all(isinstance(base, float) for base in plan.base_lrs)  # a tensor would be read back at every step
    stepper.step()
    plan.step()
    assert stepper.param_groups[0]["lr"] is rate
    assert float(rate) < 0.2


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="'one_cycle', 'cosine', 'steps', 'constant'"):
        rates("linear", 10)
    with pytest.raises(ValueError, match="its own rise"):
        rates("one_cycle", 10, 2)
    with pytest.raises(ValueError, match="10 steps does not fit into 10"):
        rates("cosine", 10, 10)
