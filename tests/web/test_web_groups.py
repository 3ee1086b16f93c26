"""Clusters, duplicates, families and places on the map: the zoo's own answers, in pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from web_examples import INPUTS, SIZE, made

from sosie.web import create_app
from sosie.web import questions as groups
from sosie.zoo import Zoo


def numbers(zoo: Zoo) -> dict[str, int]:
    return {name: zoo[name].id for name in zoo}


def test_clusters_are_those_of_the_zoo(client: Any, zoo: Zoo) -> None:
    found = client.get("/api/clusters?k=3").json()
    told = zoo.clusters(3)
    assert {(n, c) for n, c in zip(found["ids"], found["clusters"], strict=True)} == {
        (row["id"], row["cluster"]) for row in told.rows()
    }
    assert found["silhouette"] == pytest.approx(told.asked["silhouette"])
    assert [group["count"] for group in found["groups"]] == [len(group) for group in told.groups]
    family = found["groups"][0]  # numbered by the first member: base and what was tuned from it
    assert found["ids"][: family["count"]].count(numbers(zoo)["base"]) == 1
    centres = {row["cluster"]: row["name"] for row in told.rows() if row["centre"]}
    assert [group["centre"]["name"] for group in found["groups"]] == [centres[k] for k in range(3)]
    best = client.get("/api/clusters").json()
    assert (best["chosen"], found["chosen"]) == (True, False)
    filtered = client.get("/api/clusters?k=2&tag=tuned").json()
    assert filtered["total"] == 3


def test_the_members_of_a_cluster_come_in_pages_the_most_typical_first(client: Any, zoo: Zoo) -> None:
    whole = client.get("/api/clusters?k=2").json()
    for number in (0, 1):
        told = [row for row in zoo.clusters(2).rows() if row["cluster"] == number]
        first = client.get(f"/api/clusters/{number}?k=2&limit=2").json()
        rest = client.get(f"/api/clusters/{number}?k=2&limit=200&offset=2").json()
        assert first["total"] == len(told)
        assert [row["name"] for row in first["rows"] + rest["rows"]] == [row["name"] for row in told]
        assert first["group"] == whole["groups"][number]
    answer = client.get("/api/clusters/7?k=2")
    assert answer.status_code == 404
    assert "no cluster 7" in answer.json()["error"]


@pytest.mark.parametrize("query", ["k=0", "k=101", "k=13", "kind=eyes"])  # there are twelve models
def test_a_number_of_clusters_that_cannot_be_is_refused(client: Any, query: str) -> None:
    answer = client.get(f"/api/clusters?{query}")
    assert answer.status_code == 422
    assert answer.json()["error"]


def test_duplicates_are_those_of_the_zoo_by_reason(client: Any, zoo: Zoo) -> None:
    assert client.get("/api/duplicates").json()["rows"] == []
    base = made(0)
    zoo.add(base, "copy", tags=["twice"])
    zoo.add(made(40, near=base, off=1e-4), "hardly")  # other weights, alike at every site
    found = client.get("/api/duplicates").json()
    assert [(row["name"], row["same_as"], row["why"]) for row in found["rows"]] == [
        (row["name"], row["same_as"], row["why"]) for row in zoo.duplicates().rows()
    ]
    ids = numbers(zoo)
    assert [(row["id"], row["same_id"]) for row in found["rows"]] == [
        (ids["copy"], ids["base"]), (ids["hardly"], ids["base"])
    ]  # fmt: skip
    assert (found["same_weights"], found["alike"], found["total"]) == (1, 1, 2)
    assert [row["name"] for row in client.get("/api/duplicates?why=weights").json()["rows"]] == ["copy"]
    assert [row["name"] for row in client.get("/api/duplicates?why=alike").json()["rows"]] == ["hardly"]
    paged = client.get("/api/duplicates?limit=1&offset=1").json()
    assert ([row["name"] for row in paged["rows"]], paged["total"]) == (["hardly"], 2)
    # base-1 is at a cosine of 1/√(1 + .3²) = .958 of base, more or less
    lower = client.get("/api/duplicates?threshold=0.9").json()
    assert "base-1" in {row["name"] for row in lower["rows"]}
    assert client.get("/api/duplicates?threshold=0.4").status_code == 422


def test_duplicates_of_too_many_models_are_left_to_the_command_line(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "MOST_HELD", 11)
    answer = client.get("/api/duplicates")
    assert answer.status_code == 422
    assert "sosie zoo duplicates" in answer.json()["error"]


def test_a_family_is_that_of_the_zoo(client: Any, zoo: Zoo) -> None:
    ids = numbers(zoo)
    found = client.get(f"/api/models/{ids['base-2']}/family?k=3").json()
    told = zoo.family("base-2", 3)
    assert found["parent"] == {"name": "base", "id": ids["base"]}
    base = next(row for row in found["rows"] if row["name"] == "base")
    assert base["recorded"] == "parent"
    for row, other in zip(found["rows"], told.rows(), strict=True):
        assert (row["name"], row["score"], row["above"]) == (other["name"], other["score"], other["above"])
    # By hand: the mean over layers of the same name, from the whole vectors.
    cosines = zoo["base-2"].fingerprint.cosine(zoo["base"].fingerprint, exact=True).diagonal()
    assert base["cka"] == pytest.approx(cosines.mean(), abs=1e-12)
    assert client.get("/api/models/99999/family").status_code == 404


def test_a_recorded_parent_that_is_not_there_is_named(client: Any, zoo: Zoo) -> None:
    zoo.remove("base")
    found = client.get(f"/api/models/{numbers(zoo)['base-1']}/family").json()
    assert found["parent"] == {"name": "base", "id": None}
    assert "base" not in {row["name"] for row in found["rows"]}


@pytest.mark.parametrize("landmarks", [None, 8])
def test_a_model_of_the_zoo_is_placed_where_it_lies(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landmarks: int | None
) -> None:
    """An identity of classical scaling: what places a new model gives those of the map their own places."""
    if landmarks is not None:
        monkeypatch.setattr("sosie.zoo.questions.MOST_MAPPED", 10)
        monkeypatch.setattr("sosie.zoo.questions.LANDMARKS", landmarks)
    client = TestClient(create_app(zoo), base_url="http://127.0.0.1:8017")
    points = {point["name"]: point for point in client.get("/api/map").json()["points"]}
    assert client.get("/api/map").json()["landmarks"] == landmarks
    for name in ("base", "m7", "m10"):
        path = zoo[name].fingerprint.save(tmp_path / "sent.safetensors")
        found = client.post("/api/near?place=1", content=path.read_bytes()).json()["place"]
        assert [found["x"], found["y"]] == pytest.approx([points[name]["x"], points[name]["y"]], abs=2e-5)
        assert found["models"] == (landmarks or 12)
        assert 0 < found["stress"] < 1


def test_a_new_model_is_placed_among_its_relatives(client: Any, zoo: Zoo, tmp_path: Path) -> None:
    path = made(50, near=made(0), off=0.2).save(tmp_path / "sent.safetensors")
    found = client.post("/api/near?place=1&k=1", content=path.read_bytes()).json()
    assert found["rows"][0]["name"] == "base"
    at = np.array([found["place"]["x"], found["place"]["y"]])
    points = {p["name"]: np.array([p["x"], p["y"]]) for p in client.get("/api/map").json()["points"]}
    away = {name: float(np.linalg.norm(point - at)) for name, point in points.items()}
    assert min(away, key=lambda name: away[name]) in {"base", "base-1"}
    plain = client.post("/api/near?k=1", content=path.read_bytes()).json()
    assert "place" not in plain  # only where it is asked for: the map may have to be made first


def test_a_place_is_on_the_map_that_is_shown(
    client: Any, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zoo["m7"].fingerprint.save(tmp_path / "sent.safetensors")
    asked = lambda: client.post("/api/near?place=1", content=path.read_bytes()).json()["place"]  # noqa: E731
    shown = lambda: {p["name"]: [p["x"], p["y"]] for p in client.get("/api/map").json()["points"]}  # noqa: E731
    shown()
    zoo.remove("m4")
    assert shown().keys() == set(zoo)
    assert [asked()["x"], asked()["y"]] == pytest.approx(shown()["m7"], abs=2e-5)
    # One that took long is shown again although a model went: it is put on that one, by those that are left.
    monkeypatch.setattr("sosie.web.cache.SLOW", 0.0)
    monkeypatch.setattr("sosie.web.cache.PATIENCE", 1e9)
    zoo.remove("m5")
    shown()
    zoo.remove("m6")
    assert "m6" in shown()
    assert asked()["models"] == 9
    assert [asked()["x"], asked()["y"]] == pytest.approx(shown()["m7"], abs=0.2)


def test_a_place_in_a_zoo_of_one(tmp_path: Path) -> None:
    zoo = Zoo(tmp_path / "one", INPUTS, size=SIZE)
    zoo.add(made(0), "only")
    client = TestClient(create_app(zoo), base_url="http://127.0.0.1:8017")
    path = made(2).save(tmp_path / "sent.safetensors")
    found = client.post("/api/near?place=1", content=path.read_bytes()).json()["place"]
    assert (found["x"], found["y"]) == (0, 0)


def test_lists_are_filtered_by_an_index_alone(zoo: Zoo) -> None:
    """The rows of models are long: a search for a part of a name must not go through them."""
    with zoo.store.reading() as connection:
        plan = connection.execute(
            "EXPLAIN QUERY PLAN SELECT count(*) FROM models WHERE models.removed IS NULL AND name LIKE ? ESCAPE '\\'",
            ("%a%",),
        ).fetchall()
        children = connection.execute(
            "EXPLAIN QUERY PLAN SELECT id, name FROM models WHERE removed IS NULL AND parent = ?", ("base",)
        ).fetchall()
    assert "COVERING INDEX model_lists" in plan[0]["detail"]
    assert "model_parents" in children[0]["detail"]


def test_a_page_knows_how_many_there_are(client: Any) -> None:
    """Also the last one, one past the end, and one that is full to the last row."""
    for limit, offset in [(5, 0), (5, 10), (12, 0), (4, 8), (5, 12), (5, 100)]:
        assert client.get(f"/api/models?limit={limit}&offset={offset}").json()["total"] == 12
    assert client.get("/api/models?text=base&limit=4").json()["total"] == 4
    assert client.get("/api/models?text=base&offset=9").json()["total"] == 4
    assert client.get("/api/models?text=nobody").json()["total"] == 0
