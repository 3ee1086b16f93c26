"""What fingerprints are made of: the probe set, the projection to short vectors, and the vectors of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..capture import Batches, Chunk, NoData, model_arguments, recut, unwrap, without_labels
from ..checks import whole_number
from ..data import open_data
from ..engine.network import Network
from ..engine.provenance import AsyncCopy, Digest, digest_of
from ..linalg import centred_diagonal, double_centred, gram_cuda, gram_stack, live_gram, u_centred, widened, with_room
from ..models import atom_layers
from ..process_state import products
from ..stats import Buckets
from ..weights.maps import FEWEST, check_weights, look, probe

PROBES = 256
FEWEST_PROBES = 4  # U-centring needs as many
MOST_PROBES = 2048  # from there on the exact vectors of a model's sites take half a gigabyte


@dataclass(frozen=True, eq=False)
class Probe:
    """Inputs in one batch, and the hash by which two fingerprints can tell that they saw the same."""

    batch: Any
    n: int
    digest: str  # of the inputs, their order and their type; not of labels, nor of how they came in batches

    @classmethod
    def of(cls, data: Any, most: int = PROBES) -> Probe:
        """The first inputs of the data, `most` of them at most; data are what `sosie.compare` takes."""
        if isinstance(data, Probe):
            return data
        whole_number(most, "the number of probes", least=FEWEST_PROBES, most=MOST_PROBES)
        batches = Batches(open_data(data) if isinstance(data, str) else data)
        chunk = next(recut(batches, block=most, max_rows=most), None)
        if chunk is None:
            raise NoData("the data yielded no inputs")
        if chunk.count < FEWEST_PROBES:
            raise ValueError(f"a probe set needs at least {FEWEST_PROBES} inputs, got {chunk.count}")
        return cls(chunk.batch, chunk.count, digest_of(without_labels(chunk.batch)))

    def __repr__(self) -> str:
        return f"<Probe {self.digest}: {self.n} inputs>"


# Long vectors to short ones, the same way for every model: cosines stay what they were, but for a stated error

SIZE = 512
SMALLEST, LARGEST = 16, 4096
AT_ONCE = 2**24  # numbers that are widened to float64


def check_size(size: int) -> None:
    whole_number(size, "size", least=SMALLEST, most=LARGEST, why="256 to 1024 serve well")


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


# Kind "cka": of each site the U-centred Gram matrix of the probes, as one vector whose cosine is debiased CKA

ROUNDING = 16  # units in the last place of an activation: rows that differ by less are equal
GRAM_LOST = 1e-5  # of a Gram matrix's norm: what float32 products leave where U-centring takes all away
TOGETHER = 2**24  # entries of Gram matrices that are looked at together
EQUAL = "is the same for all probes"
NOTHING = "is as far from itself for any two probes: nothing is left to compare"


@dataclass(frozen=True)
class GramVectors:
    """Of the sites in execution order the vectors of length 1, queued on a GPU: `sift` waits for them."""

    name: str
    sites: tuple[str, ...]
    vectors: Tensor  # (sites, n (n − 1) / 2), float32, on the CPU or a GPU
    model: Digest  # of the weights
    _lengths: AsyncCopy  # (sites, 4), see `_vectors`
    _digits: tuple[float, ...]
    _no_rows: dict[str, str]
    mixing: str | None  # whether inputs of a batch are mixed, in words; None: they are not

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
            elif not norm > GRAM_LOST * whole:
                left_out[site] = NOTHING
            else:
                kept.append(k)
        if not kept:
            raise ValueError(f"{self.name}: no site is left: {'; '.join(f'{s} {why}' for s, why in left_out.items())}")
        return kept, left_out


def gram_vectors(source: Network, probe: Probe) -> GramVectors:
    """One forward pass; each site's rows become a Gram matrix as they appear, and no activation is kept."""

    def sink(site: str, rows: Tensor) -> tuple[Tensor, Tensor, float]:
        if len(rows) != probe.n:
            raise ValueError(
                f"{site}: {len(rows)} rows of {probe.n} probes, but a fingerprint has one row per input: "
                "rows='flatten', 'mean', 'cls' or 'last'"
            )
        return *_gram(rows), torch.finfo(rows.dtype).eps

    with source.opened():
        made = source.read(Chunk(probe.batch, 0, probe.n), sink)
        sites, no_rows = tuple(source.per_input()), source.left_out
        model = source.begun_digest()  # now, while a GPU is still busy with the pass
        mixing = source.mixing(probe.batch)
    step = max(1, TOGETHER // probe.n**2)
    parts = [_vectors(made[k : k + step]) for k in range(0, len(made), step)]
    vectors, lengths = (torch.cat(some) for some in zip(*parts, strict=True))
    digits = tuple(each[2] for each in made)
    return GramVectors(source.name, sites, vectors, model, AsyncCopy(lengths), digits, no_rows, mixing)


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


def _vectors(made: Sequence[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor]:
    """Vectors (k, n (n − 1) / 2) of length 1, and of each four lengths (k, 4), which say whether it means anything.

    The norm of the U-centred matrix, of the centred one, and squared how far rows are from their mean and the first
    of them from zero.
    """
    grams, first = _stacked([gram for gram, *_ in made]), _stacked([length for _, length, _ in made])
    centred = u_centred(grams)
    norm = centred.flatten(1).norm(dim=1)
    whole = double_centred(grams).flatten(1).norm(dim=1)
    spread = centred_diagonal(grams).mean(1)
    i, j = torch.triu_indices(grams.shape[1], grams.shape[1], 1, device=grams.device)
    vectors = centred[:, i, j] * (2**0.5 / norm[:, None])
    return vectors.float(), torch.stack([norm, whole, spread, first], dim=1)


# Kind "weights": no data; a network without its activation functions, tried on seeded random inputs
#
# For independent Gaussian u and v the mean of (uᵀHKHv)(uᵀHLHv) is ⟨HKH, HLH⟩, with K = W Wᵀ of the linear map W of a
# site and H the centring over the entries of the input: vectors of uᵀHKHv over many pairs have a cosine that tends to
# wCKA. Pairs are all those within blocks of inputs, far more than as many inputs would give as pairs of their own.

INPUTS = FEWEST  # random ones
MAP_LOST = 1e-12  # of the products' norm: what float64 leaves where centring takes all away


@products()  # a forward is how weights are read here, and the caller's autocast is not for it
def linear_vectors(
    source: Network, given: Probe, *, seed: int, inputs: int = INPUTS
) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """By site, in execution order, the vector (pairs,) of length 1 in float64; why other sites have none; and notes.

    ValueError (NotLinear where that is why) if the model is no linear map of its input without its activations.
    """
    check_weights(source)
    linear = look(source, input_shape(given.batch))
    grams = probe(linear, inputs, seed)
    block = grams[True].shape[-1]
    i, j = torch.triu_indices(block, block, 1)
    centred, plain = (grams[kind][..., i, j].transpose(0, 1).flatten(1) for kind in (True, False))
    left = centred.norm(dim=1) > MAP_LOST * plain.norm(dim=1)
    sites = dict(zip(linear.side.sites, left.tolist(), strict=True))
    if not any(sites.values()):
        raise ValueError("its linear map gives the same for each entry of the input: nothing is left to compare")
    why = "as a linear map gives the same for each entry of the input"
    kept = [site for site, there in sites.items() if there]
    vectors = dict(zip(kept, unit(centred[left]), strict=True))
    return vectors, {site: why for site in sites if site not in kept}, linear.notes


def input_shape(batch: Any) -> tuple[int, ...] | None:
    """Of one input, where the model takes one tensor."""
    args, _ = model_arguments(batch)
    first = args[0] if len(args) == 1 else None
    return tuple(first.shape[1:]) if isinstance(first, Tensor) and first.ndim > 1 else None


# Kind "atoms": the filter atoms of each layer; only models that share their coefficients have comparable ones


def atom_vectors(model: nn.Module, size: int, seed: int) -> tuple[str, dict[str, Tensor]]:
    """The digest of the coefficients, and of each layer the atoms as one vector (size,) of length 1."""
    layers = atom_layers(unwrap(model))
    if not layers:
        raise ValueError("the model has no layer of filter atoms")
    found = {}
    for name, layer in layers.items():
        atoms = layer.atoms.detach().cpu().double().flatten()
        largest = atoms.abs().max()
        if not bool(torch.isfinite(largest)) or not bool(largest > 0):
            raise ValueError(f"the atoms of {name} are {'all 0' if not bool(largest) else 'NaN or infinite'}")
        # By the largest first: the squares of very small or large numbers are 0 or infinite.
        found[name] = project((atoms / largest)[None], size, seed)[0]
    shared = {name: (tuple(layer.atoms.shape), layer.coefficients.detach().float()) for name, layer in layers.items()}
    return digest_of(shared), found
