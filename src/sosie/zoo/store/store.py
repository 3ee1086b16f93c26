"""Writing a zoo: rows go to files that only grow, then one transaction says that they exist."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from . import statements
from .database import Database
from .errors import ZooGone
from .lock import only_writer
from .reading import Reader
from .record import Block, Facts, Record
from .vectors import append_rows, cut_tail, file_name, placed, sync_folder

FileKey = tuple[str, int]  # kind and width


class NameTaken(ValueError):
    """Another model has that name."""


class Store(Reader):
    """A folder that can be changed: every change is one transaction, made by one writer at a time."""

    @classmethod
    def create(cls, folder: Path, about: Mapping[str, Any], wait: float) -> Store:
        """In a folder that is there and empty but for the probe set."""
        (folder / "vectors").mkdir()
        Database.create(folder / "zoo.sqlite", dict(about), wait)
        sync_folder(folder)
        return cls(folder, wait)

    def writer(self) -> AbstractContextManager[None]:
        if not self.folder.is_dir():
            raise ZooGone(f"no folder {self.folder}: the zoo was moved or deleted")
        if not os.access(self.folder, os.W_OK):
            raise PermissionError(f"{self.folder} cannot be written to: it is read-only")
        return only_writer(self.folder / "zoo.lock", self.wait)

    def append(
        self, records: Sequence[Record], *, replace: bool = False, added: Sequence[str] | None = None
    ) -> list[bool]:
        """Write models; whether each is new. One that is there with the same digest only gets the facts given.

        Rows first, synced; then one transaction names them, and from then on the models exist: all of them, or none.
        """
        if len({record.name for record in records}) < len(records):
            raise ValueError("a name more than once among the models to add")
        with self.writer():
            there = [self._there(record, replace) for record in records]
            new = [record for record, (_, same) in zip(records, there, strict=True) if not same]
            files = _by_file(new)
            try:
                places = self._write_rows(files)
                with self.database.writing() as connection:
                    for k, (record, (model, same)) in enumerate(zip(records, there, strict=True)):
                        if same:
                            assert model is not None
                            statements.update(connection, model, record.facts)
                            continue
                        if model is not None:
                            statements.remove(connection, model, "replaced")
                        when = statements.now() if added is None else added[k]
                        statements.insert(connection, record, places, when)
            except Exception:
                self._cut_tails(files)
                raise
        return [not same for _, same in there]

    def _there(self, record: Record, replace: bool) -> tuple[int | None, bool]:
        """The model of that name, if there is one, and whether it is this very one."""
        with self.database.reading() as connection:
            row = connection.execute(
                "SELECT id, digest FROM models WHERE name = ? AND removed IS NULL", (record.name,)
            ).fetchone()
        if row is None:
            return None, False
        if not replace and row["digest"] != record.digest:
            raise NameTaken(
                f"{record.name!r} is in the zoo with other weights ({row['digest']}, these are {record.digest}): add "
                "it under another name, or with replace=True (--replace) in place of the old one"
            )
        return row["id"], not replace

    def _write_rows(self, files: Mapping[FileKey, list[tuple[str, Block]]]) -> dict[tuple[str, str], int]:
        """Append the rows of each file; the first row of each model, by (name, kind)."""
        places: dict[tuple[str, str], int] = {}
        for (kind, width), blocks in files.items():
            name, end = self._end(kind, width)
            append_rows(placed(self.folder, name), end, [block.vectors for _, block in blocks])
            for model, block in blocks:
                places[model, kind] = end
                end += len(block.labels)
        return places

    def _end(self, kind: str, width: int) -> tuple[str, int]:
        """The file of a kind, and how many of its rows the database names."""
        with self.database.reading() as connection:
            row = connection.execute(
                "SELECT id, name FROM files WHERE kind = ? AND width = ?", (kind, width)
            ).fetchone()
            if row is None:
                return file_name(kind, width), 0
            last = connection.execute(
                "SELECT first + rows FROM blocks WHERE file = ? ORDER BY first DESC LIMIT 1", (row["id"],)
            ).fetchone()
        return row["name"], last[0] if last else 0

    def _cut_tails(self, files: Mapping[FileKey, Any]) -> None:
        """Give the room back that a failed add took; what the database names is never touched."""
        with contextlib.suppress(Exception):
            for kind, width in files:
                name, end = self._end(kind, width)
                cut_tail(placed(self.folder, name), end, width)

    def remove(self, names: Sequence[str]) -> None:
        """Mark models as removed: all of them, or none. `compact` gives their room back. Failed ones are forgotten."""
        with self.writer(), self.database.writing() as connection:
            for name in names:
                if not connection.execute("DELETE FROM failed WHERE name = ?", (name,)).rowcount:
                    statements.remove(connection, self.id_of(connection, name), "removed")

    def change_facts(self, name: str, facts: Facts, drop: Sequence[str] = ()) -> None:
        with self.writer(), self.database.writing() as connection:
            statements.update(connection, self.id_of(connection, name), facts, drop)

    def record_failure(self, name: str, reason: str, source: str | None) -> None:
        with self.writer(), self.database.writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO failed VALUES (?, ?, ?, ?)", (name, reason, source, statements.now())
            )

    def forget_failures(self) -> None:
        with self.writer(), self.database.writing() as connection:
            connection.execute("DELETE FROM failed")


def _by_file(records: Sequence[Record]) -> dict[FileKey, list[tuple[str, Block]]]:
    found: dict[FileKey, list[tuple[str, Block]]] = {}
    for record in records:
        for kind, block in record.blocks.items():
            found.setdefault((kind, block.vectors.shape[1]), []).append((record.name, block))
    return found
