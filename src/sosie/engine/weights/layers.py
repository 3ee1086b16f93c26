"""The weights of a model by layer: which there are, and the tensor that stands for each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ...capture import unwrap
from ...results import WHOLE
from .same_tensors import check_finite, check_same_tensors

ALL = WHOLE  # the site that stands for every parameter of a model, as one vector
OUTPUT = "output"  # a site of other measures of weights: the whole network, which is no one tensor
NO_WEIGHTS = "it holds no matrix of weights of its own"
RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # in a state dict, but no parameters

Model: TypeAlias = nn.Module | Mapping[str, Tensor]
Sites: TypeAlias = str | type | Sequence[str | type] | None
Found: TypeAlias = dict[str, Tensor | str]  # by site: its weights, or why there are none


def tensor_sites(model: Model, sites: Sites = None) -> list[str]:
    """Names of the sites asked for; None: layers that hold a matrix of weights, as they are registered, and "all"."""
    weights, modules = weights_of(model), _modules(model)
    layers = [name.removesuffix(".weight") for name, tensor in weights.items() if tensor.ndim > 1]
    if sites is None:
        return [*layers, ALL]
    found: list[str] = []
    for asked in [sites] if isinstance(sites, (str, type)) else sites:
        if isinstance(asked, type):
            matching = [name for name, module in modules.items() if isinstance(module, asked)]
        elif asked in (ALL, OUTPUT) or asked in modules or asked in weights or asked in layers:
            matching = [asked]
        else:
            matching = [name for name in dict.fromkeys([*layers, *weights]) if fnmatchcase(name, asked)]
        if not matching:
            near = difflib.get_close_matches(str(asked), [*layers, *modules, *weights], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no layer and no parameter is called {asked!r}{hint}")
        found += matching
    return list(dict.fromkeys(found))


def parameters_of(model: Model) -> dict[str, Tensor]:
    """Parameters by name, of a model or a state dict."""
    if isinstance(model, nn.Module):
        return {name: parameter.detach() for name, parameter in unwrap(model).named_parameters()}
    return {name: tensor.detach() for name, tensor in model.items() if not name.endswith(RUNNING)}


def one_architecture(model_a: Model, model_b: Model) -> bool:
    """Whether both have parameters of the same names and shapes."""
    shapes = [{name: tensor.shape for name, tensor in parameters_of(model).items()} for model in (model_a, model_b)]
    return shapes[0] == shapes[1]


def task_vector(model: Model, base: Model, names: tuple[str, str] = ("the model", "its base")) -> dict[str, Tensor]:
    """What training changed: each parameter less that of the base model, in float64."""
    return _moved(parameters_of(model), parameters_of(base), names)


def _moved(weights: Mapping[str, Tensor], start: Mapping[str, Tensor], names: tuple[str, str]) -> dict[str, Tensor]:
    check_same_tensors(weights, start, names)
    check_finite(start, names[1])
    return {name: tensor.double() - start[name].to(tensor.device).double() for name, tensor in weights.items()}


def weights_of(model: Model) -> dict[str, Tensor]:
    """The same with the kernels of a convolution made of atoms put together: `.weight` for coefficients and atoms."""
    found = parameters_of(model)
    joined: dict[str, Tensor] = {}
    for name, tensor in found.items():
        layer, dot, part = name.rpartition(".")
        other = found.get(f"{layer}{dot}{ {'coefficients': 'atoms', 'atoms': 'coefficients'}.get(part) }")
        if other is None or {tensor.ndim, other.ndim} != {3}:
            joined[name] = tensor
        elif part == "coefficients":
            joined[f"{layer}{dot}weight"] = torch.einsum("oim,mhw->oihw", tensor.double(), other.double())
    return joined


def tensors_at(model: Model, base: Model | None, sites: Sequence[str], label: str) -> Found:
    """For each site its weights in float64, or what became of them since the base; or, in words, why there are none."""
    weights = weights_of(model)
    if not weights:
        raise ValueError(f"{label} has no weights")
    check_finite(weights, label)
    nothing = "all its weights are 0"
    if base is not None:
        weights, nothing = _moved(weights, weights_of(base), (label, "the base")), "its weights are those of the base"
    found: Found = {}
    for site in sites:
        tensor = _tensor_at(site, weights, _modules(model))
        found[site] = NO_WEIGHTS if tensor is None else tensor if bool(tensor.any()) else nothing
    return found


def _modules(model: Model) -> dict[str, nn.Module]:
    return dict(unwrap(model).named_modules()) if isinstance(model, nn.Module) else {}


def _tensor_at(site: str, weights: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> Tensor | None:
    name = site if site in weights else f"{site}.weight" if site else "weight"
    if name in weights:
        # Of a transposed convolution the second axis is that of the neurons.
        turned = isinstance(modules.get(name.rpartition(".")[0]), nn.modules.conv._ConvTransposeNd)
        tensor = weights[name].double()
        return tensor.transpose(0, 1).contiguous() if turned and tensor.ndim > 1 else tensor
    if site == ALL:
        return torch.cat([tensor.double().flatten() for tensor in weights.values()])
    return None
