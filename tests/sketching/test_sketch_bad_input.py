"""What cannot be sketched is said in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gradient_nets import Residual, built, rows, state_of
from torch import Tensor

from sosie.sketching import sketch


def gradients(model: Any, x: Any, **options: Any) -> Tensor:
    return sketch(model, [x], sites=["stem"], size=None, **options).site("stem").gradients.rows


# What is not a number


@pytest.mark.parametrize("kernels", ["features", "hadamard"])
def test_a_nan_is_named_with_its_inputs(kernels: str) -> None:
    x = rows(40)
    x[25, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite for some of the inputs 20 to 29"):
        sketch(built(Residual), x.split(10), sites=["stem"], kernels=kernels, size=8)


def test_a_gradient_that_is_not_finite_though_the_answer_is() -> None:
    class Rooted(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.left(self.stem(x)) * 0).abs().sqrt())

    with pytest.raises(ValueError, match="the gradients at left are NaN or infinite for some of the inputs 0 to 11"):
        sketch(built(Rooted), [rows()], sites=["left"], size=8)


def test_an_answer_that_is_not_finite() -> None:
    model = built(Residual)
    with torch.no_grad():
        model.head.bias[0] = torch.inf
    with pytest.raises(ValueError, match="the answer or the loss is NaN or infinite"):
        sketch(model, [rows()], sites=["stem"], size=8)


# Bad input


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda z: z.softmax(-1), "returns probabilities"),
        (lambda z: z[:, 0], r"returns \(12,\) for 12 inputs"),
        (lambda z: z[:, :1], "at least two classes"),
        (lambda z: z.argmax(-1), "returns int64"),
        (lambda z: (z > 0).long(), "returns int64"),
    ],
)
def test_answers_that_are_no_logits(change: Callable[[Tensor], Tensor], word: str) -> None:
    class Changed(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return change(super().forward(x))

    with pytest.raises(ValueError, match=word):
        gradients(built(Changed), rows())


def test_a_gaussian_of_fixed_variance() -> None:
    class Mean(Residual):
        def forward(self, x: Tensor) -> Any:
            mean = super().forward(x)
            return mean, torch.zeros_like(mean)

    with pytest.raises(ValueError, match="variance"):
        gradients(built(Mean), rows(), output="gaussian")
    with pytest.raises(ValueError, match="Add a variance head"):
        gradients(built(Residual), rows(), output="gaussian")


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"beta": 1.5}, ValueError, "beta"),
        ({"beta": 1}, ValueError, "beta=1"),
        ({"size": 0}, ValueError, "size of a sketch must be a whole number"),
        ({"size": 1}, ValueError, "size of a sketch must be a whole number"),
        ({"size": 2.5}, ValueError, "size of a sketch must be a whole number"),
        ({"size": 10, "stack": 3}, ValueError, "does not divide"),
        ({"kernels": "cosine"}, ValueError, "kernel must be one of"),
        ({"kernels": []}, ValueError, "at least one kernel"),
        ({"output": "scores"}, ValueError, "output is 'logits'"),
        ({"rows": "columns"}, ValueError, "no row rule"),
        ({"max_rows": 0}, ValueError, "max_rows"),
        ({"memory": "lots"}, ValueError, "memory is a number of bytes"),
        ({"sites": ["nowhere"]}, ValueError, "nowhere"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], word: str) -> None:
    model = built(Residual)
    before = state_of(model)
    with pytest.raises(error, match=word):
        sketch(model, [rows()], **{"sites": ["stem"], **options})
    assert state_of(model) == before


@pytest.mark.parametrize("data", [[], torch.zeros(0, 6), [torch.zeros(0, 6)]])
def test_no_data(data: Any) -> None:
    with pytest.raises(ValueError, match="no inputs"):
        sketch(built(Residual), data, sites=["stem"])


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="is not a model"):
        sketch({"a": np.zeros((3, 2))}, [rows()])


@pytest.mark.parametrize("labels", [torch.arange(12) - 1, torch.full((12,), 10**9), torch.rand(12)])
@pytest.mark.parametrize("size", [None, 8])
def test_numbers_that_are_no_classes_are_not_kept_as_labels(labels: Tensor, size: int | None) -> None:
    found = sketch(built(Residual), [(rows(), labels)], sites=["stem"], size=size)
    assert found.labels is None
    assert found.unsigned_labels is None


@pytest.mark.parametrize("size", [None, 8])
def test_labels_of_some_batches_are_none(size: int | None) -> None:
    x, y = rows(), torch.arange(12) % 3
    found = sketch(built(Residual), [(x[:6], y[:6]), (x[6:], y[6:] - 5)], sites=["stem"], size=size)
    assert found.labels is None
    later = sketch(built(Residual), [(x[:6], y[:6] * 0), (x[6:], y[6:])], sites=["stem"], size=size)
    assert later.labels.shape[1] == 3


def test_weights_that_cannot_be_differentiated_are_named_and_stay_as_they_are() -> None:
    with torch.inference_mode():
        model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"made in torch\.inference_mode.*deepcopy"):
        sketch(model, torch.randn(8, 4))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert sketch(copy.deepcopy(model), torch.randn(8, 4)).n == 8


def test_layers_that_give_no_gradient_are_named() -> None:
    class NoGradient(torch.autograd.Function):
        """As a dynamically quantised layer."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return NoGradient.apply(x)

    with pytest.raises(ValueError, match="no gradient reaches 0: what follows it cannot be differentiated"):
        sketch(torch.nn.Sequential(torch.nn.Linear(4, 3), Layer()), torch.randn(8, 4), sites="0")
