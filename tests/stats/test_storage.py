"""Statistics survive a file, and a damaged file is refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from forged import save_file
from paired import correlated_rows
from safetensors.torch import load_file

from sosie.files import DamagedFile
from sosie.stats import (
    Alignment,
    DebiasedAlignment,
    Grams,
    Moments,
    Sample,
    is_statistics,
    load_statistics,
    save_statistics,
)


def test_round_trip_and_merge_after_it(tmp_path: Path) -> None:
    x, y = correlated_rows(n=200)
    first = {
        "moments": Moments.of(x[:90], y[:90]),
        "grams": Grams.of(x[:96], y[:96], block=16),
        "sample": Sample.of(x, y),
    }
    path = save_statistics(first, tmp_path / "s.safetensors", note="a test")
    assert is_statistics(path)
    back, about = load_statistics(path)
    assert about == {"note": "a test"}
    assert torch.equal(back["moments"].cross, first["moments"].cross)
    assert torch.equal(back["grams"].alignment(Alignment).xy, first["grams"].alignment(Alignment).xy)
    assert back["sample"].index.tolist() == list(range(200))
    merged = back["moments"].merge(Moments.of(x[90:], y[90:])).alignment(DebiasedAlignment).xy
    assert torch.allclose(merged, Moments.of(x, y).alignment(DebiasedAlignment).xy, rtol=1e-12)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    x, y = correlated_rows(n=20)
    path = save_statistics({"moments": Moments.of(x, y)}, tmp_path / "s.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedFile, match="was it cut off or changed"):
        is_statistics(path)
    with pytest.raises(DamagedFile, match="cannot be read as safetensors"):
        load_statistics(path)
    save_file({"a": torch.zeros(2)}, path, {})
    with pytest.raises(DamagedFile, match="not a sosie statistics"):
        load_statistics(path)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("version", "99", "newer sosie"),
        ("layout", json.dumps({"m": {"class": "os.system", "fields": {}}}), "damaged"),
        ("layout", json.dumps({"m": {"class": "Moments", "fields": {}}}), "damaged"),
        ("layout", "{", "damaged"),
    ],
)
def test_hostile_metadata_is_refused(tmp_path: Path, key: str, text: str, message: str) -> None:
    x, y = correlated_rows(n=20)
    path = save_statistics({"moments": Moments.of(x, y)}, tmp_path / "s.safetensors")
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        metadata = {**opened.metadata(), key: text}
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(DamagedFile, match=message):
        load_statistics(path)
