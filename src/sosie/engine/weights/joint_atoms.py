"""Atoms of models that never shared anything: common coefficients for all, or a basis that each layer has itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...capture import unwrap
from ...models import AtomConv2d, atom_layers, recompose, share_coefficients
from ...models.atoms import check_count, check_weight, relative_error, replace_convolutions, why_not
from ...stats import AtomTable
from .matching import match_weights


@dataclass(frozen=True, eq=False)
class JointAtoms:
    """Models in atom form that hold the same coefficients, and what that cost."""

    models: tuple[nn.Module, ...]  # copies; neurons in the order of the first where they were matched
    atoms: dict[str, int]  # of each layer that was decomposed: how many
    errors: dict[str, tuple[float, ...]]  # of each such layer: ‖W − αD‖ / ‖W‖ of every model
    left: dict[str, str]  # layers of weights that stayed as they were, and why
    caveats: tuple[str, ...]  # what matching has to say

    def table(self) -> AtomTable:
        """The atoms of all models, so that all pairs are one product."""
        return AtomTable.of([{name: layer.atoms for name, layer in atom_layers(m).items()} for m in self.models])

    def __repr__(self) -> str:
        worst = max(max(each) for each in self.errors.values())
        return (
            f"<JointAtoms of {len(self.models)} models: {len(self.atoms)} layers of up to {max(self.atoms.values())} "
            f"atoms, errors up to {worst:.2g}>"
        )


def decompose_together(
    models: Sequence[nn.Module],
    atoms: int,
    *,
    match: bool = True,
    seed: int = 0,
    input_shape: Sequence[int] | None = None,
) -> JointAtoms:
    """Models of one architecture made of atoms with common coefficients α, αᵀα = I, as near to them as `atoms` allow.

    `match` first puts the neurons of every model into the order of the first's (`match_weights`); models that started
    from the same weights need none of it. The weights of each layer side by side, (kernels, models × entries of a
    kernel), have α as their leading left singular vectors; a model's atoms are αᵀW. There may be as many atoms as there
    are columns: then all is exact, and the atom cosine is the cosine of the weights.
    """
    check_count(atoms)
    plain, caveats = aligned(models, match=match, seed=seed, input_shape=input_shape)
    kernels = [kernels_of(model) for model in plain]
    check_layers(kernels)
    parts = {name: common_atoms(torch.stack([each[name] for each in kernels]), atoms) for name in kernels[0]}
    errors: dict[str, list[float]] = {name: [] for name in parts}
    made: list[nn.Module] = []
    left: dict[str, str] = {}
    for k, model in enumerate(plain):

        def joint(name: str, layer: nn.Conv2d, k: int = k) -> nn.Module:
            coefficients, own = parts[name]
            new = AtomConv2d.like(layer, coefficients.shape[1], empty=True)
            with torch.no_grad():
                new.coefficients.copy_(coefficients.view_as(new.coefficients))
                new.atoms.copy_(own[k].view_as(new.atoms))
                if new.bias is not None and layer.bias is not None:
                    new.bias.copy_(layer.bias)
            errors[name].append(relative_error(layer.weight, new.weight))
            return new

        model, left = replace_convolutions(model, joint)
        made.append(model)
    share_coefficients(made[0], made)  # the first too, so that an error has the number of its model
    counts = {name: own.shape[1] for name, (_, own) in parts.items()}
    return JointAtoms(tuple(made), counts, {name: tuple(each) for name, each in errors.items()}, left, caveats)


def aligned(
    models: Sequence[nn.Module], *, match: bool, seed: int = 0, input_shape: Sequence[int] | None = None
) -> tuple[list[nn.Module], tuple[str, ...]]:
    """Plain copies, each with its neurons in the order of the first's; and what matching could not do."""
    if len(models) < 2:
        raise ValueError(f"need at least two models to decompose together, got {len(models)}")
    plain = [recompose(unwrap(model)) for model in models]
    caveats: list[str] = []
    for k in range(1, len(plain) if match else 0):
        found = match_weights(plain[0], plain[k], seed=seed, input_shape=input_shape)
        plain[k] = found.model_b
        caveats += found.caveats
    return plain, tuple(dict.fromkeys(caveats))


def kernels_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights of every convolution that atoms can stand for, (kernels, entries of a kernel) in float64."""
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | AtomConv2d) and (isinstance(layer, AtomConv2d) or why_not(layer) is None):
            check_weight(name, layer.weight)
            found[name] = layer.weight.detach().double().flatten(2).flatten(0, 1)
    if not found:
        raise ValueError("nothing to decompose: the model has no convolution of kernels with more than one entry")
    return found


def check_layers(kernels: Sequence[Mapping[str, Tensor]], names: Sequence[str] | None = None) -> None:
    """Refuse layers that no common coefficients could stand for."""
    first = {name: tuple(each.shape) for name, each in kernels[0].items()}
    for k, other in enumerate(kernels[1:], 1):
        own = {name: tuple(each.shape) for name, each in other.items()}
        if odd := [name for name in {**first, **own} if first.get(name) != own.get(name)]:
            a, b = (names[0], names[k]) if names else ("the first model", f"model {k}")
            raise ValueError(
                f"{odd[0]}: {_told(first.get(odd[0]))} in {a}, {_told(own.get(odd[0]))} in {b}; common coefficients "
                "need layers of one shape. joint='polar' compares convolutions of any number of channels"
            )


def common_atoms(weights: Tensor, atoms: int) -> tuple[Tensor, Tensor]:
    """Of weights (models, kernels, entries): orthonormal coefficients (kernels, m), and atoms (models, m, entries)."""
    count, rows, entries = weights.shape
    side_by_side = weights.movedim(0, 1).reshape(rows, count * entries)
    u, _, _ = torch.linalg.svd(side_by_side, full_matrices=False)
    sign = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()  # known up to it: the largest entry is positive
    coefficients = (u * sign)[:, :atoms]
    # From the weights, not from the other singular vectors: a model of zeros has atoms of zeros, not of rounding.
    return coefficients, coefficients.T @ weights


def polar_atoms(kernels: Tensor) -> Tensor:
    """P = (WᵀW)^½ of W (kernels, entries): what is left of W = QP, QᵀQ = I, without Q: kernels in any order."""
    _, s, vh = torch.linalg.svd(kernels, full_matrices=False)
    return vh.mT @ (s[:, None] * vh)


def _told(shape: tuple[int, ...] | None) -> str:
    return "no such layer" if shape is None else f"{shape[0]} kernels of {shape[1]} entries"
