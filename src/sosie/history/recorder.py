"""A record of training: atoms, weights or activations at each step, in a folder that survives a kill."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ..capture import (
    Batches,
    Masks,
    Rule,
    Site,
    as_found,
    check_rule,
    count_inputs,
    cut,
    model_arguments,
    nearest,
    recut,
    to_rows,
    unwrap,
    watch,
    without_labels,
)
from ..capture.arguments import explain_types
from ..models import AtomConv2d
from ..process_state import products
from .run_folder import CODES, KINDS, RECORDS, About, FrameWriter, check_same, read_about, write_about

# What is kept of a model at one moment: its atoms, its weights, or its activations on a probe set

Model: TypeAlias = nn.Module | Mapping[str, Tensor]
RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # in a state dict, but no parameters


def parameters_of(model: Model) -> dict[str, Tensor]:
    """Parameters by name, of a model or a state dict."""
    if isinstance(model, nn.Module):
        return {name: parameter.detach() for name, parameter in unwrap(model).named_parameters()}
    return {name: tensor.detach() for name, tensor in model.items() if not name.endswith(RUNNING)}


def described(model: Model) -> str:
    kind = type(unwrap(model)).__name__ if isinstance(model, nn.Module) else "state dict"
    return f"{kind}, {sum(tensor.numel() for tensor in parameters_of(model).values()):,} parameters"


def atoms_of(model: Model, sites: Any = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Atoms and coefficients of the layers made of them, in the order of registration."""
    if isinstance(model, nn.Module):
        layers = [(name, m) for name, m in unwrap(model).named_modules() if isinstance(m, AtomConv2d)]
        found = {name: (layer.atoms.detach(), layer.coefficients.detach()) for name, layer in layers}
        kinds: dict[str, nn.Module] = dict(layers)
    else:
        names = [name.removesuffix(".atoms") for name in model if name.endswith(".atoms")]
        found = {n: (model[f"{n}.atoms"], model[f"{n}.coefficients"]) for n in names if f"{n}.coefficients" in model}
        kinds = {}
    if not found:
        raise ValueError(
            "the model has no layer of atoms: decompose(model, m) or with_atoms(model, m) of sosie.models.atoms makes "
            "them; or keep weights or activations"
        )
    return {name: found[name] for name in _chosen(found, sites, kinds, "layer of atoms")}


def weights_of(model: Model, sites: Any = None) -> dict[str, Tensor]:
    """Weights of layers that hold a matrix of them, in the order of registration; of atoms, the kernels made of them.

    Sites are layers or parameters by name, globs of them, or types of layers.
    """
    found: dict[str, Tensor] = {}
    kinds: dict[str, nn.Module] = {}
    if isinstance(model, nn.Module):
        for name, module in unwrap(model).named_modules():
            weight = getattr(module, "weight", None)
            if name and isinstance(weight, Tensor) and weight.ndim > 1:
                found[name], kinds[name] = weight.detach(), module
    parameters = parameters_of(model)
    if not isinstance(model, nn.Module):
        for full, tensor in parameters.items():
            name, _, last = full.rpartition(".")
            if name and last == "weight" and tensor.ndim > 1:
                found[name] = tensor
            elif last == "atoms" and f"{name}.coefficients" in parameters:
                with products():
                    found[name] = torch.einsum("oim,mhw->oihw", parameters[f"{name}.coefficients"], tensor)
    if sites is None:
        if not found:
            raise ValueError("the model has no layer with a matrix of weights; name parameters as sites")
        return found
    every = {**found, **{name: tensor for name, tensor in parameters.items() if name not in found}}
    return {name: every[name] for name in _chosen(every, sites, kinds, "layer or parameter")}


def _chosen(known: Mapping[str, Any], sites: Any, kinds: Mapping[str, nn.Module], word: str) -> list[str]:
    if sites is None:
        return list(known)
    wanted: set[str] = set()
    selectors: Iterable[Any] = [sites] if isinstance(sites, (str, type)) else sites
    for asked in selectors:
        if isinstance(asked, type):
            found = {name for name, module in kinds.items() if isinstance(module, asked)}
        else:
            found = {asked} & set(known) or {name for name in known if fnmatchcase(name, str(asked))}
        if not found:
            raise ValueError(f"no {word} is called {asked!r}{nearest(str(asked), known)}")
        wanted |= found
    if not wanted:
        raise ValueError(f"an empty list of sites; leave sites out for every {word}")
    return [name for name in known if name in wanted]


