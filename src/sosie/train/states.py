"""What is kept of a model at one moment: its atoms, its weights, or its activations on a probe set."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

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
from ..models.atoms import AtomConv2d
from ..process_state import products
from .checks import tell_types

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
                    tell_types(error, model, [args, kwargs], "inputs")
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
