"""Convolutions whose kernels are combinations of a few small ones, the atoms; conversion of networks to and from these.

Each model has its own atoms; coefficients can be shared between models, so that their atoms correspond by number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.common_types import _size_2_t
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import skip_init
from torch.nn.utils.parametrize import is_parametrized

from ..checks import one_of, whole_number

Part = Literal["atoms", "coefficients"]
SHARED = 1e-6  # relative difference of coefficients above which one is not a rounded copy of the other
# Hooks on a module's computation; those on its state dict refer to parameters that no longer exist.
HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
)  # fmt: skip


def check_count(atoms: int) -> None:
    whole_number(atoms, "atoms", least=1, why="a convolution is made of at least one atom")


class AtomConv2d(_ConvNd):
    """A convolution with weight = coefficients × atoms (Qiu et al. 2018).

    `atoms` (m, height, width) are the small kernels, `coefficients` (outputs, inputs / groups, m) their weights in each
    kernel. Every forward computes the weight by one product, which costs a fraction m / (batch × height × width of the
    output) of the convolution, and then runs a plain convolution.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _size_2_t,
        atoms: int,
        *,
        stride: _size_2_t = 1,
        padding: _size_2_t | str = 0,
        dilation: _size_2_t = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # a convolution's would make a weight
        check_count(atoms)
        # A convolution without memory checks and completes the arguments.
        mode: Any = padding_mode
        meta = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, mode, device="meta"
        )
        vars(self).update({name: value for name, value in vars(meta).items() if name not in vars(self)})
        self.coefficients = nn.Parameter(
            torch.empty(out_channels, in_channels // groups, atoms, device=device, dtype=dtype)
        )
        self.atoms = nn.Parameter(torch.empty(atoms, *self.kernel_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw atoms of length about 1, and coefficients so that kernels have the variance of He et al. 2015 (fan out).

        The weight does not determine the length of atoms, but training turns shorter atoms further.
        """
        count, height, width = self.atoms.shape
        nn.init.normal_(self.atoms, std=1 / math.sqrt(height * width))
        nn.init.normal_(self.coefficients, std=math.sqrt(2 * self.groups / (self.out_channels * count)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def like(cls, layer: nn.Conv2d, atoms: int, *, empty: bool = False) -> AtomConv2d:
        """Return a layer of the same shape with its own parameters, random or (`empty`) uninitialised."""
        device = "meta" if empty else layer.weight.device
        twin = cls(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            atoms,
            device=device,
            dtype=layer.weight.dtype,
            **_options(layer),
        )
        twin = twin.to_empty(device=layer.weight.device) if empty else twin
        return twin.train(layer.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The kernels, (outputs, inputs / groups, height, width)."""
        # Autocast would round the atoms before the product, and most of what they learn would be lost.
        with torch.autocast(self.atoms.device.type, enabled=False):
            kernels = self.coefficients.flatten(0, 1) @ self.atoms.flatten(1)
        return kernels.view(*self.coefficients.shape[:2], *self.atoms.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        return nn.Conv2d._conv_forward(self, x, self.weight, self.bias)  # type: ignore[arg-type]

    def to_conv(self) -> nn.Conv2d:
        """Return a plain convolution that computes the same, with its own parameters."""
        place: dict[str, Any] = {"device": self.atoms.device, "dtype": self.atoms.dtype}
        channels = self.in_channels, self.out_channels
        conv = skip_init(nn.Conv2d, *channels, self.kernel_size, **_options(self), **place)  # draws nothing
        assert isinstance(conv, nn.Conv2d)
        with torch.no_grad():
            conv.weight.copy_(self.weight)
            if conv.bias is not None and self.bias is not None:
                conv.bias.copy_(self.bias)
                conv.bias.requires_grad_(self.bias.requires_grad)
        conv.weight.requires_grad_(self.coefficients.requires_grad or self.atoms.requires_grad)
        return conv.train(self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, atoms={len(self.atoms)}"


def _options(layer: _ConvNd) -> dict[str, Any]:
    """Return the arguments of a convolution besides its size."""
    names = ("stride", "padding", "dilation", "groups", "padding_mode")
    return {**{name: getattr(layer, name) for name in names}, "bias": layer.bias is not None}


# Conversion of any convolutional network into atom form by singular values, and back


@dataclass(frozen=True, eq=False)
class Decomposition:
    """A model in atom form, with the error of each layer."""

    model: nn.Module
    atoms: dict[str, int]  # the number in each decomposed layer
    errors: dict[str, float]  # ‖W − αD‖ / ‖W‖ of each decomposed layer
    left: dict[str, str]  # why other layers with weights did not change

    def __repr__(self) -> str:
        return (
            f"<Decomposition {type(self.model).__name__}: {len(self.atoms)} layers of up to {max(self.atoms.values())} "
            f"atoms, errors up to {max(self.errors.values()):.2g}, {len(self.left)} left alone>"
        )


def decompose(model: nn.Module, atoms: int) -> Decomposition:
    """Return the closest copy of the model whose convolutions consist of at most `atoms` atoms each.

    Each weight is decomposed as a matrix (kernels, height × width) by its singular values: the coefficients have
    orthonormal columns, and the first atom is the largest. The number of atoms is limited by the entries of a kernel
    and by the number of kernels; at the limit the layer is exact. 1 × 1 convolutions and linear layers do not change.
    """
    check_count(atoms)
    counts: dict[str, int] = {}
    errors: dict[str, float] = {}

    def replaced(name: str, layer: nn.Conv2d) -> nn.Module:
        check_weight(name, layer.weight)
        exact = layer.weight.detach().double().flatten(2).flatten(0, 1)  # (kernels, height × width)
        count = min(atoms, *exact.shape)
        u, s, vh = torch.linalg.svd(exact, full_matrices=False)
        # The sign of a singular vector is arbitrary: make the largest entry of each atom positive.
        sign = vh.gather(1, vh.abs().argmax(1, keepdim=True)).sign()
        replacement = AtomConv2d.like(layer, count, empty=True)
        with torch.no_grad():
            replacement.coefficients.copy_((u * sign.T)[:, :count].view_as(replacement.coefficients))
            replacement.atoms.copy_((s[:, None] * vh * sign)[:count].view_as(replacement.atoms))
            if replacement.bias is not None and layer.bias is not None:
                replacement.bias.copy_(layer.bias)
                replacement.bias.requires_grad_(layer.bias.requires_grad)
        replacement.coefficients.requires_grad_(layer.weight.requires_grad)
        replacement.atoms.requires_grad_(layer.weight.requires_grad)
        lost, size = (replacement.weight.detach().double().view_as(exact) - exact).norm(), float(exact.norm())
        counts[name], errors[name] = count, float(lost) / size if size else 0.0
        return replacement

    result, left = replace_convolutions(model, replaced)
    if not counts:
        reasons = "; ".join(f"{name or 'the model'} {why}" for name, why in left.items())
        raise ValueError(f"nothing to decompose: {reasons or 'the model has no convolution'}")
    return Decomposition(result, counts, errors, left)


def recompose(model: nn.Module) -> nn.Module:
    """Return a copy in which every `AtomConv2d` is a plain convolution; hooks are copied too, as in any deep copy."""
    tied: dict[tuple[Tensor, Tensor], nn.Conv2d] = {}

    def plain(name: str, layer: nn.Module) -> nn.Module:
        if not isinstance(layer, AtomConv2d):
            return layer
        conv = layer.to_conv()
        for kind in HOOKS:
            setattr(conv, kind, getattr(layer, kind))
        # Layers with shared parts share the weight.
        conv.weight = tied.setdefault((layer.coefficients, layer.atoms), conv).weight
        return conv

    return _mapped(model, plain)


def replace_convolutions(
    model: nn.Module, make: Callable[[str, nn.Conv2d], nn.Module]
) -> tuple[nn.Module, dict[str, str]]:
    """Return a copy with `make(name, layer)` for every convolution that atoms can replace, and why others stay."""
    left: dict[str, str] = {}
    tied: dict[Tensor, AtomConv2d] = {}

    def replaced(name: str, layer: nn.Module) -> nn.Module:
        reason = why_not(layer)
        if reason is None:
            assert isinstance(layer, nn.Conv2d)
            replacement = make(name, layer)
            if isinstance(replacement, AtomConv2d):
                # Layers with a shared weight share its parts.
                first = tied.setdefault(layer.weight, replacement)
                replacement.coefficients, replacement.atoms = first.coefficients, first.atoms
            return replacement
        if reason:
            left[name] = reason
        return layer

    return _mapped(model, replaced), left


def why_not(layer: nn.Module) -> str | None:
    """Return why atoms cannot replace this layer: None if they can, "" if it has no weight matrix."""
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


def check_weight(name: str, weight: Tensor) -> None:
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise ValueError(f"{name}.weight has {bad} of {weight.numel()} values that are NaN or infinite")


def _mapped(model: nn.Module, change: Callable[[str, nn.Module], nn.Module]) -> nn.Module:
    """Return a deep copy with some modules replaced; a module used in two places is replaced once."""
    copied = copy.deepcopy(model)
    done: dict[nn.Module, nn.Module] = {}
    for name, module in list(copied.named_modules()):
        done[module] = change(name, module)
    if done[copied] is not copied:
        return done[copied]
    for parent in list(copied.modules()):
        # named_children would skip a layer's second place.
        for name, child in list(parent._modules.items()):
            if child is not None and done.get(child, child) is not child:
                setattr(parent, name, done[child])
    return copied


# The two parts of models in atom form: individual atoms, coefficients that can be shared


def with_atoms(model: nn.Module, atoms: int) -> nn.Module:
    """Return a copy whose convolutions consist of at most `atoms` random atoms each: a network to train.

    The number of atoms is limited by the entries of a kernel and by the number of kernels.
    """
    check_count(atoms)

    def fresh(name: str, layer: nn.Conv2d) -> nn.Module:
        kernels = layer.weight.shape[0] * layer.weight.shape[1]
        return AtomConv2d.like(layer, min(atoms, kernels, layer.weight[0, 0].numel()))

    converted, _ = replace_convolutions(model, fresh)
    if not atom_layers(converted):
        raise ValueError("the model has no convolution that atoms could replace")
    return converted


def atom_layers(model: nn.Module) -> dict[str, AtomConv2d]:
    """Return every layer made of atoms by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, AtomConv2d)}


def freeze(model: nn.Module, part: Part, frozen: bool = True) -> nn.Module:
    """Freeze one part of every layer of atoms, or with `frozen=False` make it trainable again."""
    one_of(part, "part", ("atoms", "coefficients"))
    for layer in some_atom_layers(model).values():
        (layer.atoms if part == "atoms" else layer.coefficients).requires_grad_(not frozen)
    return model


def share_coefficients(source: nn.Module, others: Iterable[nn.Module]) -> None:
    """Give models the coefficients of another as the same tensors in memory, so that training changes all of them.

    The models must have the same type and device.
    """
    ours = some_atom_layers(source)
    for k, model in enumerate(others):
        theirs = some_atom_layers(model)
        if missing := sorted(set(ours) ^ set(theirs)):
            raise ValueError(f"model {k} and the source do not both have a layer of atoms called {missing[0]!r}")
        for name, layer in theirs.items():
            if layer.coefficients.shape != ours[name].coefficients.shape:
                raise ValueError(
                    f"{name}: coefficients of {tuple(layer.coefficients.shape)} (outputs, inputs, atoms) cannot be "
                    f"those of the source, {tuple(ours[name].coefficients.shape)}"
                )
            pair = layer.coefficients, ours[name].coefficients
            here, there = (f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}" for tensor in pair)
            if here != there:
                raise ValueError(
                    f"{name} of model {k} is in {here}, the source's coefficients in {there}: bring the models to one "
                    "type and device first (model.to)"
                )
        for name, layer in theirs.items():
            layer.coefficients = ours[name].coefficients


def load_atoms(model: nn.Module, atoms: Mapping[str, Tensor]) -> nn.Module:
    """Set the atoms of layers by name and keep the coefficients."""
    layers = some_atom_layers(model)
    for name, tensor in atoms.items():
        if name not in layers:
            raise ValueError(f"no layer of atoms is called {name!r}; there are {', '.join(layers)}")
        if tensor.shape != layers[name].atoms.shape:
            raise ValueError(f"{name}: atoms of {tuple(tensor.shape)}, the layer has {tuple(layers[name].atoms.shape)}")
    with torch.no_grad():
        for name, tensor in atoms.items():
            layers[name].atoms.copy_(tensor)
    return model


def some_atom_layers(model: nn.Module) -> dict[str, AtomConv2d]:
    """Return every layer made of atoms by name; raise if there is none."""
    layers = atom_layers(model)
    if not layers:
        raise ValueError("the model has no layer of atoms: decompose(model, m) or with_atoms(model, m) makes them")
    return layers


def check_shared(named: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise unless the coefficients of all models agree with the first's, to 1e-6 of their norm in each layer."""
    (first_name, first), *others = ((name, atom_layers(model)) for name, model in named)
    for name, layers in others:
        pairs = {layer: (first[layer], layers[layer]) for layer in first if layer in layers}
        if not pairs:
            raise ValueError(f"{first_name} and {name} have no layer of atoms in common")
        for layer, (a, b) in pairs.items():
            if a.atoms.shape != b.atoms.shape:
                x, y = (" × ".join(map(str, atoms.shape)) for atoms in (a.atoms, b.atoms))
                raise ValueError(
                    f"{layer}: {first_name} has atoms of {x} and {name} of {y} (number × height × width), and only "
                    "atoms of one shape can be compared entry by entry"
                )
            if a.coefficients.shape != b.coefficients.shape:
                raise ValueError(
                    f"{layer}: coefficients of {tuple(a.coefficients.shape)} (outputs, inputs, atoms) in {first_name} "
                    f"and {tuple(b.coefficients.shape)} in {name} are not shared; joint='polar' compares layers with "
                    "any number of channels"
                )
        for layer, (a, b) in pairs.items():
            if a.coefficients.data_ptr() == b.coefficients.data_ptr():
                continue
            alpha, beta = (tensor.detach().to(a.atoms.device).double() for tensor in (a.coefficients, b.coefficients))
            size, difference = float(alpha.norm()), float((alpha - beta).norm())
            if difference and not size:
                raise ValueError(f"{layer}: all coefficients of {first_name} are 0")
            if difference > SHARED * size:
                raise ValueError(
                    f"{layer}: {first_name} and {name} do not share their coefficients, which differ by "
                    f"{difference / size:.2g} of their norm (more than {SHARED:g}), so their atoms do not correspond "
                    "and a cosine would mean nothing. share_coefficients makes them one tensor; compare_weights with "
                    "joint=9, say, first decomposes the models together"
                )
