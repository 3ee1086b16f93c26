"""Statistics that are saved, merged and resumed give what one pass gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import inputs, mlp
from torch import Tensor, nn
from torch.nn.functional import pad

import sosie
from sosie.data import DataPart
from sosie.engine.provenance import input_digests
from sosie.files import DamagedFile

MEASURES = ["debiased_cka", "mean_cca", "mutual_knn", "linear_cka"]


class Interrupted(Exception):
    pass


def stopping(batches, after: int):
    for k, batch in enumerate(batches):
        if k == after:
            raise Interrupted
        yield batch


@pytest.mark.parametrize("small", [0, 10**9], ids=["blocks", "moments"])
def test_an_interrupted_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr("sosie.engine.partial.EVERY", 0.0)
    monkeypatch.setattr("sosie.engine.plan.SMALL_WORK", small)
    x, path = inputs(400), tmp_path / "part.safetensors"
    kwargs = {"measures": MEASURES, "block": 16}
    whole = sosie.compare(mlp(0), mlp(1), x.split(64), **kwargs)
    with pytest.raises(Interrupted):
        sosie.compare(mlp(0), mlp(1), stopping(x.split(64), 4), resume=path, **kwargs)
    assert path.exists()
    found = sosie.compare(mlp(0), mlp(1), x.split(64), resume=path, **kwargs)
    for name in MEASURES:
        assert np.abs(found.matrix(name) - whole.matrix(name)).max() < 1e-9, name
    assert found.provenance["inputs"] == 400


def test_parts_of_the_data_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosie.engine.plan.SMALL_WORK", 0)
    x = inputs(320)
    kwargs = {"measures": MEASURES, "block": 16}
    whole = sosie.compare(mlp(0), mlp(1), x, **kwargs)
    paths = []
    for start, stop in ((0, 128), (128, 320)):
        paths.append(tmp_path / f"{start}.safetensors")
        sosie.compare(mlp(0), mlp(1), DataPart(x[start:stop], start), resume=paths[-1], **kwargs)
    found = sosie.compare(paths)
    two = sosie.compare(str(paths[0]), str(paths[1]))
    for name in MEASURES:
        assert np.abs(found.matrix(name) - whole.matrix(name)).max() < 1e-9, name
        assert (two.matrix(name) == found.matrix(name)).all()
    assert found["debiased_cka"].n == 320
    assert "blocks of 16" in found["debiased_cka"].statistic


def test_another_comparison_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    sosie.compare(mlp(0), mlp(1), inputs(), resume=path)
    with pytest.raises(ValueError, match=r"part\.safetensors is of another comparison: kinds"):
        sosie.compare(mlp(0), mlp(1), inputs(), resume=path, measures="mean_cca")
    with pytest.raises(ValueError, match="one pair of models"):
        sosie.compare([mlp(0), mlp(1), mlp(2)], inputs(), resume=path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DamagedFile):
        sosie.compare(mlp(0), mlp(1), inputs(), resume=path)


def test_other_weights_other_data_or_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    sosie.compare(mlp(0), mlp(1), inputs(), resume=path)
    with pytest.raises(ValueError, match="another comparison: the models are not the same"):
        sosie.compare(mlp(0), mlp(2), inputs(), resume=path)
    with pytest.raises(ValueError, match="another comparison: the data are not the same"):
        sosie.compare(mlp(0), mlp(1), inputs(seed=3), resume=path)
    with pytest.raises(ValueError, match="another comparison: the settings are not the same"):
        sosie.compare(mlp(0), mlp(1), inputs(), resume=path, block=32)
    again = sosie.compare(mlp(0), mlp(1), inputs(), resume=path)
    assert again.provenance["inputs"] == 150


def wave(frequency: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.sin(frequency * x)


@pytest.mark.parametrize("option", ["prepare_a", "inputs", "rows"])
def test_rows_made_in_another_way_are_refused(tmp_path: Path, option: str) -> None:
    path, x = tmp_path / "part.safetensors", inputs()
    sosie.compare(mlp(0), mlp(1), x[:100], resume=path, **{option: wave(1)})
    with pytest.raises(
        ValueError, match=r"another comparison: the first inputs give other rows at .*prepare.*remove it"
    ):
        sosie.compare(mlp(0), mlp(1), x, resume=path, **{option: wave(8)})
    assert sosie.compare(mlp(0), mlp(1), x, resume=path, **{option: wave(1)}).provenance["inputs"] == 150


def test_a_model_that_computes_something_else_is_refused_and_a_random_one_is_not(tmp_path: Path) -> None:
    model, path = nn.Sequential(mlp(0), nn.LeakyReLU(0.1)), tmp_path / "part.safetensors"
    sosie.compare(model, mlp(1), inputs()[:100], resume=path)
    model[1].negative_slope = 3.0
    with pytest.raises(ValueError, match="other rows at 1 of Sequential"):
        sosie.compare(model, mlp(1), inputs(), resume=path)
    path.unlink()
    for count in (100, 150):
        sosie.compare(mlp(0), mlp(1), inputs()[:count], resume=path, prepare_a=torch.rand_like)


@pytest.mark.parametrize(
    ("dtype", "rounding", "other"),
    [(torch.float64, 1e-11, 1e-7), (torch.float32, 3e-3, 0.015), (torch.bfloat16, 0.022, 0.1)],
    ids=str,
)
def test_rows_may_differ_by_what_another_machine_rounds(tmp_path: Path, dtype, rounding, other) -> None:
    x, path = inputs().to(dtype), tmp_path / "part.safetensors"
    models = [mlp(k).to(dtype) for k in range(2)]

    def resume(rows: int, scale: float) -> Any:
        scaled = lambda a: a.double().flatten(1) * (1 + scale)  # noqa: E731
        return sosie.compare(*models, x[:rows], resume=path, rows=scaled, sites="leaves")

    resume(100, 0)
    with pytest.raises(ValueError, match="other rows"):
        resume(150, other)
    assert resume(150, rounding).provenance["inputs"] == 150


@pytest.mark.parametrize("measure", ["mutual_knn", "debiased_cka"])
def test_overlapping_parts_are_refused(tmp_path: Path, measure: str) -> None:
    paths = [tmp_path / f"{k}.safetensors" for k in range(2)]
    for path in paths:
        sosie.compare(mlp(0), mlp(1), inputs(), measures=measure, resume=path)
    with pytest.raises(ValueError, match="DataPart"):
        sosie.compare(paths)


def with_other(x: Tensor, row: int) -> Tensor:
    other = x.clone()
    other[row, 0] += 1
    return other


def test_other_data_are_refused_wherever_they_differ(tmp_path: Path) -> None:
    x, path = inputs(1500), tmp_path / "part.safetensors"
    whole = sosie.compare(mlp(0), mlp(1), x, resume=path, max_rows=1280)
    kept = path.read_bytes()
    for row, told in ((1, "0 to 1023"), (700, "0 to 1023"), (1279, "1024 to 1279")):
        with pytest.raises(ValueError, match=f"the data are not the same: inputs {told} differ"):
            sosie.compare(mlp(0), mlp(1), with_other(x, row).split(96), resume=path)
    with pytest.raises(ValueError, match=r"the data end after 300 inputs, but .* hold 1280"):
        sosie.compare(mlp(0), mlp(1), x[:300], resume=path)
    with pytest.raises(ValueError, match="the data are not the same"):
        sosie.compare(mlp(0), mlp(1), x[torch.cat([torch.arange(1), torch.arange(1, 1500).flip(0)])], resume=path)
    assert path.read_bytes() == kept
    for batches in (x.split(64), x.split(300), list(x.split(1000))):  # the batch size does not matter
        path.write_bytes(kept)
        found = sosie.compare(mlp(0), mlp(1), batches, resume=path)
        assert found["debiased_cka"].n == 1500
    assert whole["debiased_cka"].n == 1280


def test_other_saved_activations_are_refused(tmp_path: Path) -> None:
    x, y = inputs(300).numpy(), inputs(300, seed=1).numpy()
    path, saved = tmp_path / "part.safetensors", tmp_path / "a.npz"
    np.savez_compressed(saved, a=x)
    sosie.compare(saved, {"b": y}, resume=path, max_rows=192)
    with pytest.raises(ValueError, match="inputs 0 to 191 differ"):
        sosie.compare(saved, {"b": with_other(torch.from_numpy(y), 100).numpy()}, resume=path)
    found = sosie.compare(saved, {"b": y}, resume=path)
    np.savez_compressed(saved, a=x[:100])
    with pytest.raises(ValueError, match="the data end after 100 inputs"):
        sosie.compare(saved, {"b": y[:100]}, resume=path)
    assert found["debiased_cka"].n == 300


def test_padding_is_no_difference(tmp_path: Path) -> None:
    tokens = torch.arange(1, 13).reshape(4, 3)
    short = {"ids": tokens[:2, :2], "attention_mask": torch.ones(2, 2)}
    padded = {"ids": pad(tokens[:2, :2], (0, 3)), "attention_mask": pad(torch.ones(2, 2), (0, 3))}
    others = {**padded, "ids": padded["ids"].flip(0)}
    assert [*input_digests(short, 0, 2)] == [*input_digests(padded, 0, 2)] != [*input_digests(others, 0, 2)]
