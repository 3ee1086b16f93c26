from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sosie.capture import labels_of, model_arguments
from sosie.models import Tokenise

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
    with pytest.raises(ValueError, match="no floating-point tensor among ids"):
        model_arguments({"ids": X.long()}, prepare=lambda x: x)
    with pytest.raises(ValueError, match="is list, not a tensor"):
        model_arguments([1, 2], prepare=lambda x: x)
    with pytest.raises(ValueError, match="empty tuple"):
        model_arguments(())


def test_everything_the_model_gets_is_moved_before_it_is_prepared():
    devices = []

    def prepare(x):
        devices.append(x.device.type)
        return x

    _, kwargs = model_arguments({"x": X, "nested": (X, [X])}, prepare=prepare, device="meta")
    assert devices == ["meta"]
    assert kwargs["nested"][1][0].device.type == "meta"


TEXTS = ["a b", "c"]


@pytest.mark.parametrize("batch", [TEXTS, tuple(TEXTS), (TEXTS, X), [tuple(TEXTS), X]])
def test_prepare_gets_texts_whole_and_returns_the_arguments(batch):
    got = []

    def tokenise(texts):
        got.append(list(texts))
        return {"input_ids": np.ones((2, 3), dtype=np.int64), "use_cache": False}

    args, kwargs = model_arguments(batch, prepare=tokenise)
    assert got == [TEXTS]
    assert args == ()
    assert kwargs["use_cache"] is False
    torch.testing.assert_close(kwargs["input_ids"], torch.ones(2, 3, dtype=torch.int64))


def test_prepare_gets_a_dict_with_texts_without_its_labels():
    args, _ = model_arguments({"text": TEXTS, "label": X}, prepare=lambda d: X * len(d) * len(d["text"]))
    torch.testing.assert_close(args, (2 * X,))


def test_a_tokeniser_must_make_tensors_and_leaves_token_ids_alone():
    with pytest.raises(ValueError, match=r"prepare must turn text into tensors.*padding=True"):
        model_arguments(TEXTS, prepare=lambda texts: {"input_ids": [[1, 2], [3]]})
    tokenise = Tokenise(SimpleNamespace(pad_token="pad"))
    assert model_arguments({"input_ids": X.long()}, prepare=tokenise)[1].keys() == {"input_ids"}


class TakesMask(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None):
        return input_ids


class TakesNone(torch.nn.Module):
    def forward(self, input_ids):
        return input_ids


def test_a_part_as_large_as_the_ids_is_the_mask_of_a_model_that_takes_one():
    ids, mask = torch.arange(6).view(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
    args, kwargs = model_arguments((ids, mask), model=TakesMask())
    assert args[0].equal(ids)
    assert kwargs["attention_mask"].equal(mask)
    for batch, model in [
        ((ids, mask), TakesNone()),
        ((ids, mask[:, 0]), TakesMask()),
        ((ids.float(), mask), TakesMask()),
    ]:
        assert model_arguments(batch, model=model)[1] == {}
    assert model_arguments((ids, mask), model=TakesMask(), inputs=lambda batch: batch[0])[1] == {}
    with pytest.raises(
        ValueError, match=r"TakesMask takes an attention_mask.*1 beside the ids .*\(2, 3\), and 0 of these"
    ):
        model_arguments((ids, ids), model=TakesMask())


class HandsOn(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


def test_a_mask_is_found_beside_embeddings_and_through_a_wrapper():
    ids, mask = torch.arange(6).view(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
    for first, model in [(torch.randn(2, 3, 4), TakesMask()), (ids, HandsOn(TakesMask()))]:
        assert model_arguments((first, mask), model=model)[1]["attention_mask"].equal(mask)
    assert model_arguments((ids, mask), model=HandsOn(TakesNone()))[1] == {}


@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 1, 1, 3), (2, 3, 3)])
def test_a_mask_of_attention_scores_is_refused_rather_than_passed_by(shape):
    ids = torch.arange(6).view(2, 3)
    with pytest.raises(ValueError, match=r"TakesMask takes an attention_mask.*\(inputs, tokens\), 1 at tokens"):
        model_arguments((ids, torch.ones(shape)), model=TakesMask())
    assert model_arguments((ids, torch.ones(shape)), model=TakesNone())[1] == {}


def test_labels_of_zeros_and_ones_are_not_taken_for_a_mask():
    ids, labels = torch.arange(8).view(2, 4), torch.tensor([[0, 1, 0, 1], [1, 0, 0, 1]])
    with pytest.raises(ValueError, match=r"zeros between ones as in labels of tokens\. Give dicts"):
        model_arguments((ids, labels), model=TakesMask())
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])  # padding after the tokens, and before them
    assert model_arguments((ids, mask), model=TakesMask())[1]["attention_mask"].equal(mask)
    with pytest.raises(ValueError, match="2 of these hold only 0 and 1"):
        model_arguments((ids, labels, mask), model=TakesMask())
    named = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    assert model_arguments(named, model=TakesMask())[1]["attention_mask"].equal(mask)
    assert model_arguments((named, labels), model=TakesMask())[1]["attention_mask"].equal(mask)


def test_a_mask_beside_the_ids_is_not_dropped_where_the_forward_has_another_name_for_it():
    class Own(torch.nn.Module):
        def forward(self, tokens, padding_mask=None):
            return tokens

    ids, mask = torch.arange(6).view(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
    with pytest.raises(ValueError, match="the forward of Own takes 'padding_mask'"):
        model_arguments((ids, mask), model=Own())
    with pytest.raises(ValueError, match="only 0 and 1 is that or labels"):  # texts packed side by side, or holes
        model_arguments((ids, torch.tensor([[0, 1, 0], [1, 0, 1]])), model=Own())
    assert model_arguments((ids, torch.tensor([[4, 1, 0], [1, 1, 1]])), model=Own())[1] == {}
    assert model_arguments((ids, mask[:, 0]), model=Own())[1] == {}


def test_labels_come_third_where_a_mask_is_second():
    ids, mask, labels = torch.arange(6).view(2, 3), torch.ones(2, 3, dtype=torch.long), torch.tensor([4, 5])
    assert labels_of((ids, mask, labels)).equal(labels)
    assert labels_of((ids, mask)) is None
    assert labels_of((ids, labels, mask)).equal(labels)
