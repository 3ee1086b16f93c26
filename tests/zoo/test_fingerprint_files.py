"""Fingerprints written and read again; files of others that are not what they say are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forged import save_file
from safetensors import safe_open

from sosie.files import DamagedFile
from sosie.models import open_model, with_atoms
from sosie.zoo import Fingerprint, fingerprint
from sosie.zoo import fingerprints as files

Arrays = dict[str, Any]
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def made() -> Fingerprint:
    model = with_atoms(open_model("small_cnn(seed=0)").model, 6)
    probe = torch.rand(40, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    return fingerprint(model, probe, sites=["conv2", "fc"], size=64)


def test_what_is_saved_is_read_again(made: Fingerprint, tmp_path: Path) -> None:
    read = Fingerprint.load(made.save(tmp_path / "a.safetensors"))
    for name in ("probe", "n", "size", "seed", "rows", "labels", "absent", "about", "sites", "kinds"):
        assert getattr(read, name) == getattr(made, name)
    assert list(read.vectors) == list(made.vectors)
    assert len(read.vectors) == 3
    for key, vectors in made.vectors.items():
        np.testing.assert_array_equal(read.vectors[key], vectors)
    np.testing.assert_array_equal(read.exact, made.exact)


def rewritten(made: Fingerprint, folder: Path, change: Callable[[Facts, Arrays], Any]) -> Path:
    """The file with its facts and its arrays changed."""
    path = made.save(folder / "a.safetensors")
    with safe_open(path, framework="np") as opened:
        head = opened.metadata()
        arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    facts = json.loads(head["fingerprint"])
    text = change(facts, arrays)
    head["fingerprint"] = text if isinstance(text, str) else json.dumps(facts)
    save_file(arrays, path, metadata=head)
    return path


def _set(facts: Facts, name: str, value: Any) -> None:
    facts[name] = value


def _scaled(arrays: Arrays, key: str, by: float) -> None:
    arrays[key] = (arrays[key] * by).astype(np.float32)


def _swapped(arrays: Arrays) -> None:
    arrays["vectors.cka"] = arrays["vectors.cka"][::-1].copy()


HOSTILE: dict[str, tuple[Callable[[Facts, Arrays], Any], str]] = {
    "not finite": (lambda f, a: _scaled(a, "vectors.cka", float("nan")), "NaN or infinite"),
    "length": (lambda f, a: _scaled(a, "vectors.weights", 1.01), "length differs from 1"),
    "exact length": (lambda f, a: _scaled(a, "exact", 0.9), "length differs from 1"),
    "not its own": (lambda f, a: _swapped(a), "not those of the whole ones"),
    "shape": (lambda f, a: _set(a, "vectors.cka", a["vectors.cka"][:, :50].copy()), "has shape"),
    "float64": (lambda f, a: _set(a, "exact", a["exact"].astype(np.float64)), "not float32"),
    "another tensor": (lambda f, a: _set(a, "more", np.zeros(3, np.float32)), "no fingerprint has: more"),
    "no whole ones": (lambda f, a: a.pop("exact"), "come with the whole ones"),
    "missing": (lambda f, a: a.pop("vectors.cka"), "no 'vectors.cka'"),
    "another seed": (lambda f, a: _set(f, "seed", 1), "not those of the whole ones"),
    "seed": (lambda f, a: _set(f, "seed", 2**60), "the seed of a sketch must be"),
    "n": (lambda f, a: _set(f, "n", 10**6), "probes .* from 4 to 2048"),
    "n is none": (lambda f, a: _set(f, "n", True), "n must be a whole number"),
    "size": (lambda f, a: _set(f, "size", 10**9), "size .*got 1000000000"),
    "probe": (lambda f, a: _set(f, "probe", "../../etc"), "hash of the probe"),
    "labels": (lambda f, a: _set(f["labels"], "cka", ["fc", "fc"]), "each once"),
    "long label": (lambda f, a: _set(f["labels"], "cka", ["fc", "x" * 2000]), "at most 1000"),
    "kind": (lambda f, a: _set(f["labels"], "../x", ["fc"]), "no kind '../x'"),
    "about": (lambda f, a: _set(f, "about", 3), "about must be an object"),
    "nothing said": (lambda f, a: "[]", "must be an object"),
    "deep": (lambda f, a: "[" * 100_000, "damaged: RecursionError"),
    "not JSON": (lambda f, a: "{", "damaged: JSONDecodeError"),
    "long": (lambda f, a: _set(f["about"], "notes", "x" * 2**21), "characters of facts"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_lie_are_refused(name: str, made: Fingerprint, tmp_path: Path) -> None:
    change, words = HOSTILE[name]
    with pytest.raises(DamagedFile, match=words):
        Fingerprint.load(rewritten(made, tmp_path, change))


def test_files_that_are_none_are_refused(made: Fingerprint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made.save(tmp_path / "a.safetensors")
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-100])
    (tmp_path / "text").write_text("hello")
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "other", {})
    for name, words in (("cut", "safetensors"), ("text", "safetensors"), ("other", "not a sosie fingerprint")):
        with pytest.raises(DamagedFile, match=words):
            Fingerprint.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Fingerprint.load(tmp_path / "nowhere")
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    with pytest.raises(DamagedFile, match="no fingerprint has more than 1,000"):
        Fingerprint.load(path)
