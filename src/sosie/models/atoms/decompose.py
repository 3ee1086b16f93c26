"""Any network of convolutions into atom form by singular values, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .layer import AtomConv2d, check_count

# What torch keeps of hooks on what a module computes. Those on its state dict speak of parameters that are gone.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


@dataclass(frozen=True, eq=False)
class Decomposed:
    """A model in atom form, and what that cost."""

    model: nn.Module
    atoms: dict[str, int]  # of each layer that was decomposed: how many
    errors: dict[str, float]  # ‖W − αD‖ / ‖W‖ of each
    left: dict[str, str]  # layers of weights that stayed as they were, and why

    def __repr__(self) -> str:
        return (
            f"<Decomposed {type(self.model).__name__}: {len(self.atoms)} layers of up to {max(self.atoms.values())} "
            f"atoms, errors up to {max(self.errors.values()):.2g}, {len(self.left)} left alone>"
        )


def decompose(model: nn.Module, atoms: int) -> Decomposed:
    """A copy whose convolutions are made of at most `atoms` atoms each, as near to the model as that allows.

    By the singular values of each weight as a matrix (kernels, height × width): the coefficients have orthonormal
    columns, the first atom is the largest. A layer has no more atoms than its kernels have entries, or than
    there are kernels: then it is exact. 1 × 1 convolutions and linear layers have nothing to decompose and stay.
    """
    check_count(atoms)
    counts: dict[str, int] = {}
    errors: dict[str, float] = {}

    def replaced(name: str, layer: nn.Conv2d) -> nn.Module:
        check_weight(name, layer.weight)
        made = decomposed_layer(layer, atoms)
        counts[name], errors[name] = len(made.atoms), relative_error(layer.weight, made.weight)
        return made

    result, left = replace_convolutions(model, replaced)
    if not counts:
        raise ValueError(f"nothing to decompose: {_told(left)}")
    return Decomposed(result, counts, errors, left)


def recompose(model: nn.Module) -> nn.Module:
    """A copy in which every `AtomConv2d` is a plain convolution again; hooks come along, as in any deep copy."""
    tied: dict[tuple[Tensor, Tensor], nn.Conv2d] = {}

    def plain(name: str, layer: nn.Module) -> nn.Module:
        if not isinstance(layer, AtomConv2d):
            return layer
        made = layer.to_conv()
        for kind in HOOKS:
            setattr(made, kind, getattr(layer, kind))
        # Layers that share their parts go on sharing the weight.
        made.weight = tied.setdefault((layer.coefficients, layer.atoms), made).weight
        return made

    return _mapped(model, plain)


def replace_convolutions(
    model: nn.Module, make: Callable[[str, nn.Conv2d], nn.Module]
) -> tuple[nn.Module, dict[str, str]]:
    """A copy with `make(name, layer)` for every convolution that atoms can stand for; others, and why not."""
    left: dict[str, str] = {}
    tied: dict[Tensor, AtomConv2d] = {}

    def replaced(name: str, layer: nn.Module) -> nn.Module:
        reason = why_not(layer)
        if reason is None:
            assert isinstance(layer, nn.Conv2d)
            made = make(name, layer)
            if isinstance(made, AtomConv2d):
                # Layers that share a weight go on sharing it.
                first = tied.setdefault(layer.weight, made)
                made.coefficients, made.atoms = first.coefficients, first.atoms
            return made
        if reason:
            left[name] = reason
        return layer

    return _mapped(model, replaced), left


def decomposed_layer(layer: nn.Conv2d, atoms: int) -> AtomConv2d:
    """The best approximation of one convolution by that many atoms, or by as many as it needs."""
    flat = layer.weight.detach().double().flatten(2).flatten(0, 1)  # (kernels, height × width)
    count = min(atoms, *flat.shape)
    u, s, vh = torch.linalg.svd(flat, full_matrices=False)
    # A singular vector is known up to its sign: the largest entry of an atom is positive.
    sign = vh.gather(1, vh.abs().argmax(1, keepdim=True)).sign()
    made = AtomConv2d.like(layer, count, empty=True)
    with torch.no_grad():
        made.coefficients.copy_((u * sign.T)[:, :count].view_as(made.coefficients))
        made.atoms.copy_((s[:, None] * vh * sign)[:count].view_as(made.atoms))
        if made.bias is not None and layer.bias is not None:
            made.bias.copy_(layer.bias)
            made.bias.requires_grad_(layer.bias.requires_grad)
    made.coefficients.requires_grad_(layer.weight.requires_grad)
    made.atoms.requires_grad_(layer.weight.requires_grad)
    return made


def why_not(layer: nn.Module) -> str | None:
    """None: atoms can stand for this layer; "": it has no weights to speak of; else why they cannot."""
    if isinstance(layer, AtomConv2d):
        return "is made of atoms already"
    if isinstance(layer, nn.Conv2d):
        if is_parametrized(layer, "weight") or not isinstance(layer._parameters.get("weight"), nn.Parameter):
            return "its weight is computed by a parametrisation"
        if type(layer) is not nn.Conv2d:
            return f"is a {type(layer).__name__}, not a plain Conv2d"
        if layer._forward_hooks or layer._forward_pre_hooks:
            return "has hooks, which would be lost"
        return "has kernels of one entry" if layer.kernel_size == (1, 1) else None
    weight = getattr(layer, "weight", None)
    if isinstance(weight, nn.Parameter) and weight.ndim > 1:
        return f"is a {type(layer).__name__}, not a convolution of images"
    return ""


def relative_error(weight: Tensor, made: Tensor) -> float:
    """‖W − αD‖ / ‖W‖; 0 of a weight of zeros."""
    exact = weight.detach().double()
    size = float(exact.norm())
    return float((exact - made.detach().double()).norm()) / size if size else 0.0


def check_weight(name: str, weight: Tensor) -> None:
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise ValueError(f"{name}.weight has {bad} of {weight.numel()} values that are NaN or infinite")


def _mapped(model: nn.Module, change: Callable[[str, nn.Module], nn.Module]) -> nn.Module:
    """A deep copy with some modules replaced; one that is used in two places is replaced by one."""
    made = copy.deepcopy(model)
    done: dict[nn.Module, nn.Module] = {}
    for name, module in list(made.named_modules()):
        done[module] = change(name, module)
    if done[made] is not made:
        return done[made]
    for parent in list(made.modules()):
        # Not named_children, which leaves out a layer's second place.
        for name, child in list(parent._modules.items()):
            if child is not None and done.get(child, child) is not child:
                setattr(parent, name, done[child])
    return made


def _told(left: dict[str, str]) -> str:
    return "; ".join(f"{name or 'the model'} {why}" for name, why in left.items()) or "the model has no convolution"
