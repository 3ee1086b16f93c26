"""A zoo as one file, and files that only look like one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forged import save_file
from made_prints import INPUTS, SIZE, made, new_zoo, same
from safetensors.numpy import load_file

from sosie.files import DamagedFile
from sosie.zoo import Zoo


def test_there_and_back(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 40)
    zoo.tag("m3", add=["<b>", "x"])
    zoo.remove("m5")
    zoo.add(made(50), "child", task="digits", parent="m3", source="a/b.safetensors")
    path = zoo.export(tmp_path / "z.sosiezoo")
    assert load_file(path)["vectors.cka"].shape == (40 * 3, SIZE)  # anyone's safetensors can read it
    copy = Zoo.import_(path, tmp_path / "copy")
    assert list(copy) == list(zoo)
    assert copy.settings == zoo.settings
    assert copy.list().rows() == zoo.list().rows()
    assert all(same(copy[name].fingerprint, zoo[name].fingerprint) for name in zoo)
    assert copy.check().problems == ()
    Zoo(tmp_path / "copy", INPUTS)  # the same probe set
    with pytest.raises(FileExistsError, match="new folder"):
        Zoo.import_(path, tmp_path / "copy")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "z.sosiezoo", "zoo"]  # nothing else is left


def test_an_empty_zoo_is_exported_too(tmp_path: Path) -> None:
    new_zoo(tmp_path).export(tmp_path / "z.sosiezoo")
    assert len(Zoo.import_(tmp_path / "z.sosiezoo", tmp_path / "copy")) == 0


@pytest.mark.parametrize("name", ["zoo.sqlite", "vectors/../zoo.sqlite", "new.sosiezoo"])
def test_no_export_into_the_zoo_itself(tmp_path: Path, name: str) -> None:
    zoo = new_zoo(tmp_path, 2)
    with pytest.raises(ValueError, match="own folder"):
        zoo.export(zoo.folder / name)
    assert zoo.check().problems == ()


@pytest.fixture
def parts(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """The tensors and the facts of an exported zoo, to be changed."""
    path = new_zoo(tmp_path, 3).export(tmp_path / "z.sosiezoo")
    tensors = load_file(path)
    return tensors, json.loads(bytes(tensors["facts"])), path


def refused(parts: tuple[dict[str, Any], dict[str, Any], Path], said: str, **header: str) -> None:
    """Written again with its changes, the file is refused, and nothing is left of it."""
    import numpy as np

    tensors, facts, path = parts
    tensors["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    save_file(tensors, path, {"format": "sosie-zoo-file", "version": "2"} | header)
    folder = path.parent / "copy"
    with pytest.raises(DamagedFile, match=said):
        Zoo.import_(path, folder)
    assert sorted(p.name for p in path.parent.iterdir()) == ["z.sosiezoo", "zoo"]


def name(facts: dict[str, Any]) -> None:
    facts["models"][1]["name"] = "../../etc/passwd"


def twice(facts: dict[str, Any]) -> None:
    facts["models"][1]["name"] = "m0"


def outside(facts: dict[str, Any]) -> None:
    facts["models"][1]["places"]["cka"]["first"] = 10**9


def negative(facts: dict[str, Any]) -> None:
    facts["models"][1]["places"]["cka"]["first"] = -3


def others(facts: dict[str, Any]) -> None:
    facts["models"][1]["places"]["cka"]["first"] = 0


def kind(facts: dict[str, Any]) -> None:
    facts["models"][1]["places"]["../cka"] = facts["models"][1]["places"].pop("cka")


def probe(facts: dict[str, Any]) -> None:
    facts["settings"]["probe"] = "0" * 16


def size(facts: dict[str, Any]) -> None:
    facts["settings"]["size"] = 32


def when(facts: dict[str, Any]) -> None:
    facts["models"][0]["added"] = "<script>"


def tags(facts: dict[str, Any]) -> None:
    facts["models"][0]["tags"] = ["a\0b"]


def digest(facts: dict[str, Any]) -> None:
    facts["models"][0]["digest"] = "other"


def no_list(facts: dict[str, Any]) -> None:
    facts["models"] = "all of them"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (name, "separators"), (twice, "once"), (outside, "outside of the 9 rows"), (negative, "outside"),
        (others, "not those of the whole ones"), (kind, "KeyError"), (probe, "hash"), (size, "shape"),
        (when, "isoformat"), (tags, "printable"), (digest, "two digests"), (no_list, "a list"),
    ],
)  # fmt: skip
def test_facts_that_do_not_add_up(change: Callable[[dict[str, Any]], None], said: str, parts: Any) -> None:
    change(parts[1])
    refused(parts, said)


def test_tensors_that_do_not_add_up(parts: Any) -> None:
    tensors = parts[0]
    whole = tensors["vectors.cka"].copy()
    for value, said in ((float("nan"), "NaN"), (2.0, "length")):
        tensors["vectors.cka"] = whole.copy()
        tensors["vectors.cka"][4, 0] = value
        refused(parts, said)
    tensors["vectors.cka"] = whole.astype("float64")
    refused(parts, "not float32")
    tensors["vectors.cka"] = whole
    tensors["vectors.weights"] = tensors["vectors.weights"][:1]
    refused(parts, "outside")


def test_files_of_another_kind(parts: Any, tmp_path: Path) -> None:
    refused(parts, "not a sosie exported zoo", format="sosie-fingerprint")
    refused(parts, "newer sosie", version="7")
    path = parts[2]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedFile, match="not an exported zoo, or is damaged"):
        Zoo.import_(path, tmp_path / "copy")
    path.write_bytes(b"\xff" * 8 + b"{" * 1000)
    with pytest.raises(DamagedFile, match="not an exported zoo, or is damaged"):
        Zoo.import_(path, tmp_path / "copy")
    with pytest.raises(FileNotFoundError, match="nothere"):
        Zoo.import_(tmp_path / "nothere", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_facts_nested_without_end(parts: Any, tmp_path: Path) -> None:
    import numpy as np

    tensors, _, path = parts
    tensors["facts"] = np.frombuffer(b"[" * 200_000, np.uint8)
    save_file(tensors, path, {"format": "sosie-zoo-file", "version": "2"})
    with pytest.raises(DamagedFile, match="damaged"):
        Zoo.import_(path, tmp_path / "copy")
