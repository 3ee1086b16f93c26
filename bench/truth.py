"""Debiased CKA the slow and plain way, in float64, as a reference that shares no code with sosie."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def leaves(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not list(module.children())]


def song(k: Tensor, l: Tensor) -> Tensor:
    """n (n − 3) times Song's unbiased HSIC of Gram matrices (A, n, n) and (B, n, n): all pairs."""
    n = k.shape[-1]
    k, l = (g - torch.diag_embed(g.diagonal(dim1=-2, dim2=-1)) for g in (k, l))
    trace = torch.einsum("aij,bij->ab", k, l)
    sums = k.sum((1, 2))[:, None] * l.sum((1, 2))[None, :] / ((n - 1) * (n - 2))
    cross = torch.einsum("ai,bi->ab", k.sum(2), l.sum(2)) * 2 / (n - 2)
    return trace + sums - cross


def cka(kx: Tensor, ky: Tensor) -> Tensor:
    return song(kx, ky) / torch.outer(_own(kx), _own(ky)).sqrt()


def _own(k: Tensor) -> Tensor:
    return torch.stack([song(g[None], g[None])[0, 0] for g in k])


@torch.no_grad()
def activations(model: nn.Module, names: list[str], batches: list[Tensor], *, add: float = 0.0) -> list[list[Tensor]]:
    """For each name its first call's output in every batch, flattened, kept on the CPU or GPU as it was."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    seen: set[str] = set()

    def keep(name: str):
        def hook(_module, _inputs, output) -> None:
            if name not in seen:
                seen.add(name)
                found[name].append(output.flatten(1).clone() + add)

        return hook

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(keep(name)) for name in names]
    for batch in batches:
        seen.clear()
        model(batch)
    for handle in handles:
        handle.remove()
    return [found[name] for name in names]


def whole_data(model_a: nn.Module, model_b: nn.Module, batches: list[Tensor]) -> Tensor:
    """Every leaf against every leaf, on whole Gram matrices of all rows."""
    grams = []
    for model in (model_a, model_b):
        sites = activations(model, leaves(model), batches)
        grams.append(torch.stack([_gram(torch.cat(sites.pop(0))) for _ in range(len(sites))]))
    return cka(*grams)


def _gram(rows: Tensor) -> Tensor:
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for columns in rows.split(4096, dim=1):
        part = columns.double()
        gram += part @ part.T
    return gram
