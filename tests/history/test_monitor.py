"""Comparing with a reference while training: in a loop, and in the trainers of Lightning and transformers."""

from __future__ import annotations

import copy
import importlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import sosie
from sosie.history import Monitor, hf_callback, lightning_callback
from sosie.results import Comparison

IMAGES = torch.rand(24, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def shake(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


class Run:
    """A run of W&B."""

    def __init__(self) -> None:
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        self.lines.append((step, data))


def test_a_loop_sees_the_model_leave_its_start() -> None:
    model, run = network(), Run()
    start = copy.deepcopy(model)
    monitor = Monitor(model, start, IMAGES, sites="*", every=2, log=run, names=("now", "start"))
    before = torch.random.get_rng_state()
    model.train()
    monitor.record(0)
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())
    shake(model)
    monitor.record(1)  # left out
    monitor.record(2)
    assert monitor.steps == [0, 2]
    first, last = (monitor.comparisons[step].matrix("debiased_cka").diagonal() for step in (0, 2))
    assert first == pytest.approx(1)
    assert (last < 0.999).all()
    expected = sosie.compare(model, start, IMAGES, measures="debiased_cka", sites="*").matrix().diagonal()
    assert last == pytest.approx(expected)
    assert [step for step, _ in run.lines] == [0, 2]
    assert run.lines[1][1]["sosie/debiased_cka/same_depth"] == pytest.approx(last.mean())
    assert {row["step"] for row in monitor.rows()} == {0, 2}
    assert "2 steps" in repr(monitor)
    assert (monitor.comparisons[2].side_a.name, monitor.comparisons[2].side_b.name) == ("now", "start")


def test_a_loader_that_shuffles_is_read_once() -> None:
    model = network()
    loader = torch.utils.data.DataLoader(IMAGES, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    seen: list[tuple[Comparison, int]] = []
    monitor = Monitor(model, copy.deepcopy(model), loader, sites="0", max_rows=16, log=lambda c, s: seen.append((c, s)))
    shake(model)
    for step in (0, 1):
        monitor.record(step)
    assert monitor.comparisons[0].matrix() == monitor.comparisons[1].matrix()
    assert monitor.comparisons[0]["debiased_cka"].n == 16
    assert [step for _, step in seen] == [0, 1]


def test_the_model_is_no_reference_for_itself() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"copy\.deepcopy"):
        Monitor(model, model, IMAGES)
    with pytest.raises(TypeError, match="Module"):
        Monitor({}, model, IMAGES)  # type: ignore[arg-type]


def test_lightning_compares_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    part = types.ModuleType("lightning.pytorch")
    part.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", part)
    model = network()
    monitor = Monitor(model, copy.deepcopy(model), IMAGES, sites="*")
    callback = lightning_callback(monitor, at="epoch")
    for _ in range(2):  # a second fit starts anew
        trainer = types.SimpleNamespace(is_global_zero=True, current_epoch=0, global_step=0)
        callback.on_train_start(trainer, model)
        for epoch in range(2):
            trainer.current_epoch = epoch
            shake(model)
            callback.on_train_batch_end(trainer, model, None, None, 0)
            callback.on_train_epoch_end(trainer, model)
        callback.teardown(trainer, model, "fit")
        assert monitor.steps == [0, 1, 2]
    assert monitor.comparisons[0].matrix()[0, 0] < 0.999


def test_transformers_compares_every_few_steps() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sosie[hf]'")
    trainer_callback = importlib.import_module("transformers.trainer_callback")
    model, run = network(), Run()
    monitor = Monitor(model, copy.deepcopy(model), IMAGES, sites="*", every=2, log=run)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    handler = trainer_callback.CallbackHandler([hf_callback(monitor)], model, None, None, None)
    handler.on_train_begin(None, state, control)
    for step in range(1, 6):
        state.global_step = step
        shake(model)
        handler.on_step_end(None, state, control)
    state.is_world_process_zero = False
    state.global_step = 6
    handler.on_step_end(None, state, control)  # other processes compare nothing
    handler.on_train_end(None, state, control)
    assert [step for step, _ in run.lines] == monitor.steps == [0, 2, 4]


def test_other_processes_need_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first process of a training on several devices gets here, so the pass must not wait for others."""
    from sosie.engine import distributed

    class Joined:
        def __init__(self) -> None:
            raise AssertionError("waits for others")

    monkeypatch.setattr(distributed, "Distributed", Joined)
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 2)
    model: Any = network()
    with pytest.raises(AssertionError, match="waits"):
        sosie.compare(model, network(), IMAGES)
    monitor = Monitor(model, network(), IMAGES, sites="0")
    monitor.record(0)
    assert monitor.steps == [0]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.mix(self.words(input_ids))


def test_rows_that_the_model_does_not_give_are_refused_before_the_training() -> None:
    batch = {"input_ids": torch.ones(8, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 0]] * 8)}
    with pytest.raises(ValueError, match=r"padded tokens.*use the rule mean, positions, cls or last \(rows='mean'"):
        Monitor(Reader(), Reader(), batch)
    assert Monitor(Reader(), Reader(), batch, rows="mean").steps == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ([network()], "list is not a model"),
        ("gone.safetensors", "no file gone"),
        (nn.Linear(4, 8), "no module is called"),
    ],
)
def test_a_reference_that_cannot_be_compared_is_refused_before_the_training(reference: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, OSError), match=message):
        Monitor(network(), reference, IMAGES, sites=["0"])
