"""Kind "cka": of each site the U-centred Gram matrix of the probes, as one vector whose cosine is debiased CKA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...capture import Chunk
from ...engine.digest import Digest
from ...engine.precision import products
from ...engine.sources import ModelSource
from ...linalg import centred_diagonal, double_centred, gram_cuda, gram_stack, live_gram, u_centred, widened
from .probe import Probe

ROUNDING = 16  # units in the last place of an activation: rows that differ by less are equal
LOST = 1e-5  # of a Gram matrix's norm: what float32 products leave where U-centring takes all away
TOGETHER = 2**24  # entries of Gram matrices that are looked at together
EQUAL = "is the same for all probes"
NOTHING = "is as far from itself for any two probes: nothing is left to compare"


@dataclass(frozen=True)
class GramVectors:
    """The sites in execution order, their vectors of length 1, and the sites that have none with the reason."""

    sites: tuple[str, ...]
    vectors: Tensor  # (sites, n (n − 1) / 2), float32, on the CPU or a GPU
    left_out: dict[str, str]
    model: Digest  # of the weights


@dataclass(frozen=True)
class _Made:
    """What one site's rows leave behind, on their device."""

    gram: Tensor  # (n, n)
    length: Tensor  # ‖first row‖²
    digits: float  # relative rounding of the activations


def gram_vectors(source: ModelSource, probe: Probe) -> GramVectors:
    """One forward pass; each site's rows become a Gram matrix as they appear, and no activation is kept."""
    with source.opened():
        found = _read(source, probe)
        model = source.begun_digest()  # now, while a GPU is still busy with the pass
    parts = [_vectors([found[site] for site in sites]) for sites in _groups(list(found), probe.n)]
    vectors = torch.cat([part for part, _ in parts])
    kept, left_out = [], {}
    for k, (site, lengths) in enumerate(zip(found, torch.cat([part for _, part in parts]).tolist(), strict=True)):
        norm, whole, spread = lengths
        if not norm < torch.inf:
            raise ValueError(
                f"{source.name}: the activations at {site} are NaN or infinite, or too large for a product"
            )
        if not spread > 1:  # also where the activations are 0
            left_out[site] = EQUAL
        elif not norm > LOST * whole:
            left_out[site] = NOTHING
        else:
            kept.append(k)
    if not kept:
        raise ValueError(f"{source.name}: no site is left: {'; '.join(f'{s} {why}' for s, why in left_out.items())}")
    sites = list(found)
    return GramVectors(tuple(sites[k] for k in kept), vectors[kept] if left_out else vectors, left_out, model)


def _read(source: ModelSource, probe: Probe) -> dict[str, _Made]:
    def sink(site: str, rows: Tensor) -> _Made:
        if len(rows) != probe.n:
            raise ValueError(
                f"{site}: {len(rows)} rows of {probe.n} probes, but a fingerprint has one row an input: rows='flatten',"
                " 'mean', 'cls' or 'last'"
            )
        return _Made(*_gram(rows), torch.finfo(rows.dtype).eps)

    made = source.read(Chunk(probe.batch, 0, probe.n), sink)
    return dict(zip(source.per_input(), made, strict=True))


def _gram(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The Gram matrix, centred so far that products of a few digits do not lose the spread, and ‖first row‖².

    On a CPU a strip of columns at a time, centred while it is in the cache. A GPU takes off the first row, which needs
    no look at the others, and is not waited for; U-centring takes away what is left of the mean.
    """
    if not _on_gpu(rows):
        return live_gram(rows), widened(rows[0]).square().sum()
    if gram_cuda.suits(rows[None], "first"):
        grams, lengths = gram_cuda.gram_blocks(rows[None], about="first", tf32=True)
        return grams[0], lengths[0]
    rows = widened(rows)
    with products(tf32=True):
        return gram_stack((rows - rows[:1])[None])[0], rows[0].square().sum()


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """In float64 on one device that has it; a model may be spread over several."""
    home = tensors[0].device if tensors[0].device.type in ("cpu", "cuda") else torch.device("cpu")
    return torch.stack([each.to(home) for each in tensors]).double()


def _groups(sites: list[str], n: int) -> Iterator[list[str]]:
    step = max(1, TOGETHER // (n * n))
    yield from (sites[k : k + step] for k in range(0, len(sites), step))


def _vectors(made: Sequence[_Made]) -> tuple[Tensor, Tensor]:
    """Vectors (k, n (n − 1) / 2) of length 1, and of each three lengths (k, 3), which say whether it means anything.

    The norm of the U-centred matrix, of the centred one, and how far rows are apart in units of rounding, squared.
    """
    grams = _stacked([each.gram for each in made])
    centred = u_centred(grams)
    norm = centred.flatten(1).norm(dim=1)
    whole = double_centred(grams).flatten(1).norm(dim=1)
    rounding = grams.new_tensor([(ROUNDING * each.digits) ** 2 for each in made]) * _stacked([m.length for m in made])
    spread = centred_diagonal(grams).mean(1) / rounding
    i, j = torch.triu_indices(grams.shape[1], grams.shape[1], 1, device=grams.device)
    vectors = centred[:, i, j] * (2**0.5 / norm[:, None])
    return vectors.float(), torch.stack([norm, whole, spread], dim=1)
