"""What the explorer asks a zoo: about one model or two, about all, the map, and recorded runs; answers are JSON."""

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


def about(zoo: Zoo) -> dict[str, Any]:
    """What the front end needs to know of the zoo."""
    settings = zoo.settings
    there = {kind_of(key) for key in zoo.store.kinds()}
    return {
        "name": zoo.folder.absolute().name, "models": len(zoo), "failed": len(zoo.failed()), "probe": settings.probe,
        "n": settings.n, "size": settings.size, "kinds": [kind for kind in settings.kinds if kind in there],
        "what": WHAT, "version": __version__, "ramp": RAMP, "choices": zoo.store.choices(),
    }  # fmt: skip


def facts_of(zoo: Zoo, model: int) -> dict[str, Any]:
    """Of a model that is in the zoo now."""
    found = zoo.store.short_facts("id", [model])
    if not found:
        raise UnknownModel(f"no model number {model} in this zoo: it was removed, or never there")
    return found[0]


def model(zoo: Zoo, number: int) -> dict[str, Any]:
    """All that is known of a model, but for its vectors."""
    with zoo.store.reading():  # all of one moment, in one transaction
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
    """The models, or layers, nearest to a model of the zoo or to a fingerprint that was sent; never itself."""
    # Never a text: one that is no name in the zoo is opened as a model, which may run a file of that name.
    asked = query if isinstance(query, Fingerprint) else _as_query(zoo, query)
    found = zoo.search(asked, k=k, kind=kind, by=by, site=site, **filters)
    picked = (*FACTS, "site_a", "site_b", "value", "estimated", "exact")
    rows = [{name: row[name] for name in picked} for row in found.rows()]
    return {"kind": kind, "what": WHAT[kind], "by": by, "searched": found.asked["searched"], "rows": rows}


def _as_query(zoo: Zoo, number: int) -> Query:
    name = facts_of(zoo, number)["name"]
    return Query(name, zoo.settings.fingerprint(zoo.store.read(number)), number)


def family(zoo: Zoo, number: int, k: int) -> dict[str, Any]:
    """The models that it may come from, or that come from it, with what was recorded of them."""
    found = zoo.family(_as_query(zoo, number), k)
    parent = found.asked["recorded_parent"]
    known = _numbers(zoo, [parent] if parent else [])
    picked = (*FACTS, "recorded", "score", "above", "early", "cka", "weights", "atoms")
    return {
        "parent": None if parent is None else {"name": parent, "id": known.get(parent)},
        "candidates": found.asked["candidates"], "total": len(found),
        "rows": [{name: row[name] for name in picked} for row in found.rows()[:MOST_FAMILY]],
        "notes": list(found.notes),
    }  # fmt: skip


def _numbers(zoo: Zoo, names: list[str]) -> dict[str, int]:
    """The ids of models by their names; removed ones are left out."""
    return {row["name"]: row["id"] for row in zoo.store.short_facts("name", names)}


def pair(zoo: Zoo, first: int, second: int, *, kind: str, exact: bool) -> dict[str, Any]:
    """Every site of one model against every site of another."""
    with zoo.store.reading():
        sides = [facts_of(zoo, number) for number in (first, second)]
        kinds = [_kinds(zoo, number) for number in (first, second)]
    # The whole vectors are large: where they are asked for, nothing else is read.
    keys = [EXACT] if exact and kind == "cka" else [key for key in zoo.store.kinds() if kind_of(key) == kind]
    prints = [zoo.settings.fingerprint(zoo.store.read(number, kinds=keys)) for number in (first, second)]
    values = prints[0].cosine(prints[1], kind, exact=exact)
    return {
        "kind": kind, "what": WHAT[kind], "exact": exact or kind == "atoms",
        "kinds": [name for name in kinds[0] if name in kinds[1]],
        "a": {"id": first, "name": sides[0]["name"], "sites": kinds[0][kind]},
        "b": {"id": second, "name": sides[1]["name"], "sites": kinds[1][kind]}, "value": np.round(values, 6).tolist(),
    }  # fmt: skip


# Questions about all models, put to the zoo: which belong together, which are there twice

MOST_HELD = 20_000  # models: among more, duplicates take longer than a reader waits
SAME, ALIKE = "same weights", "alike at every site"


