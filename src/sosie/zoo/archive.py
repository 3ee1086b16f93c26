"""A zoo as one file: safetensors with the vectors of each kind, the probe set, and the facts as JSON.

Written and read a model at a time. What others send is checked before it is believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import DamagedFile, Part, assemble, check_schema, check_tensors, check_writable, write_atomically
from ..progress import Progress, track
from .fingerprints import from_parts
from .folder import Settings, load_probe, new_folder
from .search import blocks
from .store import TAGS, Facts, Record, Store, check_key, errors_in_words
from .vectors import EXACT, ITEM, Vectors, as_bytes

if TYPE_CHECKING:
    from .zoo import Zoo


KIND, VERSION = "zoo-file", 2
GROUP = 32  # models written in one transaction
MOST_TEXT = 2**30  # bytes of JSON
SCHEMA = {
    "settings": {"probe": str, "n": int, "size": int, "seed": int, "kinds": [str], "rows": str},
    "models": [
        {
            "name": str, "digest": str, "architecture": str, "added": str, "tags": [str], "task": (str, None),
            "source": (str, None), "parent": (str, None), "places": {str: {"first": int, "labels": [str]}},
        }
    ],
}  # fmt: skip


def export(zoo: Zoo, path: Path) -> Path:
    """Whole or not at all: the zoo as it is at one moment, whatever is added, changed or removed meanwhile."""
    if path.resolve().is_relative_to(zoo.folder.resolve()):
        raise ValueError(f"{path} is inside the zoo's own folder, whose files it might replace: name one elsewhere")
    check_writable(path)
    probe = zoo.probe_path.read_bytes()
    load_probe(zoo.probe_path, zoo.settings.probe)
    models, vectors = zoo.store.again(lambda: _models(zoo.store))
    facts = json.dumps({"settings": zoo.settings.as_json(), "models": models}, ensure_ascii=False, allow_nan=False)

    def write(temporary: Path) -> None:
        with Progress("exporting", sum(int(each.count.sum()) for each in vectors), "rows") as bar:
            parts = [_rows_part(each, bar) for each in vectors]  # before the bytes, so that they are aligned
            for name, content in (("facts", facts.encode()), ("probe", probe)):
                parts.append(Part(name, "U8", (len(content),), len(content), [content]))
            assemble(temporary, parts, {"format": f"sosie-{KIND}", "version": str(VERSION)})

    with errors_in_words(path):
        return write_atomically(path, write)


def _models(store: Store) -> tuple[list[dict[str, Any]], list[Vectors]]:
    """The models of one moment, each with the places of its vectors in the file to be, and these vectors."""
    columns = "id, name, digest, architecture, parameters, added, task, source, parent, about"
    with store.reading():
        rows = store.select(f"SELECT {columns}, {TAGS} FROM models WHERE removed IS NULL ORDER BY id")
        models = {row["id"]: row | {"places": {}} for row in rows}
        vectors = [some for kind in store.files() if len((some := store.read_vectors(kind)).models)]
        for each in vectors:
            starts = (np.cumsum(each.count) - each.count).tolist()
            facts = store.describe(each.models.tolist(), each.kind)
            for model, start in zip(each.models.tolist(), starts, strict=True):
                models[model]["places"][each.kind] = {"first": start, "labels": facts[model]["labels"]}
    return [{name: model[name] for name in model if name != "id"} for model in models.values()], vectors


def _rows_part(vectors: Vectors, bar: Progress) -> Part:
    rows, width = int(vectors.count.sum()), vectors.rows.shape[1]

    def pieces() -> Iterator[memoryview]:
        for _, _, some in blocks(vectors):
            yield as_bytes(some)
            bar.advance(len(some))

    return Part(f"vectors.{vectors.kind}", "F32", (rows, width), rows * width * ITEM, pieces())


def import_(cls: type[Zoo], path: Path, folder: Path) -> Zoo:
    """A new folder with the models of a file; nothing is there until all of it was found to be sound."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if (folder / "zoo.sqlite").exists():
        raise FileExistsError(f"{folder} is a zoo already: import into a new folder")
    try:
        with safe_open(path, framework="np") as opened, new_folder(folder) as temporary:
            check_tensors(path, opened.metadata() or {}, KIND, VERSION, "exported zoo")
            _read(opened, temporary)
    except DamagedFile as error:
        if str(path) in str(error):
            raise
        raise DamagedFile(f"{path}: {error}") from error
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFile(f"{path} is no exported zoo, or is damaged: {type(error).__name__}: {error}") from error
    return cls(folder)


def _read(opened: Any, folder: Path) -> None:
    found = json.loads(_bytes(opened, "facts"))
    check_schema("its list of models", found, SCHEMA)
    settings = Settings.from_json(found["settings"])
    (folder / "probe.safetensors").write_bytes(_bytes(opened, "probe"))
    if load_probe(folder / "probe.safetensors", settings.probe).n != settings.n:
        raise DamagedFile(f"the probe set has not the {settings.n} inputs that the settings say")
    names = sorted({*opened.keys()} - {"facts", "probe"})
    vectors = {name.removeprefix("vectors."): opened.get_slice(name) for name in names}
    for kind, part in vectors.items():
        check_key(kind)
        if part.get_dtype() != "F32" or len(part.get_shape()) != 2:
            raise DamagedFile(f"vectors of kind {kind!r} are {part.get_dtype()} {part.get_shape()}, not float32 rows")
    store = Store.create(folder, settings.as_json(), wait=10.0)
    try:
        starts = range(0, len(found["models"]), GROUP)
        for start in track(starts, "importing", len(starts), f"times {GROUP} models"):
            some = found["models"][start : start + GROUP]
            records = [_record(model, settings, vectors) for model in some]
            if not all(store.append(records)):
                raise DamagedFile("a model of one name more than once")
    finally:
        store.close()


def _record(model: dict[str, Any], settings: Settings, vectors: dict[str, Any]) -> Record:
    """Checked as a fingerprint that somebody sent."""
    arrays, labels = {}, {}
    for kind, place in model["places"].items():
        first, names = place["first"], place["labels"]
        rows, _ = vectors[kind].get_shape()
        if not 0 <= first <= first + len(names) <= rows:
            raise DamagedFile(f"{model['name']!r} has its vectors outside of the {rows} rows of {kind}")
        arrays[EXACT if kind == EXACT else f"vectors.{kind}"] = vectors[kind][first : first + len(names)]
        if kind != EXACT:
            labels[kind] = names
    facts = {**settings.as_json(), "labels": labels, **model["about"]}
    own = Facts(tuple(model["tags"]), model["task"], model["source"], model["parent"])
    when = datetime.fromisoformat(model["added"]).isoformat(timespec="seconds")
    record = settings.record(model["name"], from_parts(facts, arrays), own, when)
    if (record.digest, record.architecture) != (model["digest"], model["architecture"]):
        raise DamagedFile(f"{model['name']!r} says two things about its weights or architecture")
    return record


def _bytes(opened: Any, name: str) -> bytes:
    part = opened.get_slice(name)
    if part.get_dtype() != "U8" or len(part.get_shape()) != 1 or part.get_shape()[0] > MOST_TEXT:
        raise DamagedFile(f"{name!r} is {part.get_dtype()} {part.get_shape()}, not so many bytes")
    return bytes(opened.get_tensor(name))
