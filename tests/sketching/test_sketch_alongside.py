"""What is sketched along with the sites: labels, looked at many at a time, and the fingerprint."""

from __future__ import annotations

import pytest
import torch
from gradient_nets import Residual, Words, built, rows, words
from torch import Tensor

from sosie.sketching import sketch, sketches
from sosie.sketching.gradients import input_numbers
from sosie.stats import Buckets


def labelled(*labels: Tensor | None) -> list[object]:
    x = rows(40).split(10)
    return [part if found is None else (part, found) for part, found in zip(x, labels, strict=True)]


MORE_AND_MORE = (
    torch.zeros(10).long(),
    torch.arange(10) % 3,
    torch.arange(10) % 2,
    torch.arange(10, dtype=torch.uint8),
)


@pytest.mark.parametrize("at_once", [1, 15, 2**16])
@pytest.mark.parametrize("stack", [1, 2])
def test_sums_of_one_column_a_class(at_once: int, stack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "LABELS", at_once)
    found = sketch(built(Residual), labelled(*MORE_AND_MORE), size=8, stack=stack, kernels="features", seed=3)
    coded = torch.nn.functional.one_hot(torch.cat([part.long() for part in MORE_AND_MORE])).double()
    for name, signed in (("labels", True), ("unsigned_labels", False)):
        wanted = torch.zeros(8, 10, dtype=torch.float64)
        Buckets(8, 3, stack).draw(0, 40).add(wanted, coded, signed=signed)
        assert torch.allclose(getattr(found, name), wanted, atol=1e-14)


def test_every_row_kept_keeps_its_label() -> None:
    found = sketch(built(Residual), labelled(*MORE_AND_MORE), size=None, kernels="features")
    assert torch.equal(found.labels.argmax(1), torch.cat([part.long() for part in MORE_AND_MORE]))


@pytest.mark.parametrize(("at_once", "size"), [(1, 8), (2**16, None)])
@pytest.mark.parametrize("bad", [None, torch.arange(10) - 1, torch.arange(10) + 2**15, torch.rand(10)])
@pytest.mark.parametrize("place", [0, 2])
def test_no_labels_if_a_batch_has_none(
    at_once: int, size: int | None, bad: Tensor | None, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketches, "LABELS", at_once)
    labels: list[Tensor | None] = [*MORE_AND_MORE]
    labels[place] = bad
    found = sketch(built(Residual), labelled(*labels), size=size, kernels="features")
    assert found.labels is None
    assert found.unsigned_labels is None
    assert found.to("cpu") is found


def test_an_input_without_tokens_has_no_number() -> None:
    """Under "positions", the number of an input stands at its first row."""
    batch = words()
    batch["attention_mask"][0] = batch["attention_mask"][2] = 0
    found = sketch(built(Words), [batch], sites=["block"], size=8, rows="positions", kernels="features")
    tokens, numbers = batch["attention_mask"].sum(1), input_numbers(batch, len(batch["attention_mask"]))
    wanted = torch.zeros(found.n, dtype=torch.float64)
    for k in torch.nonzero(tokens).flatten().tolist():
        wanted[tokens[:k].sum()] = numbers[k]
    sums = torch.zeros(8, dtype=torch.float64)
    Buckets(8).draw(0, found.n).add(sums, wanted)
    assert torch.allclose(found.fingerprint, sums)
