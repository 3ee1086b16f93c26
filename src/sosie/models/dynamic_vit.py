"""A vision transformer that drops tokens on the way (DynamicViT, Rao et al. 2021)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from .registry import State, architecture
from .specification import seeded
from .token_gates import TokenGates, eq13
from .vit import TransformerBlock, VisionTransformer, initialise_linear, read_options, sizes

Rule = Literal["learned", "cka", "eq13"]
RULES: tuple[Rule, ...] = get_args(Rule)


class DynamicViT(VisionTransformer):
    """A vision transformer with a gate before some blocks; with the same weights and keep=1 it is the plain one.

    In training a gate draws which tokens stay, and the others are masked from attention; in evaluation the tokens with
    the highest scores stay, `counts` of them for every image, and the others are removed. The class token always stays.
    `keep`, `rule` and `gamma` may be set anew between forwards. `likeness` (stages, patches) is what `calibrate_tokens`
    measured.
    """

    def __init__(self, *, keep: float, stages: Sequence[int], rule: Rule, gamma: float, **built_from: int) -> None:
        super().__init__(**built_from)
        self.keep, self.stages, self.rule, self.gamma = keep, tuple(stages), rule, gamma
        self.heads = built_from["heads"]
        self.patch_count = self.positions.shape[1] - 1
        self.gates = TokenGates(built_from["width"], stages)
        self.register_buffer("likeness", torch.zeros(len(self.stages), self.patch_count))
        self.likeness: Tensor
        self.calibrated_on = 0  # images that `likeness` rests on
        initialise_linear(self.gates)
        _check(self)

    @property
    def counts(self) -> dict[int, int]:
        """Patches that stay from each stage on: ⌊keep^s × patches⌋ from the s-th."""
        share = Fraction(str(self.keep))  # of the decimal: 0.7² of 100 is 49, and not what binary fractions make of it
        return {stage: int(share**s * self.patch_count) for s, stage in enumerate(self.stages, 1)}

    def forward(self, x: Tensor) -> Tensor:
        _check(self)
        tokens = self.embed(x)
        return self.answer(self._masked(tokens) if self.training else self._removed(tokens, {}))

    @torch.no_grad()
    def kept_positions(self, x: Tensor) -> dict[int, Tensor]:
        """Which patches (batch, count) stay at each stage in evaluation, numbered as they lie in the image."""
        _check(self)
        found: dict[int, Tensor] = {}
        self._removed(self.embed(x), found)
        return found

    def _masked(self, tokens: Tensor) -> Tensor:
        """Every token stays in place; those that were dropped are seen by no other."""
        kept: Tensor | None = None
        policy: Tensor | None = None
        for number, block in enumerate(self.blocks):
            if self._drops_at(number):
                kept = self.gates(tokens[:, 1:], number, kept, drawing=True)
                policy = torch.cat([torch.ones_like(kept[:, :1]), kept], 1)
            tokens = block(tokens, policy)
        return tokens

    def _removed(self, tokens: Tensor, found: dict[int, Tensor]) -> Tensor:
        """Only the tokens that stay go on, in the order they have in the image; `found` is told which."""
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
        """A gate that would let everything pass is not asked."""
        return number in self.stages and self.keep < 1

    def _scores(self, stage: int, patches: Tensor, positions: Tensor) -> Tensor:
        log_probability = self.gates(patches, stage)
        if self.rule == "learned":
            return log_probability  # ordered like π, which rounds to 1 where gates are sure
        if self.rule == "eq13":
            return eq13(log_probability.exp(), patches)
        if not self.calibrated_on:
            raise ValueError(
                "rule='cka' weighs how alike tokens are, which was not measured yet: "
                "sosie.train.calibrate_tokens(model, images)"
            )
        alike = self.likeness[self.stages.index(stage)]
        return log_probability.exp() - self.gamma * alike[positions]

    # What a file has to say of the network besides its weights. Options that were stated when it was built stay.

    def get_extra_state(self) -> Tensor:
        options = [self.keep, self.gamma, RULES.index(self.rule), self.heads, self.calibrated_on]
        return torch.tensor(options, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        _check_extra(state)
        self.calibrated_on = int(state[4])


def _check(model: DynamicViT) -> None:
    if isinstance(model.keep, bool) or not isinstance(model.keep, (int, float)) or not 0 < model.keep <= 1:
        raise ValueError(f"keep={model.keep!r}: the share of tokens that each stage lets pass, above 0 and at most 1")
    if model.rule not in RULES:
        raise ValueError(f"rule={model.rule!r}: there are {', '.join(map(repr, RULES))}")
    if not math.isfinite(model.gamma):
        raise ValueError(f"gamma={model.gamma!r}: how much likeness weighs against the probability, a finite number")
    if not min(model.counts.values()):
        raise ValueError(
            f"keep={model.keep} leaves none of {model.patch_count} patches after {len(model.stages)} stages: "
            "keep more, or take fewer stages"
        )


def _check_extra(state: Tensor) -> None:
    """Refuse what no DynamicViT wrote, before it is read as options."""
    if state.shape != (5,) or not bool(state.isfinite().all()) or state[2] not in range(len(RULES)):
        raise ValueError(
            f"_extra_state is {state.flatten()[:6].tolist()}, where a dynamic_vit keeps five numbers: keep, gamma, the "
            "number of its rule, heads and calibration images; was the file made by another version?"
        )


def _read_options(state: State) -> dict[str, Any]:
    found = read_options(state)
    stages = sorted({int(match[1]) for name in state if (match := re.match(r"gates\.enter\.(\d+)\.", name))})
    found["stages"] = tuple(stages) or None
    own = state.get("_extra_state")
    if own is not None:
        _check_extra(own)
        keep, gamma, rule, heads, _ = own.tolist()
        found |= {"keep": keep, "gamma": gamma, "rule": RULES[int(rule)], "heads": int(heads)}
    return found


@architecture(_read_options)
def dynamic_vit(
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
) -> nn.Module:
    """A `vit` that drops tokens before the blocks of `stages`, each time all but a share `keep` of those it had.

    Stages are block numbers from 0; by default a quarter, half and three quarters of the depth. `rule` says what is
    kept in evaluation: the tokens with the highest keep probability π ("learned"), π − gamma × the token's mean CKA
    with the others, from a calibration ("cka"), or Eq. 13 of the CKA-SR appendix as printed ("eq13").
    """
    if stages is None:
        stages = sorted({depth // 4, depth // 2, 3 * depth // 4} - {0})
    stages = [stages] if isinstance(stages, int) else list(stages)
    whole = all(isinstance(stage, int) for stage in stages)
    if not stages or not whole or stages != sorted(set(stages)) or not (stages[0] >= 0 and stages[-1] < depth):
        raise ValueError(f"stages={tuple(stages)}: one or more of the blocks 0 to {depth - 1}, in ascending order")
    built_from = sizes(classes, size, patch, depth, width, heads=heads, hidden=hidden, channels=channels)
    return DynamicViT(keep=keep, stages=stages, rule=rule, gamma=gamma, **built_from)


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
    options = {**_read_options(state), "keep": keep, "stages": stages, "rule": rule, "gamma": gamma}
    first = cast(TransformerBlock, model.blocks[0])
    with seeded(seed):
        made = dynamic_vit(**{**options, "heads": first.attention.heads})
    assert isinstance(made, DynamicViT)
    own = {name: value for name, value in state.items() if not name.startswith(("gates.", "likeness", "_extra_state"))}
    made.load_state_dict({**made.state_dict(), **own})
    return made.to(model.positions).train(model.training)
