"""Corruptions of images: noise, blur, weather and the like, each at five severities; seeded by the image's number."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..checks import nearest, whole_number
from .draws import derived, normals, poisson, uniforms
from .images import check_images

DEFAULT = 3  # the strength of MNIST-C


@dataclass(frozen=True)
class Draws:
    """The random numbers of each image, whatever the batch it is in; `part` gives further ones."""

    seed: Tensor
    index: Tensor

    def part(self, number: int) -> Draws:
        return Draws(derived(self.seed, number), self.index)

    def uniforms(self, *shape: int) -> Tensor:
        return uniforms(self.seed, self.index, torch.Size(shape).numel()).reshape(-1, *shape)

    def normals(self, *shape: int) -> Tensor:
        return normals(self.seed, self.index, torch.Size(shape).numel()).reshape(-1, *shape)

    def poisson(self, rates: Tensor) -> Tensor:
        return poisson(self.seed, self.index, rates)

    def signs(self, *shape: int) -> Tensor:
        return 2 * (self.uniforms(*shape) < 0.5).double() - 1


Change = Callable[[Tensor, Any, Draws], Tensor]


@dataclass(frozen=True)
class Corruption:
    """A change to images (n, channels, height, width) in [0, 1], with its strength at severities 1 to 5."""

    name: str
    change: Change
    strengths: tuple[Any, Any, Any, Any, Any]

    def __call__(
        self, images: Tensor, *, severity: int = DEFAULT, seed: int = 0, index: Tensor | None = None
    ) -> Tensor:
        """Return the corrupted images (see `corrupt`); `index` numbers the images, from 0 on if None."""
        severity = whole_number(severity, f"{self.name}: severity", least=1, most=5)
        x = _floats(images, self.name)
        index = torch.arange(len(images), device=images.device) if index is None else index.to(images.device)
        if index.shape != images.shape[:1]:
            raise ValueError(f"need one number per image: {len(images)} images, numbers {tuple(index.shape)}")
        if not x.numel():
            return images.clone()
        draws = Draws(derived(seed, zlib.crc32(self.name.encode())), index)
        changed = self.change(x, self.strengths[severity - 1], draws).to(x.dtype).clamp(0, 1)
        return changed.mul(255).round().byte() if images.dtype == torch.uint8 else changed.to(images.dtype)


CORRUPTIONS: dict[str, Corruption] = {}


def define(*strengths: Any) -> Callable[[Change], Change]:
    """Register a change under its own name, with its five strengths."""

    def enter(change: Change) -> Change:
        CORRUPTIONS[change.__name__] = Corruption(change.__name__, change, strengths)
        return change

    return enter


def corrupt(images: Tensor, name: str, *, severity: int = DEFAULT, seed: int = 0) -> Tensor:
    """Corrupt images (n, channels, height, width): uint8 stay uint8, floats in [0, 1] stay floats.

    `severity` 1 to 5; 3 is as strong as in MNIST-C (Mu and Gilmer 2019), lengths being in 28ths of the shorter side.
    Random numbers of image i depend only on `seed` and i.
    """
    if name not in CORRUPTIONS:
        raise ValueError(f"no corruption is called {name!r}{nearest(name, CORRUPTIONS)}")
    return CORRUPTIONS[name](images, severity=severity, seed=seed)


def unit(x: Tensor) -> float:
    """Return the length of a pixel of a 28 × 28 image."""
    return min(x.shape[-2:]) / 28


def _floats(images: Tensor, name: str) -> Tensor:
    check_images(images, name, "normalise afterwards")
    if images.dtype == torch.uint8:
        return images.float() / 255
    return images.detach() if images.dtype == torch.float64 else images.detach().float()


# Smoothing and interpolation


def smoothed(x: Tensor, sigma: float) -> Tensor:
    """Convolve with a Gaussian of standard deviation `sigma` in pixels; edges are replicated."""
    reach = math.ceil(4 * sigma)
    weights = torch.exp(-(torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device) ** 2) / (2 * sigma**2))
    weights = weights / weights.sum()
    flat = x.reshape(-1, 1, *x.shape[-2:])
    flat = functional.conv2d(functional.pad(flat, (0, 0, reach, reach), "replicate"), weights[None, None, :, None])
    flat = functional.conv2d(functional.pad(flat, (reach, reach, 0, 0), "replicate"), weights[None, None, None, :])
    return flat.reshape(x.shape)


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each pixel, (1, height, 1) and (1, 1, width)."""
    rows, columns = (torch.arange(size, dtype=torch.float64, device=x.device) for size in x.shape[-2:])
    return rows[None, :, None], columns[None, None, :]


