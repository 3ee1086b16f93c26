"""Random numbers that depend only on the seed and the number of an input, not on its batch or the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood 2014): a counter, mixed by two multiplications that wrap around.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def row_bits(seed: int, index: Tensor) -> Tensor:
    """Return 64 pseudo-random bits as an int64 for each row index under a seed."""
    mixed_seed = int(_mix(_tensor(seed) + _signed(_STEP)))  # on the CPU, so that a GPU waits for no copy
    return _mix(_mix(index * _signed(_STEP)) ^ mixed_seed)


def derived(seed: int | Tensor, part: int) -> Tensor:
    """Return a seed made of a seed and a number, such as that of a step or a use."""
    return _mix(_mix(_tensor(seed) + _signed(_STEP)) + _signed(_STEP * (part + 1)))


def uniforms(seed: int | Tensor, index: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return numbers in [0, 1), (*index.shape, count), for each `index` under `seed`; the two broadcast.

    They are multiples of 2⁻³² (of 2⁻²⁴ unless in float64): each counter gives two of them.
    """
    device = index.device
    key = _mix(_mix(_tensor(seed).to(device) + _signed(_STEP)) + _mix(index.long() * _signed(_STEP)))
    places = torch.arange(1, count // 2 + count % 2 + 1, device=device) * _signed(_STEP)
    halves = _mix(key[..., None] + places).view(torch.int32)[..., :count]
    if dtype == torch.float64:
        return halves.double().mul_(2.0**-32).add_(0.5)
    return (halves >> 8).float().mul_(2.0**-24).add_(0.5).to(dtype)


def normals(seed: int | Tensor, index: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return standard normal numbers, (*index.shape, count)."""
    # The middle of each step, since a uniform 0 would become minus infinity.
    return torch.special.ndtri(uniforms(seed, index, count).add_(2.0**-33)).to(dtype)


def in_sphere(seed: int | Tensor, index: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return points uniform in the unit ball of `count` dimensions, (*index.shape, count)."""
    directions = normals(seed, index, count)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    return (directions * uniforms(derived(seed, count), index, 1) ** (1 / count)).to(dtype)


def poisson(seed: int | Tensor, index: Tensor, rates: Tensor) -> Tensor:
    """Return Poisson counts with these rates (n, …), by inversion of one uniform number each."""
    drawn = uniforms(seed, index, math.prod(rates.shape[1:])).reshape(rates.shape)
    chance = torch.exp(-rates.double())
    below, counts, k = chance.clone(), torch.zeros_like(chance), 0
    # Rounding can leave the sum of chances just below a number near 1: stop after the last chance.
    while bool((more := (drawn >= below) & ((chance > 0) & ((k < rates) | (chance > 1e-18)))).any()):
        k += 1
        counts += more
        chance = chance * rates / k
        below = below + chance
    return counts


def _mix(z: Tensor) -> Tensor:
    """Mix in place, since memory is the cost."""
    z.bitwise_xor_(shifted(z, 30)).mul_(_signed(_FIRST))
    z.bitwise_xor_(shifted(z, 27)).mul_(_signed(_SECOND))
    return z.bitwise_xor_(shifted(z, 31))


def shifted(z: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros; torch's integers are signed and would fill with the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _tensor(seed: int | Tensor) -> Tensor:
    return seed if isinstance(seed, Tensor) else torch.tensor(_signed(seed))


def _signed(number: int) -> int:
    """Return the number modulo 2⁶⁴ as the signed number with the same bits."""
    return (number + 2**63) % 2**64 - 2**63
