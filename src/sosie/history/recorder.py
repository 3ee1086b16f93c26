"""Records of training: atoms, weights or activations at each step, in a folder that survives a kill."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from uuid import uuid4

import torch
from torch import Tensor, nn

from ..capture.batches import Batches, Chunk, copied, count_inputs, cut, explain_types, recut, without_labels
from ..capture.rows import Rule, check_rule, rule_name
from ..capture.sites import named_parameters, unwrap
from ..checks import one_of, renamed, whole_number
from ..engine.network import Network
from ..models import atom_layers
from ..process_state import products
from .run_folder import CODES, RECORDED, RECORDS, About, FrameWriter, choose_sites, is_run

if TYPE_CHECKING:
    from .monitor import Monitor

Model: TypeAlias = nn.Module | Mapping[str, Tensor]
What = Literal["atoms", "weights", "activations"]


class Recorder(AbstractContextManager["Recorder"]):
    """Records a model at each step: `recorder.record(step)` in any loop, `fit(…, after_epoch=recorder.record)`.

    `what`: the atoms of layers made of them, the weights of layers, or activations on `data` (as for `compare`),
    which become rows by the rule `rows`. `sites`: names, globs or types; None takes all layers of atoms, all layers
    with a matrix of weights, or for activations blocks or layers as `compare` does. Every `every`-th step is recorded,
    in numbers of type `dtype`. `prepare` and `inputs` are as for `compare`. `by_depth=False`: sites are not in order of
    depth (as in a state dict sorted by name), so nothing is concluded from their order.

    The folder holds run.json and records, which grows by whole records: a run that is killed loses at most the record
    it was writing. A recorder of the same model, sites and data continues after the last step of its folder; an
    earlier step raises. `resume(step)` removes later records, for a run that goes back to a checkpoint;
    `overwrite=True` replaces the run that the folder holds, and closes a recorder of this process that writes there, as
    for a cell of a notebook that is run again. The model's mode, gradients and random state are left as found.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: Model,
        what: What = "atoms",
        *,
        sites: Any = None,
        data: Any = None,
        rows: Rule = "flatten",
        every: int = 1,
        dtype: torch.dtype = torch.float32,
        prepare: Callable[[Any], Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        by_depth: bool = True,
        overwrite: bool = False,
        probe: Any = None,
    ) -> None:
        one_of(what, "what", RECORDED)
        data = renamed(probe, data, "probe", "data")
        if data is None and what == "activations":
            raise ValueError("activations need inputs: give data=")
        if data is not None and what != "activations":
            raise ValueError(f"data= is for activations, not for {what}")
        if dtype not in CODES:
            raise ValueError(f"dtype={dtype}: one of {', '.join(map(str, CODES))}")
        self.folder, self.model, self.what = Path(folder), model, what
        self.every = whole_number(every, "every", least=1)
        self._dtype, self._sites, self._probe = dtype, sites, None
        if what == "activations":
            if not isinstance(model, nn.Module):
                raise TypeError(f"activations need a torch.nn.Module to run, got {type(model).__name__}")
            self._probe = data if isinstance(data, RunInputs) else RunInputs(data, rows, prepare=prepare, inputs=inputs)
        self.about = self._describe(by_depth)
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is a file: name a folder")
        replaced = overwrite and is_run(self.folder)
        known = None if replaced else About.read(self.folder)
        if known is not None:
            known.check_same(self.about, self.folder)
        elif not replaced and self.folder.is_dir() and any(not f.name.startswith(".") for f in self.folder.iterdir()):
            raise FileExistsError(f"{self.folder} holds other files: name an empty or a new folder")
        self.about = replace(self.about, run=uuid4().hex if known is None else known.run)
        if replaced:  # nothing is touched while another recorder writes there
            self._writer = FrameWriter(self.folder / RECORDS, empty=True)
        if known is None:
            self.about.save(self.folder)
        if not replaced:
            self._writer = FrameWriter(self.folder / RECORDS)
        self._head, _, self._size = self.about.layout()
        self.note = self._writer.torn  # a message about what an interruption lost
        if self.note is not None:
            warnings.warn(f"{self.folder}: {self.note}", stacklevel=2)

    @property
    def steps(self) -> list[int]:
        """The steps on record."""
        return [frame.step for frame in self._writer.frames]

    @property
    def sites(self) -> list[str]:
        return list(self.about.sites)

    @torch.no_grad()
    def record(self, step: int) -> None:
        """Record the model as it is now; a step that `every` leaves out costs nothing."""
        step = whole_number(step, "step", least=0, most=2**63 - 1)
        if self._writer.closed:
            raise ValueError(f"the recorder of {self.folder} is closed: open it again to continue")
        if step % self.every:
            return
        if self.steps and step <= self.steps[-1]:
            raise ValueError(
                f"step {step} is not after step {self.steps[-1]}, the last on record in {self.folder}: open the "
                "recorder with overwrite=True to replace that run, name another folder, or call resume(step) first to "
                "go back to a checkpoint"
            )
        self._writer.append(step, self._payload())

    def resume(self, step: int) -> list[int]:
        """Continue from the state at `step`: remove the records of later steps, and return those steps."""
        if step <= 0 and self.steps:
            raise ValueError(
                f"{self.folder} has records up to step {self.steps[-1]} and this run starts at step {step}: name "
                "another folder, or replace that run with overwrite=True"
            )
        return self._writer.drop_after(step)

    def close(self) -> None:
        self._writer.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Recorder {self.folder}: {self.what} of {len(self.about.sites)} sites, {len(self.steps)} steps>"

    def _describe(self, by_depth: bool) -> About:
        probe, rows, left_out = None, None, {}
        if self._probe is not None:
            assert isinstance(self.model, nn.Module)
            shapes = self._probe.shapes(self.model, self._sites)
            probe = {"inputs": self._probe.inputs, "digest": self._probe.digest()}
            rows, left_out = self._probe.rule, self._probe.left_out
        else:
            shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors()[0].items()}
        parameters = {name: tuple(tensor.shape) for name, tensor in named_parameters(self.model).items()}
        kind = type(unwrap(self.model)).__name__ if isinstance(self.model, nn.Module) else "state dict"
        model = f"{kind}, {sum(map(math.prod, parameters.values())):,} parameters"
        sites = tuple(shapes), tuple(shapes.values())
        return About(self.what, *sites, CODES[self._dtype], model, parameters, rows, probe, by_depth, left_out)

    def _tensors(self) -> tuple[dict[str, Tensor], bytes]:
        """The tensor of each site and, for atoms, two sums of each layer's coefficients."""
        if self._probe is not None:
            assert isinstance(self.model, nn.Module)
            return self._probe.take(self.model, self._sites), b""
        if self.what == "weights":
            return _weights(self.model, self._sites), b""
        layers = _atoms(self.model, self._sites)
        sums = [torch.stack([c.float().sum(), c.float().square().sum()]) for _, c in layers.values()]
        return {name: atoms for name, (atoms, _) in layers.items()}, _bytes(torch.stack(sums))

    def _payload(self) -> bytes:
        """The numbers of one record, copied off the device for all sites together."""
        tensors, sums = self._tensors()
        before = dict(zip(self.about.sites, self.about.shapes, strict=True))
        now = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if before != now:
            odd = next(site for site in {**before, **now} if before.get(site) != now.get(site))
            raise ValueError(f"site {odd} was {before.get(odd)} and is {now.get(odd)}: a run cannot change its shapes")
        content = self._head + _bytes(torch.cat([tensors[site].to(self._dtype).flatten() for site in before])) + sums
        assert len(content) == self._size
        return content


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


