"""Upkeep of a zoo: check and repair it, compact it, export it as one file, and import such a file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import DamagedFile, Part, assemble, check_schema, check_tensors, check_writable, reading, write_atomically
from ..progress import Progress, track
from ..results import counted
from .fingerprints import Probe, Settings, from_parts
from .search import blocks
from .store import END, TAGS, Facts, Record, Store, errors_in_words, new_folder, remove
from .vectors import (
    EXACT,
    ITEM,
    Vectors,
    as_bytes,
    checksum,
    file_name,
    generation_of,
    path_of,
    read_rows,
    write_rows,
)

if TYPE_CHECKING:
    from .zoo import Zoo

# Check and repair: is everything there that the database names?


@dataclass(frozen=True)
class Report:
    """The problems that `check` found, if any, and what `repair` did about them."""

    models: int
    problems: tuple[dict[str, Any], ...]  # what, model, file, text, harmless, mended
    repaired: bool = False
    dropped: tuple[str, ...] = ()  # models that lost bytes and were removed

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong but what a killed writer left, which the next add overwrites."""
        return all(problem["harmless"] for problem in self.problems)

    @property
    def left(self) -> list[str]:
        """The problems that remain: all of them, or after a repair those that no repair can mend."""
        return [p["text"] for p in self.problems if not p["harmless"] and not p["mended"]]

    @property
    def lost(self) -> list[str]:
        """The models that lost bytes."""
        return list(dict.fromkeys(p["model"] for p in self.problems if p["what"] == "lost"))

    def rows(self) -> list[dict[str, Any]]:
        return [dict(problem) for problem in self.problems]

    def sentence(self) -> str:
        serious = sum(not problem["harmless"] for problem in self.problems)
        text = f"{counted(self.models, 'model')}, {counted(serious, 'problem') if serious else 'whole'}"
        if left := len(self.problems) - serious:
            text += f"; {counted(left, 'harmless leftover')} of an interrupted write"
        if self.repaired and self.problems:
            text += f"; {len(self.left):,} cannot be repaired" if self.left else "; repaired"
        return text + (f", dropped {', '.join(self.dropped)}" if self.dropped else "")

    def __repr__(self) -> str:
        return f"<Report: {self.sentence()}>"


def check(zoo: Zoo, repair: bool, data: Probe | None) -> Report:
    """See `Zoo.check`; `data` restores a lost probe set."""
    if not repair:
        return Report(len(zoo), tuple(find_problems(zoo)))
    with zoo.store.writing():
        problems = find_problems(zoo)
        _drop_lost_models(zoo.store, problems)
        for path, size, _ in _sizes(zoo.store):
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
        for problem in problems:
            what = problem["what"]
            if what == "leftover":
                path_of(zoo.folder, problem["file"]).unlink(missing_ok=True)
            if what == "probe" and data is not None:
                data.save(zoo.probe_path)
            problem["mended"] = what != "database" and (what != "probe" or data is not None)
        dropped = dict.fromkeys(problem["model"] for problem in problems if problem["model"] is not None)
        return Report(len(zoo), tuple(problems), True, tuple(dropped))


def find_problems(zoo: Zoo) -> list[dict[str, Any]]:
    """Return the rows of `Report`.

    `what` is "lost" (a model that lost bytes), "database" or "probe"; or "tail" or "leftover", which are harmless: the
    next writer overwrites them.
    """
    while True:
        files = zoo.store.files()
        problems = [*_damage(zoo.store), *_lost_blocks(zoo.store), *_leftovers(zoo.store)]
        if zoo.store.files() == files:  # else the zoo was compacted meanwhile
            break
    try:
        Probe.load(zoo.probe_path, zoo.settings.probe)
    except (DamagedFile, OSError) as error:
        problems.append(_problem("probe", str(error), file=zoo.probe_path.name))
    return problems


