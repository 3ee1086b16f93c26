"""Networks trained together are those trained one after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sosie.train import Recipe, accuracy, fit, fit_together


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(70, 1, 4, 4, generator=generator).to(dtype)
    return x, (x[:, 0, 0, 0] > x[:, 0, 3, 3]).long()


def network(dtype: torch.dtype = torch.float64, norm: bool = False) -> nn.Module:
    middle = [nn.Linear(8, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), *middle, nn.Linear(8, 2)).to(dtype)


SHORT = Recipe(epochs=1, rate=1e-3, schedule="constant")


def alone(seed: int, recipe: Recipe) -> nn.Module:
    torch.manual_seed(seed)
    return fit(network(), *problem(), recipe=recipe, seed=seed)


def apart(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


@pytest.mark.parametrize(
    ("attack", "way"),
    [
        *((attack, {"optimiser": "adam"}) for attack in (None, "fgsm(epsilon=0.1)", "fast_fgsm", "pgd(norm='2')")),
        (None, {"optimiser": "sgd", "rate": 0.1, "momentum": 0.0}),
        ("pgd(steps=3)", {"optimiser": "sgd", "rate": 0.1, "momentum": 0.0}),
        ("fast_fgsm", {"schedule": "one_cycle"}),
    ],
)
def test_each_network_is_as_if_it_were_alone(attack: str | None, way: dict[str, Any]) -> None:
    # 70 images: the last batch has 6
    plain = Recipe(2, **{"rate": 1e-2, "schedule": "constant", "batch": 16, "decay": 1e-3, **way})
    recipe = replace(plain, attack=attack)
    seeds = [5, 3, 11]
    (found,) = fit_together(network, 3, *problem(), recipe=recipe, seeds=seeds)
    for k, seed in enumerate(seeds):
        one = alone(seed, recipe)
        assert apart(found.model(k), one) < 1e-10
        assert not found.model(k).training
    assert apart(found.model(0), found.model(1)) > 1e-2
    clean = fit_together(network, 3, *problem(), recipe=plain, seeds=seeds)[0]
    assert (apart(found.model(0), clean.model(0)) > 1e-6) == (attack is not None)


def test_batch_norm_learns_from_the_batches_and_not_from_the_attack() -> None:
    # With SGD: a bias before batch norm has no gradient but rounding, which Adam would make as large as any other.
    recipe = Recipe(2, 16, 0.1, "sgd", schedule="constant", attack="pgd(steps=2)")
    (found,) = fit_together(lambda: network(norm=True), 2, *problem(), recipe=recipe)
    torch.manual_seed(1)
    one = fit(network(norm=True), *problem(), seed=1, recipe=recipe)
    assert apart(found.model(1), one) < 1e-10
    assert int(one[4].num_batches_tracked) == 10


def test_in_float32_to_rounding() -> None:
    torch.manual_seed(4)
    one = fit(network(torch.float32), *problem(torch.float32), seed=4, recipe=replace(SHORT, epochs=3, batch=16))
    kept = fit_together(
        lambda: network(torch.float32), 5, *problem(torch.float32), recipe=replace(SHORT, epochs=3, batch=16)
    )
    assert apart(kept[0].model(4), one) < 1e-4


def test_groups_do_not_matter() -> None:
    ways = [
        fit_together(network, 5, *problem(), recipe=replace(SHORT, epochs=2), keep=[0, 2], at_once=size)
        for size in (1, 2, 5)
    ]
    for other in ways[1:]:
        assert [c.seeds for c in other] == [c.seeds for c in ways[0]]
        for a, b in zip(ways[0], other, strict=True):
            assert max(map(apart, a.models(), b.models())) < 1e-12


def test_checkpoints_are_what_shorter_trainings_give() -> None:
    state = torch.get_rng_state()
    kept = fit_together(network, 4, *problem(), recipe=replace(SHORT, epochs=3), keep=[0, 1, 3])
    assert torch.equal(torch.get_rng_state(), state)
    assert [checkpoint.epoch for checkpoint in kept] == [0, 1, 3]
    torch.manual_seed(2)
    assert apart(kept[0].model(2), network()) == 0
    assert apart(kept[1].model(2), fit_together(network, 4, *problem(), recipe=SHORT)[0].model(2)) == 0
    assert apart(kept[1].model(2), kept[2].model(2)) > 1e-3


def test_they_learn_and_answer_together() -> None:
    x, y = problem(torch.float32)
    x = (255 * x).byte()
    (found,) = fit_together(
        lambda: network(torch.float32), 3, x, y, recipe=Recipe(epochs=60, rate=1e-2, schedule="constant")
    )
    assert len(found) == 3
    answers = found.outputs(x, batch=32)
    assert answers.shape == (3, 70, 2)
    for k, model in enumerate(found.models()):
        assert torch.allclose(model(x / 255), answers[k], atol=1e-5)
        assert accuracy(model, x, y) > 0.9
    assert torch.allclose(found((x / 255).expand(3, *x.shape)), answers, atol=1e-5)


def test_what_is_wrong_is_said() -> None:
    x, y = problem()
    with pytest.raises(ValueError, match="one seed per network: 3 networks, 2 seeds"):
        fit_together(network, 3, x, y, recipe=SHORT, seeds=[1, 2])
    with pytest.raises(ValueError, match="epoch 5"):
        fit_together(network, 3, x, y, recipe=replace(SHORT, epochs=4), keep=[5])
    with pytest.raises(ValueError, match="one label per image"):
        fit_together(network, 3, x, y[:9], recipe=SHORT)
    with pytest.raises(ValueError, match="there are fgsm"):
        fit_together(network, 3, x, y, recipe=replace(SHORT, attack="madry"))
    with pytest.raises(RuntimeError, match="randomness") as drawn:
        fit_together(
            lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16, 2)).double(), 2, x, y, recipe=SHORT
        )
    assert "must not draw random numbers" in drawn.value.__notes__[0]


def test_networks_of_several_shapes_are_refused() -> None:
    widths = iter((3, 4))
    with pytest.raises(RuntimeError, match=r"equal size, but got \[3, 5\] at entry 0 and \[4, 5\] at entry 1"):
        fit_together(lambda: nn.Linear(5, next(widths)), 2, torch.rand(4, 5), torch.zeros(4).long(), recipe=SHORT)
