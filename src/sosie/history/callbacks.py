"""A recorder as a callback of Lightning's or Hugging Face's trainer, each imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..checks import one_of
from .recorder import Recorder

if TYPE_CHECKING:
    from torch import nn

At = Literal["epoch", "step"]


def lightning_callback(recorder: Recorder, at: At = "epoch") -> Any:
    """A callback for Lightning's Trainer: records before training and after each epoch, or each optimiser step.

    Give the recorder the module that is trained; its `every` thins out the steps. A fit that goes on from a checkpoint
    first removes records of later steps; one that starts anew in a folder with records is an error.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback  # type: ignore[assignment, unused-ignore]
        except ImportError as error:
            raise ImportError("lightning_callback needs Lightning: pip install 'sosie[lightning]'") from error
    one_of(at, "at", ("epoch", "step"))

    class RecorderCallback(Callback):
        """Keeps a record of training."""

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            if trainer.is_global_zero:
                _start(recorder, trainer.current_epoch if at == "epoch" else trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if at == "step" and trainer.is_global_zero:
                _record(recorder, trainer.global_step)

        def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
            if at == "epoch" and trainer.is_global_zero:
                _record(recorder, trainer.current_epoch + 1)

        def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
            if stage == "fit":
                recorder.close()

    return RecorderCallback()


def hf_callback(recorder: Recorder, at: At = "step") -> Any:
    """A callback for transformers' Trainer: records before training and after each optimiser step, or each epoch.

    As `lightning_callback`; give the recorder the model that is trained.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ImportError("hf_callback needs transformers: pip install 'sosie[hf]'") from error
    one_of(at, "at", ("epoch", "step"))

    def now(state: Any) -> int:
        return int(state.global_step) if at == "step" else round(state.epoch or 0)

    class RecorderCallback(TrainerCallback):
        """Keeps a record of training."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                _start(recorder, now(state))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if at == "step" and state.is_world_process_zero:
                _record(recorder, now(state))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if at == "epoch" and state.is_world_process_zero:
                _record(recorder, now(state))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.close()

    return RecorderCallback()


def _start(recorder: Recorder, step: int) -> None:
    if recorder.steps:
        recorder.resume(step)
    _record(recorder, step)


def _record(recorder: Recorder, step: int) -> None:
    """Record once per step: with accumulated gradients several batches end in the same one."""
    if not recorder.steps or step > recorder.steps[-1]:
        recorder.record(step)
