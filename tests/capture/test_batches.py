from collections import namedtuple
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import sosie
from sosie.capture import Batches, recut

Pair = namedtuple("Pair", "x y")


class Samples(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i >= self.n:
            raise IndexError(i)
        return torch.full((2,), float(i)), i


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.full((2,), float(i)) for i in range(5))


def cat(chunks):
    return torch.cat([chunk.batch for chunk in chunks])


# Kinds of data


@pytest.mark.parametrize("convert", [torch.as_tensor, np.asarray])
def test_a_whole_array_is_cut_into_batches(convert):
    data = Batches(convert(np.arange(600.0).reshape(300, 2)))
    assert data.total == 300
    assert [len(batch) for batch in data] == [128, 128, 44]
    assert all(isinstance(batch, torch.Tensor) for batch in data)


def test_a_dict_of_arrays_is_one_data_set():
    data = Batches({"input_ids": np.arange(600).reshape(300, 2), "attention_mask": torch.ones(300, 2), "flag": True})
    assert data.total == 300
    batches = list(data)
    assert [len(batch["input_ids"]) for batch in batches] == [128, 128, 44]
    assert batches[0]["flag"] is True


@pytest.mark.parametrize("convert", [list, tuple])
def test_a_list_of_texts_is_one_data_set(convert):
    texts = [str(i) for i in range(300)]
    data = Batches(convert(texts))
    assert data.total == 300
    assert [len(batch) for batch in data] == [128, 128, 44]
    assert [text for batch in data for text in batch] == texts


def test_texts_with_labels_are_counted_and_cut():
    loader = DataLoader([(str(i), i) for i in range(10)], batch_size=4)
    chunks = list(recut(loader, block=5))
    assert [chunk.count for chunk in chunks] == [5, 5]
    assert [text for chunk in chunks for text in chunk.batch[0]] == [str(i) for i in range(10)]
    assert torch.cat([chunk.batch[1] for chunk in chunks]).tolist() == list(range(10))


def test_a_dataset_of_samples_is_batched_in_order():
    data = Batches(Samples(200))
    assert data.total == 200
    batches = list(data)
    assert [len(x) for x, _ in batches] == [128, 72]
    torch.testing.assert_close(torch.cat([y for _, y in batches]), torch.arange(200))
    assert [len(batch) for batch in Batches(Stream())] == [5]
    assert Batches(Stream()).total is None


def test_a_one_shot_iterator_works_once():
    data = Batches(torch.ones(2, 1) for _ in range(3))
    assert data.total is None
    assert len(list(data)) == 3
    with pytest.raises(ValueError, match="one-shot iterator"):
        list(data)


@pytest.mark.parametrize(
    ("loader", "total"),
    [
        (DataLoader(Samples(10), batch_size=4), 10),
        (DataLoader(Samples(10), batch_size=4, drop_last=True), 8),
        (DataLoader(Samples(10), batch_size=4, sampler=SubsetRandomSampler([1, 2, 3])), 3),
        (DataLoader(Samples(10), batch_sampler=[[1, 2], [3]]), None),
        (DataLoader(Stream(), batch_size=4), None),
        ([torch.ones(3, 1), torch.ones(2, 1)], 5),
    ],
)
def test_the_total_is_known_where_it_is_cheap(loader, total):
    data = Batches(loader)
    assert data.total == total
    if total is not None:
        assert sum(chunk.count for chunk in recut(data, block=None)) == total


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        ([], ValueError, "no inputs"),
        (iter([]), ValueError, "no inputs"),
        (torch.empty(0, 3), ValueError, "no inputs"),
        ([torch.empty(0, 3)], ValueError, "no inputs"),
        ([torch.tensor(1.0)], ValueError, "without dimensions"),
        (torch.tensor(1.0), ValueError, "without dimensions"),
        ([object()], ValueError, "of type object; data yields tensors"),
        (iter(["text"]), ValueError, "of type str"),
        ([3], ValueError, "of type int"),
        ([None], ValueError, "NoneType"),
        ([(torch.ones(3, 8, 8), 5)], ValueError, "part 1 of the batch is of type int.*DataLoader"),
        ([{}], ValueError, "holds no tensor"),
        (
            [(torch.ones(3, 2), torch.ones(2))],
            ValueError,
            "part 0 of the batch has 3 rows, part 1 of the batch has 2",
        ),
        (
            [{"x": torch.ones(3, 2), "attention_mask": torch.ones(2, 2)}],
            ValueError,
            "'x' has 3 rows, 'attention_mask'",
        ),
        ((torch.ones(3, 2), torch.ones(3)), ValueError, "TensorDataset"),
        (5, TypeError, "iterable and yield batches, got int"),
        ("cifar10", TypeError, "got str"),
    ],
)
def test_data_that_cannot_be_used_are_refused_in_words(data, error, says):
    with pytest.raises(error, match=says):
        list(Batches(data))


