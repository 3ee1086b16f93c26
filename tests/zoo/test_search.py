"""Search: against the same numbers worked out model by model, and against debiased CKA of the activations."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from made_prints import INPUTS, PROBE, SIZE, made, new_zoo
from torch import nn

import sosie
from sosie.files import DamagedFile
from sosie.results import Neighbours
from sosie.zoo import Fingerprint, Zoo
from sosie.zoo import search as plain
from sosie.zoo.search import nearest_rows, score_models
from sosie.zoo.vectors import Vectors


def mean_of_best(a: Fingerprint, b: Fingerprint, kind: str = "cka", exact: bool = True) -> float:
    return float(a.cosine(b, kind, exact=exact and kind == "cka").max(1).mean())


@pytest.mark.parametrize(("exact", "kind"), [(True, "cka"), (False, "cka"), (True, "weights")])
def test_models_come_in_the_order_of_the_mean_of_the_best_matches(tmp_path: Path, exact: bool, kind: str) -> None:
    zoo = new_zoo(tmp_path, 12)
    others = [k for k in range(12) if k != 3 and (kind == "cka" or k % 2)]
    wanted = {f"m{k}": mean_of_best(made(3), made(k), kind, exact) for k in others}
    found = zoo.search("m3", k=len(wanted), kind=kind, exact=exact)
    assert found.names == sorted(wanted, key=lambda name: -wanted[name])
    for row in found:
        assert row["value"] == pytest.approx(wanted[row["name"]], abs=1e-12)
        short = mean_of_best(made(3), made(int(row["name"][1:])), kind, exact=False)
        assert row["estimated"] == pytest.approx(short, abs=1e-12)
        assert row["exact"] is (exact and kind == "cka")


def test_either_way_round(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    zoo.add({f"m{k}": made(k, sites=2 + k % 3) for k in range(8)})
    scores = score_models(made(4, sites=3).vectors["cka"], zoo.store.vectors("cka"), symmetric=True)
    for k, score in enumerate(scores):
        cosines = made(4, sites=3).cosine(made(k, sites=2 + k % 3))
        assert score == pytest.approx((cosines.max(1).mean() + cosines.max(0).mean()) / 2, abs=1e-6)
    found = zoo.search("m4", k=7, symmetric=True)
    for row in found:
        other = zoo[row["name"]].fingerprint
        wanted = (mean_of_best(made(4, sites=3), other) + mean_of_best(other, made(4, sites=3))) / 2
        assert row["value"] == pytest.approx(wanted, abs=1e-12)


def test_layers(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 10)
    found = zoo.search(made(20), k=4, by="layer", site=["layer0", "layer2"])
    assert [row["site_a"] for row in found] == ["layer0"] * 4 + ["layer2"] * 4
    for place, site in ((0, "layer0"), (2, "layer2")):
        every = [
            (value, f"m{k}", f"layer{b}")
            for k in range(10)
            for b, value in enumerate(made(20).cosine(made(k), exact=True)[place].tolist())
        ]
        got = [(row["value"], row["name"], row["site_b"]) for row in found if row["site_a"] == site]
        for one, wanted in zip(got, sorted(every, reverse=True)[:4], strict=True):
            assert one[1:] == wanted[1:]
            assert one[0] == pytest.approx(wanted[0], abs=1e-12)
    assert zoo.similar_layers(made(20), "layer[02]", 4).rows() == found.rows()


def test_a_short_list_is_sorted_by_the_whole_vectors(tmp_path: Path) -> None:
    """Of three that the short vectors find, that which is nearest by the whole ones comes first."""
    zoo = new_zoo(tmp_path, 12)
    short = zoo.search("m0", k=11, exact=False)
    found = zoo.search("m0", k=2, rerank=3)
    assert set(found.names) <= set(short.names[:3])
    wanted = sorted(short.names[:3], key=lambda name: -mean_of_best(made(0), zoo[name].fingerprint))
    assert found.names == wanted[:2]


def test_filters_and_removed_models(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 12)
    zoo.tag("m2", add=["x", "y"])
    zoo.tag("m5", add="x")
    assert set(zoo.search(made(0), tag="x").names) == {"m2", "m5"}
    assert zoo.search(made(0), tag=["x", "y"]).names == ["m2"]
    assert set(zoo.search(made(0), architecture="Net1").names) == {f"m{k}" for k in range(12) if k % 3 == 1}
    with pytest.raises(ValueError, match="no model has the task 'none'; none has a task"):
        zoo.search(made(0), task="none")
    with pytest.raises(ValueError, match="no model has the architecture 'Net9' or 'Nat1'; there are Net"):
        zoo.search(made(0), architecture=["Net9", "Nat1"])
    with pytest.raises(ValueError, match="no model has the tag 'y' and the architecture 'Net0'"):
        zoo.search(made(0), tag="y", architecture="Net0")
    assert zoo.search(made(7)).names[0] == "m7"
    zoo.remove("m7")
    assert "m7" not in zoo.search(made(7), k=20).names
    before = zoo.search(made(7), k=20)
    zoo.compact()
    assert zoo.search(made(7), k=20).rows() == before.rows()
    zoo.add(made(7), "again")
    assert zoo.search(made(7)).names[0] == "again"


def test_a_model_is_compared_on_the_probe_set_of_the_zoo(tmp_path: Path) -> None:
    """The value of a search is what `sosie.compare` gives on the same inputs."""
    torch.manual_seed(0)
    nets = {f"n{k}": nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)) for k in range(4)}
    zoo = new_zoo(tmp_path)
    zoo.add(nets)
    query = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    found = zoo.search(query, k=4)
    for row in found:
        cka = sosie.compare(query, nets[row["name"]], INPUTS, measures="debiased_cka").matrix("debiased_cka")
        assert row["value"] == pytest.approx(cka.max(1).mean(), abs=1e-5)
        assert row["best"] == pytest.approx(cka.max(), abs=1e-5)


def test_an_answer_says_what_its_value_is(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 5)
    found = zoo.search("m1")
    assert "The value is the mean over 3 layers of the largest similarity with a layer" in found.sentence()
    assert "opposite direction" in zoo.search("m1", symmetric=True).sentence()
    assert "similarity with a layer of the model, at layer0" in zoo.search("m1", site="layer0").sentence()
    # A pair of layers beside a mean would look as if the value were that pair's.
    assert not {"site_a", "site_b"} & set(found.table()[0])
    assert "site_b" not in found._repr_html_()
    assert {"site_a", "site_b", "best"} <= set(found.rows()[0])
    layers = zoo.search("m1", by="layer")
    assert {"site_a", "site_b"} <= set(layers.table()[0])
    assert "The value" not in layers.sentence()
    assert "mean over" not in Neighbours({"query": "m", "by": "model"}, found.found).sentence()  # of an old file


def test_saved_and_read_again(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 5)
    zoo.add(made(9), "<b>bold<b>")
    found = zoo.search("m1")
    path = found.save(tmp_path / "n.json")
    assert Neighbours.load(path) == found
    assert "<b>" not in found._repr_html_()
    assert repr(found).startswith(found.sentence())
    assert list(found.to_pandas()["name"]) == found.names
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**content, "question": "strangers", "hash": None}), "utf-8")
    with pytest.raises(DamagedFile, match="strangers"):
        Neighbours.load(path)
    path.write_text('{"format": "sosie-answer", "version": 1, "question": "neighbours", "rows": 3}', "utf-8")
    with pytest.raises(DamagedFile, match="damaged"):
        Neighbours.load(path)


def test_fingerprints_from_files_and_wrong_questions(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 5)
    path = made(3).save(tmp_path / "print.safetensors")
    assert zoo.search(path, k=1).names == ["m3"]
    assert zoo.search(str(path), k=1).names == ["m3"]
    with pytest.raises(ValueError, match="did you mean 'm1'"):
        zoo.search("m11")
    with pytest.raises(ValueError, match="no linear form"):
        zoo.search("m2", kind="weights")
    with pytest.raises(ValueError, match="has no site 'head'; there are layer0, layer1, layer2"):
        zoo.search("m2", site="head")
    with pytest.raises(ValueError, match="one of 'model', 'layer', got 'colour'"):
        zoo.search("m2", by="colour")
    with pytest.raises(ValueError, match=r"k .*whole number of at least 1, got 0"):
        zoo.search("m2", k=0)
    with pytest.raises(ValueError, match="size=32; the zoo has size=16"):
        zoo.search(made(0, size=32))
    other = sosie.zoo.Probe.of(INPUTS + 1)
    with pytest.raises(ValueError, match=f"another probe set, {other.digest}.*{PROBE.digest}"):
        zoo.search(made(0, probe=other))


def test_blocks_do_not_change_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(500, SIZE)).astype(np.float32)
    count = random.integers(1, 9, 60)
    first = np.cumsum(count) - count + 3 * np.arange(60)  # rows of removed models in between
    rows = rows[: int(first[-1] + count[-1])]
    mapped = Vectors("cka", rows, np.arange(60), first, count)
    query = random.normal(size=(4, SIZE)).astype(np.float32)
    cosines = query @ rows.T
    live = mapped.row_numbers()
    wanted = [cosines[:, f : f + c].max(1).mean() for f, c in zip(first, count, strict=True)]
    best = [sorted(live, key=lambda row: -one[row])[:7] for one in cosines]
    for block in (1, 10, 64, 10_000):
        monkeypatch.setattr(plain, "BLOCK", block)
        monkeypatch.setattr(plain.blocks, "__defaults__", (block,))
        np.testing.assert_allclose(score_models(query, mapped), wanted, rtol=1e-5)
        assert nearest_rows(query, mapped, 7)[0].tolist() == [list(map(int, one)) for one in best]


def test_threads_search_while_models_come(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 6)
    wrong: list[object] = []

    def ask() -> None:
        for _ in range(20):
            try:
                if zoo.search(made(3), k=1).names != ["m3"]:
                    wrong.append("another")
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    writer = Zoo(tmp_path / "zoo")
    writer.add({f"n{k}": made(20 + k) for k in range(6)})
    writer.remove("n0", "m0")
    writer.compact()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(zoo.search(made(3), k=50).names) == 10
