"""Vision transformers, written out so that every part can be hooked; plain, and dropping tokens (DynamicViT)."""

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

    patches, a class token and learned positions, `blocks.N`, norm, and a head on the class token. The number of heads
    cannot be read from a weights file: give it where it is not width / 64.
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


vit = VisionTransformer


def initialise_linear(model: nn.Module) -> None:
    """Small normal weights and no biases, as vision transformers start."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


# Which tokens of a vision transformer stay: a predictor, a draw for training, and likeness between tokens

SAME = 8  # roundings of the first image's token within which tokens that differ do not differ
NOTHING_LEFT = 1e-12  # share of ‖K‖² that is rounding once its diagonal is taken off


class TokenGates(nn.Module):
    """Whether each token stays (batch, tokens) at a stage, from its own features and the mean of those still there.

    The predictors of DynamicViT (Rao et al. 2021), one per stage. They return log π, π being the probability to keep
    the token, or with `drawing` 1 or 0, drawn from π and multiplied by the earlier decisions `kept`. The mean is over
    kept tokens, and 0 where none is left. All stages are one module, called once per stage, so that the sites that are
    compared or penalised by default are the blocks.
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
        # Of dropping and of keeping.
        log_probabilities = functional.log_softmax(widened(self.decide[str(stage)](both)), -1)
        return draw(log_probabilities, kept) if drawing else log_probabilities[..., 1]


def draw(log_probabilities: Tensor, before: Tensor | None = None) -> Tensor:
    """Keep decisions (batch, tokens), exactly 0 or 1, drawn with Gumbel noise; gradients are those of the soft draw.

    `before`, earlier decisions, is multiplied in: what was dropped stays dropped. Random numbers are torch's, as those
    of dropout are, so that checkpointing, compiling and recorded graphs repeat them.
    """
    soft = functional.gumbel_softmax(log_probabilities, dim=-1)[..., 1]
    # Added as a difference: 0 to the last bit, where hard − soft + soft would be 1 but for rounding.
    drawn = (soft >= 0.5).to(soft.dtype) + (soft - soft.detach())
    return drawn if before is None else drawn * before