def _problem(what: str, text: str, **more: Any) -> dict[str, Any]:
    known = {"what": what, "text": text, "model": None, "model_id": None, "file": None, "harmless": False}
    return known | {"mended": False} | more


def _drop_lost_models(store: Store, problems: list[dict[str, Any]]) -> None:
    """Remove models that lost bytes, and delete blocks past the end of their file.

    No reader can have mapped these blocks, and the next add will write where they were.
    """
    with store.reading() as connection:
        for model in {problem["model_id"] for problem in problems if problem["what"] == "lost"}:
            remove(connection, model, "lost bytes")
        for file in connection.execute("SELECT id, width, name FROM files").fetchall():
            path = path_of(store.folder, file["name"])
            whole = (path.stat().st_size if path.exists() else 0) // (file["width"] * ITEM)
            connection.execute("DELETE FROM blocks WHERE file = ? AND first + rows > ?", (file["id"], whole))


def _damage(store: Store) -> Iterator[dict[str, Any]]:
    """Yield what SQLite finds wrong with its own file."""
    with errors_in_words(store.path), store.reading() as connection:
        for row in connection.execute("PRAGMA integrity_check(20)").fetchall():
            if row[0] != "ok":
                yield _problem("database", f"{store.path}: {row[0]}")
        for row in connection.execute("PRAGMA foreign_key_check").fetchall():
            yield _problem("database", f"{store.path}: a row of {row[0]} belongs to nothing")


def _lost_blocks(store: Store) -> Iterator[dict[str, Any]]:
    """Yield the blocks that are not whole, overlap others, or have other bytes than were written."""
    with store.reading() as connection:
        rows = connection.execute(
            "SELECT models.name AS model, models.id AS id, files.id AS file, files.name AS name, width, first, rows, "
            "checksum, removed, CASE WHEN json_valid(labels) AND json_valid(about) "
            "THEN json_array_length(labels) = rows ELSE 0 END AS readable "
            "FROM blocks JOIN models ON models.id = model JOIN files ON files.id = file "
            "ORDER BY files.id, first"
        ).fetchall()
    end: dict[int, int] = {}
    for row in track(rows, "checking the vectors", len(rows), "blocks"):
        overlaps = row["first"] < end.get(row["file"], 0)
        end[row["file"]] = row["first"] + row["rows"]
        if row["removed"] is None and (why := _wrong(store, row, overlaps)):
            text = f"{row['model']!r}: {row['name']} {why}"
            yield _problem("lost", text, model=row["model"], model_id=row["id"], file=row["name"])


def _wrong(store: Store, row: Any, overlaps: bool) -> str:
    path = path_of(store.folder, row["name"])
    wanted = (row["first"] + row["rows"]) * row["width"] * ITEM
    if not row["readable"]:
        return "has rows whose sites, or what is known of the model, cannot be read"
    if overlaps:
        return f"has rows of another model among its own (from row {row['first']} on)"
    try:
        if (size := path.stat().st_size) < wanted:
            return f"was cut off at byte {size:,}, its rows go up to byte {wanted:,}"
        rows = read_rows(path, row["first"], row["rows"], row["width"])
    except FileNotFoundError:
        return "is gone"
    except (DamagedFile, OSError) as error:
        return f"cannot be read: {error}"
    return "" if checksum(rows) == row["checksum"] else f"was changed from row {row['first']} on"


def _leftovers(store: Store) -> Iterator[dict[str, Any]]:
    """Yield what a killed writer left."""
    for path, size, name in _sizes(store):
        with contextlib.suppress(FileNotFoundError):  # `_lost_blocks` reports it
            if (extra := path.stat().st_size - size) > 0:
                text = f"{name} has {extra:,} bytes at its end that belong to no model: the next add overwrites them"
                yield _problem("tail", text, file=name, harmless=True)
    for name in _unnamed_files(store):
        yield _problem("leftover", f"{name} belongs to nothing: the next compact removes it", file=name, harmless=True)


