"""Bytes that are lost, disks that are full, databases that are locked: told in words, and the rest is kept."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_prints import INPUTS, SIZE, made, new_zoo, same

from sosie.files import DamagedFile
from sosie.zoo import DiskFull, Probe, Zoo, ZooBusy
from sosie.zoo.vectors import checksum


@pytest.mark.parametrize("file", ["exact.f32", "vectors/cka-16.f32", "vectors/weights-16.f32"])
def test_a_file_that_was_cut_off(file: str, tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 6)  # odd ones have weights too
    path = tmp_path / "zoo" / file
    os.truncate(path, path.stat().st_size - 5)
    lost = "m5"
    report = zoo.check()
    assert not report.ok
    assert report.lost == [lost]
    assert f"{lost!r}: {file} was cut off" in report.problems[0]["text"]
    with pytest.raises(DamagedFile, match="repair=True"):
        zoo.add(made(7), "more")
    with pytest.raises(DamagedFile, match=r"cut off.*repair=True"):
        zoo[lost].fingerprint  # noqa: B018
    assert same(zoo["m4"].fingerprint, made(4))
    repaired = zoo.check(repair=True)
    assert repaired.dropped == (lost,)
    assert f"dropped {lost}" in repaired.sentence()
    assert list(zoo) == ["m0", "m1", "m2", "m3", "m4"]
    assert zoo.check().problems == ()
    zoo.add({lost: made(5), "more": made(7)})
    assert [same(zoo[name].fingerprint, made(seed)) for name, seed in ((lost, 5), ("more", 7), ("m3", 3))] == [True] * 3
    assert zoo.check().problems == ()


def test_a_map_never_goes_past_the_end_of_a_file(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 3)
    os.truncate(tmp_path / "zoo" / "vectors" / "cka-16.f32", 100)
    with pytest.raises(DamagedFile, match="100 bytes"):
        zoo.store.vectors("cka")


def test_bytes_that_were_changed(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 3)
    with (tmp_path / "zoo" / "vectors" / "cka-16.f32").open("r+b") as file:
        file.seek(3 * SIZE * 4 + 8)  # a number of m1
        file.write(b"\x01")
    with pytest.raises(DamagedFile, match="'m1': it was changed"):
        zoo["m1"].fingerprint  # noqa: B018
    with pytest.raises(DamagedFile, match="has other bytes than were written"):
        zoo.compact()
    assert zoo.check().lost == ["m1"]
    assert zoo.check(repair=True).dropped == ("m1",)
    assert list(zoo) == ["m0", "m2"]
    zoo.compact()
    assert zoo.check().problems == ()


def test_a_place_that_was_changed(tmp_path: Path) -> None:
    new_zoo(tmp_path, 3).store.close()
    with sqlite3.connect(tmp_path / "zoo" / "zoo.sqlite") as database:
        database.execute("UPDATE blocks SET first = -122 WHERE model = 2")
    with pytest.raises(DamagedFile, match="model number 2"):
        Zoo(tmp_path / "zoo").search(made(1), k=2)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 2)
    (tmp_path / "zoo" / "exact.f32").unlink()
    with pytest.raises(DamagedFile, match="gone"):
        zoo["m0"].fingerprint  # noqa: B018
    assert zoo.check(repair=True).dropped == ("m0", "m1")
    zoo.add(made(0), "m0")
    assert same(zoo["m0"].fingerprint, made(0))


def test_the_probe_set_is_checked(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 1)
    path = tmp_path / "zoo" / "probe.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\x42")
    report = zoo.check()
    assert [p["what"] for p in report.problems] == ["probe"]
    assert "checksum" in report.problems[0]["text"]
    Probe.of(INPUTS + 1).save(path)  # whole, but another
    assert zoo.settings.probe in zoo.check().problems[0]["text"]
    path.unlink()
    assert "gone" in zoo.check().problems[0]["text"]
    with pytest.raises(FileNotFoundError, match=r"probe set is gone.*puts it back"):
        zoo.add("small_cnn", "a")
    assert "puts it back" in zoo.add({"a": "small_cnn"}).failed["a"]


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_lost_probe_set_is_put_back_by_those_who_have_it(damage: str, tmp_path: Path) -> None:
    new_zoo(tmp_path, 1)
    path = tmp_path / "zoo" / "probe.safetensors"
    whole = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(whole[:-1] + b"\x42")
    report = Zoo(tmp_path / "zoo").check(repair=True)
    assert report.sentence() == "1 model, 1 problem; 1 cannot be repaired"
    assert len(report.left) == 1
    with pytest.raises(ValueError, match="another probe set"):
        Zoo(tmp_path / "zoo", INPUTS + 1)
    report = Zoo(tmp_path / "zoo", INPUTS).check(repair=True)
    assert report.sentence() == "1 model, 1 problem; repaired"
    assert not report.left
    assert bool((Zoo(tmp_path / "zoo").probe.batch == INPUTS).all())
    assert Zoo(tmp_path / "zoo").check().ok


def test_a_database_that_names_files_elsewhere(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 1)
    (tmp_path / "secret.f32").write_bytes(b"\0" * 4096)
    with sqlite3.connect(tmp_path / "zoo" / "zoo.sqlite") as connection:
        connection.execute("UPDATE files SET name = '../secret.f32' WHERE kind = 'cka'")
    with pytest.raises(DamagedFile, match="which no zoo has"):
        zoo.store.vectors("cka")
    with pytest.raises(DamagedFile, match="which no zoo has"):
        zoo["m0"].fingerprint  # noqa: B018


def test_a_locked_database(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 2, wait=0.1)
    other = sqlite3.connect(tmp_path / "zoo" / "zoo.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    size = (tmp_path / "zoo" / "exact.f32").stat().st_size
    with pytest.raises(ZooBusy, match="by another process"):
        zoo.add(made(5), "late")
    assert same(zoo["m1"].fingerprint, made(1))  # reading goes on
    assert (tmp_path / "zoo" / "exact.f32").stat().st_size == size
    other.execute("ROLLBACK")
    zoo.add(made(5), "late")
    assert zoo.check().problems == ()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = new_zoo(tmp_path, 2)
    size = (tmp_path / "zoo" / "exact.f32").stat().st_size
    real = os.write

    def no_room(handle: int, *content: Any) -> int:
        if content:
            real(handle, content[0][:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, call, no_room)
        with pytest.raises(DiskFull, match=r"no room left on the disk.*the zoo is as it was") as told:
            zoo.add(made(5), "late")
        assert told.value.errno == errno.ENOSPC
        with pytest.raises(DiskFull):
            zoo.compact()
        with pytest.raises(DiskFull) as several:
            zoo.add({"x": made(5), "y": made(6)})
        assert "in the zoo: 0" in several.value.__notes__[0]
    assert (tmp_path / "zoo" / "exact.f32").stat().st_size == size
    assert zoo.check().problems == ()
    zoo.add(made(5), "late")
    assert [same(zoo[name].fingerprint, made(seed)) for name, seed in (("m0", 0), ("m1", 1), ("late", 5))] == [True] * 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Half a megabyte, where the system lets us have it."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 100_000)
    zoo = Zoo(small_disk / "zoo", INPUTS, size=SIZE)

    def fill() -> None:
        for k in range(10_000):
            zoo.add(made(k), f"m{k}")

    with pytest.raises(DiskFull, match="no room"):
        fill()
    done = len(zoo)
    assert done > 3
    again = Zoo(small_disk / "zoo")
    assert list(again) == [f"m{k}" for k in range(done)]
    assert again.check().ok
    assert same(again[f"m{done - 1}"].fingerprint, made(done - 1))
    with pytest.raises(DiskFull, match="no room"):
        again.export(small_disk / "z.sosiezoo")
    ballast.unlink()
    again.add(made(done), f"m{done}")
    assert len(again) == done + 1
    assert again.check().problems == ()


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    bad = made(0)
    bad.vectors["cka"][0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        zoo.add(bad, "a")
    assert len(zoo) == 0


CHANGED = {
    "UPDATE blocks SET labels = '[\"a' WHERE model = 2": "which is not JSON",
    "UPDATE blocks SET labels = CAST(x'5bff5d' AS TEXT) WHERE model = 2": "damaged",
    "UPDATE models SET about = '{' WHERE id = 2": "which is not JSON",
}


def test_facts_of_a_model_under_another_name_are_damage(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 3)
    with sqlite3.connect(zoo.folder / "zoo.sqlite") as other:
        other.execute("UPDATE models SET about = replace(about, 'absent', 'absemt') WHERE id = 2")
    with pytest.raises(DamagedFile, match=r"zoo\.sqlite is damaged: KeyError: 'absent'"):
        zoo["m1"].fingerprint  # noqa: B018


@pytest.mark.parametrize("change", CHANGED)
def test_a_database_with_other_bytes_than_were_written(tmp_path: Path, change: str) -> None:
    """SQLite has no checksums: what it hands out may not be text, or not JSON."""
    zoo = new_zoo(tmp_path, 3)
    with sqlite3.connect(zoo.folder / "zoo.sqlite") as other:
        other.execute(change)
    with pytest.raises(DamagedFile, match=CHANGED[change]):
        zoo["m1"].fingerprint  # noqa: B018
    assert zoo.check().lost == ["m1"]
    assert zoo.check(repair=True).dropped == ("m1",)
    assert zoo.search("m0").names == ["m2"]


def test_a_foreign_table_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "zoo").mkdir()
    with sqlite3.connect(tmp_path / "zoo" / "zoo.sqlite") as other:
        other.executescript("CREATE TABLE about (other TEXT); INSERT INTO about VALUES ('x')")
    with pytest.raises(DamagedFile, match="damaged"):
        Zoo(tmp_path / "zoo")


@pytest.mark.parametrize("file", ["vectors/cka-16.f32", "exact.f32"])
def test_a_question_about_changed_vectors_is_refused(file: str, tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 8)
    path = zoo.folder / file
    whole = bytearray(path.read_bytes())
    width = len(whole) // 24
    whole[5 * 3 * width + 3] ^= 0x7F  # the exponent of the first number of m5
    path.unlink()
    path.write_bytes(whole)
    fresh = Zoo(zoo.folder)
    questions = {
        "search": lambda: fresh.search(made(5), k=8),
        "layers": lambda: fresh.search(made(5), k=24, by="layer"),
        "duplicates": lambda: fresh.duplicates(threshold=0.5),
        "family": lambda: fresh.family(made(5)),
    }
    for ask in questions.values():
        with pytest.raises(DamagedFile, match=f"{file} has other bytes than were written for .*check"):
            ask()


def test_vectors_are_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = new_zoo(tmp_path, 6)
    looked: list[int] = []
    monkeypatch.setattr("sosie.zoo.vectors.checksum", lambda rows: looked.append(len(rows)) or checksum(rows))
    zoo.search(made(5), k=6)
    assert len(looked) == 6 + 6  # the short vectors of all, and the whole ones
    zoo.search(made(4), k=6)
    assert len(looked) == 6 + 6
    zoo.add(made(9), "m9")
    looked.clear()
    zoo.search(made(4), k=7)
    assert len(looked) == 2  # those that came since


def test_a_search_refuses_a_database_whose_indices_disagree(tmp_path: Path) -> None:
    new_zoo(tmp_path, 3)
    path = tmp_path / "zoo" / "zoo.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (size,) = database.execute("PRAGMA page_size").fetchone()
        (page,) = database.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'block_places'").fetchone()
    database.close()
    assert Zoo(tmp_path / "zoo").search("m1")
    with path.open("r+b") as file:
        file.seek(page * size - 1)  # the end of the first entry
        (last,) = file.read(1)
        file.seek(page * size - 1)
        file.write(bytes([last ^ 1]))
    zoo = Zoo(tmp_path / "zoo")
    with pytest.raises(DamagedFile, match=r"zoo\.sqlite is damaged \(.*block_places"):
        zoo.search("m1")
    assert not zoo.check().ok
