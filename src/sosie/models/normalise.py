"""A model's own input normalisation, applied to images in [0, 1]."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
NAMED = {
    "imagenet": "mean .485 .456 .406 std .229 .224 .225",
    "cifar": "mean .4914 .4822 .4465 std .2023 .1994 .2010",
}


@dataclass(frozen=True)
class Normalise:
    """(x - mean) / std per channel; one number serves every channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"one mean and one std per channel, got {len(self.mean)} and {len(self.std)}")
        if any(not s > 0 for s in self.std):
            raise ValueError(f"every std must be above 0, got {self.std}")

    def __call__(self, x: Tensor) -> Tensor:
        """Images (…, channels, height, width) in floating point, on any device."""
        if not x.is_floating_point():
            raise TypeError(f"normalisation wants images in [0, 1], got {x.dtype}: divide by 255 first")
        if x.dim() < 3 or len(self.mean) not in (1, x.shape[-3]):
            raise ValueError(f"normalisation of {len(self.mean)} channels does not fit images {tuple(x.shape)}")
        mean = x.new_tensor(self.mean).view(-1, 1, 1)
        std = x.new_tensor(self.std).view(-1, 1, 1)
        return (x - mean) / std


def parse_normalisation(text: str) -> Normalise | None:
    """Read 'ImageNet mean/std', 'CIFAR mean a b c std d e f', 'mean … std …', '(x*255-127)/128' or 'none'."""
    plain = text.strip().lower()
    if plain in ("none", ""):
        return None
    name = re.fullmatch(r"(imagenet|cifar)(?:-?10)?(?:\s+mean/std)?", plain)
    if name:
        plain = NAMED[name[1]]
    lists = re.fullmatch(rf"(?:\w+\s+)?mean((?:[\s,]+{NUMBER})+)[\s,]+std((?:[\s,]+{NUMBER})+)", plain)
    if lists:
        mean, std = (tuple(float(number) for number in re.findall(NUMBER, part)) for part in lists.groups())
        return Normalise(mean, std)
    affine = re.fullmatch(rf"\(x\s*\*\s*({NUMBER})\s*-\s*({NUMBER})\)\s*/\s*({NUMBER})", plain)
    if affine:
        scale, shift, divisor = map(float, affine.groups())
        if scale > 0 and divisor > 0:
            return Normalise((shift / scale,), (divisor / scale,))
    raise ValueError(
        f"do not know the normalisation {text!r}; known: 'ImageNet mean/std', 'mean a b c std d e f', "
        "'(x*255-127)/128', 'none'. State it in the specification, as in resnet20(normalise='none')@file"
    )