def clusters(zoo: Zoo, kind: str, k: int | None, filters: dict[str, Any]) -> dict[str, Any]:
    """Groups with their centres, and the group of every model: by group, and in it the most typical first."""
    found = zoo.clusters(k, kind, **filters)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in found.found:
        groups.setdefault(row["cluster"], []).append(row)
    asked = found.asked
    return {
        "kind": kind, "what": WHAT[kind], "total": len(found), "silhouette": asked["silhouette"],
        "chosen": asked["chosen"], "groups": [_group(number, groups[number]) for number in sorted(groups)],
        "ids": [row["id"] for row in found.found], "clusters": [row["cluster"] for row in found.found],
        "similarities": [None if row["similarity"] is None else round(row["similarity"], 6) for row in found.found],
        "notes": list(found.notes),
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
    """A page of the models of one group, of an answer of `clusters`."""
    found = json.loads(whole)
    group = next((group for group in found["groups"] if group["cluster"] == number), None)
    if group is None:
        raise UnknownModel(f"no cluster {number}: there are {len(found['groups'])}, counted from 0")
    every = [
        (model, similarity)
        for model, cluster, similarity in zip(found["ids"], found["clusters"], found["similarities"], strict=True)
        if cluster == number
    ]
    some = every[offset : offset + limit]
    facts = {row["id"]: row for row in zoo.store.short_facts("id", [model for model, _ in some])}
    rows = [{**facts[model], "similarity": similarity} for model, similarity in some if model in facts]
    return {"group": group, "total": len(every), "offset": offset, "rows": rows}


def duplicates(zoo: Zoo, kind: str, threshold: float) -> dict[str, Any]:
    """Every model that is there under another name already, with the first that it is like."""
    if (count := len(zoo)) > MOST_HELD:
        raise ValueError(
            f"{count:,} models: the explorer looks for duplicates among at most {MOST_HELD:,}. `sosie zoo duplicates` "
            "looks among all"
        )
    found = zoo.duplicates(threshold, kind)
    numbers = _numbers(zoo, list({row[key]: None for row in found.found for key in ("name", "same_as")}))
    rows = []
    for row in found.found:
        if row["name"] in numbers and row["same_as"] in numbers:
            named = {"id": numbers[row["name"]], "same_id": numbers[row["same_as"]]}
            picked = ("name", "same_as", "why", "value", "exact", "architecture", "task", "tags", "parent")
            rows.append({**named, **{name: row[name] for name in picked}})
    return {
        "kind": kind, "what": WHAT[kind], "threshold": threshold, "models": found.asked["models"], "rows": rows,
        "notes": list(found.notes),
    }  # fmt: skip


def page_of_duplicates(whole: bytes, why: str | None, limit: int, offset: int) -> dict[str, Any]:
    """Some rows of an answer of `duplicates`, of one reason or both, and how many there are of each."""
    found = json.loads(whole)
    counts = Counter(row["why"] for row in found["rows"])
    rows = [row for row in found["rows"] if why is None or row["why"] == {"weights": SAME, "alike": ALIKE}[why]]
    return {
        **found, "same_weights": counts[SAME], "alike": counts[ALIKE], "total": len(rows), "offset": offset,
        "rows": rows[offset : offset + limit],
    }  # fmt: skip


# The map of all models, and where a fingerprint that was sent belongs on it

MOST_POINTS = 20_000
REFERENCES = 10  # models that a place is worked out from


class Maps:
    """The last map of each kind, as it is shown, so that what is sent is put on that one."""

    def __init__(self, zoo: Zoo) -> None:
        self._zoo = zoo
        self._last: dict[str, Map] = {}

    def answer(self, kind: str) -> dict[str, Any]:
        """All models as points, near ones near each other; beyond the most evenly picked ones."""
        found = self._zoo.map(kind)
        self._last[kind] = found
        rows = list(found.found)
        if len(rows) > MOST_POINTS:
            rows = [rows[k] for k in np.linspace(0, len(rows) - 1, MOST_POINTS).round().astype(int)]
        points = [
            {name: row[name] for name in FACTS} | {"x": round(row["x"], 6), "y": round(row["y"], 6)} for row in rows
        ]
        landmarks = found.asked["landmarks"]
        return {
            "kind": kind, "what": WHAT[kind], "total": len(found), "landmarks": landmarks, "points": points,
            "stress": found.stress,
        }  # fmt: skip

    def place(self, kind: str, sent: Fingerprint) -> dict[str, Any] | None:
        """Where a fingerprint lies on the map that was answered last; None where models were removed meanwhile.

        As landmark scaling places a model (de Silva and Tenenbaum 2004), from its squared distances to the models
        that the map was laid out around. That is linear in them, and gives those models their own places: so what it
        takes is the place of a few models, and how far the distances are from theirs.
        """
        last = self._last.get(kind)
        if last is None or len(last) < last.asked["models"]:  # some were removed while it was made
            return None
        vectors = vectors_of(self._zoo, kind)
        key = sent.key(kind)
        rows = np.ascontiguousarray(sent.vectors[key], np.float32)
        zero = np.zeros(1, np.int64)
        mine = Vectors(key, rows, zero, zero, np.array([len(rows)], np.int64))
        if key != vectors.kind:
            raise NotComparable("its atoms have other coefficients than those of the zoo, and nothing in common")
        landmarks, models = last.asked["landmarks"], last.asked["models"]
        laid_around = np.arange(models) if landmarks is None else drawn(models, landmarks, last.asked["seed"])
        there = {*vectors.models.tolist()}
        anchors = [row for row in (last.found[k] for k in laid_around) if row["id"] in there]
        if not anchors:
            return None
        some = vectors.part(np.searchsorted(vectors.models, [row["id"] for row in anchors]))
        points = np.array([(row["x"], row["y"]) for row in anchors])
        alike = similarities(some, mine)
        near = np.sort(np.argsort(-alike[0], kind="stable")[:REFERENCES])
        squared = squared_distances(alike)
        theirs = squared_distances(similarities(some, some.part(near)))
        point = points[near].mean(0) + placed(points, theirs, squared)[0]
        x, y = (round(float(axis), 6) for axis in point)
        return {"x": x, "y": y, "models": len(anchors), "stress": stress_of(point[None], points, squared)}


# Dynamics that lie in the zoo's folder `runs/`: saved results, looked at through a slider

MOST_BYTES = 32 * 2**20
MOST_RUNS = 1000


class UnknownRun(ValueError):
    """No run of that name."""


def listed(folder: Path) -> list[dict[str, Any]]:
    """The files of `runs/` by name; links are not followed."""
    found: list[dict[str, Any]] = []
    if (folder / "runs").is_symlink():
        return found
    try:
        entries = sorted(os.scandir(folder / "runs"), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return found
    for entry in entries:
        if entry.name.endswith(".json") and entry.is_file(follow_symlinks=False) and _decent(entry.name):
            found.append({"name": entry.name.removesuffix(".json"), "bytes": entry.stat(follow_symlinks=False).st_size})
    return found[:MOST_RUNS]


def _decent(name: str) -> bool:
    return name.isprintable() and "/" not in name and "\\" not in name


def stamp(folder: Path, name: str) -> tuple[int, int]:
    """Changes when the file does."""
    found = _placed(folder, name).stat()
    return found.st_mtime_ns, found.st_size


def _placed(folder: Path, name: str) -> Path:
    """The file of a run: one that is listed, or none. A name is never made into a path before that."""
    if name not in {run["name"] for run in listed(folder)}:
        raise UnknownRun(f"no run {visible(name[:200])!r} in the zoo's folder runs/")
    return folder / "runs" / f"{name}.json"


def opened(folder: Path, name: str) -> dict[str, Any]:
    """A run as the front end shows it."""
    path = _placed(folder, name)
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > MOST_BYTES:
        raise DamagedFile(f"{path.name} has {facts.st_size:,} bytes; runs of up to {MOST_BYTES:,} are shown")
    try:
        run = Dynamics.load(path)
    except DamagedFile as error:
        raise DamagedFile(str(error).replace(str(path), path.name)) from error
    return {
        "name": name, "names": [run.name_a, run.name_b], "two_runs": run.two_runs, "what": run.what,
        "sites": list(run.sites), "steps_a": list(run.steps_a), "steps_b": list(run.steps_b),
        "measures": [_measure(run, measure) for measure in run.values],
    }  # fmt: skip


def _measure(run: Dynamics, name: str) -> dict[str, Any]:
    values, scale = run[name], full_scale(run[name])
    settled = {} if run.two_runs else run.settled(THRESHOLDS[0], name)
    return {
        "name": name, "value": values.value.tolist(), "closer": values.closer, "ends": [scale.far, scale.alike],
        "threshold": THRESHOLDS[0], "settled": [settled.get(site) for site in run.sites],
        "caveats": list(dict.fromkeys(caveat.text for caveat in values.caveats)),
    }  # fmt: skip
