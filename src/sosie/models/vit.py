"""Vision transformers made of modules that can all be hooked: plain, and with dropped tokens (DynamicViT)."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..checks import one_of, positive
from ..linalg import centred_grams, u_centred, widened
from .specification import State, architecture, count_blocks, dimension, seeded

HEAD_WIDTH = 64
HIGHEST = 60.0  # the most by which a dropped key's score exceeds the best kept one: e^60 is finite in float32


class AttentionWeights(nn.Softmax):
    """Softmax over the keys, or over the keys that a policy keeps.

    `policy` (batch, tokens) is 1 for kept and 0 for dropped tokens. A dropped token still sees itself, so it is
    computed as if it had stayed (Rao et al. 2021); kept tokens do not see it. The gradient with respect to the policy
    is that of the quotient; torch's softmax of −inf would have none.
    """

    def forward(self, scores: Tensor, policy: Tensor | None = None) -> Tensor:
        if policy is None:
            return super().forward(scores)
        itself = torch.eye(policy.shape[-1], dtype=policy.dtype, device=policy.device)
        seen = policy[:, None, None, :]
        seen = seen + (1 - seen) * itself  # (batch, 1, queries, keys)
        best = scores.detach().masked_fill(seen.detach() == 0, -math.inf).amax(-1, keepdim=True)
        # Only dropped keys are above 0; they are multiplied by 0, which the bound keeps from being 0 times infinity.
        raised = (scores - best).clamp(max=HIGHEST).exp() * seen
        return (raised / raised.sum(-1, keepdim=True)).to(scores.dtype)


class Attention(nn.Module):
    """Multi-head self-attention; `weights` returns the attention maps, `project` takes the mixed values."""

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
        """Reshape (batch, tokens, width) to (batch, heads, tokens, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TransformerBlock(nn.Module):
    """Pre-norm: x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        layers = {"fc1": nn.Linear(width, hidden), "gelu": nn.GELU(), "fc2": nn.Linear(hidden, width)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor, policy: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), policy)
        return x + self.mlp(self.norm2(x))


def _read_vit(state: State) -> dict[str, Any]:
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


@architecture(_read_vit, name="vit")
class VisionTransformer(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021) for CIFAR; heads of width 64, MLPs four times as wide.

    patches, a class token and learned positions, `blocks.N`, norm, and a head on the class token. A weights file does
    not contain the number of heads: give it unless it is width / 64.
    """

    def __init__(
        self,
        classes: int = 10,
        size: int = 32,
        patch: int = 4,
        depth: int = 6,
        width: int = 192,
        heads: int | None = None,
        hidden: int | None = None,
        channels: int = 3,
    ) -> None:
        super().__init__()
        heads, hidden = heads or max(1, width // HEAD_WIDTH), hidden or 4 * width
        if width % heads:
            raise ValueError(f"width {width} cannot be split into {heads} heads")
        if size % patch:
            raise ValueError(f"images of side {size} cannot be cut into patches of side {patch}")
        self.heads = heads
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
        """Turn images into tokens (batch, 1 + patches, width), the class token first."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if tokens.shape[1] + 1 != self.positions.shape[1]:
            raise ValueError(
                f"images of shape {tuple(x.shape)} give {tokens.shape[1]} patches, "
                f"the network was built for {self.positions.shape[1] - 1}: build it with size={x.shape[-1]}"
            )
        return torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1) + self.positions

    def answer(self, tokens: Tensor) -> Tensor:
        """Return the logits from the class token of the last block."""
        return self.head(self.norm(tokens)[:, 0])


vit = VisionTransformer


def initialise_linear(model: nn.Module) -> None:
    """Initialise linear layers with small normal weights and zero biases, as is usual for vision transformers."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


# Which tokens of a vision transformer are kept: a predictor, a draw for training, and similarity between tokens

SAME = 8  # rounding errors of the first image's token within which tokens count as equal
NOTHING_LEFT = 1e-12  # share of ‖K‖² without its diagonal that is only rounding


class TokenGates(nn.Module):
    """Predict whether each token (batch, tokens) stays at a stage, from its features and the mean of the kept tokens.

    These are the predictors of DynamicViT (Rao et al. 2021), one per stage. They return log π, the log probability to
    keep the token, or with `drawing` 1 or 0, drawn from π and multiplied by the earlier decisions `kept`. The mean is 0
    if no token is left. All stages are one module, called once per stage, so that the default sites are the blocks.
    """

    def __init__(self, width: int, stages: Sequence[int]) -> None:
        super().__init__()
        half, quarter = max(1, width // 2), max(1, width // 4)
        self.enter, self.decide = nn.ModuleDict(), nn.ModuleDict()
        for stage in map(str, stages):
            self.enter[stage] = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            self.decide[stage] = nn.Sequential(
                nn.Linear(width, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), nn.Linear(quarter, 2)
            )

    def forward(self, tokens: Tensor, stage: int, kept: Tensor | None = None, *, drawing: bool = False) -> Tensor:
        local, shared = self.enter[str(stage)](tokens).tensor_split(2, dim=-1)
        if kept is None:
            mean = shared.mean(1, keepdim=True)
        else:
            count = kept.sum(1)[:, None, None]
            mean = (shared * kept[..., None]).sum(1, keepdim=True) / torch.where(count > 0, count, 1)
        both = torch.cat([local, mean.to(local.dtype).expand(-1, tokens.shape[1], -1)], -1)
        # The first of dropping, the second of keeping.
        log_probabilities = functional.log_softmax(widened(self.decide[str(stage)](both)), -1)
        return draw(log_probabilities, kept) if drawing else log_probabilities[..., 1]


def draw(log_probabilities: Tensor, before: Tensor | None = None) -> Tensor:
    """Draw decisions (batch, tokens), exactly 0 or 1, with Gumbel noise; gradients are those of the soft draw.

    They are multiplied by the earlier decisions `before`, so dropped tokens stay dropped. Random numbers are torch's,
    as for dropout, so that checkpointing, compiling and recorded graphs repeat them.
    """
    soft = functional.gumbel_softmax(log_probabilities, dim=-1)[..., 1]
    # The difference is exactly 0, whereas hard − soft + soft would only be near 1.
    drawn = (soft >= 0.5).to(soft.dtype) + (soft - soft.detach())
    return drawn if before is None else drawn * before


def token_cka(tokens: Tensor, *, debiased: bool = True) -> Tensor:
    """Return the CKA of all pairs of tokens (tokens, tokens) from (images, tokens, width); the rows are the images.

    The debiased CKA is 0 on average for unrelated tokens; linear CKA grows towards 1 with few images. Products are
    float64; memory is tokens × images².
    """
    images, least = tokens.shape[0], 4 if debiased else 3
    if tokens.ndim != 3 or images < least:
        kind = "debiased" if debiased else "linear"
        raise ValueError(
            f"{kind} CKA between tokens needs (images, tokens, width) with at least {least} images, "
            f"got {tuple(tokens.shape)}"
        )
    grams = centred_grams(tokens.transpose(0, 1).double())
    spread = grams.diagonal(dim1=1, dim2=2).sum(1)
    noise = (SAME * torch.finfo(tokens.dtype).eps) ** 2 * images * tokens[0].double().square().sum(1)
    varies = spread > noise
    if debiased:
        whole, grams = grams.square().sum((1, 2)), u_centred(grams)
        varies = varies & (grams.square().sum((1, 2)) > NOTHING_LEFT * whole)
    if not bool(spread.isfinite().all()):
        raise ValueError("tokens are NaN or infinite: look for such values in the images or the model")
    if not bool(varies.all()):
        still = (~varies).nonzero().flatten().tolist()
        raise ValueError(
            f"tokens {still[:5]} are the same for all {images} images, so they have no CKA: choose a later stage "
            "(after a block every token has seen the others) or other images"
        )
    flat = functional.normalize(grams.flatten(1), dim=1)
    return flat @ flat.T


def mean_of_others(likeness: Tensor) -> Tensor:
    """Return the mean similarity (tokens,) of each token to the others."""
    return (likeness.sum(1) - likeness.diagonal()) / (len(likeness) - 1)


def eq13(probability: Tensor, tokens: Tensor) -> Tensor:
    """Return π − Σ_{j≠i} CKA(Xᵢ, Xⱼ) as printed, (batch, tokens) from (batch, tokens) and (batch, tokens, width).

    This is not a probability: the sum grows with the number of tokens, so the result is far below 0 and π hardly
    matters. It also depends on the batch, so the tokens dropped from an image depend on the other images.
    """
    likeness = token_cka(tokens, debiased=False)
    return probability - (likeness.sum(1) - likeness.diagonal()).to(probability.dtype)


# A vision transformer that drops tokens (DynamicViT, Rao et al. 2021)

TokenRule = Literal["learned", "cka", "eq13"]
TOKEN_RULES: tuple[TokenRule, ...] = get_args(TokenRule)


def _check_extra(state: Tensor) -> None:
    """Raise for an extra state that is not a DynamicViT's."""
    if state.shape != (5,) or not bool(state.isfinite().all()) or state[2] not in range(len(TOKEN_RULES)):
        raise ValueError(
            f"_extra_state is {state.flatten()[:6].tolist()}, but a dynamic_vit saves five numbers: keep, gamma, the "
            "number of its rule, heads and calibration images; was the file saved by another version?"
        )


def _read_dynamic_vit(state: State) -> dict[str, Any]:
    options = _read_vit(state)
    stages = sorted({int(match[1]) for name in state if (match := re.match(r"gates\.enter\.(\d+)\.", name))})
    options["stages"] = tuple(stages) or None
    own = state.get("_extra_state")
    if own is not None:
        _check_extra(own)
        keep, gamma, rule, heads, _ = own.tolist()
        options |= {"keep": keep, "gamma": gamma, "rule": TOKEN_RULES[int(rule)], "heads": int(heads)}
    return options


@architecture(_read_dynamic_vit, name="dynamic_vit")
class DynamicViT(VisionTransformer):
    """A `vit` that before the blocks of `stages` keeps a share `keep` of the tokens and drops the others.

    Stages are block numbers from 0; by default a quarter, half and three quarters of the depth. In evaluation the
    tokens with the highest scores by `rule` stay: the keep probability π ("learned"), π − gamma × the token's mean CKA
    with the others in a calibration ("cka"), or Eq. 13 of the CKA-SR appendix as printed ("eq13").

    In training a gate draws which tokens stay, and the others are masked from attention; in evaluation `counts` tokens
    of every image stay, and the others are removed. The class token always stays. With keep=1 and the same weights this
    is the plain network. `keep`, `rule` and `gamma` may change between forwards. `likeness` (stages, patches) holds the
    measurement of `calibrate_tokens`.
    """

    def __init__(
        self,
        classes: int = 10,
        size: int = 32,
        patch: int = 4,
        depth: int = 6,
        width: int = 192,
        keep: float = 0.7,
        stages: Sequence[int] | None = None,
        rule: TokenRule = "learned",
        gamma: float = 1.0,
        heads: int | None = None,
        hidden: int | None = None,
        channels: int = 3,
    ) -> None:
        if stages is None:
            stages = sorted({depth // 4, depth // 2, 3 * depth // 4} - {0})
        stages = [stages] if isinstance(stages, int) else list(stages)
        whole = all(isinstance(stage, int) for stage in stages)
        if not stages or not whole or stages != sorted(set(stages)) or not (stages[0] >= 0 and stages[-1] < depth):
            raise ValueError(f"stages={tuple(stages)}: one or more of the blocks 0 to {depth - 1}, in ascending order")
        super().__init__(classes, size, patch, depth, width, heads, hidden, channels)
        self.keep, self.stages, self.rule, self.gamma = keep, tuple(stages), rule, gamma
        self.patch_count = self.positions.shape[1] - 1
        self.gates = TokenGates(width, stages)
        self.register_buffer("likeness", torch.zeros(len(self.stages), self.patch_count))
        self.likeness: Tensor
        self.calibrated_on = 0  # the number of images behind `likeness`
        initialise_linear(self.gates)
        self._check()

    def _check(self) -> None:
        positive(self.keep, "keep", most=1, why="the share of tokens that each stage keeps")
        one_of(self.rule, "rule", TOKEN_RULES)
        if not math.isfinite(self.gamma):
            raise ValueError(f"gamma, the weight of similarity against probability, must be finite, got {self.gamma!r}")
        if not min(self.counts.values()):
            raise ValueError(
                f"keep={self.keep} leaves none of {self.patch_count} patches after {len(self.stages)} stages: "
                "keep more, or take fewer stages"
            )

    @property
    def counts(self) -> dict[int, int]:
        """The number of patches from each stage on: ⌊keep^s × patches⌋ from the s-th."""
        share = Fraction(str(self.keep))  # exact in decimals, so that 0.7² of 100 is 49
        return {stage: int(share**s * self.patch_count) for s, stage in enumerate(self.stages, 1)}

    def forward(self, x: Tensor) -> Tensor:
        self._check()
        tokens = self.embed(x)
        return self.answer(self._masked(tokens) if self.training else self._removed(tokens, {}))

    @torch.no_grad()
    def kept_positions(self, x: Tensor) -> dict[int, Tensor]:
        """Return the patches (batch, count) that stay at each stage in evaluation, numbered by place in the image."""
        self._check()
        kept: dict[int, Tensor] = {}
        self._removed(self.embed(x), kept)
        return kept

    def _masked(self, tokens: Tensor) -> Tensor:
        """Run the blocks on all tokens, with dropped ones masked from attention."""
        kept = policy = None
        for number, block in enumerate(self.blocks):
            if self._drops_at(number):
                kept = self.gates(tokens[:, 1:], number, kept, drawing=True)
                policy = torch.cat([torch.ones_like(kept[:, :1]), kept], 1)
            tokens = block(tokens, policy)
        return tokens

    def _removed(self, tokens: Tensor, kept: dict[int, Tensor]) -> Tensor:
        """Run the blocks on the remaining tokens in the order of the image; `kept` receives their numbers."""
        positions = torch.arange(self.patch_count, device=tokens.device).expand(len(tokens), -1)
        for number, block in enumerate(self.blocks):
            if self._drops_at(number):
                patches = tokens[:, 1:]
                order = self._scores(number, patches, positions).argsort(dim=1, descending=True, stable=True)
                chosen = order[:, : self.counts[number]].sort(1).values
                left = patches.gather(1, chosen[..., None].expand(-1, -1, patches.shape[-1]))
                tokens, positions = torch.cat([tokens[:, :1], left], 1), positions.gather(1, chosen)
                kept[number] = positions
            tokens = block(tokens)
        return tokens

    def _drops_at(self, number: int) -> bool:
        return number in self.stages and self.keep < 1

    def _scores(self, stage: int, patches: Tensor, positions: Tensor) -> Tensor:
        log_probability = self.gates(patches, stage)
        if self.rule == "learned":
            return log_probability  # in the order of π, which rounds to 1 where gates are sure
        if self.rule == "eq13":
            return eq13(log_probability.exp(), patches)
        if not self.calibrated_on:
            raise ValueError("rule='cka' needs the similarity of tokens: sosie.train.calibrate_tokens(model, images)")
        likeness = self.likeness[self.stages.index(stage)]
        return log_probability.exp() - self.gamma * likeness[positions]

    # Options saved with the weights; options stated when the network is built take precedence.

    def get_extra_state(self) -> Tensor:
        options = [self.keep, self.gamma, TOKEN_RULES.index(self.rule), self.heads, self.calibrated_on]
        return torch.tensor(options, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        _check_extra(state)
        self.calibrated_on = int(state[4])


dynamic_vit = DynamicViT


def with_dynamic_tokens(
    model: VisionTransformer,
    keep: float = 0.7,
    stages: Sequence[int] | None = None,
    rule: TokenRule = "learned",
    gamma: float = 1.0,
    *,
    seed: int = 0,
) -> DynamicViT:
    """Return a dynamic copy of a plain `vit`, trained or not, with random gates from `seed`."""
    if not isinstance(model, VisionTransformer):
        raise TypeError(f"need one of sosie's vision transformers (vit), got {type(model).__name__}")
    state = model.state_dict()
    options = {**_read_dynamic_vit(state), "keep": keep, "stages": stages, "rule": rule, "gamma": gamma}
    with seeded(seed):
        dynamic = DynamicViT(**{**options, "heads": model.heads})
    plain = {
        name: value for name, value in state.items() if not name.startswith(("gates.", "likeness", "_extra_state"))
    }
    dynamic.load_state_dict({**dynamic.state_dict(), **plain})
    return dynamic.to(model.positions).train(model.training)