# Cutting anew

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(1, 6), st.integers(0, 20), st.one_of(st.none(), st.integers(1, 40)))
def test_any_batch_sizes_give_the_same_inputs_in_aligned_chunks(sizes, block, skip, max_rows):
    whole = torch.arange(sum(sizes))
    if not len(whole):
        return
    chunks = list(recut(list(whole.split(sizes)), block=block, skip=skip, max_rows=max_rows))
    expected = whole[:max_rows][skip:]
    if not len(expected):
        assert chunks == []
        return
    torch.testing.assert_close(cat(chunks), expected)
    assert [chunk.start for chunk in chunks] == [int(chunk.batch[0]) for chunk in chunks]
    assert all(chunk.count == len(chunk.batch) for chunk in chunks)
    assert all(chunk.count % block == 0 for chunk in chunks[:-1])
    assert chunks[-1].count >= min(block, len(expected))


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 6))
def test_the_blocks_do_not_depend_on_the_batch_size(sizes, block):
    """Whatever the chunks, cutting them into blocks (a remainder joins the last) gives the same blocks."""
    whole = torch.arange(sum(sizes))
    if not len(whole):
        return

    def blocks(batches):
        found = []
        for chunk in recut(batches, block=block):
            full = max(chunk.count // block, 1)
            edges = [block * i for i in range(full)] + [chunk.count]
            found += [chunk.batch[a:b].tolist() for a, b in pairwise(edges)]
        return found

    assert blocks(list(whole.split(sizes))) == blocks([whole])


def test_chunks_are_about_as_large_as_the_loaders_batches():
    counts = [chunk.count for chunk in recut(torch.arange(1000.0).split(100), block=32)]
    assert counts == [96] * 10 + [40]
    assert [chunk.count for chunk in recut(torch.arange(100.0).split(10), block=32)] == [32, 32, 36]


def test_a_remainder_never_stands_alone_and_few_inputs_are_one_chunk():
    assert [chunk.count for chunk in recut(torch.arange(131.0).split(64), block=64)] == [64, 67]
    assert [chunk.count for chunk in recut(torch.arange(3.0).split(2), block=64)] == [3]


def test_batches_that_fit_are_not_copied():
    batches = [torch.randn(8, 2) for _ in range(4)]
    found = list(recut(batches, block=4))
    assert [chunk.batch.data_ptr() for chunk in found] == [batch.data_ptr() for batch in batches]


def test_only_one_batch_is_read_ahead_and_none_past_max_rows():
    read = []

    def loader():
        for i in range(10):
            read.append(i)
            yield torch.full((8, 1), float(i))

    stream = recut(loader(), block=4, max_rows=20)
    next(stream)
    assert read == [0, 1]
    assert sum(chunk.count for chunk in stream) == 12
    assert read == [0, 1, 2]


def test_without_a_block_batches_pass_as_they_are():
    batches = [torch.ones(3, 1), torch.ones(0, 1), torch.ones(5, 1)]
    found = list(recut(batches, block=None))
    assert [(chunk.start, chunk.count) for chunk in found] == [(0, 3), (3, 5)]
    assert found[1].batch.data_ptr() == batches[2].data_ptr()
    assert [(c.start, c.count) for c in recut(batches, block=None, skip=2, max_rows=6)] == [(2, 1), (3, 3)]


def test_every_structure_is_cut_and_joined():
    x = torch.arange(10.0)
    text = [str(i) for i in range(10)]
    cuts = [slice(0, 3), slice(3, 4), slice(4, 10)]
    for batches in (
        [(x[c], text[c]) for c in cuts],
        [[x[c], x[c].numpy()] for c in cuts],
        [Pair(x[c], x[c]) for c in cuts],
        [{"x": x[c], "text": np.array(text[c]), "flag": True} for c in cuts],
        [({"x": x[c]}, x[c]) for c in cuts],
    ):
        chunks = list(recut(batches, block=4))
        assert [chunk.count for chunk in chunks] == [4, 6]
        assert type(chunks[0].batch) is type(batches[0])
    assert [chunk.batch for chunk in recut([text[c] for c in cuts], block=5)] == [text[:5], text[5:]]


def test_dicts_of_different_token_length_are_padded_where_a_mask_says_so():
    def batch(n, tokens):
        return {
            "input_ids": torch.full((n, tokens), 5),
            "embeds": torch.ones(n, tokens, 3),
            "pixel_values": torch.ones(n, 7),
            "attention_mask": torch.ones(n, tokens, dtype=torch.long),
        }

    (chunk,) = recut([batch(3, 4), batch(2, 6)], block=5)
    assert chunk.batch["input_ids"].shape == (5, 6)
    assert chunk.batch["embeds"].shape == (5, 6, 3)
    assert chunk.batch["pixel_values"].shape == (5, 7)
    assert chunk.batch["attention_mask"].sum(1).tolist() == [4, 4, 4, 6, 6]
    assert chunk.batch["input_ids"][0].tolist() == [5, 5, 5, 5, 0, 0]


def test_a_decoders_tokens_are_padded_by_their_own_mask_or_not_at_all():
    def batch(n, tokens, **more):
        ids = torch.full((n, tokens), 5)
        return {"input_ids": ids, "attention_mask": torch.ones(n, tokens), "decoder_input_ids": ids, **more}

    def masked(n, tokens, longer):
        mask = torch.ones(n, tokens + longer)
        ids = torch.full((n, tokens + longer), 5)
        return {**batch(n, tokens), "decoder_input_ids": ids, "decoder_attention_mask": mask, "labels": ids}

    (chunk,) = recut([masked(3, 4, 3), masked(2, 6, 0)], block=5)
    assert {key: part.shape[1] for key, part in chunk.batch.items()} == {
        "input_ids": 6, "attention_mask": 6, "decoder_input_ids": 7, "decoder_attention_mask": 7, "labels": 7,
    }  # fmt: skip
    assert chunk.batch["decoder_attention_mask"].sum(1).tolist() == [7, 7, 7, 6, 6]
    with pytest.raises(ValueError, match=r"different shape, \(4,\) and \(6,\)"):
        list(recut([batch(3, 4), batch(2, 6)], block=5))  # nothing would say that zeros do not count


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([torch.ones(3, 4), torch.ones(3, 6)], r"different shape, \(4,\) and \(6,\)"),
        ([{"x": torch.ones(3, 4)}, {"x": torch.ones(3, 6)}], r"\(4,\) and \(6,\).*attention_mask"),
        ([{"x": torch.ones(3, 4)}, {"y": torch.ones(3, 4)}], "dict of x and dict of y"),
        ([torch.ones(3, 4), (torch.ones(3, 4),)], "Tensor and tuple of 1"),
        ([{"x": torch.ones(4, 2), "scale": scale} for scale in (0.1, 50.0)], r"scale=0\.1 and scale=50\.0"),
        (
            [{"attention_mask": torch.ones(2, 4, 4)}, {"attention_mask": torch.ones(2, 6, 6)}],
            r"attention_mask of shape \(2, 4, 4\) cannot be padded",
        ),
    ],
)
def test_batches_that_do_not_fit_together_are_refused(batches, says):
    with pytest.raises(ValueError, match=says):
        list(recut(batches, block=5))


