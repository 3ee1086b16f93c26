"""The questions of the explorer: about one model or two, about all, the map, and recorded runs; answers are JSON."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..files import DamagedFile
from ..report.colour import RAMP, full_scale
from ..report.words import visible
from ..results import THRESHOLDS, Dynamics, Map
from ..zoo import Fingerprint, NotComparable, Zoo
from ..zoo.fingerprints import kind_of
from ..zoo.questions import drawn, placed, similarities, squared_distances, stress_of, vectors_of
from ..zoo.search import Query
from ..zoo.store import UnknownModel, notes_of
from ..zoo.vectors import EXACT, Vectors

FACTS = ("id", "name", "architecture", "task", "tags", "parent")
WHAT = {"cka": "debiased CKA", "weights": "wCKA", "atoms": "atom cosine"}
MOST_FAMILY = 100


def about(zoo: Zoo, most_bytes: int) -> dict[str, Any]:
    """Return what the front end needs to know about the zoo."""
    settings = zoo.settings
    present = {kind_of(key) for key in zoo.store.kinds()}
    return {
        "name": zoo.folder.absolute().name, "models": len(zoo), "failed": len(zoo.failed()), "probe": settings.probe,
        "n": settings.n, "size": settings.size, "kinds": [kind for kind in settings.kinds if kind in present],
        "what": WHAT, "version": __version__, "ramp": RAMP, "choices": zoo.store.choices(), "most_bytes": most_bytes,
    }  # fmt: skip


def models(zoo: Zoo, limit: int, offset: int, **options: Any) -> dict[str, Any]:
    """Return a page of the models."""
    return zoo.store.page(limit, offset, **options)


def facts_of(zoo: Zoo, number: int) -> dict[str, Any]:
    """Return the facts of a model that is in the zoo now."""
    rows = zoo.store.short_facts("id", [number])
    if not rows:
        raise UnknownModel(f"no model number {number} in this zoo: it was removed, or never existed")
    return rows[0]


def named(zoo: Zoo, name: str) -> dict[str, Any]:
    """Return the number of the model of that name."""
    return {"id": zoo.store.id_of(name), "name": name}


def model(zoo: Zoo, number: int) -> dict[str, Any]:
    """Return all facts of a model, without its vectors."""
    with zoo.store.reading():  # one transaction: all of one moment
        facts = facts_of(zoo, number)
        stored = zoo.store.read(number, kinds=())
        related = zoo.store.relatives(number)
        kinds = _kinds(zoo, number)
    return {
        **facts, "parameters": stored.parameters, "source": stored.source, "added": stored.added,
        "digest": stored.digest, "kinds": kinds, "absent": stored.absent,
        "notes": notes_of(stored.about.get("notes")), **related,
    }  # fmt: skip


def _kinds(zoo: Zoo, number: int) -> dict[str, list[str]]:
    return {kind_of(key): labels for key, labels in zoo.store.sites(number).items() if key != EXACT}


def near(
    zoo: Zoo, query: int | Fingerprint, *, k: int, kind: str, by: str, site: str | None = None, **filters: Any
) -> dict[str, Any]:
    """Return the models or layers nearest to a model of the zoo or to a fingerprint that was sent; never itself."""
    # Never search by a string: if no model of the zoo has that name, it is opened, which may run a file of that name.
    model = query if isinstance(query, Fingerprint) else _as_query(zoo, query)
    answer = zoo.search(model, k=k, kind=kind, by=by, site=site, **filters)
    columns = (*FACTS, "site_a", "site_b", "value", "estimated", "exact")
    rows = [{name: row[name] for name in columns} for row in answer.rows()]
    return {"kind": kind, "what": WHAT[kind], "by": by, "searched": answer.asked["searched"], "rows": rows}


def _as_query(zoo: Zoo, number: int) -> Query:
    name = facts_of(zoo, number)["name"]
    return Query(name, zoo.settings.fingerprint(zoo.store.read(number)), number)


def family(zoo: Zoo, number: int, k: int) -> dict[str, Any]:
    """Return the models that a model may come from, or that come from it, with their recorded relation."""
    answer = zoo.family(_as_query(zoo, number), k)
    parent = answer.asked["recorded_parent"]
    known = _numbers(zoo, [parent] if parent else [])
    columns = (*FACTS, "recorded", "score", "above", "early", "cka", "weights", "atoms")
    return {
        "parent": None if parent is None else {"name": parent, "id": known.get(parent)},
        "candidates": answer.asked["candidates"], "total": len(answer),
        "rows": [{name: row[name] for name in columns} for row in answer.rows()[:MOST_FAMILY]],
        "notes": list(answer.notes),
    }  # fmt: skip


def _numbers(zoo: Zoo, names: list[str]) -> dict[str, int]:
    """Return the ids of models by name, without removed ones."""
    return {row["name"]: row["id"] for row in zoo.store.short_facts("name", names)}


def pair(zoo: Zoo, first: int, second: int, *, kind: str, exact: bool) -> dict[str, Any]:
    """Compare every site of one model with every site of another."""
    with zoo.store.reading():
        sides = [facts_of(zoo, number) for number in (first, second)]
        kinds = [_kinds(zoo, number) for number in (first, second)]
    # The whole vectors are large: with exact=True nothing else is read.
    keys = [EXACT] if exact and kind == "cka" else [key for key in zoo.store.kinds() if kind_of(key) == kind]
    prints = [zoo.settings.fingerprint(zoo.store.read(number, kinds=keys)) for number in (first, second)]
    values = prints[0].cosine(prints[1], kind, exact=exact)
    return {
        "kind": kind, "what": WHAT[kind], "exact": exact or kind == "atoms",
        "kinds": [name for name in kinds[0] if name in kinds[1]],
        "a": {"id": first, "name": sides[0]["name"], "sites": kinds[0][kind]},
        "b": {"id": second, "name": sides[1]["name"], "sites": kinds[1][kind]}, "value": np.round(values, 6).tolist(),
    }  # fmt: skip


# Questions about all models: clusters and duplicates

MOST_HELD = 20_000  # models: among more, duplicates take longer than a reader waits
SAME, ALIKE = "same weights", "alike at every site"


def clusters(zoo: Zoo, kind: str, k: int | None, filters: dict[str, Any]) -> dict[str, Any]:
    """Return groups with their centres, and the group of every model, sorted by group, the most typical first."""
    answer = zoo.clusters(k, kind, **filters)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in answer.found:
        groups.setdefault(row["cluster"], []).append(row)
    asked = answer.asked
    return {
        "kind": kind, "what": WHAT[kind], "total": len(answer), "silhouette": asked["silhouette"],
        "chosen": asked["chosen"], "groups": [_group(number, groups[number]) for number in sorted(groups)],
        "ids": [row["id"] for row in answer.found], "clusters": [row["cluster"] for row in answer.found],
        "similarities": [None if row["similarity"] is None else round(row["similarity"], 6) for row in answer.found],
        "notes": list(answer.notes),
    }  # fmt: skip


def _group(number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    centre = next((row for row in rows if row["centre"]), rows[0])
    alike = [row["similarity"] for row in rows if row["similarity"] is not None]
    most = Counter(row["architecture"] for row in rows).most_common(1)[0]
    return {
        "cluster": number, "count": len(rows), "centre": {"id": centre["id"], "name": centre["name"]},
        "similarity": sum(alike) / len(alike) if alike else None, "architecture": {"name": most[0], "count": most[1]},
    }  # fmt: skip


def members(zoo: Zoo, whole: bytes, number: int, limit: int, offset: int) -> dict[str, Any]:
    """Return a page of the models of one group, from an answer of `clusters`."""
    answer = json.loads(whole)
    group = next((group for group in answer["groups"] if group["cluster"] == number), None)
    if group is None:
        raise UnknownModel(f"no cluster {number}: there are {len(answer['groups'])}, counted from 0")
    every = [
        (model, similarity)
        for model, cluster, similarity in zip(answer["ids"], answer["clusters"], answer["similarities"], strict=True)
        if cluster == number
    ]
    page = every[offset : offset + limit]
    facts = {row["id"]: row for row in zoo.store.short_facts("id", [model for model, _ in page])}
    rows = [{**facts[model], "similarity": similarity} for model, similarity in page if model in facts]
    return {"group": group, "total": len(every), "offset": offset, "rows": rows}


def duplicates(zoo: Zoo, kind: str, threshold: float) -> dict[str, Any]:
    """Return every model that the zoo also has under an earlier name, with that name."""
    if (count := len(zoo)) > MOST_HELD:
        raise ValueError(
            f"{count:,} models: the explorer looks for duplicates among at most {MOST_HELD:,}, `sosie zoo duplicates` "
            "among all"
        )
    answer = zoo.duplicates(threshold, kind)
    numbers = _numbers(zoo, list({row[key]: None for row in answer.found for key in ("name", "same_as")}))
    columns = ("name", "same_as", "why", "value", "exact", "architecture", "task", "tags", "parent")
    rows = [
        {"id": numbers[row["name"]], "same_id": numbers[row["same_as"]]} | {name: row[name] for name in columns}
        for row in answer.found
        if row["name"] in numbers and row["same_as"] in numbers
    ]
    return {
        "kind": kind, "what": WHAT[kind], "threshold": threshold, "models": answer.asked["models"], "rows": rows,
        "notes": list(answer.notes),
    }  # fmt: skip


def page_of_duplicates(whole: bytes, why: str | None, limit: int, offset: int) -> dict[str, Any]:
    """Return some rows of an answer of `duplicates`, for one reason or both, and the count of each."""
    answer = json.loads(whole)
    counts = Counter(row["why"] for row in answer["rows"])
    rows = [row for row in answer["rows"] if why is None or row["why"] == {"weights": SAME, "alike": ALIKE}[why]]
    return {
        **answer, "same_weights": counts[SAME], "alike": counts[ALIKE], "total": len(rows), "offset": offset,
        "rows": rows[offset : offset + limit],
    }  # fmt: skip


# The map of all models, and the place of a fingerprint on it

MOST_POINTS = 20_000
REFERENCES = 10  # models that determine the place


def shown_map(answer: Map) -> dict[str, Any]:
    """Return all models as points, or evenly spread ones if there are too many to show."""
    rows, kind = list(answer.found), answer.asked["kind"]
    if len(rows) > MOST_POINTS:
        rows = [rows[k] for k in np.linspace(0, len(rows) - 1, MOST_POINTS).round().astype(int)]
    points = [{name: row[name] for name in FACTS} | {"x": round(row["x"], 6), "y": round(row["y"], 6)} for row in rows]
    return {
        "kind": kind, "what": WHAT[kind], "total": len(answer), "landmarks": answer.asked["landmarks"],
        "points": points, "stress": answer.stress,
    }  # fmt: skip


def place(zoo: Zoo, last: Map | None, kind: str, sent: Fingerprint) -> dict[str, Any] | None:
    """Return the place of a fingerprint on the last map; None if models were removed meanwhile.

    Landmark scaling places a model by its squared distances to the models that the map is laid out around (de Silva and
    Tenenbaum 2004). That is linear in the distances, and gives those models their own places: so the place of a few
    models is enough, with the difference of the distances from theirs.
    """
    if last is None or len(last) < last.asked["models"]:  # some were removed while it was made
        return None
    vectors = vectors_of(zoo, kind)
    key = sent.key(kind)
    rows = np.ascontiguousarray(sent.vectors[key], np.float32)
    zero = np.zeros(1, np.int64)
    sent_vectors = Vectors(key, rows, zero, zero, np.array([len(rows)], np.int64))
    if key != vectors.kind:
        raise NotComparable("its atoms have other coefficients than those of the zoo, and cannot be compared")
    landmarks, models = last.asked["landmarks"], last.asked["models"]
    chosen = np.arange(models) if landmarks is None else drawn(models, landmarks, last.asked["seed"])
    present = {*vectors.models.tolist()}
    anchors = [row for row in (last.found[k] for k in chosen) if row["id"] in present]
    if not anchors:
        return None
    anchor_vectors = vectors.part(np.searchsorted(vectors.models, [row["id"] for row in anchors]))
    points = np.array([(row["x"], row["y"]) for row in anchors])
    similarity = similarities(anchor_vectors, sent_vectors)
    near = np.sort(np.argsort(-similarity[0], kind="stable")[:REFERENCES])
    squared = squared_distances(similarity)
    near_squared = squared_distances(similarities(anchor_vectors, anchor_vectors.part(near)))
    point = points[near].mean(0) + placed(points, near_squared, squared)[0]
    x, y = (round(float(axis), 6) for axis in point)
    return {"x": x, "y": y, "models": len(anchors), "stress": stress_of(point[None], points, squared)}


# Dynamics in the zoo's folder `runs/`: saved results, shown with a slider

MOST_BYTES = 32 * 2**20
MOST_RUNS = 1000


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the files of `runs/` by name; links are not followed."""
    if (folder / "runs").is_symlink():
        return []
    try:
        entries = sorted(os.scandir(folder / "runs"), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    runs = [
        {"name": entry.name.removesuffix(".json"), "bytes": entry.stat(follow_symlinks=False).st_size}
        for entry in entries
        if entry.name.endswith(".json") and entry.name.isprintable() and entry.is_file(follow_symlinks=False)
    ]
    return runs[:MOST_RUNS]


def stamp(folder: Path, name: str) -> tuple[int, int]:
    """Return what changes when the file of a run does."""
    facts = _path_of(folder, name).stat()
    return facts.st_mtime_ns, facts.st_size


def _path_of(folder: Path, name: str) -> Path:
    """Return the file of a run that is listed; other names never become a path."""
    if name not in {run["name"] for run in list_runs(folder)}:
        raise UnknownModel(f"no run {visible(name[:200])!r} in the zoo's folder runs/")
    return folder / "runs" / f"{name}.json"


def run(folder: Path, name: str) -> dict[str, Any]:
    """Return a run as the front end shows it."""
    path = _path_of(folder, name)
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_BYTES:
        raise DamagedFile(f"{path.name} has {facts.st_size:,} bytes; runs of up to {MOST_BYTES:,} are shown")
    try:
        dynamics = Dynamics.load(path)
    except DamagedFile as error:
        raise DamagedFile(str(error).replace(str(path), path.name)) from error
    return {
        "name": name, "names": [dynamics.name_a, dynamics.name_b], "two_runs": dynamics.two_runs,
        "what": dynamics.what, "sites": list(dynamics.sites), "steps_a": list(dynamics.steps_a),
        "steps_b": list(dynamics.steps_b), "measures": [_measure(dynamics, measure) for measure in dynamics.values],
    }  # fmt: skip


def _measure(dynamics: Dynamics, name: str) -> dict[str, Any]:
    values, scale = dynamics[name], full_scale(dynamics[name])
    settled = {} if dynamics.two_runs else dynamics.settled(THRESHOLDS[0], name)
    return {
        "name": name, "value": values.value.tolist(), "closer": values.closer, "ends": [scale.far, scale.alike],
        "threshold": THRESHOLDS[0], "settled": [settled.get(site) for site in dynamics.sites],
        "caveats": list(dict.fromkeys(caveat.text for caveat in values.caveats)),
    }  # fmt: skip
