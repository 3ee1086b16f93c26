"""Kind "weights": no data; a network without its activation functions, tried on seeded random inputs.

For independent Gaussian u and v the mean of (uᵀHKHv)(uᵀHLHv) is ⟨HKH, HLH⟩, with K = W Wᵀ of the linear map W of a
site and H the centring over the entries of the input: vectors of uᵀHKHv over many pairs have a cosine that tends to
wCKA. Pairs are all those within blocks of inputs, far more than as many inputs would give as pairs of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...capture import model_arguments
from ...engine.weights.probing import FEWEST, probe
from ...engine.weights.sources import WeightSource, check_weights
from ...process_state import products
from .probe import Probe
from .projection import unit

INPUTS = FEWEST  # random ones
LOST = 1e-12  # of the products' norm: what float64 leaves where centring takes all away


@dataclass(frozen=True)
class LinearVectors:
    """The sites in execution order, their vectors of length 1, and the sites that have none with the reason."""

    sites: tuple[str, ...]
    vectors: Tensor  # (sites, pairs), float64
    left_out: dict[str, str]
    notes: tuple[str, ...]


@products()  # a forward is how weights are read here, and the caller's autocast is not for it
def linear_vectors(source: WeightSource, given: Probe, *, seed: int, inputs: int = INPUTS) -> LinearVectors:
    """ValueError (NotLinear where that is why) if the model is no linear map of its input without its activations."""
    check_weights(source)
    source.look(input_shape(given.batch))
    probed = probe(source, inputs, seed)
    block = probed.centred.shape[-1]
    i, j = torch.triu_indices(block, block, 1)
    centred, plain = (grams[..., i, j].transpose(0, 1).flatten(1) for grams in (probed.centred, probed.plain))
    left = centred.norm(dim=1) > LOST * plain.norm(dim=1)
    sites = source.known.sites
    left_out = {
        site: "as a linear map gives the same for each entry of the input"
        for site, there in zip(sites, left.tolist(), strict=True)
        if not there
    }
    kept = tuple(site for site in sites if site not in left_out)
    if not kept:
        raise ValueError("its linear map gives the same for each entry of the input: nothing is left to compare")
    return LinearVectors(kept, unit(centred[left]), left_out, source.notes)


def input_shape(batch: Any) -> tuple[int, ...] | None:
    """Of one input, where the model takes one tensor."""
    args, _ = model_arguments(batch)
    first = args[0] if len(args) == 1 else None
    return tuple(first.shape[1:]) if isinstance(first, Tensor) and first.ndim > 1 else None
