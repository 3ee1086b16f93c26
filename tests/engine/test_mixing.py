"""Models that mix the inputs of a batch are noticed, others are not, and trying it leaves no trace."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from stand_ins import Bert, ResNet20, Skips
from torch import nn

import sosie
from sosie.capture import as_found, model_arguments, watch
from sosie.engine.mixing import by_input, mixing_note


def note(model: nn.Module, batch, sites="leaves") -> str | None:
    with as_found(model), watch(model, sites, sink=lambda site, x: by_input(x.flatten(1))) as seen:

        def read(chunk):
            args, kwargs = model_arguments(chunk.batch)
            seen.run(*args, **kwargs)
            return dict(seen.items())

        return mixing_note("net", model, batch, read)


def rows(n: int = 6, width: int = 4) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(0))


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.between = between if isinstance(between, nn.Module) else Calls(between)

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class Calls(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class AlwaysTraining(nn.BatchNorm1d):
    """Uses and updates the statistics of the batch in evaluation mode too."""

    def train(self, mode: bool = True):
        return super().train(True)


class OwnNoise(nn.Module):
    """Draws from a generator that nobody else knows."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.generator)


def neighbours(x):
    return x + 0.2 * x.view(-1, 2, 4).flip(1).reshape(-1, 4)


MIXING = {
    "batch norm without statistics": nn.BatchNorm1d(4, track_running_stats=False),
    "batch norm that trains": AlwaysTraining(4),
    "attention over the batch": lambda x: torch.softmax(x @ x.T, 1) @ x,
    "centring": lambda x: x - x.mean(0),
    "all before it": lambda x: x.cumsum(0),
    "all after it": lambda x: x.flip(0).cumsum(0).flip(0),
    "the next one": lambda x: x + 0.1 * x.roll(1, 0),
    "pairs": neighbours,
    "halves": lambda x: x + x.roll(len(x) // 2, 0),
}


@pytest.mark.parametrize("which", MIXING)
@pytest.mark.parametrize("n", [3, 4, 128])
def test_mixing_is_noticed_where_it_begins(which: str, n: int) -> None:
    if which == "pairs" and n == 3:
        assert "could not be run on 3 of them (shape" in note(Between(MIXING[which]), rows(n))
        return
    found = note(Between(MIXING[which]), rows(n))
    assert found is not None
    assert "net mixes the inputs of a batch, at first at 'between" in found


ALONE = {
    "batch norm": nn.BatchNorm1d(4),
    "dropout": nn.Dropout(0.5),
    "numbers that are not used": lambda x: x + 0 * torch.rand(1).item(),
    "nothing left": lambda x: x * 0,
    "not finite": lambda x: x / 0,
    "rounding": lambda x: x + 1e-4 * x.mean(0),
}


@pytest.mark.parametrize("which", ALONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_keeps_inputs_apart_is_not_accused(which: str, dtype: torch.dtype) -> None:
    assert note(Between(ALONE[which]).to(dtype), rows().to(dtype)) is None


RANDOM = {
    "noise": lambda x: x + torch.randn_like(x),
    "noise of NumPy": lambda x: x + torch.from_numpy(np.random.rand(*x.shape)).to(x),
    "noise of Python": lambda x: x + 100 * random.random(),  # beyond the rounding of bfloat16
    "dropout": nn.Sequential(nn.Dropout(0.5), Calls(lambda x: nn.functional.dropout(x, 0.5, training=True))),
}


@pytest.mark.parametrize("which", RANDOM)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_numbers_in_evaluation_mode_are_told(which: str, dtype: torch.dtype) -> None:
    model, x = Between(RANDOM[which]).to(dtype), rows().to(dtype)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    found = note(model, x)
    assert "net draws random numbers in evaluation mode, at first at 'between" in found
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(after[0], states[0])
    assert after[1:] == states[1:]


def test_digits_count_in_double_precision() -> None:
    assert "at first at 'between" in note(Between(ALONE["rounding"]).double(), rows().double())


def test_networks_of_many_kinds() -> None:
    assert note(ResNet20(), torch.randn(5, 3, 8, 8)) is None
    ids = torch.randint(0, 20, (5, 6))
    mask = torch.ones(5, 6, dtype=torch.long)
    mask[1:3, 3:] = 0
    assert note(Bert(), {"input_ids": ids, "attention_mask": mask}) is None
    assert note(nn.TransformerEncoderLayer(4, 2, batch_first=True), torch.randn(5, 7, 4), ".") is None
    over_inputs = nn.TransformerEncoderLayer(4, 2)  # (tokens, inputs, features) is what it takes
    assert "at first at 'output'" in note(over_inputs, torch.randn(5, 7, 4), ".")


def test_a_model_that_draws_from_a_generator_of_its_own() -> None:
    assert note(Between(OwnNoise()), rows()) is None  # its state is put back
    both = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), OwnNoise())
    assert "mixes the inputs of a batch, at first at 'between.0'" in note(Between(both), rows())