def token_cka(tokens: Tensor, *, debiased: bool = True) -> Tensor:
    """CKA of each two tokens (tokens, tokens), whose rows are the images: tokens is (images, tokens, width).

    `debiased` is 0 on average for tokens that have nothing in common; otherwise it is linear CKA, which few images push
    towards 1. Products are float64; memory is tokens × images².
    """
    images, least = tokens.shape[0], 4 if debiased else 3
    if tokens.ndim != 3 or images < least:
        kind = "debiased" if debiased else "linear"
        raise ValueError(
            f"{kind} CKA between tokens needs (images, tokens, width) with {least} images at least, "
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
        raise ValueError("tokens have values that are NaN or infinite: look for such values in the images or the model")
    if not bool(varies.all()):
        still = (~varies).nonzero().flatten().tolist()
        raise ValueError(
            f"tokens {still[:5]} are the same for all {images} images, so that they have no CKA: choose a later stage "
            "(after a block, every token has seen the others) or other images"
        )
    flat = functional.normalize(grams.flatten(1), dim=1)
    return flat @ flat.T


def mean_of_others(likeness: Tensor) -> Tensor:
    """The mean likeness (tokens,) of each token to the others, itself left out."""
    return (likeness.sum(1) - likeness.diagonal()) / (len(likeness) - 1)


def eq13(probability: Tensor, tokens: Tensor) -> Tensor:
    """π − Σ_{j≠i} CKA(Xᵢ, Xⱼ) as printed: (batch, tokens) from (batch, tokens) and (batch, tokens, width).

    It is not a probability: the sum grows with the number of tokens, so that it is far below 0 and π hardly counts; and
    it depends on the batch, so that what is dropped from an image depends on the images beside it.
    """
    likeness = token_cka(tokens, debiased=False)
    return probability - (likeness.sum(1) - likeness.diagonal()).to(probability.dtype)


# A vision transformer that drops tokens on the way (DynamicViT, Rao et al. 2021)

Rule = Literal["learned", "cka", "eq13"]
RULES: tuple[Rule, ...] = get_args(Rule)


def _check_extra(state: Tensor) -> None:
    """Raise for an extra state that no DynamicViT wrote."""
    if state.shape != (5,) or not bool(state.isfinite().all()) or state[2] not in range(len(RULES)):
        raise ValueError(
            f"_extra_state is {state.flatten()[:6].tolist()}, where a dynamic_vit keeps five numbers: keep, gamma, the "
            "number of its rule, heads and calibration images; was the file made by another version?"
        )


def _read_dynamic_vit(state: State) -> dict[str, Any]:
    options = _read_vit(state)
    stages = sorted({int(match[1]) for name in state if (match := re.match(r"gates\.enter\.(\d+)\.", name))})
    options["stages"] = tuple(stages) or None
    own = state.get("_extra_state")
    if own is not None:
        _check_extra(own)
        keep, gamma, rule, heads, _ = own.tolist()
        options |= {"keep": keep, "gamma": gamma, "rule": RULES[int(rule)], "heads": int(heads)}
    return options


@architecture(_read_dynamic_vit, name="dynamic_vit")
class DynamicViT(VisionTransformer):
    """A `vit` that drops tokens before the blocks of `stages`, each time all but a share `keep` of those it had.

    Stages are block numbers from 0; by default a quarter, half and three quarters of the depth. `rule` says what is
    kept in evaluation: the tokens with the highest keep probability π ("learned"), π − gamma × the token's mean CKA
    with the others, from a calibration ("cka"), or Eq. 13 of the CKA-SR appendix as printed ("eq13").

    In training a gate draws which tokens stay, and the others are masked from attention; in evaluation the tokens with
    the highest scores stay, `counts` of them for every image, and the others are removed. The class token always stays.
    With keep=1 and the same weights this is the plain network. `keep`, `rule` and `gamma` may be set anew between
    forwards. `likeness` (stages, patches) is what `calibrate_tokens` measured.
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
        rule: Rule = "learned",
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
        self.calibrated_on = 0  # images that `likeness` rests on
        initialise_linear(self.gates)
        self._check()

    def _check(self) -> None:
        positive(self.keep, "keep", most=1, why="the share of tokens that each stage lets pass")
        one_of(self.rule, "rule", RULES)
        if not math.isfinite(self.gamma):
            raise ValueError(f"gamma={self.gamma!r}: how much likeness weighs against the probability, a finite number")
        if not min(self.counts.values()):
            raise ValueError(
                f"keep={self.keep} leaves none of {self.patch_count} patches after {len(self.stages)} stages: "
                "keep more, or take fewer stages"
            )

    @property
    def counts(self) -> dict[int, int]:
        """Patches that stay from each stage on: ⌊keep^s × patches⌋ from the s-th."""
        share = Fraction(str(self.keep))  # of the decimal: 0.7² of 100 is 49, and not what binary fractions make of it
        return {stage: int(share**s * self.patch_count) for s, stage in enumerate(self.stages, 1)}

    def forward(self, x: Tensor) -> Tensor:
        self._check()
        tokens = self.embed(x)
        return self.answer(self._masked(tokens) if self.training else self._removed(tokens, {}))

    @torch.no_grad()
    def kept_positions(self, x: Tensor) -> dict[int, Tensor]:
        """Which patches (batch, count) stay at each stage in evaluation, numbered as they lie in the image."""
        self._check()
        found: dict[int, Tensor] = {}
        self._removed(self.embed(x), found)
        return found

    def _masked(self, tokens: Tensor) -> Tensor:
        """Every token stays in place; those that were dropped are seen by no other."""
        kept = policy = None
        for number, block in enumerate(self.blocks):
            if self._drops_at(number):
                kept = self.gates(tokens[:, 1:], number, kept, drawing=True)
                policy = torch.cat([torch.ones_like(kept[:, :1]), kept], 1)
            tokens = block(tokens, policy)
        return tokens

    def _removed(self, tokens: Tensor, found: dict[int, Tensor]) -> Tensor:
        """Only the tokens that stay go on, in the order they have in the image; `found` receives which."""
        positions = torch.arange(self.patch_count, device=tokens.device).expand(len(tokens), -1)
        for number, block in enumerate(self.blocks):
            if self._drops_at(number):
                patches = tokens[:, 1:]
                order = self._scores(number, patches, positions).argsort(dim=1, descending=True, stable=True)
                chosen = order[:, : self.counts[number]].sort(1).values
                left = patches.gather(1, chosen[..., None].expand(-1, -1, patches.shape[-1]))
                tokens, positions = torch.cat([tokens[:, :1], left], 1), positions.gather(1, chosen)
                found[number] = positions
            tokens = block(tokens)
        return tokens

    def _drops_at(self, number: int) -> bool:
        return number in self.stages and self.keep < 1

    def _scores(self, stage: int, patches: Tensor, positions: Tensor) -> Tensor:
        log_probability = self.gates(patches, stage)
        if self.rule == "learned":
            return log_probability  # ordered like π, which rounds to 1 where gates are sure
        if self.rule == "eq13":
            return eq13(log_probability.exp(), patches)
        if not self.calibrated_on:
            raise ValueError(
                "rule='cka' needs to know how alike tokens are: call sosie.train.calibrate_tokens(model, images)"
            )
        alike = self.likeness[self.stages.index(stage)]
        return log_probability.exp() - self.gamma * alike[positions]

    # Options that a file of weights keeps; those that were stated when the network was built win.

    def get_extra_state(self) -> Tensor:
        options = [self.keep, self.gamma, RULES.index(self.rule), self.heads, self.calibrated_on]
        return torch.tensor(options, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        _check_extra(state)
        self.calibrated_on = int(state[4])


dynamic_vit = DynamicViT


def with_dynamic_tokens(
    model: VisionTransformer,
    keep: float = 0.7,
    stages: Sequence[int] | None = None,
    rule: Rule = "learned",
    gamma: float = 1.0,
    *,
    seed: int = 0,
) -> DynamicViT:
    """A dynamic copy of a plain `vit`, trained or not: its weights, and gates at random from `seed`."""
    if not isinstance(model, VisionTransformer):
        raise TypeError(f"need one of sosie's vision transformers (vit), got {type(model).__name__}")
    state = model.state_dict()
    options = {**_read_dynamic_vit(state), "keep": keep, "stages": stages, "rule": rule, "gamma": gamma}
    with seeded(seed):
        made = DynamicViT(**{**options, "heads": model.heads})
    own = {name: value for name, value in state.items() if not name.startswith(("gates.", "likeness", "_extra_state"))}
    made.load_state_dict({**made.state_dict(), **own})
    return made.to(model.positions).train(model.training)
