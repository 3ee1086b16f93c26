"""Kind "cka": of each site the U-centred Gram matrix of the probes, as one vector whose cosine is debiased CKA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...capture import Chunk
from ...engine.precision import products
from ...engine.sources import ModelSource
from ...linalg import double_centred, gram_stack, live_gram, u_centred, widened
from .probe import Probe
from .projection import unit

ROUNDING = 16  # units in the last place of an activation: rows that differ by less are equal
LOST = 1e-5  # of a Gram matrix's norm: what float32 products leave where U-centring takes all away


@dataclass(frozen=True)
class GramVectors:
    """The sites in execution order, their vectors of length 1, and the sites that have none with the reason."""

    sites: tuple[str, ...]
    vectors: Tensor  # (sites, n (n − 1) / 2), float64, on the CPU
    left_out: dict[str, str]


@dataclass(frozen=True)
class _Made:
    """What one site's rows leave behind, on their device."""

    gram: Tensor  # (n, n) about some row
    spread: Tensor  # Σ‖x − first row‖²/n over the squared length of the first row, in units of rounding


def gram_vectors(source: ModelSource, probe: Probe) -> GramVectors:
    """One forward pass; each site's rows become a Gram matrix as they appear, and no activation is kept."""

    def sink(site: str, rows: Tensor) -> _Made:
        if len(rows) != probe.n:
            raise ValueError(
                f"{site}: {len(rows)} rows of {probe.n} probes, but a fingerprint has one row an input: rows='flatten',"
                " 'mean', 'cls' or 'last'"
            )
        with products(tf32=True):
            gram = _gram(rows)
        rounding = ROUNDING * torch.finfo(rows.dtype).eps * torch.linalg.vector_norm(rows[0], dtype=torch.float64)
        return _Made(gram, gram.diagonal().double().mean() / rounding.square())

    with source.opened():
        made = source.read(Chunk(probe.batch, 0, probe.n), sink)
        sites = list(source.per_input())
    kept, vectors, left_out = [], [], {}
    for site, each in zip(sites, made, strict=True):
        vector = _vector(source.name, site, each)
        if isinstance(vector, str):
            left_out[site] = vector
        else:
            kept.append(site)
            vectors.append(vector.cpu())
    if not kept:
        raise ValueError(f"{source.name}: no site is left: {'; '.join(f'{s} {why}' for s, why in left_out.items())}")
    return GramVectors(tuple(kept), torch.stack(vectors), left_out)


def _gram(rows: Tensor) -> Tensor:
    """Of the rows about one of them, so that a large mean costs no digits; U-centring takes away the rest.

    On a CPU a strip of columns at a time, which stays in the cache; a GPU has one large product.
    """
    if not rows.is_cuda:
        return live_gram(rows)
    rows = widened(rows)
    return gram_stack((rows - rows[:1])[None])[0]


def _vector(model: str, site: str, made: _Made) -> Tensor | str:
    """The vector, or why there is none."""
    gram = made.gram.double()
    if not bool(torch.isfinite(gram).all()):
        raise ValueError(f"{model}: the activations at {site} are NaN or infinite, or too large for a product")
    if not bool(made.spread > 1):  # also where the activations are 0
        return "is the same for all probes"
    centred = u_centred(gram)
    if not bool(centred.norm() > LOST * double_centred(gram).norm()):
        return "is as far from itself for any two probes: nothing is left to compare"
    upper = torch.triu_indices(len(gram), len(gram), 1, device=gram.device)
    return unit(centred[upper[0], upper[1]][None])[0]