def read_at(x: Tensor, rows: Tensor, columns: Tensor, beyond: Literal["zeros", "border"] = "zeros") -> Tensor:
    """Return the values at these places (n, height, width) of each image, interpolated linearly."""
    height, width = x.shape[-2:]
    rows, columns = torch.broadcast_tensors((2 * rows + 1) / height - 1, (2 * columns + 1) / width - 1)
    grid = torch.stack([columns, rows], -1).to(x.dtype).expand(len(x), -1, -1, -1)
    return functional.grid_sample(x, grid, padding_mode=beyond, align_corners=False)


# Sensor noise


@define(12.0, 6.0, 3.0, 1.5, 0.75)
def shot_noise(x: Tensor, photons: float, draws: Draws) -> Tensor:
    """Few photons: Poisson counts whose mean is `photons` at full brightness."""
    return draws.poisson(x * photons) / photons


@define(0.05, 0.1, 0.17, 0.27, 0.4)
def impulse_noise(x: Tensor, share: float, draws: Draws) -> Tensor:
    """A share of the values is set to black or white, equally often."""
    u = draws.uniforms(*x.shape[1:])
    return torch.where(u < share / 2, torch.zeros_like(x), torch.where(u >= 1 - share / 2, torch.ones_like(x), x))


# Blur by glass or motion


@define((0.4, 1, 1), (0.55, 1, 2), (0.7, 1, 2), (0.9, 2, 2), (1.2, 3, 2))
def glass_blur(x: Tensor, strength: tuple[float, int, int], draws: Draws) -> Tensor:
    """Smoothed; then, repeatedly, half of the pixels are taken from a place nearby; then smoothed again."""
    sigma, reach, rounds = strength[0] * unit(x), max(1, round(strength[1] * unit(x))), strength[2]
    n, _, height, width = x.shape
    rows, columns = (place.long() for place in places(x))
    image = torch.arange(n, device=x.device)[:, None, None]
    x = smoothed(x, sigma)
    for k in range(rounds):
        u = draws.part(k).uniforms(3, height, width)
        moved = torch.where(u[:, :1] < 0.5, ((2 * reach + 1) * u[:, 1:]).floor().long() - reach, 0)
        down = (rows + moved[:, 0]).clamp(0, height - 1)
        across = (columns + moved[:, 1]).clamp(0, width - 1)
        x = x[image, :, down, across].movedim(-1, 1)
    return smoothed(x, sigma)


@define(1.5, 2.2, 3.0, 4.5, 6.0)
def motion_blur(x: Tensor, length: float, draws: Draws) -> Tensor:
    """Smeared to one side, at up to 45° from the horizontal, fading as half a Gaussian."""
    length = length * unit(x)
    angle = (draws.uniforms(1, 1) - 0.5) * (math.pi / 2)
    rows, columns = places(x)
    total, weights = torch.zeros_like(x), 0.0
    for distance in range(math.ceil(3 * length) + 1):
        weight = math.exp(-((distance / length) ** 2) / 2)
        moved = read_at(x, rows + distance * angle.sin(), columns + distance * angle.cos(), beyond="border")
        total, weights = total + weight * moved, weights + weight
    return total / weights


# Affine changes about the centre; outside the image is black


def _mapped(x: Tensor, matrix: list[list[Tensor | float]], shift: tuple[Tensor | float, Tensor | float]) -> Tensor:
    """Read each pixel where matrix and shift lead, in (row, column) from the centre."""
    middle = [(size - 1) / 2 for size in x.shape[-2:]]
    rows, columns = (place - centre for place, centre in zip(places(x), middle, strict=True))
    down, across = (a * rows + b * columns + c + m for (a, b), c, m in zip(matrix, shift, middle, strict=True))
    return read_at(x, torch.as_tensor(down).expand(len(x), -1, -1), torch.as_tensor(across).expand(len(x), -1, -1))


@define(0.2, 0.3, 0.4, 0.6, 0.8)
def shear(x: Tensor, slope: float, draws: Draws) -> Tensor:
    """Vertical lines lean to the left or to the right."""
    return _mapped(x, [[1.0, 0.0], [slope * draws.signs(1, 1), 1.0]], (0.0, 0.0))


