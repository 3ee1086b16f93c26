"""What pulls at an answer, against autograd of the expected loss; and answers that cannot be pulled at."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sosie.sketching.gradients import input_numbers, predictive_of


def logits(*shape: int, scale: float = 3.0) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return (scale * torch.randn(*shape, generator=random, dtype=torch.float64)).requires_grad_()


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_categorical_is_the_gradient_of_the_expected_loss(beta: float) -> None:
    z = logits(5, 4)
    p = z.softmax(-1).detach()
    q = p**beta / (p**beta).sum(-1, keepdim=True)
    wanted = torch.autograd.grad(-(q * z.log_softmax(-1)).sum(), z)[0]
    part, pull = predictive_of("logits", beta).pull(z, None, None, False)
    assert part is z
    assert torch.allclose(pull, wanted, atol=1e-14)
    assert pull.sum(-1).abs().max() < 1e-14


def test_a_confident_answer_keeps_its_digits_in_float32() -> None:
    """p − q near 1 − 1: in float32 nothing would be left."""
    z = torch.tensor([[40.0, 0.0, 0.0]])
    _, pull = predictive_of("logits", 0.9).pull(z, None, None, False)
    exact = math.expm1(0) - 2 * (math.exp(-40) - math.exp(-36) / (1 + 2 * math.exp(-36)))
    assert float(pull[0, 0]) == pytest.approx(exact, rel=1e-3)
    assert float(pull[0, 0]) > 0


def test_padded_tokens_are_not_pulled_at() -> None:
    z, mask = logits(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    _, pull = predictive_of("logits", 0.5).pull(z, None, mask, False)
    assert torch.equal(pull.abs().sum(-1) > 0, mask.bool())
    _, whole = predictive_of("logits", 0.5).pull(z, None, None, False)
    assert torch.equal(pull[0, :2], whole[0, :2])


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_gaussian_by_samples_of_the_tempered_prediction(beta: float) -> None:
    """q ∝ p^β drawn 400 000 times: the mean is not pulled at, the log-variance by (1 − 1/β) / 2."""
    mean, log_variance = torch.tensor([0.7], requires_grad=True), torch.tensor([-0.3], requires_grad=True)
    random = torch.Generator().manual_seed(0)
    spread = (log_variance.detach() / 2).exp() / beta**0.5
    y = mean.detach() + spread * torch.randn(400_000, generator=random)
    loss = (0.5 * log_variance + (y - mean) ** 2 / (2 * log_variance.exp())).mean()
    of_mean, of_spread = torch.autograd.grad(loss, (mean, log_variance))
    part, pull = predictive_of("gaussian", beta).pull((mean, log_variance), None, None, False)
    assert part is log_variance
    assert float(of_spread) == pytest.approx(float(pull), rel=0.02)
    assert abs(float(of_mean)) < 0.02 / beta


@pytest.mark.parametrize("beta", [0, 0.0, -0.5, 1.5, math.nan, math.inf, "x", None, True])
@pytest.mark.parametrize("output", ["logits", "gaussian"])
def test_temperatures_that_are_none(beta: Any, output: str) -> None:
    with pytest.raises(ValueError, match="beta must be a number above 0 and at most 1"):
        predictive_of(output, beta)


def test_beta_one_has_no_gradient() -> None:
    with pytest.raises(ValueError, match="beta=1 gives gradients of exactly 0"):
        predictive_of("logits", 1.0)
    z = logits(3, 4)
    p = z.softmax(-1).detach()
    assert torch.autograd.grad(-(p * z.log_softmax(-1)).sum(), z)[0].abs().max() < 1e-14


def test_beta_may_be_numpys() -> None:
    assert predictive_of("logits", np.float32(0.5)).words == "logits, beta 0.5"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (torch.rand(4, 3).softmax(-1), "returns probabilities"),
        (torch.rand(4), r"returns \(4,\) for 4 inputs"),
        (torch.rand(4, 1), r"returns \(4, 1\) for 4 inputs"),
        (torch.rand(4, 3, 2, 2), r"returns \(4, 3, 2, 2\) for 4 inputs"),
        (torch.rand(5, 3), r"returns \(5, 3\) for 4 inputs"),
        (torch.randint(0, 3, (4, 3)), "returns int64"),
        ("text", "returns str"),
        ({"n": 3}, "returns dict"),
    ],
)
def test_answers_that_are_no_logits(answer: Any, word: str) -> None:
    with pytest.raises(ValueError, match=f"output='logits'.*{word}.*output=function") as found:
        predictive_of("logits", 0.5).pull(answer, torch.zeros(4, 2), None, True)
    assert "answer" in str(found.value)


def test_log_probabilities_are_logits() -> None:
    z = logits(4, 3)
    predictive_of("logits", 0.5).pull(z.log_softmax(-1), torch.zeros(4, 2), None, True)
    one, two = (predictive_of("logits", 0.5).pull(x, None, None, False)[1] for x in (z, z.log_softmax(-1)))
    assert torch.allclose(one, two)


def test_a_fixed_variance_is_refused() -> None:
    mean = logits(4, 2)
    for answer in (mean, (mean, None), (mean, mean, mean)):
        with pytest.raises(ValueError, match="every gradient is exactly 0, whatever beta"):
            predictive_of("gaussian", 0.5).pull(answer, torch.zeros(4, 2), None, True)
    with pytest.raises(ValueError, match="log-variance does not depend"):
        predictive_of("gaussian", 0.5).pull((mean, torch.zeros(4, 2)), torch.zeros(4, 2), None, True)
    with pytest.raises(ValueError, match="of one shape"):
        predictive_of("gaussian", 0.5).pull((mean, mean[:, :1]), torch.zeros(4, 2), None, True)
    predictive_of("gaussian", 0.5).pull({"mean": mean, "log_variance": mean + 1}, torch.zeros(4, 2), None, True)


@pytest.mark.parametrize("found", [torch.tensor(3.0), torch.zeros(4, 2), torch.zeros(3), 3.0, [1.0] * 4])
def test_losses_are_one_an_input(found: Any) -> None:
    with pytest.raises(ValueError, match=r"one number per input, a tensor \(4,\)"):
        predictive_of(lambda answer, batch: found, 0.5).pull(None, torch.zeros(4, 2), None, False)


def test_outputs_by_name() -> None:
    with pytest.raises(ValueError, match="output is 'logits', 'gaussian' or a function"):
        predictive_of("probabilities", 0.5)
    assert predictive_of(lambda answer, batch: answer, 1.0).words.startswith("loss ")


# One number an input


def test_fingerprints_tell_inputs_apart() -> None:
    x = torch.rand(6, 3, 4, generator=torch.Generator().manual_seed(0))
    found = input_numbers((x, torch.zeros(6)), 6)
    assert torch.equal(found, input_numbers((x, torch.ones(6)), 6))  # labels aside
    assert torch.allclose(found[2:4], input_numbers(x[2:4], 2))
    assert torch.allclose(found, input_numbers(x.numpy(), 6))
    assert len(set(found.tolist())) == 6
    assert not torch.allclose(found, input_numbers(x.flip(1), 6))
    assert len(set(input_numbers(["a", "b", "ab"], 3).tolist())) == 3
    tokens = {"input_ids": torch.arange(12).reshape(3, 4), "attention_mask": torch.ones(3, 4)}
    assert len(set(input_numbers(tokens, 3).tolist())) == 3
    x[0, 0, 0] = torch.nan
    assert torch.isfinite(input_numbers(x, 6)).all()
    state = torch.get_rng_state()
    input_numbers(x, 6)
    assert torch.equal(state, torch.get_rng_state())
