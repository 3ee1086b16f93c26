"""Sums over outputs: what kind outputs are, what is refused, and what merges."""

from __future__ import annotations

import pytest
import torch

from sosie.stats import Continuous, Distributions, MarkedPredictions, OutputSums, Predictions, Reader, check_labels

LOGITS = torch.tensor([[2.0, -1, 0], [0, 3, 1], [1, 1, 0.5], [0, 0, 4]])


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        (torch.tensor([0, 2, 1]), "labels"),
        (torch.tensor([True, False]), "labels"),
        (LOGITS, "logits"),
        (LOGITS.softmax(1), "probabilities"),
        (LOGITS.softmax(1).half(), "probabilities"),
        (torch.eye(3), "probabilities"),
        (torch.tensor([0.5, 1.2]), "regression"),
    ],
)
def test_kinds_by_their_look(outputs: torch.Tensor, kind: str) -> None:
    assert Reader("x").read(outputs).kind == kind


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (torch.tensor([1.0, 2.0]), "may be labels or numbers"),
        (torch.tensor([[1.5], [2.0]]), "may be a number or the logit"),
        (torch.tensor([[1, 0], [0, 1]]), "may be counts, one-hot labels or scores"),
        (torch.zeros(2, 3, 4), r"outputs of shape \(2, 3, 4\)"),
    ],
)
def test_what_may_be_two_things_is_asked(outputs: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reader("x").read(outputs)


def test_a_kind_that_is_given_is_taken() -> None:
    assert Reader("x", "labels").read(torch.tensor([1.0, 2.0])).predicted.tolist() == [1, 2]
    assert Reader("x", "regression").read(torch.tensor([[1.5], [2.0]])).width == 1
    assert Reader("x", "logits").read(torch.eye(3)).log_p.exp().sum(1).tolist() == pytest.approx([1, 1, 1])
    with pytest.raises(ValueError, match="kind must be one of 'auto', 'logits'"):
        Reader("x", "scores")
    with pytest.raises(ValueError, match=r"logits are \(n, classes\) with at least 2 classes"):
        Reader("x", "logits").read(torch.zeros(4, 1))
    with pytest.raises(ValueError, match="not whole"):
        Reader("x", "labels").read(torch.tensor([1.5, 2.0]))
    with pytest.raises(ValueError, match="numbers to compare"):
        Reader("x", "regression").read(torch.zeros(2, 3, 4))


def test_the_first_batch_decides_and_later_ones_must_agree() -> None:
    reader = Reader("net")
    assert reader.read(LOGITS.softmax(1)).kind == "probabilities"
    with pytest.raises(ValueError, match=r"net: 4 of 4 rows are not probabilities.*set kind='logits'"):
        reader.read(2 * LOGITS.abs() + 1)
    with pytest.raises(ValueError, match="net: 2 outputs per input, but 3 in an earlier batch"):
        reader.read(torch.tensor([[0.5, 0.5]]))


def test_probabilities_need_not_sum_to_1_to_the_last_digit() -> None:
    rough = torch.tensor([[0.3334, 0.3334, 0.3336]])
    exact = rough.double() / rough.double().sum()
    assert Reader("x").read(rough).log_p == pytest.approx(exact.log())


def test_of_several_largest_the_first_counts_and_is_counted() -> None:
    found = Reader("x").read(LOGITS)
    assert found.predicted.tolist() == [0, 1, 0, 2]
    assert found.ties == 1
    part = OutputSums.of(LOGITS, LOGITS.argmax(1))
    assert part.merge(part).ties == (2, 0)


def test_outputs_that_are_not_finite_name_the_model() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="net: 1 of 12 outputs are NaN or infinite"):
            Reader("net").read(torch.where(LOGITS == 4, bad, LOGITS))
    with pytest.raises(TypeError, match="complex"):
        Reader("net").read(LOGITS.to(torch.complex64))


def test_labels_are_class_numbers() -> None:
    with pytest.raises(ValueError, match="labels lie between -100 and 2, but there are 3 classes"):
        check_labels(torch.tensor([-100, 2]), "labels", 3)
    with pytest.raises(ValueError, match="labels lie between 0 and 3, but there are 3 classes"):
        OutputSums.of(LOGITS, LOGITS, labels=torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match="classes are numbered from 0"):
        check_labels(torch.tensor([2**40]), "labels")
    with pytest.raises(ValueError, match=r"got shape \(2, 2\)"):
        check_labels(torch.zeros(2, 2), "labels")
    with pytest.raises(ValueError, match="3 labels and 4 outputs"):
        OutputSums.of(LOGITS, LOGITS, labels=torch.tensor([0, 1, 2]))


def test_sides_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="same inputs, got 4 and 3"):
        OutputSums.of(LOGITS, LOGITS[:3])
    with pytest.raises(ValueError, match="same classes on both sides, got 3 and 2"):
        OutputSums.of(LOGITS, LOGITS[:, :2])
    with pytest.raises(ValueError, match="one side's outputs are logits, the other's regression"):
        OutputSums.of(LOGITS, LOGITS[:, 0] + 0.5)
    with pytest.raises(ValueError, match="between 0 and 5, but there are 3 classes"):
        OutputSums.of(LOGITS, torch.tensor([0, 5, 1, 2]))


def test_which_views_there_are() -> None:
    labels = torch.tensor([0, 1, 2, 2])
    marked = OutputSums.of(LOGITS, LOGITS, labels=labels).supplies
    assert {Predictions, MarkedPredictions, Distributions} <= marked
    assert Continuous not in marked
    named = OutputSums.of(labels, LOGITS).supplies
    assert Predictions in named
    assert not named & {MarkedPredictions, Distributions, Continuous}
    numbers = OutputSums.of(LOGITS, LOGITS, kind="regression", labels=labels).supplies
    assert Continuous in numbers
    assert Predictions not in numbers


def test_counts_by_hand() -> None:
    a, b, y = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 2, 2, 0]), torch.tensor([0, 1, 1, 0])
    sums = OutputSums.of(a, b, labels=y)
    view = sums.view(MarkedPredictions)
    assert isinstance(view, MarkedPredictions)
    counted = (view.n, view.equal, view.right_a, view.right_b, view.both_right)
    assert [int(count) for count in counted] == [4, 2, 2, 2, 1]
    assert [side.tolist() for side in sums.predicted] == [[1, 2, 1], [2, 0, 2]]


def test_classes_that_appear_later() -> None:
    first, second = OutputSums.of(*[torch.tensor([0, 1])] * 2), OutputSums.of(*[torch.tensor([5, 1])] * 2, start=2)
    for merged in (first.merge(second), second.merge(first)):
        assert [side.tolist() for side in merged.predicted] == [[1, 2, 0, 0, 0, 1]] * 2
        assert merged.n == 4


def test_only_sums_of_one_kind_merge() -> None:
    labels = torch.tensor([0, 1, 2, 2])
    with pytest.raises(ValueError, match="of other outputs"):
        OutputSums.of(LOGITS, LOGITS).merge(OutputSums.of(labels, labels))
    with pytest.raises(ValueError, match="of other outputs"):
        OutputSums.of(LOGITS, LOGITS).merge(OutputSums.of(LOGITS, LOGITS, labels=labels))


def test_memory_does_not_grow_with_the_inputs() -> None:
    def size(n: int) -> int:
        random = torch.Generator().manual_seed(0)
        sums = OutputSums.of(*(torch.randn(n, 3, generator=random) for _ in range(2)))
        return sum(each.numel() for each in (*sums.sums.values(), *sums.predicted))

    assert size(100) == size(10_000)
