"""An index says where to look; the numbers are those of a search without, whatever is in its file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_prints import PROBE, SIZE, made, new_zoo

from sosie.zoo import Fingerprint, Zoo
from sosie.zoo import index as indexed

pytest.importorskip("faiss", reason="sosie[zoo] is not installed")


def prints(count: int, first: int = 0) -> dict[str, Fingerprint]:
    """Models in 20 groups, of 4 sites each."""
    centres = np.random.default_rng(0).normal(size=(20, 4, SIZE))
    random = np.random.default_rng(first + 1)
    found = {}
    for k in range(first, first + count):
        vectors = centres[k % 20] + 0.3 * random.normal(size=(4, SIZE))
        vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
        about = {"architecture": f"Net{k % 2}", "parameters": 1, "model": f"{k:016x}", "sosie": "0"}
        labels = {"cka": tuple(f"layer{j}" for j in range(4))}
        found[f"p{k}"] = Fingerprint(
            PROBE.digest, PROBE.n, SIZE, 0, "flatten", {"cka": vectors}, labels, None, {}, about
        )
    return found


@pytest.fixture(scope="module")
def made_zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    zoo = new_zoo(tmp_path_factory.mktemp("indexed"))
    zoo.add(prints(400))
    about = zoo.index()
    assert about == {"kind": "cka", "rows": 1600, "lists": 40, "bytes": about["bytes"]}
    return zoo


def recall(zoo: Zoo, names: list[str], by: str, **filters: str) -> float:
    hits, total = 0, 0
    for name in names:
        plain = zoo.search(name, by=by, index=False, **filters)
        quick = zoo.search(name, by=by, index=True, **filters)
        assert quick.asked["index"]
        assert not plain.asked["index"]
        known = {(r["name"], r["site_a"], r["site_b"]): r["value"] for r in plain}
        again = {(r["name"], r["site_a"], r["site_b"]): r["value"] for r in quick}
        for key in known.keys() & again.keys():
            assert known[key] == again[key]  # the very numbers
        hits += len(known.keys() & again.keys())
        total += len(known)
    return hits / total


@pytest.mark.parametrize("by", ["model", "layer"])
@pytest.mark.parametrize(
    "filters",
    [{}, {"architecture": "Net0"}, {"architecture": "Net1"}],
    ids=["all", "without the last", "with the last"],
)
def test_the_index_finds_what_is_there(made_zoo: Zoo, by: str, filters: dict[str, str]) -> None:
    assert recall(made_zoo, [f"p{k}" for k in range(0, 400, 23)], by, **filters) > 0.97


def test_models_that_come_and_go(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    zoo.add(prints(300))
    zoo.index()
    zoo.add(prints(40, 300))
    near = zoo.search("p0", k=30).names
    assert any(int(name[1:]) >= 300 for name in near)  # not in the index, and found
    assert zoo.search(zoo["p320"].fingerprint, k=1).names == ["p320"]
    zoo.index()
    zoo.remove(*near[:5], "p339")  # the last one, too
    found = zoo.search("p0", k=30)
    assert found.asked["index"]
    assert not set(near[:5]) & set(found.names)
    zoo.add(prints(10, 340))
    assert recall(zoo, ["p1", "p2", "p330"], "model") > 0.97
    before = (tmp_path / "zoo" / "vectors" / "cka-16.faiss").stat().st_size
    assert zoo.index()["rows"] == 1400  # 40 rows more, added to what is there
    assert (tmp_path / "zoo" / "vectors" / "cka-16.faiss").stat().st_size > before
    assert indexed.open_index(zoo.store.vectors("cka")).trained == 1200  # type: ignore[union-attr]
    assert recall(zoo, ["p1", "p2", "p330"], "layer") > 0.97
    zoo.compact()
    found = zoo.search("p1")
    assert not found.asked["index"]
    assert "compacted since" in found.notes[0]
    with pytest.raises(ValueError, match=r"compacted since; `zoo.index`, or"):
        zoo.search("p1", index=True)
    zoo.index()
    assert zoo.search("p1").asked["index"]


@pytest.mark.parametrize("damage", ["cut", "changed", "head", "empty", "lists", "other"])
def test_a_damaged_index_is_not_used(tmp_path: Path, damage: str) -> None:
    zoo = new_zoo(tmp_path)
    zoo.add(prints(260))
    zoo.index()
    wanted = zoo.search("p3", index=False)
    path = tmp_path / "zoo" / "vectors" / "cka-16.faiss"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[:-100]
    elif damage == "changed":
        content[-100] ^= 1
    elif damage == "head":
        content = b"{" * 5000 + content
    elif damage == "lists":
        content = bytearray(re.sub(rb'"lists": \d+', b'"lists": 0', content, count=1))
    elif damage == "empty":
        content = bytearray()
    else:
        other = new_zoo(tmp_path / "other")
        other.add(prints(260, first=7))
        other.index()
        content = bytearray((tmp_path / "other" / "zoo" / "vectors" / "cka-16.faiss").read_bytes())
    path.write_bytes(content)
    found = Zoo(tmp_path / "zoo").search("p3")
    assert found.rows() == wanted.rows()
    assert "Searched without the index" in found.notes[0]
    zoo.index()
    assert Zoo(tmp_path / "zoo").search("p3").notes == ()


def test_an_index_that_cannot_be_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = new_zoo(tmp_path)
    zoo.add(prints(260))
    zoo.index()

    def refuse(*_: Any) -> None:
        raise PermissionError("the file belongs to somebody else")

    monkeypatch.setattr(indexed, "read_index", refuse)
    assert "belongs to somebody else" in Zoo(zoo.folder).search("p3").notes[0]


def test_small_zoos_need_no_index(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 4)
    with pytest.raises(ValueError, match="12 rows of kind 'cka': an index is for 1,000"):
        zoo.index()
    with pytest.raises(ValueError, match="there is none"):
        zoo.search(made(0), index=True)
    assert indexed.FEWEST_ROWS == 1000
