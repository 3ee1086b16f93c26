"""A small vision transformer, written out so that every part can be hooked."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .registry import State, architecture, count_blocks, dimension

HEAD_WIDTH = 64
HIGHEST = 60.0  # what a dropped key's score may exceed the best kept one by: e^60 is far, and finite in float32


class AttentionWeights(nn.Softmax):
    """Softmax over the keys; with a policy, of the keys that it keeps.

    `policy` (batch, tokens) is 1 for tokens that count and 0 for those that are dropped. A dropped token still sees
    itself, so that it is computed as if it had stayed (Rao et al. 2021); kept tokens do not see it. The gradient with
    respect to the policy is that of the quotient, where torch's own softmax of −inf would have none.
    """

    def forward(self, scores: Tensor, policy: Tensor | None = None) -> Tensor:
        if policy is None:
            return super().forward(scores)
        own = torch.eye(policy.shape[-1], dtype=policy.dtype, device=policy.device)
        seen = policy[:, None, None, :]
        seen = seen + (1 - seen) * own  # (batch, 1, queries, keys)
        best = scores.detach().masked_fill(seen.detach() == 0, -math.inf).amax(-1, keepdim=True)
        # Above 0 are dropped keys only, which weigh 0 times this: without a bound that could be 0 times infinity.
        raised = (scores - best).clamp(max=HIGHEST).exp() * seen
        return (raised / raised.sum(-1, keepdim=True)).to(scores.dtype)


class Attention(nn.Module):
    """Multi-head self-attention; `weights` gives the attention maps, `project` takes the mixed values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.weights = AttentionWeights(dim=-1)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor, policy: Tensor | None = None) -> Tensor:
        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        mixed = self.weights(scores, policy) @ value
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

    def forward(self, x: Tensor, policy: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), policy)
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
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.trunc_normal_(self.class_token, std=0.02)
        initialise_linear(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.blocks(self.embed(x)))

    def embed(self, x: Tensor) -> Tensor:
        """Images to tokens (batch, 1 + patches, width), the class token first."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if tokens.shape[1] + 1 != self.positions.shape[1]:
            raise ValueError(
                f"images of shape {tuple(x.shape)} give {tokens.shape[1]} patches, "
                f"the network was built for {self.positions.shape[1] - 1}: build it with size={x.shape[-1]}"
            )
        return torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1) + self.positions

    def answer(self, tokens: Tensor) -> Tensor:
        """Logits from the class token of the last block."""
        return self.head(self.norm(tokens)[:, 0])


def initialise_linear(model: nn.Module) -> None:
    """Small normal weights and no biases, as vision transformers start."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


def read_options(state: State) -> dict[str, Any]:
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


@architecture(read_options)
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
    return VisionTransformer(**sizes(classes, size, patch, depth, width, heads=heads, hidden=hidden, channels=channels))


def sizes(
    classes: int, size: int, patch: int, depth: int, width: int, *, heads: int | None, hidden: int | None, channels: int
) -> dict[str, int]:
    """What a VisionTransformer is built from, checked, with what was left open."""
    heads = heads or max(1, width // HEAD_WIDTH)
    if width % heads:
        raise ValueError(f"width {width} cannot be split into {heads} heads")
    if size % patch:
        raise ValueError(f"images of side {size} cannot be cut into patches of side {patch}")
    return {
        "classes": classes, "size": size, "patch": patch, "depth": depth, "width": width, "heads": heads,
        "hidden": hidden or 4 * width, "channels": channels,
    }  # fmt: skip
