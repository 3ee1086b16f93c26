"""Digests of weights, made while a model runs."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from sosie.engine import digest
from sosie.engine.digest import DigestAhead, digest_of


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_of_the_bytes_of_each_tensor() -> None:
    rows = torch.arange(6.0).reshape(2, 3)
    wanted = hashlib.sha256(b"x" + b"torch.float32(3, 2)" + rows.T.contiguous().numpy().tobytes() + b"y" + b"'text'")
    assert digest_of({"x": rows.T, "y": "text"}) == wanted.hexdigest()[:16]
    assert digest_of(torch.zeros(0)) != digest_of(torch.zeros(0, 1))


def test_ahead_is_the_same(model: nn.Module) -> None:
    weights = {**model.state_dict(), "prepare": "None"}
    assert DigestAhead(weights).of({**model.state_dict(), "prepare": "None"}) == digest_of(weights)


def test_ahead_notices_what_changes_meanwhile(model: nn.Module) -> None:
    before = digest_of(model.state_dict())
    ahead = DigestAhead(model.state_dict())
    with torch.no_grad():
        model[0].weight.add_(1)
    assert ahead.of(model.state_dict()) == digest_of(model.state_dict()) != before
    ahead = DigestAhead(model.state_dict())
    model[1].running_mean = model[1].running_mean + 1  # another tensor
    assert ahead.of(model.state_dict()) == digest_of(model.state_dict())
    ahead = DigestAhead(model.state_dict())
    model.register_buffer("more", torch.zeros(2))
    assert ahead.of(model.state_dict()) == digest_of(model.state_dict())
    assert DigestAhead({"prepare": "a"}).of({"prepare": "b"}) == digest_of({"prepare": "b"})
    with torch.inference_mode():
        untracked = {"w": torch.zeros(2)}
        ahead = DigestAhead(untracked)
        untracked["w"] += 1
        assert ahead.of(untracked) == digest_of({"w": torch.ones(2)})


def test_not_made_twice_for_a_buffer_that_was_moved_and_back(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, wanted = DigestAhead(model.state_dict()), digest_of(model.state_dict())
    own = model[0].weight.data
    model[0].weight.data = own.clone()
    model[0].weight.data = own
    model[1].running_mean = model[1].running_mean.clone()
    ahead._thread.join()
    whole: list[object] = []
    monkeypatch.setattr(digest, "digest_of", lambda value: whole.append(value) or digest_of(value))
    assert ahead.of(model.state_dict()) == wanted
    assert [tuple(value.shape) for value in whole] == [(4,), (4,)]  # the two to be compared, and no more


def test_weights_that_are_not_there_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    ahead = DigestAhead(model.state_dict())
    model(torch.rand(2, 5))
    assert ahead.of(model.state_dict()) == digest_of(model.state_dict())


def test_what_cannot_be_hashed_says_so_in_the_end(model: nn.Module) -> None:
    weights = {"w": torch.eye(2).to_sparse()}
    with pytest.raises(RuntimeError):
        DigestAhead(weights).of(weights)
