"""A recorder in other people's loops: Lightning's and transformers' own Trainers where they are installed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sosie.history import Recorder, hf_callback, lightning_callback, open_run


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Tellable(nn.Module):
    """A model as transformers' Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        )


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Recorder(tmp_path / "r", network(), "weights") as recorder:
        for module in ("lightning.pytorch", "pytorch_lightning", "transformers"):
            monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(ImportError, match=r"sosie\[lightning\]"):
            lightning_callback(recorder)
        with pytest.raises(ImportError, match=r"sosie\[hf\]"):
            hf_callback(recorder)


def test_hugging_face_calls_it_at_every_step(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sosie[hf]'")
    trainer_callback = importlib.import_module("transformers.trainer_callback")
    model = network()
    recorder = Recorder(tmp_path / "r", model, "weights", every=2)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    handler = trainer_callback.CallbackHandler([hf_callback(recorder)], model, None, None, None)
    handler.on_train_begin(None, state, control)
    for step in range(1, 6):
        state.global_step = step
        handler.on_step_end(None, state, control)
        handler.on_step_end(None, state, control)  # a step is recorded once
    state.is_world_process_zero = False
    state.global_step = 8
    handler.on_step_end(None, state, control)  # other processes record nothing
    handler.on_train_end(None, state, control)
    assert open_run(tmp_path / "r").steps == [0, 2, 4]


@pytest.mark.parametrize("at", ["step", "epoch"])
def test_transformers_own_trainer(tmp_path: Path, at: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sosie[hf]'")
    if find_spec("accelerate") is None:
        pytest.skip("transformers' Trainer needs accelerate, which is not installed")
    data = [{"x": torch.randn(4), "labels": torch.tensor(k % 2)} for k in range(32)]

    def train(model: nn.Module, recorder: Recorder, checkpoint: str | None = None) -> None:
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), num_train_epochs=3, per_device_train_batch_size=16, report_to=[], use_cpu=True,
            save_strategy="epoch", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[hf_callback(recorder, at)])
        trainer.train(resume_from_checkpoint=checkpoint)

    model = Tellable()
    train(model, Recorder(tmp_path / "r", model, "weights"))
    steps = list(range(7)) if at == "step" else list(range(4))
    assert open_run(tmp_path / "r").steps == steps
    again = Tellable()
    train(again, Recorder(tmp_path / "r", again, "weights"), str(tmp_path / "out" / "checkpoint-4"))
    assert open_run(tmp_path / "r").steps == steps
    with pytest.raises(ValueError, match="name another folder"):
        train(again, Recorder(tmp_path / "r", again, "weights"))


@pytest.fixture
def lightning() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    pytest.skip("Lightning is not installed: pip install 'sosie[lightning]'")


@pytest.mark.parametrize("at", ["epoch", "step"])
def test_lightnings_own_trainer(lightning: Any, tmp_path: Path, at: Any) -> None:
    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))

    def trainer(recorder: Recorder, epochs: int) -> Any:
        return lightning.Trainer(
            max_epochs=epochs, callbacks=[lightning_callback(recorder, at)], logger=False, accelerator="cpu",
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip

    model = Module()
    first = trainer(Recorder(tmp_path / "r", model, "weights"), 2)
    first.fit(model, torch.utils.data.DataLoader(data, batch_size=32))
    first.save_checkpoint(tmp_path / "two.ckpt")
    expected = [0, 1, 2] if at == "epoch" else [0, 1, 2, 3, 4]
    assert open_run(tmp_path / "r").steps == expected
    run = open_run(tmp_path / "r")
    assert torch.equal(run.tensor(len(expected) - 1, "net.0"), model.net[0].weight.detach())
    again = Module()
    second = trainer(Recorder(tmp_path / "r", again, "weights"), 3)
    second.fit(again, torch.utils.data.DataLoader(data, batch_size=32), ckpt_path=tmp_path / "two.ckpt")
    assert open_run(tmp_path / "r").steps == (([0, 1, 2, 3]) if at == "epoch" else list(range(7)))
    fresh = Module()
    with pytest.raises(ValueError, match="name another folder"):
        trainer(Recorder(tmp_path / "r", fresh, "weights"), 1).fit(fresh, torch.utils.data.DataLoader(data))