def _sizes(store: Store) -> list[tuple[Path, int, str]]:
    """Return each file of vectors with the bytes that the database knows, and its name there."""
    rows = store.select(f"SELECT name, width, {END} FROM files")
    return [(path_of(store.folder, row["name"]), row["end"] * row["width"] * ITEM, row["name"]) for row in rows]


def _unnamed_files(store: Store) -> list[str]:
    """Return the files that the database does not name: what a killed `compact` left."""
    present = [*store.folder.glob("exact*.f32"), *(store.folder / "vectors").glob("*.f32")]
    return sorted({path.relative_to(store.folder).as_posix() for path in present} - {*store.files().values()})


# The space of removed models


def compact(store: Store) -> int:
    """Free the space of removed models; return the number of bytes. Readers keep what they have mapped.

    New files without those rows are written beside the old ones; the transaction switches to them at its end.
    """
    made: list[Path] = []
    old: list[Path] = []
    with store.writing() as connection:
        for name in _unnamed_files(store):  # of a `compact` that was killed
            path_of(store.folder, name).unlink(missing_ok=True)
        try:
            for file in connection.execute("SELECT id, kind, width, name FROM files").fetchall():
                name = file_name(file["kind"], file["width"], generation_of(file["name"]) + 1)
                old.append(path_of(store.folder, file["name"]))
                made.append(path_of(store.folder, name))
                vectors = store.read_vectors(file["kind"])
                write_rows(made[-1], 0, (rows for _, _, rows in blocks(vectors)))
                places = zip(vectors.starts().tolist(), repeat(file["id"]), vectors.models.tolist(), strict=False)
                # Places are unique: move the old ones out of the way before setting the new ones.
                connection.execute("UPDATE blocks SET first = -1 - first WHERE file = ?", (file["id"],))
                connection.executemany("UPDATE blocks SET first = ? WHERE file = ? AND model = ?", places)
                connection.execute("UPDATE files SET name = ? WHERE id = ?", (name, file["id"]))
            for table in ("blocks", "tags"):
                removed = "(SELECT id FROM models WHERE removed IS NOT NULL)"
                connection.execute(f"DELETE FROM {table} WHERE model IN {removed}")
            connection.execute("DELETE FROM models WHERE removed IS NOT NULL")
        except BaseException:
            for path in made:
                path.unlink(missing_ok=True)
            raise
    before = sum(path.stat().st_size for path in old if path.exists())
    for path in old:
        with contextlib.suppress(OSError):
            path.unlink()
    return before - sum(path.stat().st_size for path in made if path.exists())


# A zoo as one file: safetensors with the vectors of each kind, the probe set, and the facts as JSON
#
# Written and read one model at a time. A file from others is checked before it is used.

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
    """Write the zoo as it is at one moment, whatever changes meanwhile; the file is written whole or not at all."""
    if path.resolve().is_relative_to(zoo.folder.resolve()):
        raise ValueError(f"{path} is inside the zoo's own folder, whose files it might replace: name one elsewhere")
    check_writable(path)
    probe = zoo.probe_path.read_bytes()
    Probe.load(zoo.probe_path, zoo.settings.probe)
    models, vectors = zoo.store.again(lambda: _models(zoo.store))
    facts = json.dumps({"settings": zoo.settings.as_json(), "models": models}, ensure_ascii=False, allow_nan=False)

    def write(temporary: Path) -> None:
        with Progress("exporting", sum(int(each.count.sum()) for each in vectors), "rows") as bar:
            parts = [_rows_part(each, bar) for each in vectors]  # first, so that they are aligned
            for name, content in (("facts", facts.encode()), ("probe", probe)):
                parts.append(Part(name, "U8", (len(content),), len(content), [content]))
            assemble(temporary, parts, {"format": f"sosie-{KIND}", "version": str(VERSION)})

    with errors_in_words(path):
        return write_atomically(path, write)


