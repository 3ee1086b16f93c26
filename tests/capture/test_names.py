"""Modules of a model: all that a class shows of itself, also those that are equal to others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sosie.capture import as_found
from sosie.capture.restore import modules_of


class Hiding(nn.Module):
    """Holds a part in a list, where torch does not find it, and shows it nevertheless."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(2, 2)
        self.hidden = [nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))]

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        yield from super().named_modules(memo, prefix, remove_duplicate)
        yield from self.hidden[0].named_modules(memo, f"{prefix}hidden", remove_duplicate)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(*args, **kwargs)
        yield from self.hidden[0].named_parameters()

    def train(self, mode: bool = True) -> Hiding:
        self.hidden[0].train(mode)
        return super().train(mode)


class OfAKind(nn.Dropout):
    """Equal to all others of its kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfAKind)

    def __hash__(self) -> int:
        return 1


def nested() -> nn.Module:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), nn.ModuleList([shared]))
    model.register_module("none", None)
    model.register_parameter("nothing", None)
    return model


def ids(values: Any) -> list[int]:
    return sorted({id(value) for value in values})


@pytest.mark.parametrize(
    "model", [nested(), Hiding(), nn.Sequential(nn.ReLU(), Hiding())], ids=["plain", "own", "inside"]
)
def test_modules_are_those_of_torch(model: nn.Module) -> None:
    found = modules_of(model)
    assert len(found) == len(ids(found))
    assert ids(found) == ids(model.modules())


def test_those_of_a_script() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()), nn.BatchNorm1d(2)))
    assert len(modules_of(model)) == len(list(model.modules()))
    with as_found(model, "cpu"):
        assert not model.training
    assert model.training


def test_what_a_class_shows_of_itself_is_evaluated_and_put_back() -> None:
    model = Hiding()
    weight = model.hidden[0][0].weight
    with as_found(model):
        assert not model.hidden[0][1].training
        weight.requires_grad_(False)
    assert model.hidden[0][1].training
    assert weight.requires_grad


def test_equal_modules_are_two() -> None:
    model = nn.Sequential(nn.Sequential(OfAKind()), OfAKind()).eval()
    for some in ([0], [1], [0, 1]):
        inner = [model[0][0], model[1]]
        for k, module in enumerate(inner):
            module.training = k in some
        with as_found(model):
            assert not any(module.training for module in inner)
        assert [module.training for module in inner] == [k in some for k in (0, 1)]


def test_a_model_that_trains_as_it_is_moved_is_evaluated() -> None:
    class Moved(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Moved:
            return super().to(*args, **kwargs).train()

    model = Moved(2, 2).eval()
    with as_found(model, "cpu"):
        assert not model.training


def test_buffers_that_were_moved_are_the_same_tensors_again() -> None:
    class Moved(nn.Module):
        """Moved by copies, as between a CPU and a GPU."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
            self.other.running_mean = self.mean = self.one.running_mean

        def to(self, *args: Any) -> Moved:
            return self._apply(torch.clone)

    model = Moved()
    own = dict(model.named_buffers(remove_duplicate=False))
    with as_found(model, "cpu"):
        assert model.one.running_mean is model.other.running_mean is not model.mean
        model.one.running_mean += 3
        model.other.running_var = torch.zeros(2)
    assert model.one.running_mean is model.other.running_mean is model.mean is own["one.running_mean"]
    assert model.mean.tolist() == [3, 3]
    assert model.one.running_var is own["one.running_var"]
    assert model.other.running_var.tolist() == [0, 0]
