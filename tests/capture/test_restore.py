import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from stand_ins import ResNet20
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sosie.capture import as_found, kept_attributes, restored_after_errors


def random_states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def state_of(model):
    return (
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [parameter.data_ptr() for parameter in model.parameters()],
    )


@pytest.fixture
def half_frozen():
    model = ResNet20().train()
    model.layer2.eval()
    model.conv1.weight.requires_grad_(False)
    return model


def test_inside_models_are_quiet_and_afterwards_as_found(half_frozen):
    before, grad = state_of(half_frozen), torch.is_grad_enabled()
    with as_found([half_frozen, half_frozen]):
        assert not any(module.training for module in half_frozen.modules())
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert state_of(half_frozen) == before
    assert torch.is_grad_enabled() == grad


def test_everything_is_put_back_after_an_exception(half_frozen):
    before, states = state_of(half_frozen), random_states()

    def disturb():
        half_frozen.train().requires_grad_(True)
        torch.rand(1), np.random.rand(), random.random()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), as_found(half_frozen):
        disturb()
    assert state_of(half_frozen) == before
    assert random_states() == states


def test_a_compiled_model_is_put_back_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
    model[1].eval()
    wrapped = torch.compile(model, backend="eager")
    before = state_of(wrapped)
    with as_found(wrapped):
        assert not any(module.training for module in model.modules())
    assert state_of(wrapped) == before


def test_even_an_unshuffled_loader_moves_the_random_state_and_here_it_is_put_back():
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    states = random_states()
    with as_found(nn.Linear(1, 1)):
        states = random_states()
        list(loader)
        moved = random_states()
    assert moved != states
    with as_found([]):
        states = random_states()
    with as_found([]):
        list(loader)
    assert random_states() == states


def test_what_a_forward_caches_can_enter_a_later_backward():
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", None)
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            if self.angles is None:
                self.angles = torch.arange(4.0) * 2
            return x * self.weight * self.angles

    model = Caches()
    with as_found(model):
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model.weight.grad, torch.arange(4.0) * 4)


def test_a_device_that_cannot_be_reached_leaves_the_model_as_it_was(half_frozen):
    before = state_of(half_frozen)
    with pytest.raises((RuntimeError, AssertionError)), as_found(half_frozen, device="xpu:7"):
        pass
    with (
        pytest.raises(ValueError, match="meta device holds no numbers"),
        as_found(half_frozen, device="meta"),
    ):
        pass
    with as_found(half_frozen, device="cpu"):
        pass
    assert state_of(half_frozen) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_is_put_back(half_frozen):
    before = state_of(half_frozen)
    half_frozen.conv1.weight.requires_grad_(True)
    half_frozen.fc.weight.grad = torch.ones_like(half_frozen.fc.weight)
    torch.cuda.manual_seed_all(3)
    expected = torch.cuda.get_rng_state_all()
    with as_found(half_frozen, device="cuda"):
        assert half_frozen.fc.weight.device.type == "cuda"
        half_frozen.register_buffer("cached", torch.ones(1, device="cuda"))
        torch.rand(2, device="cuda")
    assert state_of(half_frozen)[2] == before[2]
    assert {tensor.device.type for tensor in half_frozen.state_dict().values()} == {"cpu"}
    assert half_frozen.fc.weight.grad.device.type == "cpu"
    assert all(torch.equal(a, b) for a, b in zip(expected, torch.cuda.get_rng_state_all(), strict=True))


