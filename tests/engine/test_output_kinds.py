"""What outputs are is guessed from the first batch; where the rest gives the guess the lie, that is said."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import nn

import sosie


def sigmoids() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 3), nn.Sigmoid()) for _ in range(2)]


def data() -> torch.Tensor:
    return torch.randn(300, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch", [4, 8, 10, 11, 64])
def test_outputs_between_0_and_1_are_asked_about_whatever_the_batches(batch: int) -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1.*set kind='logits'"):
        sosie.compare_outputs(*sigmoids(), list(data().split(batch)))


@pytest.mark.parametrize("kind", ["logits", "regression"])
def test_a_kind_that_is_given_is_taken(kind: str) -> None:
    c = sosie.compare_outputs(*sigmoids(), list(data().split(8)), kind=kind)
    assert c.provenance["outputs"] == [kind] * 2


def test_logits_that_begin_between_0_and_1_are_logits() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(6, 3) for _ in range(2)]
    x = data()
    x[:8] *= 0
    for model in models:
        model.bias.data.fill_(0.5)
    assert sosie.compare_outputs(*models, list(x.split(8))).provenance["outputs"] == ["logits"] * 2


def test_few_numbers_may_lie_there_by_chance() -> None:
    assert sosie.compare_outputs(*sigmoids(), [data()[:5], data()[5:10]])


def asked_in_a_process() -> str:
    x = data()
    x[100:110] *= 1e-6
    try:
        sosie.compare_outputs(*sigmoids(), list(x.split(10)))
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.skipif(not hasattr(torch.distributed.ProcessGroup, "get_group_store"), reason="torch is too old")
def test_several_processes_ask_too() -> None:
    for answer in run_ranks(2, asked_in_a_process):
        assert "between 0 and 1" in str(answer)