@pytest.mark.parametrize(("options", "says"), [({"block": 0}, "at least 1"), ({"block": 2, "max_rows": 0}, "max_")])
def test_senseless_cuts_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        list(recut(torch.ones(3, 1), **options))


def test_a_loader_and_a_tensor_give_the_same_chunks():
    x = torch.randn(50, 3)
    loader = DataLoader(TensorDataset(x, torch.arange(50)), batch_size=7)
    from_loader = torch.cat([chunk.batch[0] for chunk in recut(loader, block=4)])
    torch.testing.assert_close(from_loader, cat(recut(x, block=4)))


def test_a_loader_that_fills_one_buffer_again_and_again() -> None:
    x = torch.arange(40.0).view(20, 2)

    def batches():
        buffer = torch.empty(5, 2)
        for part in x.split(5):
            yield buffer.copy_(part)

    chunks = [chunk.batch.clone() for chunk in recut(batches(), block=4)]
    assert torch.equal(torch.cat(chunks), x)


IDS = torch.randint(1, 50, (40, 6), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(6) < torch.arange(40)[:, None] % 5 + 2).long()
MASKED = IDS * MASK
EMBEDDED = torch.nn.Sequential(torch.nn.Embedding(50, 6), torch.nn.Flatten(), torch.nn.Linear(36, 3))


@pytest.mark.parametrize("parts", [(MASKED, MASK), (IDS, torch.ones_like(IDS)), (IDS, IDS > 9), Pair(IDS, IDS)])
@pytest.mark.parametrize(
    "door",
    [
        lambda data, folder: sosie.compare(EMBEDDED, EMBEDDED, data),
        lambda data, folder: sosie.compare_outputs(EMBEDDED, EMBEDDED, data),
        lambda data, folder: sosie.sketch(EMBEDDED, data),
        lambda data, folder: sosie.stitch(EMBEDDED, "1", EMBEDDED, "1", data),
        lambda data, folder: sosie.Zoo(folder / "zoo", data=data),
    ],
)
def test_a_tuple_that_may_be_one_batch_is_refused_everywhere(parts, door, tmp_path):
    with pytest.raises(ValueError, match=r"several batches, .* give \[\(x, y\)\], .*'attention_mask'"):
        door(parts, tmp_path)


@pytest.mark.parametrize("data", [torch.ones(100, 6), IDS, MASK, MASK > 0, torch.randint(0, 2, (65, 3))])
def test_a_tensor_that_was_split_is_several_batches(data):
    assert torch.equal(torch.cat(list(Batches(data.split(16)))), data)


def test_options_that_stay_the_same_in_a_chunk_pass():
    batches = [{"x": torch.ones(4, 2), "scale": scale} for scale in (1.0, 2.0)]
    assert [chunk.batch["scale"] for chunk in recut(batches, block=4)] == [1.0, 2.0]
