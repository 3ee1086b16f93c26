"""A record of training: atoms, weights or activations at each step, in a folder that survives a kill."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..capture import Rule
from .frames import FrameWriter
from .run_folder import CODES, KINDS, RECORDS, About, check_same, read_about, write_about
from .states import Model, Probe, atoms_of, described, parameters_of, weights_of

What = Literal["atoms", "weights", "activations"]


class Recorder(AbstractContextManager["Recorder"]):
    """Keeps what a model is at each step: `recorder.record(step)` in any loop, `fit(…, after_epoch=recorder.record)`.

    `what`: the atoms of layers made of them, the weights of layers, or activations on `probe` (data as for `compare`),
    made rows by the rule `rows`. `sites`: names, globs or types; None takes all layers of atoms, all layers with a
    matrix of weights, or for activations blocks or layers as `compare` does. Of the steps, every `every`-th is kept.
    Numbers are stored as `dtype`. `prepare` and `inputs` are as for `compare`. `by_depth=False` says that sites are not
    in order of depth, as in a state dict that is sorted by name; then nothing is concluded from their order.

    The folder holds run.json and records, to which only whole records are added: a run that is killed loses at most the
    record it was writing. Opened again for the same model, sites and probe it goes on, after the last step; a step that
    is not after it is refused, and `resume(step)` takes off records that a run which goes back to a checkpoint makes
    again. Nothing else of the model changes: mode, gradients and random state stay as found.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: Model,
        what: What = "atoms",
        *,
        sites: Any = None,
        probe: Any = None,
        rows: Rule = "flatten",
        every: int = 1,
        dtype: torch.dtype = torch.float32,
        prepare: Callable[[Any], Any] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        by_depth: bool = True,
    ) -> None:
        _check_options(what, probe, every, dtype)
        self.folder, self.model, self.what, self.every = Path(folder), model, what, every
        self._dtype, self._sites, self._probe, self._by_depth = dtype, sites, None, by_depth
        if what == "activations":
            if not isinstance(model, nn.Module):
                raise TypeError(f"activations are of a torch.nn.Module, got {type(model).__name__}")
            self._probe = probe if isinstance(probe, Probe) else Probe(probe, rows, prepare=prepare, inputs=inputs)
        self.about = self._describe()
        self._head, self._size = self.about.layout()
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is a file; a run is recorded in a folder")
        known = read_about(self.folder)
        if known is not None:
            check_same(known, self.about, self.folder)
        elif self.folder.is_dir() and any(not item.name.startswith(".") for item in self.folder.iterdir()):
            raise FileExistsError(f"{self.folder} holds other files: name an empty or a new folder")
        else:
            write_about(self.folder, self.about)
        self._writer = FrameWriter(self.folder / RECORDS)
        self.note = self._writer.torn  # what an interruption cost, in words
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
        """Keep the model as it is now; a step that `every` leaves out costs nothing."""
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
            raise ValueError(f"a step is a whole number of at least 0, got {step!r}")
        if self._writer.closed:
            raise ValueError(f"the recorder of {self.folder} is closed; open it again to go on")
        if step % self.every:
            return
        if self.steps and step <= self.steps[-1]:
            raise ValueError(
                f"step {step} is not after step {self.steps[-1]}, the last on record in {self.folder}: a new run needs "
                "a folder of its own; one that went back to a checkpoint calls resume(step) first"
            )
        self._writer.append(step, self._head + self._payload())

    def resume(self, step: int) -> list[int]:
        """Training goes on from its state at `step`: records of later steps are taken off, and returned by number."""
        if step <= 0 and self.steps:
            raise ValueError(
                f"{self.folder} has records up to step {self.steps[-1]}, and this run starts at step {step}: name "
                "another folder"
            )
        return self._writer.drop_after(step)

    def close(self) -> None:
        self._writer.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Recorder {self.folder}: {self.what} of {len(self.about.sites)} sites, {len(self.steps)} steps>"

    def _describe(self) -> About:
        probe: dict[str, Any] | None = None
        rows: str | None = None
        if self._probe is not None:
            assert isinstance(self.model, nn.Module)
            shapes = self._probe.look(self.model, self._sites)
            probe, rows = {"inputs": self._probe.inputs, "digest": self._probe.digest()}, self._probe.rule
        elif self.what == "atoms":
            shapes = {name: tuple(atoms.shape) for name, (atoms, _) in atoms_of(self.model, self._sites).items()}
        else:
            shapes = {name: tuple(weight.shape) for name, weight in weights_of(self.model, self._sites).items()}
        parameters = {name: tuple(tensor.shape) for name, tensor in parameters_of(self.model).items()}
        code = CODES[self._dtype]
        kept = tuple(shapes), tuple(shapes.values())
        left_out = {} if self._probe is None else self._probe.left_out
        return About(self.what, *kept, code, described(self.model), parameters, rows, probe, self._by_depth, left_out)

    def _payload(self) -> bytes:
        """The numbers of one record: one copy off the device for all sites together."""
        sums = b""
        if self._probe is not None:
            assert isinstance(self.model, nn.Module)
            found = self._probe.take(self.model, self._sites)
        elif self.what == "atoms":
            layers = atoms_of(self.model, self._sites)
            found = {name: atoms for name, (atoms, _) in layers.items()}
            totals = [torch.stack([c.float().sum(), c.float().square().sum()]) for _, c in layers.values()]
            sums = _bytes(torch.stack(totals))
        else:
            found = weights_of(self.model, self._sites)
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        if (tuple(shapes), tuple(shapes.values())) != (self.about.sites, self.about.shapes):
            odd = next(site for site in (*self.about.sites, *shapes) if shapes.get(site) != self._shape(site))
            raise ValueError(f"site {odd} was {self._shape(odd)} and is {shapes.get(odd)}: a run keeps its shapes")
        content = _bytes(torch.cat([tensor.to(self._dtype).flatten() for tensor in found.values()])) + sums
        assert len(content) == self._size
        return content

    def _shape(self, site: str) -> tuple[int, ...] | None:
        return dict(zip(self.about.sites, self.about.shapes, strict=True)).get(site)


def _check_options(what: str, probe: Any, every: int, dtype: torch.dtype) -> None:
    if what not in KINDS:
        raise ValueError(f"what={what!r}: one of {', '.join(KINDS)}")
    if (probe is None) == (what == "activations"):
        raise ValueError(
            "activations are of inputs: give probe=" if probe is None else f"probe= is for activations, not for {what}"
        )
    if isinstance(probe, (int, float)):
        raise ValueError(f"probe={probe!r}: the inputs themselves (a tensor, batches, 'demo'), not how many")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r}: a whole number of at least 1")
    if dtype not in CODES:
        raise ValueError(f"dtype={dtype}: one of {', '.join(map(str, CODES))}")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes() if math.prod(tensor.shape) else b""
