"""Digests of weights and data, against sums in plain Python's integers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import sosie
from sosie.engine import provenance as digest
from sosie.engine.network import Network
from sosie.engine.provenance import digest_of
from sosie.zoo import fingerprint

WIDTHS = (1, 2, 4)
DTYPES = (
    torch.bool, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.int16, torch.float32,
    torch.int64, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of 8 words, so that a few numbers make several."""
    monkeypatch.setattr(digest, "PIECE", 8)
    digest._factors.cache_clear()
    yield
    digest._factors.cache_clear()


def mixed(z: int) -> int:
    """splitmix64's mixing."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> shift)) * factor % 2**64
    return z ^ (z >> 31)


def factor(i: int, seed: int) -> int:
    golden = 0x9E3779B97F4A7C15
    return mixed(mixed(i * golden % 2**64) ^ mixed((seed + golden) % 2**64)) | 1


def reference(weights: dict[str, Tensor], text: str, piece: int) -> str:
    """By the bytes of each width one after the other, in words of four bytes with a sign."""
    found = hashlib.sha256(text.encode())
    for width in WIDTHS:
        content = b"".join(
            each.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            for each in weights.values()
            if min(each.element_size(), 4) == width
        )
        content += b"\0" * (-len(content) % 4)
        words = [int.from_bytes(content[k : k + 4], "little", signed=True) for k in range(0, len(content), 4)]
        starts = range(0, len(words), piece)
        for seed in (1, 2):
            for start in starts:
                total = sum(word * factor(i, seed) for i, word in enumerate(words[start : start + piece])) % 2**64
                found.update(total.to_bytes(8, "little"))
    return found.hexdigest()[:16]


def content(dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    return (numbers > 0) if dtype == torch.bool else numbers.to(dtype)


def digested(weights: dict[str, Tensor]) -> str:
    parts = []
    for name, each in weights.items():
        told = f"{each.dtype}{tuple(each.shape)}"
        parts += [f"name {len(name)}:{name}", f"tensor {len(told)}:{told}"]
    return "".join(parts)


def test_whole_numbers_of_any_length_say_the_same(short_pieces: None) -> None:
    weights = {str(dtype): content(dtype) for dtype in DTYPES}
    weights |= {"turned": content(torch.float32).T, "one": torch.tensor(2.5), "none": torch.zeros(0, 2)}
    weights |= {"spread": torch.tensor([7.0]).expand(4), "every other": content(torch.float16)[:, ::2]}
    weights |= {"behind": torch.arange(9, dtype=torch.uint8)[1:4]}
    assert digest_of(weights) == reference(weights, digested(weights), 8)
    assert digest_of(list(weights.values())) != digest_of(weights)


def test_a_digest_stays_what_it_is() -> None:
    """Those in files must be found again: a change here is one of every file that holds a digest."""
    weights = {"x": torch.arange(6.0).reshape(2, 3).T, "half": torch.ones(3).bfloat16()}
    assert digest_of(weights) == reference(weights, digested(weights), 2**18) == "480d4a469df0e07f"
    assert digest_of({"prepare": "text"}) == hashlib.sha256(b"name 7:preparevalue 6:'text'").hexdigest()[:16]


@pytest.mark.parametrize("at_once", [1, 2, 64])
def test_how_many_pieces_are_taken_at_once_does_not_matter(
    short_pieces: None, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    weights = {"a": content(torch.float32, (11, 3)), "b": content(torch.bfloat16, (41,)), "c": content(torch.float64)}
    monkeypatch.setitem(digest.AT_ONCE, "cpu", at_once)
    assert digest_of(weights) == reference(weights, digested(weights), 8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_weights_on_several_devices(short_pieces: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Every tensor as if it were on a device of its own; they share words and pieces."""
    weights = {str(k): content(dtype, (k + 2,)) for k in range(9)}
    monkeypatch.setattr(digest, "groupby", lambda stream, key: ((key(each), [each]) for each in stream))
    assert digest_of(weights) == reference(weights, digested(weights), 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(short_pieces: None, dtype: torch.dtype) -> None:
    whole = content(dtype).contiguous()
    before = digest_of([whole])
    seen = {before}
    for at in range(whole.numel() * whole.element_size()):
        for bit in range(8) if dtype != torch.bool else (0,):
            changed = whole.clone()
            changed.flatten().view(torch.uint8)[at] ^= 1 << bit
            seen.add(digest_of([changed]))
    assert len(seen) == 1 + whole.numel() * (whole.element_size() * 8 if dtype != torch.bool else 1)
    assert digest_of([whole]) == before


CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "two words change places": lambda a, b: {"a": torch.cat([a[1:2], a[:1], a[2:]]), "b": b},
    "two pieces change places": lambda a, b: {"a": torch.cat([a[8:16], a[:8], a[16:]]), "b": b},
    "a word goes to the next tensor": lambda a, b: {"a": a[:-1], "b": torch.cat([a[-1:], b])},
    "the tensors change places": lambda a, b: {"a": b, "b": a},
    "names change places": lambda a, b: {"b": a, "a": b},
    "another order": lambda a, b: {"b": b, "a": a},
    "other names": lambda a, b: {"a": a, "c": b},
    "names that read the same": lambda a, b: {"a": a, "": b},
    "another shape": lambda a, b: {"a": a.reshape(2, -1), "b": b},
    "another type of the same bytes": lambda a, b: {"a": a.view(torch.int32), "b": b},
    "more zeros": lambda a, b: {"a": a, "b": torch.cat([b, torch.zeros(1)])},
    "signs": lambda a, b: {"a": torch.cat([-a[:2], a[2:]]), "b": b},
    "one tensor less": lambda a, b: {"a": a},
    "a text more": lambda a, b: {"a": a, "b": b, "prepare": "x"},
}