def _models(store: Store) -> tuple[list[dict[str, Any]], list[Vectors]]:
    """Return the models of one moment, with the places of their vectors in the new file, and these vectors."""
    columns = "id, name, digest, architecture, parameters, added, task, source, parent, about"
    with store.reading():
        rows = store.select(f"SELECT {columns}, {TAGS} FROM models WHERE removed IS NULL ORDER BY id")
        models = {row["id"]: row | {"places": {}} for row in rows}
        vectors = [found for kind in store.files() if len((found := store.read_vectors(kind)).models)]
        for each in vectors:
            facts = store.describe(each.models.tolist(), each.kind)
            for model, start in zip(each.models.tolist(), each.starts().tolist(), strict=True):
                models[model]["places"][each.kind] = {"first": start, "labels": facts[model]["labels"]}
    return [{name: model[name] for name in model if name != "id"} for model in models.values()], vectors


def _rows_part(vectors: Vectors, bar: Progress) -> Part:
    shape = int(vectors.count.sum()), vectors.rows.shape[1]

    def pieces() -> Iterator[memoryview]:
        for _, _, rows in blocks(vectors):
            yield as_bytes(rows)
            bar.advance(len(rows))

    return Part(f"vectors.{vectors.kind}", "F32", shape, shape[0] * shape[1] * ITEM, pieces())


def import_(cls: type[Zoo], path: Path, folder: Path) -> Zoo:
    """Make a zoo from an exported file; the folder appears only if the whole file is sound."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if (folder / "zoo.sqlite").exists():
        raise FileExistsError(f"{folder} is a zoo already: import into a new folder")
    try:
        with reading(path), safe_open(path, framework="np") as opened, new_folder(folder) as temporary:
            check_tensors(path, opened.metadata() or {}, KIND, VERSION, "exported zoo")
            _read(opened, temporary)
    except SafetensorError as error:
        raise DamagedFile(f"{path} is not an exported zoo, or is damaged: {error}") from error
    return cls(folder)


def _read(opened: Any, folder: Path) -> None:
    facts = json.loads(_bytes(opened, "facts"))
    check_schema("its list of models", facts, SCHEMA)
    settings = Settings.from_json(facts["settings"])
    (folder / "probe.safetensors").write_bytes(_bytes(opened, "probe"))
    if Probe.load(folder / "probe.safetensors", settings.probe).n != settings.n:
        raise DamagedFile(f"the probe set does not have {settings.n} inputs, as the settings say")
    names = sorted({*opened.keys()} - {"facts", "probe"})
    vectors = {name.removeprefix("vectors."): opened.get_slice(name) for name in names}
    store = Store.create(folder, settings.as_json(), wait=10.0)
    try:
        starts = range(0, len(facts["models"]), GROUP)
        for start in track(starts, "importing", len(starts), f"times {GROUP} models"):
            records = [_record(model, settings, vectors) for model in facts["models"][start : start + GROUP]]
            if any(is_new is not True for is_new in store.append(records)):
                raise DamagedFile("the name of a model more than once")
    finally:
        store.close()


def _record(model: dict[str, Any], settings: Settings, vectors: dict[str, Any]) -> Record:
    """Return the record of a model of the file, checked like a fingerprint from others."""
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
    user_facts = Facts(tuple(model["tags"]), model["task"], model["source"], model["parent"])
    added = datetime.fromisoformat(model["added"]).isoformat(timespec="seconds")
    record = settings.record(model["name"], from_parts(facts, arrays), user_facts, added)
    if (record.digest, record.architecture) != (model["digest"], model["architecture"]):
        raise DamagedFile(f"{model['name']!r} has two digests of weights or two architectures")
    return record


def _bytes(opened: Any, name: str) -> bytes:
    part = opened.get_slice(name)
    if part.get_dtype() != "U8" or len(part.get_shape()) != 1 or part.get_shape()[0] > MOST_TEXT:
        raise DamagedFile(f"{name!r} is {part.get_dtype()} {part.get_shape()}, not bytes, or too many")
    return bytes(opened.get_tensor(name))
