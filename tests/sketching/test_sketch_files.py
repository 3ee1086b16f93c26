"""Sketches survive a file, and a file that was tampered with is refused in words."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forged import save_file
from safetensors.torch import load_file
from sketched import random_rows, sketch_of
from torch import Tensor

import sosie
from sosie.files import DamagedFile
from sosie.models import small_cnn
from sosie.sketching import Sketch
from sosie.stats import Moments, save_statistics

F, G = random_rows(40, 6, 1), random_rows(40, 6, 2)


@pytest.mark.parametrize("size", [None, 16])
def test_a_file_brings_it_back(tmp_path: Path, size: int | None) -> None:
    one = sketch_of({"a": (F, G), "b": (G, F)}, size, labels=torch.arange(40) % 3)
    back = Sketch.load(one.save(tmp_path / "k.safetensors"))
    assert repr(back) == repr(one)
    assert back.about == one.about
    back.check_shared(one)
    for kernel in ("hadamard", "features", "maps", "midpoint"):
        assert torch.equal(back.kernel("b", kernel).gram, one.kernel("b", kernel).gram)
    later = sketch_of({"a": (F, G), "b": (G, F)}, size, start=40, labels=torch.arange(40) % 3)
    assert back.merge(later).n == 80


def _tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as opened:
            text = opened.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata=text)

    return damage


def _layout(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        from safetensors import safe_open

        with safe_open(path, framework="pt") as opened:
            text = opened.metadata()
        layout = json.loads(text["layout"])
        change(layout["sketch"]["fields"])
        save_file(load_file(path), path, metadata={**text, "layout": json.dumps(layout)})

    return damage


def _poison(tensors: dict[str, Tensor]) -> None:
    tensors["sketch/sites/0/features/rows"][0, 0] = torch.nan


ROWS = "sketch/sites/0/features/rows"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"sketch": 1})),
    "a torch file": lambda path: torch.save({"sketch": F}, path),
    "other tensors": lambda path: save_file({"a": F}, path, {}),
    "statistics": lambda path: save_statistics({"moments": Moments.of(F, G)}, path),
    "statistics as sketch": lambda path: save_statistics({"sketch": Moments.of(F, G)}, path, kind="sketch"),
    "nothing in it": lambda path: save_statistics({"other": Moments.of(F, G)}, path, kind="sketch"),
    "NaN": _tensors(_poison),
    "too few buckets": _tensors(lambda t: t.update({ROWS: t[ROWS][:-1].clone()})),
    "too few columns": _tensors(lambda t: t.update({ROWS: t[ROWS][:, 1:].clone()})),
    "no matrix": _tensors(lambda t: t.update({ROWS: t[ROWS][:, 0].clone()})),
    "one copy": _tensors(lambda t: t.update({k: t[k][0].clone() for k in t if "/hadamard/" in k and t[k].ndim == 3})),
    "a longer total": _tensors(lambda t: t.update({"sketch/sites/0/features/total": torch.zeros(9)})),
    "a shorter diagonal": _tensors(lambda t: t.update({"sketch/sites/0/maps/diagonal": torch.zeros(3)})),
    "negative squares": _tensors(lambda t: t["sketch/sites/0/features/squares"].fill_(-1)),
    "a negative trace": _tensors(lambda t: t["sketch/sites/0/trace"].fill_(-1)),
    "a trace of two": _tensors(lambda t: t.update({"sketch/sites/0/trace": torch.zeros(2)})),
    "labels": _tensors(lambda t: t.update({"sketch/labels": torch.zeros(3, 2)})),
    "labels apart": _tensors(lambda t: t.update({"sketch/unsigned_labels": torch.zeros(16, 9)})),
    "ones": _tensors(lambda t: t.update({"sketch/ones": torch.zeros(3)})),
    "counts": _tensors(lambda t: t["sketch/counts"].zero_()),
    "a moment": _tensors(lambda t: t.update({"sketch/sites/0/moment": torch.zeros(3, 4)})),
    "pairs": _tensors(lambda t: t.update({"sketch/sites/0/pairs/features": torch.zeros(3, 4)})),
    "a missing tensor": _tensors(lambda t: t.pop(ROWS)),
    "huge n": _layout(lambda f: f.update(n={"value": 2**60})),
    "another n": _layout(lambda f: f.update(n={"value": 41})),
    "n = 0": _layout(lambda f: f.update(n={"value": 0})),
    "n a text": _layout(lambda f: f.update(n={"value": "many"})),
    "size": _layout(lambda f: f.update(size={"value": 10**9})),
    "no size": _layout(lambda f: f.update(size={"value": None})),
    "size a list": _layout(lambda f: f.update(size={"value": [16]})),
    "stack": _layout(lambda f: f.update(stack={"value": 3})),
    "seed": _layout(lambda f: f.update(seed={"value": "x"})),
    "about": _layout(lambda f: f.update(about={"value": "text"})),
    "no sites": _layout(lambda f: f.update(sites={"tuple": []})),
    "sites of another kind": _layout(lambda f: f.update(sites={"tuple": [{"value": 3}]})),
    "spans": _layout(lambda f: f["spans"]["fields"].update(ranges={"value": [[0, 10**12]]})),  # type: ignore[index]
    "a field too many": _layout(lambda f: f.update(more={"value": 1})),
    "an unknown class": _layout(lambda f: f["side"].update({"class": "Exploit"})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_hostile_files_are_refused_in_words(tmp_path: Path, damage: str) -> None:
    path = sketch_of({"a": (F, G)}, labels=torch.arange(40) % 3).save(tmp_path / "k.safetensors")
    DAMAGES[damage](path)
    with pytest.raises(DamagedFile, match=r"k\.safetensors"):
        Sketch.load(path)


def _renamed(*names: object) -> Callable[[dict[str, dict[str, object]]], object]:
    return lambda layout: layout["side"]["fields"].update(sites={"tuple": [{"value": name} for name in names]})  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (_tensors(lambda t: t.update({"sketch/fingerprint": t["sketch/fingerprint"].int()})), "stored as int32"),
        (
            _tensors(lambda t: t.update({"sketch/sites/0/features/rows": t["sketch/sites/0/features/rows"].int()})),
            "int32",
        ),
        (_layout(_renamed("a", "a")), "two sites have one name"),
        (_layout(_renamed(1, 2)), "have names"),
        (_layout(lambda layout: layout.update(about={"value": {"models": 3}})), "record of models is not a list"),
        (_layout(lambda layout: layout.update(seed={"value": 2**80})), "seed"),
    ],
)
def test_types_and_names_are_looked_at(tmp_path: Path, damage: Callable[[Path], None], word: str) -> None:
    path = sketch_of({"a": (F, G), "b": (G, F)}, 16).save(tmp_path / "k.safetensors")
    damage(path)
    with pytest.raises(DamagedFile, match=word):
        Sketch.load(path)


def test_a_file_is_half_of_the_memory_and_says_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b, images = small_cnn(), small_cnn(), torch.rand(96, 1, 28, 28)
    pair = [sosie.sketch(model, images, sites=["relu1", "relu4"], size=64) for model in (a, b)]
    small = [k.save(tmp_path / f"{i}.safetensors", dtype=torch.bfloat16) for i, k in enumerate(pair)]
    whole = pair[0].save(tmp_path / "whole.safetensors")
    assert small[0].stat().st_size < 0.6 * whole.stat().st_size
    assert torch.equal(Sketch.load(whole).sites[0].features.rows, pair[0].sites[0].features.rows)
    read = [Sketch.load(path) for path in small]
    assert read[0].sites[0].dtype == torch.float32  # computed with as before
    for kernel in ("features", "gradients", "hadamard"):
        before, after = (
            sosie.compare(x.using(kernel), y.using(kernel), measures="linear_cka").matrix() for x, y in (pair, read)
        )
        assert abs(before - after).max() < 1e-3
    exact = sosie.sketch(a, images, sites="relu4", size=None)
    same = Sketch.load(exact.save(tmp_path / "exact.safetensors"))
    assert torch.equal(same.sites[0].features.rows, exact.sites[0].features.rows)
    with pytest.raises(ValueError, match="bfloat16 or"):
        pair[0].save(tmp_path / "x.safetensors", dtype=torch.int8)


def test_a_large_sketch_says_so_before_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosie.sketching.sketches.LARGE", 2**20)
    with pytest.warns(UserWarning, match=r"will take .* MiB.*relu1: 12,544 columns"):
        sosie.sketch(small_cnn(), torch.rand(8, 1, 28, 28), sites=["relu1", "relu4"], size=16)