# What is recorded: atoms, weights, or activations on a probe set


def _atoms(model: Model, sites: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """The atoms and coefficients of the layers made of them, in the order of registration."""
    parameters = named_parameters(model)
    modules: Mapping[str, nn.Module | None]
    if isinstance(model, nn.Module):
        modules = atom_layers(unwrap(model))
    else:
        names = [name.removesuffix(".atoms") for name in parameters if name.endswith(".atoms")]
        modules = {name: None for name in names if f"{name}.coefficients" in parameters}
    if not modules:
        raise ValueError(
            "the model has no layer of atoms: decompose(model, m) or with_atoms(model, m) of sosie.models.atoms makes "
            "them; or record weights or activations"
        )
    return {
        name: (
            _tensor(parameters, name, "atoms", modules[name]),
            _tensor(parameters, name, "coefficients", modules[name]),
        )
        for name in choose_sites(modules, sites, "layer of atoms", modules)
    }


def _weights(model: Model, sites: Any) -> dict[str, Tensor]:
    """The weights of layers that have a matrix of them, in the order of registration; of atoms, their kernels.

    Sites are layers or parameters by name, globs of them, or types of layers.
    """
    parameters = named_parameters(model)
    if isinstance(model, nn.Module):
        modules: dict[str, nn.Module | None] = dict(unwrap(model).named_modules())
    else:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
    weights: dict[str, Tensor] = {}
    for name, module in modules.items():
        weight = _weight(parameters, name, module)
        if name and isinstance(weight, Tensor) and weight.ndim > 1:
            weights[name] = weight
    if sites is None:
        if not weights:
            raise ValueError("the model has no layer with a matrix of weights; name parameters as sites")
        return weights
    every = {**weights, **{name: tensor for name, tensor in parameters.items() if name not in weights}}
    layers = {name: modules[name] for name in weights}
    return {name: every[name] for name in choose_sites(every, sites, "layer or parameter", layers)}


def _weight(parameters: Mapping[str, Tensor], name: str, module: nn.Module | None) -> Any:
    atoms, coefficients = (parameters.get(f"{name}.{part}") for part in ("atoms", "coefficients"))
    if atoms is None or coefficients is None:
        return _tensor(parameters, name, "weight", module)
    with products():
        return (coefficients.flatten(0, 1) @ atoms.flatten(1)).view(*coefficients.shape[:2], *atoms.shape[1:])


def _tensor(parameters: Mapping[str, Tensor], name: str, part: str, module: nn.Module | None) -> Any:
    """A layer's tensor as `named_parameters` computes it; a shared one, which that names once, from the layer."""
    if f"{name}.{part}" in parameters:
        return parameters[f"{name}.{part}"]
    own = getattr(module, part, None)
    return own.detach() if isinstance(own, Tensor) else own


class RunInputs:
    """Inputs that are the same at every step, and how activations on them become rows."""

    def __init__(
        self,
        data: Any,
        rows: Rule = "flatten",
        *,
        prepare: Callable[[Any], Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        max_rows: int | None = None,
    ) -> None:
        if isinstance(data, str):
            from ..data import open_data

            data = open_data(data)
        check_rule(rows)
        # Read once and copied: a loader may shuffle, and the tensors may be written to before the next step.
        self.batches = [copied(chunk.batch) for chunk in recut(Batches(data), block=None, max_rows=max_rows)]
        self.inputs = sum(map(count_inputs, self.batches))
        self.rows, self.prepare, self._inputs = rows, prepare, inputs
        self.rule = rule_name(rows)
        self.left_out: dict[str, str] = {}  # sites not named one by one that gave no rows, and why

    def digest(self) -> str:
        """A digest of the inputs without their labels, the same however they are cut into batches."""
        parts: dict[str, Any] = {}
        for batch in self.batches:
            _feed(parts, "", without_labels(batch))
        whole = "".join(f"{name}:{part.hexdigest()}" for name, part in sorted(parts.items()))
        return hashlib.sha256(whole.encode()).hexdigest()[:16]

    def shapes(self, model: nn.Module, sites: Any) -> dict[str, tuple[int, ...]]:
        """The sites in execution order with the shapes of their rows, from a forward of two inputs."""
        count = min(2, count_inputs(self.batches[0]))
        few = self.take(model, sites, [cut(self.batches[0], 0, count)])
        return {site: (round(len(rows) / count * self.inputs), rows.shape[1]) for site, rows in few.items()}

    def take(self, model: nn.Module, sites: Any, batches: list[Any] | None = None) -> dict[str, Tensor]:
        """The rows (n, p) of each site, on the model's device; of all batches by default."""
        network = Network(model, type(model).__name__, sites, self.rows, self.prepare, self._inputs)
        parts: dict[str, list[Tensor]] = {}
        start = 0

        def keep(site: str, rows: Tensor) -> None:
            parts.setdefault(site, []).append(rows.clone())  # a later operation of the model may write into them

        with network.opened():
            for batch in self.batches if batches is None else batches:
                count = count_inputs(batch)
                try:
                    network.read(Chunk(batch, start, count), keep)
                except RuntimeError as error:
                    explain_types(error, model, without_labels(batch), "inputs")
                    raise
                start += count
            self.left_out = network.left_out
        return {site: torch.cat(rows) for site, rows in parts.items()}


def _feed(parts: dict[str, Any], name: str, value: Any) -> None:
    """Add every tensor and list of a structure to a digest of its own."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _feed(parts, f"{name}.{key}", item)
    elif isinstance(value, tuple):
        for k, item in enumerate(value):
            _feed(parts, f"{name}.{k}", item)
    elif isinstance(value, Tensor):
        digest = parts.setdefault(f"{name} {value.dtype} {tuple(value.shape[1:])}", hashlib.sha256())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    else:
        digest = parts.setdefault(name, hashlib.sha256())
        for item in value if isinstance(value, list) else [value]:
            digest.update(f"{item!r},".encode())


# Callbacks for the trainers of Lightning and Hugging Face, each imported on first use

At = Literal["epoch", "step"]


def lightning_callback(recorder: Recorder | Monitor, at: At = "epoch") -> Any:
    """A callback for Lightning's Trainer: records before training and after each epoch, or each optimiser step.

    A `Monitor` in place of the recorder compares with a reference at those times.

    Give the recorder the module that is trained; its `every` thins out the steps. A fit that resumes from a checkpoint
    first removes records of later steps; one that starts anew in a folder with records raises.
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
        """Records training."""

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            if trainer.is_global_zero:
                _start(recorder, trainer.current_epoch if at == "epoch" else trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            if at == "step" and trainer.is_global_zero:
                _record_once(recorder, trainer.global_step)

        def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
            if at == "epoch" and trainer.is_global_zero:
                _record_once(recorder, trainer.current_epoch + 1)

        def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
            if stage == "fit":
                recorder.close()

    return RecorderCallback()


def hf_callback(recorder: Recorder | Monitor, at: At = "step") -> Any:
    """A callback for transformers' Trainer: records before training and after each optimiser step, or each epoch.

    As `lightning_callback`; give the recorder or monitor the model that is trained.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ImportError("hf_callback needs transformers: pip install 'sosie[hf]'") from error
    one_of(at, "at", ("epoch", "step"))

    def now(state: Any) -> int:
        return int(state.global_step) if at == "step" else round(state.epoch or 0)

    class RecorderCallback(TrainerCallback):
        """Records training."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                _start(recorder, now(state))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if at == "step" and state.is_world_process_zero:
                _record_once(recorder, now(state))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if at == "epoch" and state.is_world_process_zero:
                _record_once(recorder, now(state))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.close()

    return RecorderCallback()


def _start(recorder: Recorder | Monitor, step: int) -> None:
    if recorder.steps:
        recorder.resume(step)
    _record_once(recorder, step)


def _record_once(recorder: Recorder | Monitor, step: int) -> None:
    """Record, unless this step is on record: with accumulated gradients several batches end in the same step."""
    if not recorder.steps or step > recorder.steps[-1]:
        recorder.record(step)
