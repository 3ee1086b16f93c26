"""Which tokens of a vision transformer stay: a predictor, a draw for training, and likeness between tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..linalg import centred_grams, u_centred, widened

SAME = 8  # roundings of the first image's token within which tokens that differ do not differ
NOTHING_LEFT = 1e-12  # share of ‖K‖² that is rounding once its diagonal is taken off


class TokenGates(nn.Module):
    """What becomes of each token (batch, tokens) at a stage, from its own features and the mean of those still there.

    The predictor of DynamicViT (Rao et al. 2021), one a stage: log π, π the probability to keep the token, or
    with `drawing` 1 or 0, whether it stays, drawn from π and multiplied by the decisions before it, `kept`. The mean is
    over kept tokens, and 0 where none is left. All stages are one module, called once a stage: what is compared by
    default, or penalised, are the blocks.
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
        log_probabilities = functional.log_softmax(
            widened(self.decide[str(stage)](both)), -1
        )  # of dropping and of keeping
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
            f"tokens {still[:5]} are the same for all {images} images, so that they are like nothing: choose a later "
            "stage (after a block, every token has seen the others) or other images"
        )
    flat = functional.normalize(grams.flatten(1), dim=1)
    return flat @ flat.T


def mean_of_others(likeness: Tensor) -> Tensor:
    """(tokens,): how alike each token is to the others on average, itself left out."""
    return _sum_of_others(likeness) / (len(likeness) - 1)


def eq13(probability: Tensor, tokens: Tensor) -> Tensor:
    """π − Σ_{j≠i} CKA(Xᵢ, Xⱼ) as printed: (batch, tokens) from (batch, tokens) and (batch, tokens, width).

    No probability: the sum grows with the number of tokens, so that it is far below 0 and π hardly counts; and it is a
    property of the batch, so that what is dropped from an image depends on the images beside it.
    """
    return probability - _sum_of_others(token_cka(tokens, debiased=False)).to(probability.dtype)


def _sum_of_others(likeness: Tensor) -> Tensor:
    return likeness.sum(1) - likeness.diagonal()