@define(0.9, 0.8, 0.7, 0.6, 0.5)
def scale(x: Tensor, factor: float, draws: Draws) -> Tensor:
    """The image shrinks."""
    return _mapped(x, [[1 / factor, 0.0], [0.0, 1 / factor]], (0.0, 0.0))


@define(0.2, 0.3, 0.4, 0.6, 0.8)
def rotate(x: Tensor, angle: float, draws: Draws) -> Tensor:
    """The image is rotated to the left or to the right, by an angle in radians."""
    turned = angle * draws.signs(1, 1)
    return _mapped(x, [[turned.cos(), turned.sin()], [-turned.sin(), turned.cos()]], (0.0, 0.0))


@define(1.0, 2.0, 3.0, 4.0, 5.0)
def translate(x: Tensor, distance: float, draws: Draws) -> Tensor:
    """The image is shifted up or down, and to the left or to the right."""
    signs = distance * unit(x) * draws.signs(2, 1, 1)
    return _mapped(x, [[1.0, 0.0], [0.0, 1.0]], (signs[:, 0], signs[:, 1]))


# Light and weather: brightness, fog, spatter

LARGEST, OCTAVES = 64, 7  # of fog: the largest clouds in pixels of a 28 × 28 image, and the number of halvings
MUD = 63 / 255


@define(0.1, 0.3, 0.5, 0.6, 0.7)
def brightness(x: Tensor, more: float, draws: Draws) -> Tensor:
    """The largest channel of each pixel is raised; hue and saturation stay the same."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp(max=1)
    return torch.where(value > 0, x * raised / value, raised)  # black has no hue and becomes grey


@define(1.0, 2.0, 3.0, 4.0, 5.0)
def fog(x: Tensor, density: float, draws: Draws) -> Tensor:
    """Clouds of every size are added, and the image is scaled so that its brightest pixel stays in range."""
    brightest = x.amax((1, 2, 3), keepdim=True)
    total = brightest + density
    return (x + density * _clouds(x, draws)) * brightest / total


def _clouds(x: Tensor, draws: Draws) -> Tensor:
    """Return noise in [0, 1] whose amplitude halves with its size, stretched so that both ends occur."""
    rows, columns = places(x)
    clouds = torch.full((len(x), 1, *x.shape[-2:]), 0.5, dtype=x.dtype, device=x.device)
    for k in range(OCTAVES):
        size = LARGEST * unit(x) / 2**k
        height, width = (math.ceil(extent / size) + 2 for extent in x.shape[-2:])
        start = draws.part(2 * k).uniforms(2, 1, 1)  # where the image lies among the knots
        knots = draws.part(2 * k + 1).uniforms(1, height, width).to(x.dtype) - 0.5
        layer = read_at(knots, rows / size + start[:, 0], columns / size + start[:, 1], "border")
        clouds = clouds + layer / 2 ** (k + 1)
    return (clouds * (math.pi / 2)).sin() ** 2


@define(0.6, 0.3, 0.0, -0.2, -0.4)
def spatter(x: Tensor, threshold: float, draws: Draws) -> Tensor:
    """Spots of grey mud where smooth noise exceeds a threshold, in standard deviations."""
    layer = smoothed(draws.normals(1, *x.shape[-2:]).to(x.dtype), unit(x))
    level = threshold / (2 * math.sqrt(math.pi) * unit(x))  # white noise, smoothed over s pixels: 1 / (2 √π s)
    mud = smoothed((layer > level).to(x.dtype), 1.5 * unit(x))
    mud = torch.where(mud < 0.8, torch.zeros_like(mud), mud)  # the rims are too thin to see
    return x * (1 - mud) + MUD * mud


# Drawings over the image: stripes, a dotted line, a zigzag

THICKNESS = (1.2, 1.7, 2.3, 3.0, 4.0)


@define(1 / 8, 3 / 16, 1 / 4, 5 / 16, 3 / 8)
def stripe(x: Tensor, share: float, draws: Draws) -> Tensor:
    """The left and the right edge are inverted."""
    width, x = round(share * x.shape[-1]), x.clone()
    x[..., :width] = 1 - x[..., :width]
    x[..., x.shape[-1] - width :] = 1 - x[..., x.shape[-1] - width :]
    return x


@define(*THICKNESS)
def dotted_line(x: Tensor, thickness: float, draws: Draws) -> Tensor:
    """A white line from the left to the right edge, at random heights, two pixels in four."""
    rows, columns = places(x)
    height, width = x.shape[-2:]
    ends = (draws.uniforms(2, 1, 1) * max(1, height - 1)).floor()
    line = ends[:, 0] + (ends[:, 1] - ends[:, 0]) * columns / max(1, width - 1)
    shown = (columns / (2 * unit(x))).floor() % 2 == 1
    return x + (_ink(rows - line, thickness * unit(x)) * shown)[:, None]


@define(*zip((1.0, 1.5, 2.0, 3.0, 4.0), THICKNESS, strict=True))
def zigzag(x: Tensor, strength: tuple[float, float], draws: Draws) -> Tensor:
    """A white zigzag across, slightly tilted."""
    swing, thickness, step = strength[0] * unit(x), strength[1] * unit(x), 2 * unit(x)
    rows, columns = places(x)
    height, width = x.shape[-2:]
    first, last = width / 14, width * 25 / 28
    u = draws.uniforms(2, 1, 1)
    start = (u[:, 0] * max(1, height - 1)).floor()
    angle = torch.atan2((u[:, 1] * 10).floor() * unit(x) - 5 * unit(x), torch.tensor(last - first))
    along = (columns - first) * angle.cos() + (rows - start) * angle.sin()
    beside = (rows - start) * angle.cos() - (columns - first) * angle.sin()
    # The wave rises to the swing after one step, falls to minus the swing after three, and so on.
    wave = swing * (1 - (((along / step - 3) % 4) - 2).abs())
    shown = (columns >= first) & (columns < last)
    return x + (_ink(beside - wave, thickness) * shown)[:, None]


def _ink(distance: Tensor, thickness: float) -> Tensor:
    """White that fades from the middle: 1 + log(1 − distance / thickness), black where that is negative."""
    inside = (1 - distance.abs() / thickness).clamp(min=0)
    return (1 + inside.log()).clamp(min=0)


# Edges (Canny 1986)

WEAK, STRONG = 0.1, 0.2  # of Sobel's differences of an image in [0, 1]


@define(0.6, 0.8, 1.0, 1.4, 2.0)
def canny_edges(x: Tensor, sigma: float, draws: Draws) -> Tensor:
    """White edges on black: Canny's detector after smoothing, on the mean of the channels."""
    grey = smoothed(x.mean(1, keepdim=True), sigma * unit(x))
    down, across = _slopes(grey)
    steepness = (down**2 + across**2).sqrt()
    strongest = steepness.amax((1, 2, 3), keepdim=True)
    kept = (steepness >= WEAK) & _is_ridge(steepness, down, across) & (strongest > 0)
    kept[..., [0, -1], :] = False
    kept[..., :, [0, -1]] = False
    return _connected(kept, kept & (steepness >= STRONG)).to(x.dtype).expand_as(x)


