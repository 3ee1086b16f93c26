"""Long vectors to short ones, the same way for every model: cosines stay what they were, but for a stated error."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...stats import Buckets

SIZE = 512
SMALLEST, LARGEST = 16, 4096
AT_ONCE = 2**24  # numbers that are widened to float64


def check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not SMALLEST <= size <= LARGEST:
        raise ValueError(f"size={size!r}: a whole number from {SMALLEST} to {LARGEST}; 256 to 1024 serve well")


def project(vectors: Tensor, size: int = SIZE, seed: int = 0) -> Tensor:
    """Vectors (k, length) as (k, size) of length 1, in float32, where they are; those that fit are filled with zeros.

    A CountSketch (Charikar et al. 2002): entry i goes to one of `size` places, with a sign, both decided by `seed` and
    i alone, so that no matrix is made or kept.
    """
    check_size(size)
    home = vectors.device if vectors.device.type in ("cpu", "cuda") else torch.device("cpu")  # others have no float64
    vectors = vectors.detach().to(home)
    some = vectors.split(max(1, AT_ONCE // vectors.shape[1]))
    if vectors.shape[1] <= size:
        return torch.cat([unit(pad(each.double(), (0, size - each.shape[1]))).float() for each in some])
    places, signs = _drawn(size, seed, vectors.shape[1], home)
    return torch.cat([_sketched(each.double(), size, places, signs) for each in some])


def _sketched(vectors: Tensor, size: int, places: Tensor, signs: Tensor) -> Tensor:
    short = vectors.new_zeros(size, len(vectors))
    short.index_add_(0, places, (vectors * signs).T)  # whole rows are added, several times as fast as columns
    return unit(short.T).float()


@lru_cache(maxsize=2)
def _drawn(size: int, seed: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same for every model, so kept for the next."""
    with torch.inference_mode(False):
        places, signs = Buckets(size, seed).draw(0, length, torch.device("cpu"))
        return places[0].to(device), signs[0].to(device)


def standard_deviation(cosine: float, size: int = SIZE) -> float:
    """Of the cosine of two projected vectors about that of the whole ones: at most this, but for terms of 1/size.

    For unit x and y with cosine c the variance is ((1 − c²)² − 2 Σ (xᵢyᵢ − c (xᵢ² + yᵢ²)/2)²) / size by the delta
    method; the sum is small unless a few entries carry the vectors. The mean is off by c (1 − c²) / (2 size) at most.
    """
    return float((1 - cosine**2) / size**0.5)


def unit(vectors: Tensor) -> Tensor:
    """Each over its length."""
    return vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
