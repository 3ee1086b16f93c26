"""Networks trained together are those trained one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sosie.train import accuracy, fit, fit_together


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(70, 1, 4, 4, generator=generator).to(dtype)
    return x, (x[:, 0, 0, 0] > x[:, 0, 3, 3]).long()


def network(dtype: torch.dtype = torch.float64, norm: bool = False) -> nn.Module:
    middle = [nn.Linear(8, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), *middle, nn.Linear(8, 2)).to(dtype)


def alone(seed: int, **how: Any) -> nn.Module:
    torch.manual_seed(seed)
    return fit(network(), *problem(), seed=seed, **how)


def apart(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("strategy", ["standard", "fgsm(epsilon=0.1)", "fast_fgsm", "pgd(steps=3)", "pgd(norm='2')"])
@pytest.mark.parametrize(
    "way", [{"optimiser": "adam"}, {"optimiser": "sgd", "rate": 0.1, "momentum": 0.0}, {"schedule": "one_cycle"}]
)
def test_each_network_is_as_if_it_were_alone(strategy: str, way: dict[str, Any]) -> None:
    way = {"rate": 1e-2, "schedule": "constant", "batch": 16, "decay": 1e-3, **way}  # 70 images: the last batch has 6
    seeds = [5, 3, 11]
    (found,) = fit_together(network, 3, *problem(), epochs=2, seeds=seeds, strategy=strategy, **way)
    for k, seed in enumerate(seeds):
        one = alone(seed, epochs=2, attack=None if strategy == "standard" else strategy, **way)
        assert apart(found.model(k), one) < 1e-10
        assert not found.model(k).training
    assert apart(found.model(0), found.model(1)) > 1e-2
    clean = fit_together(network, 3, *problem(), epochs=2, seeds=seeds, **way)[0]
    assert (apart(found.model(0), clean.model(0)) > 1e-6) == (strategy != "standard")


def test_batch_norm_learns_from_the_batches_and_not_from_the_attack() -> None:
    # With SGD: a bias before batch norm has no gradient but rounding, which Adam would make as large as any other.
    way: dict[str, Any] = {"epochs": 2, "batch": 16, "optimiser": "sgd", "rate": 0.1, "schedule": "constant"}
    (found,) = fit_together(lambda: network(norm=True), 2, *problem(), strategy="pgd(steps=2)", **way)
    torch.manual_seed(1)
    one = fit(network(norm=True), *problem(), seed=1, attack="pgd(steps=2)", **way)
    assert apart(found.model(1), one) < 1e-10
    assert int(one[4].num_batches_tracked) == 10


def test_in_float32_to_rounding() -> None:
    torch.manual_seed(4)
    one = fit(
        network(torch.float32), *problem(torch.float32), seed=4, epochs=3, batch=16, schedule="constant", rate=1e-3
    )
    kept = fit_together(lambda: network(torch.float32), 5, *problem(torch.float32), epochs=3, batch=16)
    assert apart(kept[0].model(4), one) < 1e-4


def test_groups_do_not_matter() -> None:
    ways = [fit_together(network, 5, *problem(), epochs=2, keep=[0, 2], at_once=size) for size in (1, 2, 5)]
    for other in ways[1:]:
        assert [c.seeds for c in other] == [c.seeds for c in ways[0]]
        for a, b in zip(ways[0], other, strict=True):
            assert max(map(apart, a.models(), b.models())) < 1e-12


def test_checkpoints_are_what_shorter_trainings_give() -> None:
    state = torch.get_rng_state()
    kept = fit_together(network, 4, *problem(), epochs=3, keep=[0, 1, 3])
    assert torch.equal(torch.get_rng_state(), state)
    assert [checkpoint.epoch for checkpoint in kept] == [0, 1, 3]
    torch.manual_seed(2)
    assert apart(kept[0].model(2), network()) == 0
    assert apart(kept[1].model(2), fit_together(network, 4, *problem(), epochs=1)[0].model(2)) == 0
    assert apart(kept[1].model(2), kept[2].model(2)) > 1e-3


def test_they_learn_and_answer_together() -> None:
    x, y = problem(torch.float32)
    x = (255 * x).byte()
    (found,) = fit_together(lambda: network(torch.float32), 3, x, y, epochs=60, rate=1e-2)
    assert len(found) == 3
    answers = found.outputs(x, batch=32)
    assert answers.shape == (3, 70, 2)
    for k, model in enumerate(found.models()):
        assert torch.allclose(model(x / 255), answers[k], atol=1e-5)
        assert accuracy(model, x, y) > 0.9
    assert torch.allclose(found((x / 255).expand(3, *x.shape)), answers, atol=1e-5)


def test_what_is_wrong_is_said() -> None:
    x, y = problem()
    with pytest.raises(ValueError, match="one seed a network: 3 networks, 2 seeds"):
        fit_together(network, 3, x, y, epochs=1, seeds=[1, 2])
    with pytest.raises(ValueError, match="epoch 5"):
        fit_together(network, 3, x, y, epochs=4, keep=[5])
    with pytest.raises(ValueError, match="one label an image"):
        fit_together(network, 3, x, y[:9], epochs=1)
    with pytest.raises(ValueError, match="there are fgsm"):
        fit_together(network, 3, x, y, epochs=1, strategy="madry")
    with pytest.raises(ValueError, match=r"'1' \(Dropout\) draws random numbers"):
        fit_together(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16, 2)).double(), 2, x, y, epochs=1)


def test_networks_of_several_shapes_are_refused() -> None:
    widths = iter((3, 4))
    with pytest.raises(ValueError, match=r"one architecture: weight of network 0 is \(3, 5\), of network 1 \(4, 5\)"):
        fit_together(lambda: nn.Linear(5, next(widths)), 2, torch.rand(4, 5), torch.zeros(4).long(), epochs=1)
