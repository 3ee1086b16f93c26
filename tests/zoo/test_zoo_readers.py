"""One writer at a time, any number of readers meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_prints import INPUTS, SIZE, made, new_zoo, same

from sosie.zoo import Zoo, ZooBusy, search
from sosie.zoo import store as reading

MODELS = 12


def in_a_child(what: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            what()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def ended_well(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    prints = [made(k) for k in range(2 * MODELS)]
    zoo.store.close()

    def write(start: int) -> Callable[[], None]:
        def add() -> None:
            own = Zoo(tmp_path / "zoo", wait=60)
            for k in range(start, start + MODELS):
                own.add(prints[k], f"m{k}")
                own.add(prints[0], "shared")  # both add it: it is there once

        return add

    children = [in_a_child(write(0)), in_a_child(write(MODELS))]
    seen = 0
    while len(zoo) < 2 * MODELS + 1:
        names = list(zoo)
        assert len(names) >= seen  # nothing that was there goes away
        seen = len(names)
        for name in names[-2:]:
            if name != "shared":
                assert same(zoo[name].fingerprint, made(int(name[1:])))
        if names:
            mapped = zoo.store.vectors("cka")
            assert np.allclose(np.linalg.norm(mapped.rows[mapped.row_numbers()], axis=1), 1, atol=1e-5)
        if all(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children):
            break
    assert all(map(ended_well, children))
    assert sorted(zoo) == sorted([f"m{k}" for k in range(2 * MODELS)] + ["shared"])
    assert zoo.check().problems == ()


def test_a_second_writer_is_told_that_there_is_another(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 1, wait=0.05)
    other = Zoo(tmp_path / "zoo")
    with other.store.writing():
        with pytest.raises(ZooBusy, match=r"by another process; waited 0.05 s.*--wait"):
            zoo.add(made(3), "late")
        assert same(zoo["m0"].fingerprint, made(0))
    zoo.add(made(3), "late")  # and is not when it was let go of


def test_a_second_writer_waits(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 0, wait=60)
    done = threading.Event()

    def add() -> None:
        zoo.add(made(0), "a")
        done.set()

    thread = threading.Thread(target=add)
    with Zoo(tmp_path / "zoo").store.writing():
        thread.start()
        assert not done.wait(0.2)
    thread.join(60)
    assert done.is_set()
    assert "a" in zoo


def test_waiting_can_be_interrupted(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 0, wait=60)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Zoo(tmp_path / "zoo").store.writing():
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            start = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                zoo.add(made(0), "a")
            assert time.monotonic() - start < 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(zoo) == 0


def test_threads_share_a_zoo(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 0, wait=60)
    prints = [made(k) for k in range(8)]
    threads = [threading.Thread(target=zoo.add, args=(prints[k], f"m{k}")) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(zoo) == [f"m{k}" for k in range(8)]
    assert all(same(zoo[f"m{k}"].fingerprint, prints[k]) for k in range(8))


def test_readers_while_the_zoo_is_compacted(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 6)
    zoo.store.close()

    def churn() -> None:
        own = Zoo(tmp_path / "zoo")
        for _ in range(15):
            own.add(made(9), "scrap")
            own.remove("scrap")
            own.compact()

    child = in_a_child(churn)
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        for k in range(6):
            assert same(zoo[f"m{k}"].fingerprint, made(k))
        mapped = zoo.store.vectors("cka")
        assert np.array_equal(mapped.rows[mapped.first[2] : mapped.first[2] + 3], made(2).vectors["cka"])
    assert ended_well(child)


def test_files_that_went_away_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo, other = new_zoo(tmp_path, 3), Zoo(tmp_path / "zoo")
    other.remove("m0")
    real, times = reading.read_rows, []

    def late(*arguments: Any) -> Any:
        if not times:
            times.append(other.compact())  # after the database was asked, before the file is opened
        return real(*arguments)

    monkeypatch.setattr(reading, "read_rows", late)
    assert same(zoo["m2"].fingerprint, made(2))
    assert times[0] > 0


def test_a_check_while_the_zoo_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo, other = new_zoo(tmp_path, 3), Zoo(tmp_path / "zoo")
    real, times = Path.stat, []

    def late(path: Path, **options: Any) -> Any:
        found = real(path, **options)
        if path.name.startswith("cka") and not times:
            times.append(path)
            other.compact()
        return found

    monkeypatch.setattr(Path, "stat", late)
    assert zoo.check().ok
    assert times


def test_a_relative_that_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = new_zoo(tmp_path, 3)
    zoo.add(made(9), "base")
    zoo.add(made(11), "tuned", parent="base")
    real = search._cosines

    def late(zoo: Any, query: Any, key: str, model: int, shared: Any) -> Any:
        if "m1" in zoo:
            zoo.remove("m1", "base")
        return real(zoo, query, key, model, shared)

    monkeypatch.setattr(search, "_cosines", late)
    assert {row["name"] for row in zoo.family("tuned")} == {"m0", "m2"}


def test_what_changes_is_counted(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 1)
    before = zoo.store.changes()
    list(zoo)
    assert zoo.store.changes() == before
    Zoo(tmp_path / "zoo", INPUTS, size=SIZE).tag("m0", add="x")
    assert zoo.store.changes() == before + 1
