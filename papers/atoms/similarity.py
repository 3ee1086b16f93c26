"""How alike many networks are, all pairs at once: by atoms, by weights, and by what they represent."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from data import Prepare
from networks import State, atoms_of, sites_of
from settings import Settings
from torch import Tensor, nn

from sosie.benchmark.trials import bootstrap, pearson, percentile_interval, spearman
from sosie.capture import watch
from sosie.linalg import centred, double_centred, u_centred
from sosie.measures import atom_grassmann
from sosie.stats import AtomTable

STIMULUS = ("cca", "linear_cka", "debiased_cka", "rbf_cka")
RANK_TOLERANCE = 1e-6  # of eigenvalues, from float32 activations
BANDWIDTH = 0.5  # of the Gaussian kernels, times the median distance

Pairs = dict[str, Tensor]  # layer → (networks, networks)


@dataclass(eq=False)
class Site:
    """One layer of N networks: rows (N, r, channels) of positions for CCA, Gram matrices (N, n, n) for CKA."""

    rows: Tensor
    grams: Tensor

    def measured(self, name: str) -> Tensor:
        if name == "cca":
            return self.cca
        kernels = {"linear_cka": self._centred, "debiased_cka": self._u_centred, "rbf_cka": self._gaussian}[name]()
        flat = kernels.flatten(1)
        products = (flat @ flat.T).double()
        norms = products.diagonal().sqrt()
        norms = torch.where(norms > 0, norms, 1)  # a network that died answers all probes alike: 0 with every other
        return (products / norms[:, None] / norms[None, :]).cpu()

    @cached_property
    def cca(self) -> Tensor:
        """Root of the mean squared canonical correlation, over the smaller rank: equation 4, S_CCA = √cca_r2."""
        rows = centred(self.rows.double())
        values, vectors = torch.linalg.eigh(rows.mT @ rows)
        good = values > RANK_TOLERANCE * values[:, -1:]
        scale = torch.where(good, values, 1).rsqrt() * good
        white = rows @ (vectors * scale[:, None, :])  # (N, r, channels), 0 where there is no variance
        count, rank = len(rows), good.sum(1)
        others = white.transpose(0, 1).flatten(1)  # (r, N channels)
        squares = torch.stack([(one.mT @ others).square().sum(0).view(count, -1).sum(1) for one in white])
        return (squares / torch.minimum(rank[:, None], rank[None, :]).clamp_min(1)).sqrt().cpu()

    def _centred(self) -> Tensor:
        return torch.stack([double_centred(gram) for gram in self.grams])

    def _u_centred(self) -> Tensor:
        return torch.stack([u_centred(gram) for gram in self.grams])

    def _gaussian(self) -> Tensor:
        found = []
        for gram in self.grams:
            size = gram.diagonal()
            squares = size[:, None] + size[None, :] - 2 * gram
            squares = squares.fill_diagonal_(0).relu_()  # below 0 by rounding only
            inner = squares.flatten().sort().values
            middle = (inner[(len(inner) - 1) // 2] + inner[len(inner) // 2]) / 2
            found.append(double_centred((squares / (-2 * BANDWIDTH**2 * middle)).exp_()))
        return torch.stack(found)


@torch.no_grad()
def look(
    settings: Settings,
    model: nn.Module,
    state: State,
    images: Tensor,
    names: Sequence[str] = STIMULUS,
    *,
    seed: int = 0,
) -> dict[str, Site]:
    """What stacked networks represent after each layer of atoms (behind its ReLU), of the same images.

    `names` are the measures that it is for: rows are kept for CCA, Gram matrices for the others.
    Positions are drawn once for a layer, from the seed: the same for all networks. All of them where they are fewer.
    """
    template, prepare = copy.deepcopy(model).eval(), Prepare(settings)
    sites = sites_of(model)
    rows: dict[str, list[Tensor]] = {layer: [] for layer in sites}
    grams: dict[str, list[Tensor]] = {layer: [] for layer in sites}
    chosen: dict[str, Tensor] = {}
    x = prepare(images)
    for k in range(len(next(iter(state.values())))):
        template.load_state_dict({name: value[k] for name, value in state.items()})
        # Similarities near 1 differ in late digits.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), watch(template, list(sites.values())) as seen:
            template(x)
            found = {layer: seen[site] for layer, site in sites.items()}
        for layer, z in found.items():
            places = len(z) * z[0, 0].numel()
            if layer not in chosen:
                generator = torch.Generator().manual_seed(seed)
                order = torch.randperm(places, generator=generator)[: settings.probes.positions]
                chosen[layer] = order.sort().values.to(z.device)
            if "cca" in names:
                rows[layer].append(z.permute(0, 2, 3, 1).reshape(places, -1)[chosen[layer]])
            if set(names) - {"cca"}:
                flat = centred(z.flatten(1))  # all that follows is of centred kernels or of distances
                grams[layer].append(flat @ flat.T)
    return {layer: Site(*(stack_of(kept[layer]) for kept in (rows, grams))) for layer in sites}


def stack_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors) if tensors else torch.empty(0)


def by_stimulus(sites: Mapping[str, Site], names: tuple[str, ...] = STIMULUS) -> dict[str, Pairs]:
    return {name: {layer: site.measured(name) for layer, site in sites.items()} for name in names}


def by_atoms(state: State, base: State | None = None) -> Pairs:
    """Cosine of the atoms, layer by layer; with `base` (one network's atoms) of what was added to those."""
    atoms = atoms_of(state)
    if base is not None:
        atoms = {layer: x - base[layer].to(x) for layer, x in atoms.items()}
    table = AtomTable.stacked({layer: x.cpu() for layer, x in atoms.items()}, dtype=torch.float64)
    return {layer: cosines(table.at(layer).x.flatten(1)) for layer in table.layers}


def by_grassmann(state: State) -> Pairs:
    """Of layers with fewer atoms than a kernel has entries: it is 1 for any two models where they are as many."""
    table = AtomTable.stacked({layer: x.cpu() for layer, x in atoms_of(state).items()}, dtype=torch.float64)
    short = [layer for layer, (m, *kernel) in zip(table.layers, table.shapes, strict=True) if m < np.prod(kernel)]
    return {layer: atom_grassmann(table.at(layer)) for layer in short}


def by_weights(state: State) -> Pairs:
    """Cosine of the whole kernels α × D."""
    found = {}
    for layer, atoms in atoms_of(state).items():
        kernels = state[f"{layer}.coefficients"].flatten(1, 2).double() @ atoms.flatten(2).double()
        found[layer] = cosines(kernels.flatten(1).cpu())
    return found


def cosines(rows: Tensor) -> Tensor:
    unit = rows / rows.norm(dim=1, keepdim=True)
    return unit @ unit.T


def mean(pairs: Pairs) -> Tensor:
    """Over layers: the similarity of whole networks."""
    return torch.stack(list(pairs.values())).mean(0)


def correlation(x: Tensor, y: Tensor, draws: int) -> dict[str, Any]:
    """Pearson and Spearman over all pairs of networks, with intervals from a bootstrap over networks."""
    a, b = torch.triu_indices(len(x), len(x), 1).numpy()
    one, other = x.numpy()[a, b], y.numpy()[a, b]
    found: dict[str, Any] = {"pairs": len(a)}
    for name, coefficient in (("pearson", pearson), ("spearman", spearman)):
        try:
            value: float | None = coefficient(one, other).value
        except ValueError:  # one side does not vary: Grassmann of all kernels, say
            found[name] = {"value": None, "over_models": None}
            continue
        drawn = bootstrap(one, other, (a, b), ranks=name == "spearman", draws=draws)
        found[name] = {"value": value, "over_models": percentile_interval(drawn)}
    return found
