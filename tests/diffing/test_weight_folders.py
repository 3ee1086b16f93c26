"""Two folders of weights, tensor by tensor: what changed, by how much, and what the folders lack."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import sosie

State = dict[str, Tensor]


def weights() -> State:
    random = torch.Generator().manual_seed(0)
    state = {f"layers.{k}.{n}": torch.randn(48, 64, generator=random) for k in range(2) for n in ("q", "up")}
    return state | {"embed": torch.randn(80, 64, generator=random), "norm": torch.ones(64)}


def folder(path: Path, state: State, shards: int = 1) -> Path:
    path.mkdir()
    keys, index = sorted(state), {}
    for k in range(shards):
        part = {key: state[key].contiguous() for key in keys[k::shards]}
        file = "model.safetensors" if shards == 1 else f"model-{k + 1:05}-of-{shards:05}.safetensors"
        save_file(part, path / file)
        index |= dict.fromkeys(part, file)
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def changed(change: Callable[[State], object]) -> State:
    state = weights()
    change(state)
    return state


def test_shards_are_one_model(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", weights()), folder(tmp_path / "b", weights(), 3)
    for one, other in ((a, b), (b, a)):
        assert sosie.diff(one, other).verdict == "The same: all 6 tensors are equal, bit for bit."
    assert sosie.diff(f"hf:{a}", b / "model.safetensors.index.json").same  # the same folders, as others name them
    (b / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 3 shards that .* names are missing: model-00002-of-00003"):
        sosie.diff(a, b)


def test_a_lone_shard_is_no_model(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", weights(), 2)
    (a / "model.safetensors.index.json").unlink()
    (a / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has 1 safetensors file and no index \(model-00001-of-00002"):
        sosie.diff(a, a)
    (a / "model-00001-of-00002.safetensors").rename(a / "model-00001-of-00001.safetensors")
    assert sosie.diff(a, a).same


def low_rank(state: State) -> None:
    random = torch.Generator().manual_seed(1)
    state["layers.1.q"] += 0.1 * torch.randn(48, 4, generator=random) @ torch.randn(4, 64, generator=random)


def one_bit(state: State) -> None:
    state["layers.0.up"].view(torch.int32)[3, 4] ^= 1


def renamed(state: State) -> None:
    state["model.norm"], state["extra"] = state.pop("norm"), torch.zeros(3)
    del state["layers.1.up"]


@pytest.mark.parametrize(
    ("change", "words", "tensor"),
    [
        (low_rank, "1 changed by a matrix of rank 4, as a LoRA does", "layers.1.q"),
        (one_bit, "1 of 6 tensors differs, layers.0.up most", "layers.0.up"),
        (lambda s: s["norm"].__setitem__(5, torch.nan), "NaN in B alone at 1 of 64 entries", "norm"),
        (lambda s: s.update(embed=s["embed"].T), "the same numbers, transposed", "embed"),
        (renamed, "but 1 has another name, 1 is only in A, 1 is only in B", "layers.1.up"),
    ],
)  # fmt: skip
def test_what_changed_comes_first_and_is_said(
    change: Callable[[State], object], words: str, tensor: str, tmp_path: Path
) -> None:
    d = sosie.diff(folder(tmp_path / "a", weights()), folder(tmp_path / "b", changed(change), 2))
    assert not d.same
    assert words in d.verdict
    assert d.weights[0].name_a == tensor
    assert all(note in d.as_text() for row in d.weights if not row.equal for note in row.notes)


def test_a_rank_is_printed_once_and_leaves_room_for_names(tmp_path: Path) -> None:
    d = sosie.diff(folder(tmp_path / "a", weights()), folder(tmp_path / "b", changed(low_rank)))
    row = next(line for line in d.as_text().splitlines() if line.strip().startswith("layers.1.q"))
    assert row.endswith("rank 4 of 48, as a LoRA")
    assert row.count("rank") == 1


def test_another_type_is_said(tmp_path: Path) -> None:
    half = {key: tensor.bfloat16() for key, tensor in weights().items()}
    d = sosie.diff(folder(tmp_path / "a", weights()), folder(tmp_path / "b", half))
    assert "6 have another type (float32 in A, bfloat16 in B)" in d.verdict
    assert "no more than the rounding of bfloat16" in d.verdict


def merged(dtype: torch.dtype, sizes: Tensor, change: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights of a type, and after a relative change with these singular values was added to them in float32."""
    random = torch.Generator().manual_seed(seed)
    base = torch.randn(512, 384, generator=random).to(dtype)
    u, v = (torch.linalg.qr(torch.randn(n, len(sizes), generator=random))[0] for n in base.shape)
    delta = u * sizes @ v.T
    return base, (base.float() + delta * (change * base.float().norm() / delta.norm())).to(dtype)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rank_of_a_merged_lora_is_counted_above_the_rounding_of_the_type(dtype: torch.dtype) -> None:
    for rank in (1, 2, 4, 8, 16, 32):
        base, tuned = merged(dtype, torch.ones(rank), 0.05)
        d = sosie.diff({"w": base}, {"w": tuned})
        assert d.weights[0].low_rank == rank
        assert (f"rank {rank} of 384, as a LoRA" in d.weights[0].notes) == (rank > 1)
        # Where sizes fall far enough that rounding hides the last of them, no rank is stated that is not the true one.
        base, tuned = merged(dtype, 0.7 ** torch.arange(rank), 0.01)
        (row,) = sosie.diff({"w": base}, {"w": tuned}).weights
        said = [int(note.split()[1]) for note in row.notes if "or more: smaller directions" in note]
        assert row.low_rank in (rank, None)
        assert all(2 <= least <= rank for least in said)
        assert (said == []) == (row.low_rank == rank or rank == 1)
        assert row.low_rank == rank or dtype != torch.float32
        assert said or dtype == torch.float32 or rank < 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [0.1, 0.01, 0.003, 0.001])
def test_a_fine_tune_of_all_directions_is_no_lora(dtype: torch.dtype, change: float) -> None:
    """Whose smaller directions are below the rounding of the type, where sizes fall steeply."""
    for power in (0.0, 0.5, 1.0, 1.5, 2.0):
        d = sosie.diff(*({"w": w} for w in merged(dtype, torch.arange(1.0, 385.0) ** -power, change)))
        assert d.weights[0].low_rank is None
        assert "LoRA" not in d.as_text()


def test_rows_that_are_wider_than_what_is_read_at_a_time() -> None:
    random = torch.Generator().manual_seed(0)
    base = torch.randn(8, 2**18 + 5, generator=random)
    delta = torch.randn(8, 1, generator=random) @ torch.randn(1, 2**18 + 5, generator=random)
    assert sosie.diff({"w": base}, {"w": base + delta}).weights[0].low_rank == 1


def test_large_integers_are_compared_exactly() -> None:
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    (row,) = sosie.diff({"w": torch.tensor([2**60, 3, 2**60])}, {"w": torch.tensor([2**60, 3, 2**60 + 1])}).weights
    assert (row.equal, row.largest, row.at) == (False, 1.0, (2,))
    assert row.change == pytest.approx(2**-60.5)
    (row,) = sosie.diff({"w": torch.tensor([low, high])}, {"w": torch.tensor([high, high])}).weights
    assert row.largest == 2.0**64