def test_what_makes_another_digest(short_pieces: None) -> None:
    a, b = content(torch.float32, (20,)), content(torch.float32, (6,)) + 1
    found = [digest_of({"a": a, "b": b}), *(digest_of(change(a, b)) for change in CHANGES.values())]
    assert len(set(found)) == 1 + len(CHANGES)
    assert digest_of({"ab": "c"}) != digest_of({"a": "bc"})
    assert digest_of(torch.zeros(0)) != digest_of(torch.zeros(0, 1))
    assert digest_of([a, (b,)]) == digest_of([a, b])  # how they are nested is nothing of theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_numbers_lie_in_memory_does_not_matter(dtype: torch.dtype) -> None:
    """A column of a table of labels lies in a row, with the other columns in between."""
    table = content(dtype, (4, 6))
    for view in (table[:, 1], table[1], table.flatten()[::2], table[0, :1].expand(5), table[0, 0].expand(3), table.T):
        assert digest_of(view) == digest_of(view.clone(memory_format=torch.contiguous_format))


def test_the_default_device_does_not_matter() -> None:
    weights = {"w": content(torch.float32)}
    wanted = digest_of(weights)
    with torch.device("meta"):
        assert digest_of(weights) == wanted


def test_views_are_what_they_show() -> None:
    numbers = content(torch.complex64)
    assert digest_of(numbers.conj()) == digest_of(numbers.conj().resolve_conj()) != digest_of(numbers)
    assert digest_of(numbers.conj().imag) == digest_of(numbers.conj().imag.clone()) != digest_of(numbers.imag)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantised_numbers_and_their_scale() -> None:
    numbers = content(torch.float32)
    found = [torch.quantize_per_tensor(numbers, scale, 0, torch.qint8) for scale in (0.1, 0.1, 0.2)]
    same = torch._make_per_tensor_quantized_tensor(found[0].int_repr(), 0.2, 0)
    assert digest_of(found[0]) == digest_of(found[1])
    assert len({digest_of(each) for each in (found[0], found[2], same)}) == 3


def test_with_and_without_gradients_in_any_thread() -> None:
    weights = {"w": content(torch.float32, (700, 500))}
    wanted = digest_of(weights)
    digest._factors.cache_clear()
    with torch.inference_mode():
        assert digest_of({"w": weights["w"].clone()}) == wanted
    assert digest_of({"w": weights["w"].clone().requires_grad_()}) == wanted
    digest._factors.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(digest_of, [weights] * 8)) == {wanted}


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
    ],
    ids=["sparse", "nested"],
)
def test_what_has_no_bytes_in_order_is_refused_in_words(tensor: Tensor, layout: str) -> None:
    with pytest.raises(ValueError, match=f"layout {layout}: make it dense"):
        digest_of({"w": tensor})


class Counting(nn.Module):
    """Keeps count of its inputs, so that a forward changes its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x)
        return out


def test_of_the_weights_that_the_model_has_afterwards() -> None:
    model, rows = Counting(), torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    found = fingerprint(model, rows, kinds="cka").about["model"]
    assert found == Network(model, "x").digest()
    assert sosie.sketch(model, rows, kernels="features").model == Network(model, "x").digest() != found
