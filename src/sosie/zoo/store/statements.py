"""What is said to the database when models come, change and go; inside a transaction that somebody else holds."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from .record import Block, Facts, Record
from .vectors import checksum, file_name


def insert(connection: sqlite3.Connection, record: Record, places: Mapping[tuple[str, str], int], added: str) -> None:
    """A model whose rows are written: `places` has the first of each kind, by (name, kind)."""
    facts = record.facts
    row = (record.name, record.digest, record.architecture, record.parameters, facts.task, facts.source, facts.parent)
    about = json.dumps(record.about, ensure_ascii=False, allow_nan=False)
    model = connection.execute(
        "INSERT INTO models (name, digest, architecture, parameters, task, source, parent, added, about) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*row, added, about),
    ).lastrowid
    assert model is not None
    for kind, block in record.blocks.items():
        _insert_block(connection, model, kind, block, places[record.name, kind])
    connection.executemany("INSERT INTO tags VALUES (?, ?)", [(model, tag) for tag in facts.tags])
    connection.execute("DELETE FROM failed WHERE name = ?", (record.name,))


def _insert_block(connection: sqlite3.Connection, model: int, kind: str, block: Block, first: int) -> None:
    width = block.vectors.shape[1]
    connection.execute(
        "INSERT OR IGNORE INTO files (kind, width, name) VALUES (?, ?, ?)", (kind, width, file_name(kind, width))
    )
    file = connection.execute("SELECT id FROM files WHERE kind = ? AND width = ?", (kind, width)).fetchone()["id"]
    labels = json.dumps(block.labels, ensure_ascii=False)
    connection.execute(
        "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?)",
        (model, file, first, len(block.labels), checksum(block.vectors), labels),
    )


def update(connection: sqlite3.Connection, model: int, facts: Facts, drop: Sequence[str] = ()) -> None:
    """Tags are added and dropped; of the other facts those that are given are taken."""
    connection.executemany("DELETE FROM tags WHERE model = ? AND tag = ?", [(model, tag) for tag in drop])
    connection.executemany("INSERT OR IGNORE INTO tags VALUES (?, ?)", [(model, tag) for tag in facts.tags])
    for column in ("task", "source", "parent"):
        if (value := getattr(facts, column)) is not None:
            connection.execute(f"UPDATE models SET {column} = ? WHERE id = ?", (value, model))


def remove(connection: sqlite3.Connection, model: int, why: str) -> None:
    """Its blocks stay: a reader may have them mapped."""
    connection.execute("UPDATE models SET removed = ? WHERE id = ?", (f"{now()} {why}", model))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
