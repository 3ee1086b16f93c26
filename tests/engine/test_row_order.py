"""Blocks of rows see only rows that come close together: orders that this matters for are noticed, others are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nets import mlp
from ranks import run_ranks
from torch import Tensor, nn

import sosie
from sosie.data import DataPart
from sosie.engine.order import _from_sample, _grams
from sosie.stats import Sample

Rows = tuple[Tensor, Tensor]
IN_BLOCKS = {"memory": 10}  # too little for covariances of all rows


def two_sides(z: np.ndarray, random: np.random.Generator, width: int = 1500) -> Rows:
    a, b = ((z + 0.5 * random.normal(size=z.shape)) @ random.normal(size=(z.shape[1], width)) for _ in range(2))
    return torch.from_numpy(a).float(), torch.from_numpy(b).float()


def views(count: int, random: np.random.Generator, n: int = 1280) -> Rows:
    """`count` noisy copies of each input, one after the other."""
    return two_sides(np.repeat(random.normal(size=(n // count, 400)), count, 0), random)


def classes(count: int, random: np.random.Generator, n: int = 1280) -> Rows:
    """Class 0, 1, 2, …, and again class 0, 1, 2, …"""
    return two_sides(random.normal(size=(count, 400))[np.arange(n) % count], random)


def found(x: Rows, order: np.ndarray | None = None, **options) -> sosie.results.Estimate:
    a, b = (rows if order is None else rows[torch.from_numpy(order)] for rows in x)
    return sosie.compare({"a": a}, {"b": b}, **(IN_BLOCKS | options))["debiased_cka"]


def about_order(estimate: sosie.results.Estimate) -> list[str]:
    return [caveat.text for caveat in estimate.caveats if "shuffle the data" in caveat.text]


@pytest.mark.parametrize("count", [2, 4])
def test_views_of_an_input_beside_each_other_or_far_apart(count: int) -> None:
    random = np.random.default_rng(count)
    x = views(count, random)
    apart, shuffled = np.arange(1280).reshape(-1, count).T.ravel(), random.permutation(1280)
    truth = sosie.measure("debiased_cka", *x)
    for order in (None, apart):
        estimate = found(x, order)
        assert abs(estimate.value[0, 0] - truth) > 0.05
        (text,) = about_order(estimate)
        assert f"is {estimate.value[0, 0]:.2f} from blocks of 64 rows, but 0." in text
        assert estimate.block_error is None
    assert not about_order(found(x, shuffled))
    assert found(x, shuffled).block_error is not None


def test_classes_that_take_turns() -> None:
    random = np.random.default_rng(0)
    x = classes(64, random)
    estimate = found(x)
    assert abs(estimate.value[0, 0] - sosie.measure("debiased_cka", *x)) > 0.3
    assert about_order(estimate)
    assert not about_order(found(x, random.permutation(1280)))


def test_narrow_rows_in_double_precision_and_other_blocks() -> None:
    random = np.random.default_rng(0)
    x = tuple(rows[:, :600].double() for rows in views(2, random))
    for block in (16, 64):
        assert about_order(found(x, block=block))
    assert not about_order(found(x, random.permutation(1280), block=16))


@pytest.mark.parametrize("n", [512, 520, 700])
def test_shuffled_rows_are_in_no_order(n: int) -> None:
    for seed in range(5):
        random = np.random.default_rng(seed)
        for x in (views(2, random, n), classes(20, random, n)):
            assert not about_order(found(x, random.permutation(len(x[0]))))


def test_a_sample_does_not_depend_on_the_largest_entry_of_its_projections() -> None:
    random = np.random.default_rng(0)
    turn = torch.linalg.qr(
        torch.from_numpy(random.normal(size=(40, 40))).float()
    ).Q  # makes the largest entries smaller
    x, y = (rows * torch.logspace(0, -2, 40) for rows in two_sides(random.normal(size=(300, 40)), random, width=40))
    index = np.arange(300)
    a, b = Sample((x,), (x @ turn,), index, 300, 300, 0), Sample((y @ turn,), (y,), index, 300, 300, 0)
    value = _from_sample(_grams(a)[0], _grams(b)[0])[0]
    assert value == pytest.approx(sosie.measure("debiased_cka", x, y), abs=1e-3)


def test_with_few_blocks_nothing_is_said() -> None:
    assert not about_order(found(views(2, np.random.default_rng(0), 448)))


class Wide(nn.Module):
    """Several sites, of which only some need to be looked at."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*(nn.Linear(400 if k == 0 else 700, 700) for k in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def pixels(n: int = 1280) -> Tensor:
    random = np.random.default_rng(1)
    z = np.repeat(random.normal(size=(n // 2, 400)), 2, 0)
    return torch.from_numpy(z + 0.3 * random.normal(size=z.shape)).float()


def compared(data, *, models: int = 2, **options):
    each = [Wide(seed) for seed in range(models)]
    given = {"sites": "layers.*", **IN_BLOCKS, **options}
    return sosie.compare(*each, data, **given) if models == 2 else sosie.compare(each, data, **given)


def test_the_same_is_said_of_parts_and_on_resuming(tmp_path: Path) -> None:
    x = pixels()
    (whole,) = about_order(compared(x.split(100))["debiased_cka"])
    paths = []
    for start, stop in ((0, 384), (384, 832), (832, 1280)):
        paths.append(tmp_path / f"{start}.safetensors")
        compared(DataPart(x[start:stop], start), resume=paths[-1])
    assert about_order(sosie.compare(paths)["debiased_cka"]) == [whole]
    for count in (640, 1280):
        resumed = compared(x[:count].split(128), resume=tmp_path / "whole.safetensors")
    assert about_order(resumed["debiased_cka"]) == [whole]


def test_the_same_is_said_of_several_models() -> None:
    for pair in compared(pixels().split(100), models=3):
        assert len(about_order(pair["debiased_cka"])) == 1


def caveats_in_a_process() -> list[str]:
    return about_order(compared(pixels().split(100))["debiased_cka"])


@pytest.mark.skipif(not hasattr(torch.distributed.ProcessGroup, "get_group_store"), reason="torch is too old")
def test_the_same_is_said_by_several_processes() -> None:
    alone = caveats_in_a_process()
    assert len(alone) == 1
    assert run_ranks(2, caveats_in_a_process) == [alone, alone]


def test_a_network_and_itself_are_alike_in_any_order() -> None:
    c = sosie.compare(Wide(0), Wide(0), pixels(), sites="layers.*", **IN_BLOCKS)
    assert np.allclose(np.diag(c.matrix()), 1)


def test_small_layers_are_not_cut_into_blocks() -> None:
    c = sosie.compare(mlp(0), mlp(1), torch.randn(600, 8).repeat_interleave(2, 0))
    assert not about_order(c["debiased_cka"])