class Probe:
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
        # Read once: a loader that shuffles would give other inputs at each step.
        self.batches = [chunk.batch for chunk in recut(Batches(data), block=None, max_rows=max_rows)]
        self.inputs = sum(map(count_inputs, self.batches))
        self.rows, self._prepare, self._inputs = rows, prepare, inputs
        self.left_out: dict[str, str] = {}  # sites that were not named one by one and gave no rows, and why

    def prepared(self, prepare: Callable[[Any], Any] | None) -> Probe:
        """The same inputs for a model with a normalisation of its own."""
        made = copy.copy(self)
        made._prepare = prepare
        return made

    @property
    def rule(self) -> str:
        return self.rows if isinstance(self.rows, str) else getattr(self.rows, "__name__", "function")

    def digest(self) -> str:
        """Of the inputs, their labels aside; however they are cut into batches."""
        parts: dict[str, Any] = {}
        for batch in self.batches:
            _feed(parts, "", without_labels(batch))
        whole = "".join(f"{name}:{part.hexdigest()}" for name, part in sorted(parts.items()))
        return hashlib.sha256(whole.encode()).hexdigest()[:16]

    def look(self, model: nn.Module, sites: Any) -> dict[str, tuple[int, ...]]:
        """The sites in execution order with the shape of their rows, learnt from two inputs."""
        few = cut(self.batches[0], 0, min(2, count_inputs(self.batches[0])))
        rows = self._run(model, sites, [few])
        per_input = {site: len(found) / count_inputs(few) for site, found in rows.items()}
        return {site: (round(per_input[site] * self.inputs), found.shape[1]) for site, found in rows.items()}

    def take(self, model: nn.Module, sites: Any) -> dict[str, Tensor]:
        """The rows (n, p) of each site, on the model's device."""
        return self._run(model, sites, self.batches)

    def _run(self, model: nn.Module, sites: Any, batches: list[Any]) -> dict[str, Tensor]:
        masks, count = Masks(None), 0

        def receive(site: Site, activation: Tensor) -> Tensor:
            mask = masks.at(site, activation)
            # Cloned: a later operation of the model may write into it.
            return to_rows(activation.detach(), self.rows, site=site, inputs=count, mask=mask).clone()

        found: dict[str, list[Tensor]] = {}
        home = next((t.device for t in itertools.chain(model.parameters(), model.buffers())), None)
        with as_found(model), watch(model, sites, sink=receive) as seen:
            for batch in batches:
                count = count_inputs(batch)
                args, kwargs = model_arguments(
                    batch, model=model, inputs=self._inputs, prepare=self._prepare, device=home
                )
                masks = Masks.of(*((kwargs, batch) if self._inputs else (batch, kwargs)))
                try:
                    seen.run(*args, **kwargs)
                except RuntimeError as error:
                    explain_types(error, model, [args, kwargs], "inputs")
                    raise
                self.left_out = seen.left_out
                for label, rows in seen.items():
                    found.setdefault(label, []).append(rows)
        return {label: torch.cat(parts) for label, parts in found.items()}


def _feed(parts: dict[str, Any], name: str, value: Any) -> None:
    """Every tensor and list of a structure to a digest of its own."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _feed(parts, f"{name}.{key}", item)
    elif isinstance(value, tuple):
        for k, item in enumerate(value):
            _feed(parts, f"{name}.{k}", item)
    elif isinstance(value, Tensor):
        found = parts.setdefault(f"{name} {value.dtype} {tuple(value.shape[1:])}", hashlib.sha256())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    else:
        found = parts.setdefault(name, hashlib.sha256())
        for item in value if isinstance(value, list) else [value]:
            found.update(f"{item!r},".encode())


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
