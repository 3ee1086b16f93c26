"""What the explorer answers: the zoo's own values, in pages, and refusals in words."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import numpy as np
import pytest
from web_examples import HOSTILE, PROBE, SITES, a_run, awaited, made

from sosie.results import Dynamics
from sosie.web.cache import AnswerCache, as_json
from sosie.zoo import Zoo


def ids(client: Any) -> dict[str, int]:
    return {row["name"]: row["id"] for row in client.get("/api/models?limit=200").json()["rows"]}


def test_the_zoo_says_what_it_is(client: Any, zoo: Zoo) -> None:
    found = client.get("/api/zoo").json()
    assert (found["name"], found["models"], found["n"], found["probe"]) == ("zoo", 12, PROBE.n, PROBE.digest)
    assert found["kinds"] == ["cka", "weights"]  # no model has atoms
    assert {row["name"]: row["count"] for row in found["choices"]["tags"]} == {"trained": 11, "tuned": 3, "<i>tag": 1}
    assert str(zoo.folder) not in json.dumps(found)


def test_models_come_in_pages_and_are_filtered(client: Any) -> None:
    first = client.get("/api/models?limit=5").json()
    second = client.get("/api/models?limit=5&offset=5").json()
    names = [row["name"] for row in first["rows"] + second["rows"]]
    assert first["total"] == 12
    assert names == ["base", "base-1", "base-2", "base-3", *(f"m{k}" for k in range(4, 10))]
    asked = lambda query: [row["name"] for row in client.get(f"/api/models?{query}").json()["rows"]]  # noqa: E731
    assert asked("text=BASE-") == ["base-1", "base-2", "base-3"]
    assert asked("text=%25") == []  # a percent sign is one, not anything
    assert asked("text=_") == []
    assert asked("tag=tuned&tag=trained") == ["base-1", "base-2", "base-3"]
    assert asked("architecture=Wide0&architecture=Wide1&text=5") == ["m5"]
    assert asked("task=nothing") == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=201", "limit=1e9", "offset=-1", "text=" + "x" * 201, "&".join(["tag=a"] * 21)]
)
def test_pages_have_limits(client: Any, query: str) -> None:
    answer = client.get(f"/api/models?{query}")
    assert answer.status_code == 422
    assert answer.json()["error"]


def test_a_model_tells_its_relatives_and_its_sites(client: Any, zoo: Zoo) -> None:
    numbers = ids(client)
    zoo.add(made(0), "copy")
    base = client.get(f"/api/models/{numbers['base']}").json()
    assert [row["name"] for row in base["children"]] == ["base-1", "base-2", "base-3"]
    assert [row["name"] for row in base["same_weights"]] == ["copy"]
    assert base["kinds"] == {"cka": [f"layer{k}" for k in range(SITES)], "weights": ["layer0", "layer1"]}
    assert base["absent"] == {"atoms": "no atoms"}
    child = client.get(f"/api/models/{numbers['base-2']}").json()
    assert child["parents"] == [{"id": numbers["base"], "name": "base"}]


def test_nearest_models_are_those_of_the_zoo(client: Any, zoo: Zoo) -> None:
    found = client.get(f"/api/models/{ids(client)['base']}/near?k=3").json()["rows"]
    assert [row["name"] for row in found] == ["base-1", "base-2", "base-3"]
    told = zoo.search("base", k=3).rows()
    assert [row["value"] for row in found] == [row["value"] for row in told]
    # From the whole vectors by hand: the mean over its sites of the best match.
    cosines = zoo["base"].fingerprint.cosine(zoo["base-1"].fingerprint, exact=True)
    assert found[0]["value"] == pytest.approx(cosines.max(1).mean(), abs=1e-12)
    filtered = client.get(f"/api/models/{ids(client)['base']}/near?k=3&architecture=Wide0").json()["rows"]
    assert {row["architecture"] for row in filtered} == {"Wide0"}


def test_nearest_layers_are_of_other_models(client: Any) -> None:
    found = client.get(f"/api/models/{ids(client)['base']}/near?by=layer&site=layer2&k=4").json()["rows"]
    assert [(row["name"], row["site_b"]) for row in found[:3]] == [(f"base-{k}", "layer2") for k in (1, 2, 3)]
    assert "base" not in {row["name"] for row in found}
    assert client.get(f"/api/models/{ids(client)['base']}/near?by=layer&site=none").status_code == 422


@pytest.mark.parametrize("exact", [True, False])
def test_a_pair_is_the_cosine_of_its_fingerprints(client: Any, zoo: Zoo, exact: bool) -> None:
    numbers = ids(client)
    found = client.get(f"/api/pairs/{numbers['base']}/{numbers['m4']}?exact={exact}").json()
    told = zoo["base"].fingerprint.cosine(zoo["m4"].fingerprint, exact=exact)
    assert np.abs(np.array(found["value"]) - told).max() < 1e-6
    assert (found["a"]["name"], found["b"]["name"], found["kinds"]) == ("base", "m4", ["cka", "weights"])
    turned = client.get(f"/api/pairs/{numbers['m4']}/{numbers['base']}?exact={exact}").json()
    assert np.array_equal(np.array(turned["value"]).T, found["value"])


def test_a_pair_without_that_kind_is_refused_in_words(client: Any) -> None:
    numbers = ids(client)
    answer = client.get(f"/api/pairs/{numbers['base']}/{numbers['base-1']}?kind=weights")
    assert answer.status_code == 422
    assert "weights" in answer.json()["error"]
    assert client.get(f"/api/pairs/{numbers['base']}/{numbers['m4']}?kind=weights").status_code == 200
    assert client.get(f"/api/pairs/{numbers['base']}/{numbers['m4']}?kind=eyes").status_code == 422


def test_the_map_has_every_model_near_its_relatives(client: Any, zoo: Zoo) -> None:
    found = client.get("/api/map").json()
    places = {point["name"]: np.array([point["x"], point["y"]]) for point in found["points"]}
    assert set(places) == set(zoo)
    assert found["stress"] == pytest.approx(zoo.map("cka").stress)
    assert np.linalg.norm(places["base"] - places["base-1"]) < np.linalg.norm(places["base"] - places["m4"])


def test_answers_follow_the_zoo(client: Any, zoo: Zoo) -> None:
    base = ids(client)["base"]
    assert client.get(f"/api/models/{base}/near?k=1").json()["rows"][0]["name"] == "base-1"
    zoo.remove("base-1")
    assert client.get(f"/api/models/{base}/near?k=1").json()["rows"][0]["name"] == "base-2"
    assert len(client.get("/api/map").json()["points"]) == 11
    zoo.remove("base")
    answer = client.get(f"/api/models/{base}")
    assert answer.status_code == 404
    assert "removed" in answer.json()["error"]
    for path in (f"models/{base}/near", f"pairs/{base}/5", "models/99999", "map?kind=atoms"):
        assert client.get(f"/api/{path}").status_code == 404
        assert str(zoo.folder) not in client.get(f"/api/{path}").text


def test_a_name_that_names_a_file_is_never_opened(client: Any, zoo: Zoo, tmp_path: Any, monkeypatch: Any) -> None:
    """A text that is not in the zoo would be opened as a model: the explorer never asks by text."""
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()\ndef net(): ...\n")
    monkeypatch.chdir(tmp_path)
    entry = zoo.add(made(20), "evil.py:net")
    monkeypatch.setattr(type(zoo), "__contains__", lambda self, name: False)  # as if removed a moment ago
    assert client.get(f"/api/models/{entry.id}/near").status_code == 200
    assert not (tmp_path / "ran").exists()


def test_runs_are_those_of_the_folder(client: Any, zoo: Zoo) -> None:
    assert [row["name"] for row in client.get("/api/runs").json()["rows"]] == ["first"]
    found = client.get("/api/run?name=first").json()
    run = a_run()
    assert found["sites"] == list(run.sites)
    assert np.array_equal(found["measures"][0]["value"], run.matrix("debiased_cka"))
    assert found["measures"][0]["settled"] == list(run.settled(0.99, "debiased_cka").values())
    changed = Dynamics(**{**vars(run), "name_a": "other", "name_b": "other"})
    changed.save(zoo.folder / "runs" / "first.json")
    assert client.get("/api/run?name=first").json()["names"] == ["other", "other"]


def test_a_run_outside_the_folder_is_not_there(client: Any, zoo: Zoo, tmp_path: Any) -> None:
    a_run().save(tmp_path / "secret.json")
    os.symlink(tmp_path / "secret.json", zoo.folder / "runs" / "linked.json")
    (zoo.folder / "runs" / "broken.json").write_text("{}")
    (zoo.folder / "runs" / "deep").mkdir()
    a_run().save(zoo.folder / "runs" / "deep" / "inner.json")
    for name in ("../../secret", "linked", "deep/inner", "..%2f..%2fsecret", "first.json", "", "first%00"):
        answer = client.get(f"/api/run?name={name}")
        assert answer.status_code == 404, name
        assert "no run" in answer.json()["error"]
    assert client.get("/api/run?name=broken").status_code == 422
    assert str(zoo.folder) not in client.get("/api/run?name=broken").text
    os.rename(zoo.folder / "runs", tmp_path / "runs")
    os.symlink(tmp_path / "runs", zoo.folder / "runs")
    assert client.get("/api/run?name=first").status_code == 404
    assert client.get("/api/runs").json()["rows"] == []


def test_hostile_names_are_json_like_any_other(client: Any) -> None:
    answer = client.get("/api/models?text=%3Cimg")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["rows"][0]["name"] == HOSTILE


def test_half_a_character_in_a_name_has_a_form() -> None:
    assert as_json({"site": "\ud800"}) == b'{"site":"\\ud800"}'


def test_numbers_that_are_not_finite_are_null() -> None:
    assert as_json({"value": [[float("nan"), 0.5], [float("inf"), 1]]}) == b'{"value":[[null,0.5],[null,1]]}'


def test_an_answer_is_worked_out_once_until_the_zoo_changes() -> None:
    changes, made_times = [0], []
    kept = AnswerCache(lambda: changes[0], most_bytes=1000)
    ready = threading.Barrier(8)

    def ask() -> None:
        ready.wait()
        assert kept.answer(("map",), lambda: made_times.append(1) or "x") == b'"x"'

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made_times) == 1
    changes[0] += 1
    kept.answer(("map",), lambda: made_times.append(1) or "x")
    assert len(made_times) == 2


def test_what_took_long_is_given_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now, changes, made_times = [100.0], [0], []
    monkeypatch.setattr("sosie.web.cache.time.monotonic", lambda: now[0])
    kept = AnswerCache(lambda: changes[0])

    def make() -> int:
        made_times.append(1)
        now[0] += 2.0  # seconds that it takes
        return len(made_times)

    async def ask(patient: bool) -> bytes:
        changes[0] += 1
        return await kept.ask(("map",), make, patient=patient)

    assert [awaited(lambda: ask(True)) for _ in range(3)] == [b"1"] * 3  # though the zoo changes every time
    assert awaited(lambda: ask(False)) == b"2"
    now[0] += 39.0  # 2 s to make: good for 40 s
    assert awaited(lambda: ask(True)) == b"3"


def test_few_slow_answers_are_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("sosie.web.cache.time.monotonic", lambda: now[0])
    kept = AnswerCache(lambda: 0)

    def make() -> int:
        now[0] += 2.0
        return 1

    for k in range(40):
        awaited(lambda k=k: kept.ask(("clusters", k), make, patient=True))
    assert len(kept._slow) == 16
    assert ("clusters", 39) in kept._slow


def test_no_more_is_kept_than_there_is_room_for() -> None:
    kept = AnswerCache(lambda: 0, most_bytes=1000)
    for k in range(50):
        kept.answer((k,), lambda: "x" * 100)
    assert sum(map(len, kept._answers.values())) <= 1000
    kept.answer(("large",), lambda: "x" * 900)
    assert ("large",) not in {key[1:] for key in kept._answers}


def test_a_failed_answer_is_not_kept() -> None:
    kept = AnswerCache(lambda: 0)
    with pytest.raises(ZeroDivisionError):
        kept.answer(("a",), lambda: 1 / 0)
    assert kept.answer(("a",), lambda: 1) == b"1"
