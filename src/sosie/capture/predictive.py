"""What pulls at a network's answer: the gradient of an expected loss, which one backward pass carries to every site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from .outputs import answer_in
from .structure import count_inputs

Pulls = list[tuple[Tensor, Tensor]]  # parts of the answer, and the gradient of the loss with respect to each
Loss = Callable[[Any, Any], Tensor]
BETA = 0.5
_SUMS_TO_ONE = 1e-3
_OTHERWISE = "give output=function(answer, batch) → one loss an input"


class NoGradient(ValueError):
    """The loss does not pull at the network, and the message says why."""


class Predictive(Protocol):
    """Where a backward pass begins."""

    def check(self, answer: Any, inputs: int) -> None:
        """Raise unless a model's answer to that many inputs is what this reads."""

    def pull(self, answer: Any, batch: Any, mask: Tensor | None) -> Pulls: ...
    def describe(self) -> str: ...


@dataclass(frozen=True)
class Categorical:
    """Logits; the loss is −log p(y), its expectation over the tempered prediction q ∝ p^β, which is held fixed.

    The gradient at the logits is p − q, whatever the classes: no label is needed.
    """

    beta: float = BETA

    def __post_init__(self) -> None:
        check_beta(self.beta)

    def check(self, answer: Any, inputs: int) -> None:
        logits = answer_in(answer)
        if isinstance(answer, Mapping) and "last_hidden_state" in answer and answer.get("logits") is None:
            raise ValueError(
                "output='logits', but the model answers with hidden states, since it has no head: take one with a "
                f"head, sketch kernels='features' alone, or {_OTHERWISE}"
            )
        if logits is None or not logits.is_floating_point():
            kind = type(answer).__name__ if logits is None else str(logits.dtype).removeprefix("torch.")
            raise ValueError(f"output='logits', but the model answers with {kind}; {_OTHERWISE}")
        if logits.ndim not in (2, 3) or len(logits) != inputs or logits.shape[-1] < 2:
            raise ValueError(
                "output='logits' means (inputs, classes) or (inputs, tokens, classes), at least two classes; the model "
                f"answers {inputs} inputs with {tuple(logits.shape)}; {_OTHERWISE}"
            )
        ones = (logits.detach().double().sum(-1) - 1).abs().amax() < _SUMS_TO_ONE
        if bool(ones & (logits >= 0).all()):
            raise ValueError(
                "output='logits', but the model answers with probabilities (they add up to 1): take the model without "
                f"its softmax, or {_OTHERWISE}"
            )

    def pull(self, answer: Any, batch: Any, mask: Tensor | None) -> Pulls:
        logits = answer_in(answer)
        assert logits is not None
        # In float64: a confident p − q is the difference of two numbers near 1.
        exact = logits.detach().double()
        pull = torch.softmax(exact, -1) - torch.softmax(self.beta * exact, -1)
        if logits.ndim == 3 and mask is not None and mask.shape == logits.shape[:2]:
            pull = pull * mask.to(pull)[..., None]
        return [(logits, pull.to(logits.dtype))]

    def describe(self) -> str:
        return f"logits, beta {self.beta:g}"


@dataclass(frozen=True)
class Gaussian:
    """A mean and the logarithm of a variance for every number; q ∝ p^β is a normal of variance σ² / β.

    The mean is not pulled at, since q is symmetric about it; the logarithm of the variance is, by (1 − 1/β) / 2.
    """

    beta: float = BETA

    def __post_init__(self) -> None:
        check_beta(self.beta)

    def check(self, answer: Any, inputs: int) -> None:
        mean, log_variance = self._parts(answer)
        if log_variance.shape != mean.shape or len(mean) != inputs:
            raise ValueError(
                f"output='gaussian' means a mean and a log-variance of one shape, (inputs, …); for {inputs} inputs the "
                f"model answers {tuple(mean.shape)} and {tuple(log_variance.shape)}"
            )
        if not log_variance.requires_grad and torch.is_grad_enabled():
            raise NoGradient(f"the log-variance does not depend on what the network computes: {_FIXED}")

    def _parts(self, answer: Any) -> tuple[Tensor, Tensor]:
        if isinstance(answer, Mapping) and {"mean", "log_variance"} <= set(answer):
            answer = (answer["mean"], answer["log_variance"])
        if isinstance(answer, Sequence) and len(answer) == 2 and all(isinstance(part, Tensor) for part in answer):
            return answer[0], answer[1]
        raise NoGradient(
            "output='gaussian' needs a model that answers (mean, log_variance), or a dict with both: " + _FIXED
        )

    def pull(self, answer: Any, batch: Any, mask: Tensor | None) -> Pulls:
        _, log_variance = self._parts(answer)
        return [(log_variance, torch.full_like(log_variance, (1 - 1 / self.beta) / 2))]

    def describe(self) -> str:
        return f"gaussian, beta {self.beta:g}"


_FIXED = (
    "with a variance that is fixed, the tempered prediction is symmetric about the mean and every gradient is exactly "
    f"0, whatever beta. Add a variance head, or {_OTHERWISE}"
)


@dataclass(frozen=True)
class UserLoss:
    """A loss of the user's own: function(answer, batch) → one number an input."""

    function: Loss

    def check(self, answer: Any, inputs: int) -> None:
        pass  # what the function returns is looked at each time

    def pull(self, answer: Any, batch: Any, mask: Tensor | None) -> Pulls:
        found, inputs = self.function(answer, batch), count_inputs(batch)
        if not isinstance(found, Tensor) or found.shape != (inputs,):
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"the loss must return one number an input, a tensor ({inputs},), got {got}")
        return [(found, torch.ones_like(found))]

    def describe(self) -> str:
        return f"loss {getattr(self.function, '__qualname__', type(self.function).__qualname__)}"


def predictive_of(output: str | Loss, beta: float) -> Predictive:
    """From what a user says the answers are: "logits", "gaussian", or a loss."""
    if callable(output):
        return UserLoss(output)
    kinds: dict[str, type[Categorical | Gaussian]] = {"logits": Categorical, "gaussian": Gaussian}
    if output not in kinds:
        raise ValueError(f"output is 'logits', 'gaussian' or a function(answer, batch) → losses, got {output!r}")
    return kinds[output](beta)


def check_beta(beta: float) -> None:
    if isinstance(beta, bool) or not isinstance(beta, Real) or not 0 < beta <= 1:
        raise ValueError(f"beta tempers the prediction, q ∝ p^beta: a number in (0, 1], got {beta!r}")
    if beta == 1:
        raise NoGradient(
            "beta=1 gives exactly zero gradients: the loss is then expected under the model's own prediction, where "
            "-log p is at its least. Take beta below 1 (0.5 is the paper's), or a loss of your own"
        )
