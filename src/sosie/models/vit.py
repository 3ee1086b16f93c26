"""A small vision transformer, written out so that every part can be hooked."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .registry import State, architecture, count_blocks, dimension

HEAD_WIDTH = 64


class Attention(nn.Module):
    """Multi-head self-attention; `weights` gives the attention maps, `project` takes the mixed values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.weights = nn.Softmax(dim=-1)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        mixed = self.weights(scores) @ value
        return self.project(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, heads, tokens, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Mlp(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.gelu(self.fc1(x)))


class TransformerBlock(nn.Module):
    """Pre-norm: x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """patches, a class token and learned positions, `blocks.N`, norm, and a head on the class token."""

    def __init__(
        self,
        *,
        classes: int,
        size: int,
        patch: int,
        depth: int,
        width: int,
        heads: int,
        hidden: int,
        channels: int,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self._initialise()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if tokens.shape[1] + 1 != self.positions.shape[1]:
            raise ValueError(
                f"images of shape {tuple(x.shape)} give {tokens.shape[1]} patches, "
                f"the network was built for {self.positions.shape[1] - 1}: build it with size={x.shape[-1]}"
            )
        x = torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])

    def _initialise(self) -> None:
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.trunc_normal_(self.class_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)


def _read_options(state: State) -> dict[str, Any]:
    patch, tokens = dimension(state, "patches.weight", 2), dimension(state, "positions", 1)
    return {
        "classes": dimension(state, "head.weight", 0),
        "size": patch and tokens and patch * math.isqrt(tokens - 1),
        "patch": patch,
        "depth": count_blocks(state, "blocks"),
        "width": dimension(state, "class_token", 2),
        "hidden": dimension(state, "blocks.0.mlp.fc1.weight", 0),
        "channels": dimension(state, "patches.weight", 1),
    }


@architecture(_read_options)
def vit(
    classes: int = 10,
    size: int = 32,
    patch: int = 4,
    depth: int = 6,
    width: int = 192,
    heads: int | None = None,
    hidden: int | None = None,
    channels: int = 3,
) -> nn.Module:
    """A vision transformer (Dosovitskiy et al. 2021) for CIFAR; heads of width 64, MLPs four times as wide.

    The number of heads cannot be read from a weights file: give it where it is not width / 64.
    """
    heads = heads or max(1, width // HEAD_WIDTH)
    if width % heads:
        raise ValueError(f"width {width} cannot be split into {heads} heads")
    if size % patch:
        raise ValueError(f"images of side {size} cannot be cut into patches of side {patch}")
    return VisionTransformer(
        classes=classes, size=size, patch=patch, depth=depth, width=width, heads=heads,
        hidden=hidden or 4 * width, channels=channels,
    )  # fmt: skip
