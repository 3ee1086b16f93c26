"""Training a network that drops tokens: how many it keeps, a teacher's answers, and the similarity of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..capture import as_found, watch
from ..models import DynamicViT
from ..models.vit import mean_of_others, token_cka
from .hooks import ActivationHooks, SiteValue
from .penalties import Attached
from .recipe import Prepare, floats


def ratio_loss(decisions: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The mean over images and stages of (share − share of the image's tokens that stayed)² (Rao et al. 2021).

    `decisions`: for each stage (batch, tokens), 1 where a token stays; `shares`: the share of all tokens to keep.
    """
    if not decisions or len(decisions) != len(shares):
        raise ValueError(f"need one share per stage, got {len(decisions)} stages and {len(shares)} shares")
    terms = [(each.float().mean(1) - share).square().mean() for each, share in zip(decisions, shares, strict=True)]
    return torch.stack(terms).mean()


def answer_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """The mean over images of KL(teacher ‖ student) of the softmax answers, in nats."""
    if logits.shape != teacher.shape:
        raise ValueError(
            f"the student answers {tuple(logits.shape)} and the teacher {tuple(teacher.shape)}: take a teacher of the "
            "same classes"
        )
    student, target = (functional.log_softmax(each.float(), -1) for each in (logits, teacher.detach()))
    return functional.kl_div(student, target, reduction="batchmean", log_target=True)


def token_loss(tokens: Tensor, teacher: Tensor, kept: Tensor) -> Tensor:
    """The mean over kept tokens of all images, and over features, of the squared difference to the teacher's token.

    tokens and teacher (batch, tokens, width), kept (batch, tokens), which gets no gradient; 0 if nothing was kept.
    """
    if tokens.shape != teacher.shape or kept.shape != tokens.shape[:2]:
        raise ValueError(
            f"the student has tokens {tuple(tokens.shape)}, the teacher {tuple(teacher.shape)} and the decisions are "
            f"{tuple(kept.shape)}: take a teacher of the same patches and width, or tokens=0"
        )
    kept = kept.detach().float()
    squares = (tokens.float() - teacher.detach().float()).square().mean(-1)
    count = kept.sum()
    return (kept * squares).sum() / torch.where(count > 0, count, 1)


class TokenPenalty(Attached):
    """`with TokenPenalty(model, teacher) as penalty: fit(model, …, penalty=penalty)`: the extra loss of DynamicViT.

    `ratio` × `ratio_loss` of the shares of kept tokens and those of the model's `counts`; with a `teacher` (often the
    plain network that the model was made from) also `answers` × `answer_loss` and `tokens` × `token_loss` of the last
    stage's tokens after the final norm. The teacher runs on the same inputs, in evaluation mode, without gradients.
    `last` has the terms of the last step, unweighted, and the share of tokens that stayed at each stage.
    """

    def __init__(
        self,
        model: DynamicViT,
        teacher: nn.Module | None = None,
        *,
        ratio: float = 2.0,
        answers: float = 0.5,
        tokens: float = 0.5,
        weight: float = 1.0,
    ) -> None:
        if not isinstance(model, DynamicViT):
            raise TypeError(f"need a dynamic_vit, got {type(model).__name__}")
        if model.keep == 1:
            raise ValueError("keep=1 drops no tokens, so there is nothing to train")
        if teacher is model:
            raise ValueError("the teacher is the model itself: give the plain network, or a copy (copy.deepcopy)")
        if not all(math.isfinite(each) and each >= 0 for each in (ratio, answers, tokens)):
            raise ValueError(f"ratio={ratio}, answers={answers}, tokens={tokens}: weights must be numbers from 0 on")
        self._set_up([model], None, 1, weight)
        self.teacher, self.ratio = teacher, ratio
        self.recordable = teacher is None  # the host watches a teacher
        self.answers, self.tokens = (answers, tokens) if teacher is not None else (0.0, 0.0)
        self.last: dict[str, Tensor] = {}
        self._model = model
        self._hooks.append(ActivationHooks(model, ["gates", "norm", "head"], calls=teacher is not None))

    def settings(self) -> dict[str, Any]:
        weights = {"ratio": self.ratio, "answers": self.answers, "tokens": self.tokens}
        return {**super().settings(), **weights, "teacher": type(self.teacher).__qualname__}

    def _value(self, shown: Sequence[Sequence[SiteValue]]) -> Tensor:
        if not self._model.training:
            raise ValueError("the model is in evaluation mode, where tokens are removed: call model.train() first")
        seen = {each.site.label: each.value for each in shown[0]}
        decisions = [each.value for each in shown[0] if each.site.module_name == "gates"]  # stage by stage
        counts = self._model.counts.values()
        terms = {"ratio": ratio_loss(decisions, [count / self._model.patch_count for count in counts])}
        if self.answers or self.tokens:
            assert self.teacher is not None
            # Only the tokens need a `norm`, which other teachers may lack.
            watched: AbstractContextManager[Any] = (
                watch(self.teacher, ["norm"], axes=False) if self.tokens else nullcontext({})
            )
            with self._hooks[0].as_called(self.teacher) as (args, kwargs), watched as teacher_sites:
                logits = self.teacher(*args, **kwargs)
            terms["answers"] = answer_loss(seen["head"], logits)
            if self.tokens:  # without the class token
                terms["tokens"] = token_loss(seen["norm"][:, 1:], teacher_sites["norm"][:, 1:], decisions[-1])
        kept = torch.stack([each.detach().mean() for each in decisions])
        self.last = {**{name: term.detach() for name, term in terms.items()}, "kept": kept}
        weights = {"ratio": self.ratio, "answers": self.answers, "tokens": self.tokens}
        return torch.stack([weights[name] * term for name, term in terms.items()]).sum()


@torch.no_grad()
def calibrate_tokens(
    model: DynamicViT, images: Tensor, *, debiased: bool = True, prepare: Prepare | None = None
) -> Tensor:
    """Measure how similar each token is to the others at each stage (stages, patches), and store it for rule="cka".

    The value is the mean over the other positions of the token CKA, debiased or (`debiased=False`) linear, which is
    close to 1 for few images. Images are the rows, and no token is dropped. A few hundred images are enough; memory
    is patches × images². Nothing else of the model changes; afterwards the tokens that an image keeps depend on that
    image alone.
    """
    if not isinstance(model, DynamicViT):
        raise TypeError(f"need a dynamic_vit, got {type(model).__name__}")
    if model.patch_count < 2:
        raise ValueError("the model has one patch, but rule='cka' compares at least two")
    with as_found(model):
        tokens = model.embed(floats(images, prepare))
        means = []
        for number, block in enumerate(model.blocks):
            if number in model.stages:
                means.append(mean_of_others(token_cka(tokens[:, 1:], debiased=debiased)))
            tokens = block(tokens)
    model.likeness.copy_(torch.stack(means))
    model.calibrated_on = len(images)
    return model.likeness.clone()
