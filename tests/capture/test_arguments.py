import numpy as np
import pytest
import torch

from sosie.capture import BadBatch, mask_of, model_arguments

X = torch.ones(2, 3)


@pytest.mark.parametrize("batch", [X, X.numpy(), (X, torch.zeros(2)), [X, torch.zeros(2)], (X,)])
def test_the_first_part_is_the_argument(batch):
    args, kwargs = model_arguments(batch)
    assert kwargs == {}
    assert len(args) == 1
    torch.testing.assert_close(args[0], X)


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: (d, torch.zeros(2))])
def test_dicts_are_keyword_arguments_without_their_labels(wrap):
    batch = wrap({"input_ids": np.ones((2, 3)), "labels": X, "label": X, "return_dict": True})
    args, kwargs = model_arguments(batch)
    assert args == ()
    assert kwargs.keys() == {"input_ids", "return_dict"}
    assert isinstance(kwargs["input_ids"], torch.Tensor)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (lambda b: b["a"], ((X,), {})),
        (lambda b: (b["a"], b["b"]), ((X, 2 * X), {})),
        (lambda b: {"labels": b["b"]}, ((), {"labels": 2 * X})),
        (lambda b: ["some", "text"], ((["some", "text"],), {})),
    ],
)
def test_inputs_says_what_the_model_gets(inputs, expected):
    torch.testing.assert_close(model_arguments({"a": X, "b": 2 * X}, inputs=inputs)[1], expected[1])
    args, _ = model_arguments({"a": X, "b": 2 * X}, inputs=inputs)
    assert len(args) == len(expected[0])
    assert all(
        a is b or a == b if isinstance(a, list) else torch.equal(a, b) for a, b in zip(args, expected[0], strict=True)
    )


def test_prepare_is_applied_to_the_first_argument_only():
    args, _ = model_arguments({"a": X, "b": X}, inputs=lambda b: (b["a"], b["b"]), prepare=lambda x: x - 5)
    assert args[0].unique().tolist() == [-4.0]
    assert args[1].unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ({"scale": X, "pixel_values": X}, "pixel_values"),
        ({"scale": X, "x": X}, "x"),
        ({"ids": X.long(), "embeds": X, "more": X}, "embeds"),
    ],
)
def test_prepare_finds_the_main_keyword(batch, key):
    _, kwargs = model_arguments(batch, prepare=lambda x: x - 5)
    assert {name for name, value in kwargs.items() if value.min() < 0} == {key}
    assert batch[key].min() == 1


def test_prepare_without_a_tensor_is_refused():
    with pytest.raises(BadBatch, match="no floating-point tensor among ids"):
        model_arguments({"ids": X.long()}, prepare=lambda x: x)
    with pytest.raises(BadBatch, match="list and no tensor"):
        model_arguments(["a", "b"], prepare=lambda x: x)
    with pytest.raises(BadBatch, match="empty tuple"):
        model_arguments(())


def test_everything_the_model_gets_is_moved_before_it_is_prepared():
    devices = []

    def prepare(x):
        devices.append(x.device.type)
        return x

    _, kwargs = model_arguments({"x": X, "nested": (X, [X])}, prepare=prepare, device="meta")
    assert devices == ["meta"]
    assert kwargs["nested"][1][0].device.type == "meta"


def test_the_mask_is_found():
    mask = torch.ones(2, 3)
    assert mask_of({"attention_mask": mask}) is mask
    assert mask_of(({"attention_mask": mask.numpy()}, X)).shape == (2, 3)
    assert mask_of({"x": X}) is None
    assert mask_of((X, X)) is None
    assert mask_of(X) is None
    assert mask_of(["a", "b"]) is None


def test_a_mask_of_another_shape_is_refused_rather_than_passed_by():
    with pytest.raises(BadBatch, match=r"attention_mask has shape \(2, 1, 1, 3\)"):
        mask_of({"attention_mask": torch.ones(2, 1, 1, 3)})