class Keeps(nn.Module):
    """Everything that a forward may leave on a model."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(4))
        self.calls, self.skips, self.by_name, self.seen = 0, [[]], {"plain": torch.zeros(4)}, set()

    def forward(self, x):
        self.calls += 1
        self.skips[0].append(x)
        self.by_name["new"] = x
        self.by_name["plain"].add_(1)
        self.seen.add(len(x))
        self.last = x
        self.total += x.detach().sum(0)
        return self.norm(x)


def kept(model):
    held = model.calls, len(model.skips[0]), list(model.by_name), model.seen, "last" in vars(model)
    return (*held, {k: v.tolist() for k, v in (model.state_dict() | {"plain": model.by_name["plain"]}).items()})


def test_what_a_forward_leaves_on_a_model_is_put_back():
    model, x = Keeps().train(), torch.randn(5, 4)
    model(x[:3])
    before, skips = kept(model), model.skips[0]
    buffer, version = model.total, model.norm.weight._version
    with kept_attributes(model):
        model.eval()
        model(x)
        assert kept(model) != before
        model.train()(x)
    assert kept(model) == before
    assert model.training
    assert model.skips[0] is skips
    assert model.total is buffer
    assert model.norm.weight._version == version


def test_nothing_is_written_where_nothing_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    answer = model(torch.randn(5, 4))  # its backward needs the running statistics as they are
    with kept_attributes(model):
        model(torch.randn(3, 4))
    answer.sum().backward()
    assert model[1].running_mean._version == nn.BatchNorm1d(4).running_mean._version


def test_a_forward_that_breaks_off_leaves_nothing_on_the_model():
    model, x = Keeps(), torch.randn(5, 4)
    with restored_after_errors(model):
        model(x)
    assert (model.calls, len(model.skips[0])) == (1, 1)
    before = kept(model)[:-1]
    model.norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), restored_after_errors(model):
        model(x)
    assert kept(model)[:-1] == before


class Stateful(nn.Module):
    """Keeps something on itself in a way of its own, and shows it."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change
        self.table = torch.arange(12.0).view(4, 3)
        self.register_buffer("column", self.table[:, 0])
        self.register_buffer("single", torch.ones(3)[::3])
        self.register_buffer("repeated", torch.ones(1).expand(4))
        self.register_buffer("turned", torch.ones(2, dtype=torch.complex64).conj())
        self.register_buffer("grows", torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.array, self.space, self.ordered = np.zeros(3), SimpleNamespace(count=0), {"a": 1, "b": 2}
        self.own, self.random = Own(), torch.Generator().manual_seed(0)
        self.of_numpy, self.of_python = (np.random.default_rng(0), np.random.RandomState(0)), random.Random(0)

    def forward(self, x):
        self.change(self)
        return x


class Own:
    def __init__(self) -> None:
        self.seen: list[int] = []


def _reorder(model: Stateful) -> None:
    model.ordered["a"] = model.ordered.pop("a")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.column.add_(1),
        lambda m: m.single.add_(1),
        lambda m: m.repeated.data[:1].add_(1),
        lambda m: m.grows.resize_(5),
        lambda m: setattr(m.grows, "data", torch.ones(7)),
        lambda m: m.frozen.data.add_(1),
        lambda m: m.array.__setitem__(0, 5),
        lambda m: setattr(m.space, "count", 1),
        lambda m: m.own.seen.append(1),
        lambda m: torch.rand(1, generator=m.random),
        lambda m: m.of_numpy[0].random(),
        lambda m: m.of_numpy[1].rand(),
        lambda m: m.of_python.random(),
        _reorder,
    ],
    ids=["column", "single", "repeated", "resized", "other storage", "frozen", "array", "namespace", "own", "generator",
         "NumPy", "older NumPy", "Python", "order"],
)  # fmt: skip
def test_forwards_that_are_only_tried_leave_no_state(change) -> None:
    def state(model: Stateful):
        numbers = [buffer.resolve_conj().tolist() for buffer in model.buffers()]
        return (
            *(numbers, model.frozen.tolist(), model.array.tolist(), vars(model.space), list(model.ordered)),
            *(list(model.own.seen), model.random.get_state().tolist(), model.of_python.getstate()),
            *(model.of_numpy[0].bit_generator.state, repr(model.of_numpy[1].get_state())),
        )

    model = Stateful(change)
    before = copy.deepcopy(state(model))
    with kept_attributes(model):
        model(torch.zeros(1))
        assert state(model) != before
    assert state(model) == before


class Merging(nn.Linear):
    """As LoRA's layers do, which put their two factors into the weight for evaluation."""

    merged = False

    def train(self, mode: bool = True):
        if mode == self.merged:
            self.weight.data += -0.1 if mode else 0.1
            self.merged = not mode
        return super().train(mode)


def test_what_a_layers_own_train_does_is_undone() -> None:
    model = nn.Sequential(Merging(3, 3)).train()
    weight = model[0].weight.detach().clone()
    with as_found(model):
        assert model[0].merged
        assert not model[0].training
    assert torch.equal(model[0].weight, weight)
    assert not model[0].merged
    assert model[0].training


def test_a_model_with_frozen_sparse_weights_is_restored():
    """Which have no bytes to copy."""
    model = torch.nn.Module()
    model.weight = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    model.scale = nn.Parameter(torch.ones(2), requires_grad=False)
    with kept_attributes(model):
        model.scale.data.mul_(3)
    assert model.scale.tolist() == [1, 1]