class Keeps(nn.Module):
    """Counts its calls in something that has no state to put back."""

    def __init__(self, kept, step) -> None:
        super().__init__()
        self.kept, self.step = kept, step

    def forward(self, x):
        return x + self.step(self.kept) * x.flip(1)


def grow(sparse: torch.Tensor) -> float:
    sparse.mul_(2)
    return sparse.to_dense().sum().item()


@pytest.mark.parametrize(
    ("kept", "step"),
    [(itertools.count(), next), (iter(range(1000)), next), (torch.eye(3).to_sparse(), grow)],
    ids=["count", "iterator", "sparse tensor"],
)
def test_state_that_cannot_be_put_back_is_told_where_it_counts(kept, step) -> None:
    assert "two forwards of the same inputs differ at 'between'" in note(Between(Keeps(kept, step)), rows())
    assert note(Between(Keeps(kept, lambda kept: 0 * step(kept))), rows()) is None


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_inputs_to_tell(n: int) -> None:
    assert f"the first batch has {n} of them, and the test needs 3" in note(Between(nn.Identity()), rows(n))


def test_a_model_that_takes_one_size_only() -> None:
    model = Between(lambda x: x.view(6, 4))
    assert "net: not known whether inputs of a batch are mixed: it could not be run on 4 of them" in note(model, rows())


def test_no_trace_is_left() -> None:
    class Counts(Skips):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.norm = 0, AlwaysTraining(3)

        def forward(self, x):
            self.calls += 1
            self.cache = x
            torch.rand(1), np.random.rand(), random.random()
            return self.norm(super().forward(x))

    model, x = Counts(), rows()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert "at first at 'norm'" in note(model, x)
    assert model.calls == 0
    assert not hasattr(model, "cache")
    assert not model.skips
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
    assert torch.equal(x, rows())


def test_wide_sites_are_looked_at_in_part_and_every_channel_of_them() -> None:
    activation = torch.arange(3 * 64 * 64 * 64.0).view(3, 64 * 64 * 64)
    numbers = by_input(activation)
    assert len(numbers) == 3
    assert numbers.shape[1] <= 4096
    assert len(set((numbers[0] // 64**2).tolist())) == 64
    few = by_input(torch.arange(12.0).view(6, 2), torch.tensor([1, 3, 2]))
    assert few.tolist() == [[0, 1, 0, 0, 0, 0], [2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 0, 0]]


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x - x[:1],
        lambda x: x - x[-1:],
        lambda x: 0.5 * x + 0.5 * x.flip(0),
        lambda x: x * x.flip(0),
        lambda x: x / x[0].norm(),
        lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5) + 1000,
    ],
    ids=["first", "last", "mixup", "flipped", "norm of the first", "batch norm and a large bias"],
)
def test_mixing_with_single_inputs_or_beside_a_large_offset_is_noticed(between) -> None:
    assert "mixes the inputs of a batch" in str(note(Between(between), rows()))


def test_a_large_offset_alone_is_no_mixing() -> None:
    assert note(Between(lambda x: x + 1000), rows()) is None


@pytest.mark.parametrize("counted", [lambda x: x * len(x), lambda x: x])
def test_a_model_that_counts_its_batch_is_told(counted) -> None:
    c = sosie.compare(Between(counted), Between(lambda x: x), rows(64).split(32), measures="linear_cka")
    told = ["depend on the batch size, from 'between' on" in " ".join(row["caveats"]) for row in c.rows()]
    assert any(told) == (float(counted(torch.ones(2))[0]) == 2)