def _slopes(grey: Tensor) -> tuple[Tensor, Tensor]:
    """Return Sobel's differences, down and across."""
    difference = torch.tensor([-1.0, 0.0, 1.0], dtype=grey.dtype, device=grey.device)
    weights = torch.tensor([1.0, 2.0, 1.0], dtype=grey.dtype, device=grey.device)
    kernels = torch.stack([torch.outer(difference, weights), torch.outer(weights, difference)])[:, None]
    both = functional.conv2d(functional.pad(grey, (1, 1, 1, 1), "replicate"), kernels)
    return both[:, :1], both[:, 1:]


def _is_ridge(steepness: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Return where the slope is at least as steep as one pixel further uphill and downhill."""
    rows, columns = places(steepness)
    scale = torch.maximum(down.abs(), across.abs())
    flat = scale == 0
    down, across = (torch.where(flat, scale, part / scale.masked_fill(flat, 1)) for part in (down, across))
    ridge = ~flat
    for side in (-1, 1):
        there = read_at(steepness, rows + side * down[:, 0], columns + side * across[:, 0])
        # With a tolerance for rounding, or plateaus of two pixels would vanish on some devices.
        ridge &= steepness >= there - 1e-6
    return ridge


def _connected(kept: Tensor, strong: Tensor) -> Tensor:
    """Return the kept pixels that are connected, through kept pixels, to a strong one."""
    while True:
        grown = kept & (functional.max_pool2d(strong.float(), 3, stride=1, padding=1) > 0)
        if torch.equal(grown, strong):
            return strong
        strong = grown
