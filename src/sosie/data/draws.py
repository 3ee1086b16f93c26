"""Random numbers that belong to an input: the same for input i under one seed, whatever the batch or the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Steele, Lea and Flood (2014), SplitMix64: a counter, finished by two multiplications that wrap around.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def row_bits(seed: int, index: Tensor) -> Tensor:
    """64 pseudo-random bits, as an int64, for each row index under a seed: the same on every device."""
    own = int(_mix(_tensor(seed) + _signed(_STEP)))  # on the CPU, so that a GPU has no copy to wait for
    return _mix(_mix(index * _signed(_STEP)) ^ own)


def derived(seed: int | Tensor, part: int) -> Tensor:
    """A seed made of a seed and a number: one for each step, or for each use, of the same seed."""
    return _mix(_mix(_tensor(seed) + _signed(_STEP)) + _signed(_STEP * (part + 1)))


def uniforms(seed: int | Tensor, index: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers in [0, 1): (*index.shape, count), those of input `index` under `seed`; the two broadcast.

    In steps of 2⁻³² (of 2⁻²⁴ unless in float64): each counter gives two of them.
    """
    device = index.device
    key = _mix(_mix(_tensor(seed).to(device) + _signed(_STEP)) + _mix(index.long() * _signed(_STEP)))
    places = torch.arange(1, count // 2 + count % 2 + 1, device=device) * _signed(_STEP)
    halves = _mix(key[..., None] + places).view(torch.int32)[..., :count]
    if dtype == torch.float64:
        return halves.double().mul_(2.0**-32).add_(0.5)
    return (halves >> 8).float().mul_(2.0**-24).add_(0.5).to(dtype)


def normals(seed: int | Tensor, index: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers: (*index.shape, count)."""
    # The middle of each step, since a uniform 0 would be minus infinity.
    return torch.special.ndtri(uniforms(seed, index, count).add_(2.0**-33)).to(dtype)


def in_sphere(seed: int | Tensor, index: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Points uniform in the unit ball of `count` dimensions: (*index.shape, count)."""
    directions = normals(seed, index, count)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    return (directions * uniforms(derived(seed, count), index, 1) ** (1 / count)).to(dtype)


def poisson(seed: int | Tensor, index: Tensor, rates: Tensor) -> Tensor:
    """Poisson counts with the given rates (n, …), by inversion: one uniform number each."""
    drawn = uniforms(seed, index, math.prod(rates.shape[1:])).reshape(rates.shape)
    chance = torch.exp(-rates.double())
    below, counts, k = chance.clone(), torch.zeros_like(chance), 0
    # Rounding can leave the sum of chances just under a number next to 1: past the last chance, stop.
    while bool((more := (drawn >= below) & ((chance > 0) & ((k < rates) | (chance > 1e-18)))).any()):
        k += 1
        counts += more
        chance = chance * rates / k
        below = below + chance
    return counts


def _mix(z: Tensor) -> Tensor:
    """In place: memory is what this costs."""
    z.bitwise_xor_(shifted(z, 30)).mul_(_signed(_FIRST))
    z.bitwise_xor_(shifted(z, 27)).mul_(_signed(_SECOND))
    return z.bitwise_xor_(shifted(z, 31))


def shifted(z: Tensor, by: int) -> Tensor:
    """Right by that many bits, zeros coming in: torch has signed whole numbers, whose sign would come in."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _tensor(seed: int | Tensor) -> Tensor:
    return seed if isinstance(seed, Tensor) else torch.tensor(_signed(seed))


def _signed(number: int) -> int:
    """Modulo 2⁶⁴, as the signed number with the same bits."""
    return (number + 2**63) % 2**64 - 2**63
