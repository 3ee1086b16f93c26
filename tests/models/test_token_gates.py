"""Masked attention, draws, gates, and likeness between tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sosie
from sosie.models.vit import AttentionWeights, TokenGates, TransformerBlock, draw, eq13, mean_of_others, token_cka

pytestmark = pytest.mark.usefixtures("seeded")


def test_a_block_with_masked_tokens_is_one_without_them() -> None:
    block = TransformerBlock(24, 3, 48)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.4)
    x, kept = torch.randn(2, 9, 24), [0, 2, 3, 7]
    policy = torch.zeros(2, 9)
    policy[:, kept] = 1
    with torch.no_grad():
        torch.testing.assert_close(block(x, policy)[:, kept], block(x[:, kept]), rtol=0, atol=1e-5)
        torch.testing.assert_close(block(x, torch.ones(2, 9)), block(x), rtol=0, atol=1e-5)
        assert (block(x, policy)[:, kept] - block(x)[:, kept]).abs().max() > 0.1


def test_a_dropped_token_that_shouts_is_not_heard() -> None:
    scores = torch.randn(1, 1, 4, 4)
    scores[..., 2] += 500.0
    scores.requires_grad_()
    policy = torch.tensor([[1.0, 1.0, 0.0, 1.0]], requires_grad=True)
    found = AttentionWeights(dim=-1)(scores, policy)
    kept = [0, 1, 3]
    torch.testing.assert_close(found[..., kept, :][..., kept], scores[..., kept, :][..., kept].softmax(-1))
    found.square().sum().backward()
    assert scores.grad.isfinite().all()
    assert policy.grad.isfinite().all()


def test_the_gradient_of_masked_attention() -> None:
    scores = torch.randn(2, 2, 5, 5, dtype=torch.double, requires_grad=True)
    policy = torch.rand(2, 5, dtype=torch.double).mul(0.8).add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(AttentionWeights(dim=-1), (scores, policy))


def test_decisions_are_exact_follow_the_probabilities_and_stay() -> None:
    log_probabilities = torch.tensor([[0.8, 0.2], [0.3, 0.7]]).log().expand(20_000, 2, 2)
    drawn = draw(log_probabilities)
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(drawn.mean(0), torch.tensor([0.2, 0.7]), rtol=0, atol=0.015)
    assert torch.equal(draw(log_probabilities, torch.zeros(20_000, 2)), torch.zeros(20_000, 2))
    assert 0.13 < float((drawn * draw(log_probabilities, drawn)).mean(0)[0]) / 0.2 < 0.27  # 0.2² of 0.2


def test_a_gate_where_nothing_is_left() -> None:
    gates = TokenGates(24, [1])
    kept = torch.ones(2, 5)
    kept[1] = 0
    x = torch.randn(2, 5, 24)
    found = gates(x, 1, kept)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:1], gates(x[:1], 1))


@pytest.mark.parametrize(("debiased", "name"), [(True, "debiased_cka"), (False, "linear_cka")])
def test_token_cka_is_the_measure_of_each_pair(debiased: bool, name: str) -> None:
    tokens = torch.randn(12, 5, 7) + torch.randn(12, 1, 7)
    found = token_cka(tokens, debiased=debiased)
    wanted = [[sosie.measure(name, tokens[:, i], tokens[:, j]) for j in range(5)] for i in range(5)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.double), rtol=0, atol=1e-6)
    others = torch.tensor([sum(row) - row[i] for i, row in enumerate(wanted)]).double() / 4
    torch.testing.assert_close(mean_of_others(found), others, rtol=0, atol=1e-6)


def test_token_cka_refuses_what_has_none() -> None:
    tokens = torch.randn(12, 5, 7)
    with pytest.raises(ValueError, match=r"at least 4 images, got \(3, 5, 7\)"):
        token_cka(tokens[:3])
    with pytest.raises(ValueError, match=r"linear CKA.*at least 3 images"):
        token_cka(tokens[:2], debiased=False)
    tokens[:, [1, 4]] = 3.7
    for debiased in (True, False):
        with pytest.raises(ValueError, match=r"tokens \[1, 4\] are the same for all 12 images"):
            token_cka(tokens, debiased=debiased)


def test_eq13_is_no_probability_and_hangs_on_the_batch() -> None:
    tokens = torch.randn(16, 196, 12) + 2 * torch.randn(16, 1, 12)
    probability = torch.rand(16, 196)
    found = eq13(probability, tokens)
    assert found.max() < -100
    alone = sum(sosie.measure("linear_cka", tokens[:, 0], tokens[:, j]) for j in range(1, 196))
    torch.testing.assert_close(found[:, 0], probability[:, 0] - alone, rtol=0, atol=1e-3)
    assert (eq13(probability[:8], tokens[:8]) - found[:8]).abs().max() > 1
    assert found.std(0).max() < 0.4 < found.mean(0).std()  # the images' own π hardly count
