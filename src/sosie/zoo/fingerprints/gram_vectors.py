"""Kind "cka": of each site the U-centred Gram matrix of the probes, as one vector whose cosine is debiased CKA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...capture import Chunk
from ...engine.arriving import Arriving
from ...engine.digest import Digest
from ...engine.sources import ModelSource
from ...linalg import centred_diagonal, double_centred, gram_cuda, gram_stack, live_gram, u_centred, widened, with_room
from ...process_state import products
from .probe import Probe

ROUNDING = 16  # units in the last place of an activation: rows that differ by less are equal
LOST = 1e-5  # of a Gram matrix's norm: what float32 products leave where U-centring takes all away
TOGETHER = 2**24  # entries of Gram matrices that are looked at together
EQUAL = "is the same for all probes"
NOTHING = "is as far from itself for any two probes: nothing is left to compare"


@dataclass(frozen=True)
class _Made:
    """What one site's rows leave behind, on their device."""

    gram: Tensor  # (n, n)
    length: Tensor  # ‖first row‖²
    digits: float  # relative rounding of the activations


@dataclass(frozen=True)
class GramVectors:
    """Of the sites in execution order the vectors of length 1, queued on a GPU: `sift` waits for them."""

    name: str
    sites: tuple[str, ...]
    vectors: Tensor  # (sites, n (n − 1) / 2), float32, on the CPU or a GPU
    model: Digest  # of the weights
    _lengths: Arriving  # (sites, 4), see `_vectors`
    _digits: tuple[float, ...]
    _no_rows: dict[str, str]

    def sift(self) -> tuple[list[int], dict[str, str]]:
        """Which sites have a vector that means anything, and for the others the reason."""
        kept, left_out = [], dict(self._no_rows)
        for k, (site, lengths) in enumerate(zip(self.sites, self._lengths.read().tolist(), strict=True)):
            norm, whole, spread, first = lengths
            if not norm < torch.inf:
                raise ValueError(
                    f"{self.name}: the activations at {site} are NaN or infinite, or too large for a product"
                )
            if not spread > (ROUNDING * self._digits[k]) ** 2 * first:  # also where the activations are 0
                left_out[site] = EQUAL
            elif not norm > LOST * whole:
                left_out[site] = NOTHING
            else:
                kept.append(k)
        if not kept:
            raise ValueError(f"{self.name}: no site is left: {'; '.join(f'{s} {why}' for s, why in left_out.items())}")
        return kept, left_out


def gram_vectors(source: ModelSource, probe: Probe) -> GramVectors:
    """One forward pass; each site's rows become a Gram matrix as they appear, and no activation is kept."""
    with source.opened():
        found = _read(source, probe)
        no_rows = source.left_out
        model = source.begun_digest()  # now, while a GPU is still busy with the pass
    parts = [_vectors([found[site] for site in sites]) for sites in _groups(list(found), probe.n)]
    vectors, lengths = (torch.cat(some) for some in zip(*parts, strict=True))
    digits = tuple(each.digits for each in found.values())
    return GramVectors(source.name, tuple(found), vectors, model, Arriving(lengths), digits, no_rows)


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
        rows = with_room(rows, "the activations")
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
    """Vectors (k, n (n − 1) / 2) of length 1, and of each four lengths (k, 4), which say whether it means anything.

    The norm of the U-centred matrix, of the centred one, and squared how far rows are from their mean and the first
    of them from zero.
    """
    grams, first = _stacked([each.gram for each in made]), _stacked([each.length for each in made])
    centred = u_centred(grams)
    norm = centred.flatten(1).norm(dim=1)
    whole = double_centred(grams).flatten(1).norm(dim=1)
    spread = centred_diagonal(grams).mean(1)
    i, j = torch.triu_indices(grams.shape[1], grams.shape[1], 1, device=grams.device)
    vectors = centred[:, i, j] * (2**0.5 / norm[:, None])
    return vectors.float(), torch.stack([norm, whole, spread, first], dim=1)
