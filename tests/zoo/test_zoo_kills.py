"""Killed at any moment, a zoo has what was complete."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_prints import made, new_zoo, same

from sosie.zoo import Zoo
from sosie.zoo import store as statements

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are forked")
BENCH = Path(__file__).resolve().parents[2] / "bench" / "zoo_kills.py"


def killed(what: Callable[[], Any], arm: Callable[[], None]) -> None:
    """Run something in a child that `arm` has prepared to kill itself."""
    child = os.fork()
    if child == 0:
        try:
            arm()
            what()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_write() -> None:
    real = os.write

    def write(handle: int, content: Any) -> int:
        real(handle, content[: len(content) // 2])
        die()
        return 0

    os.write = write  # type: ignore[assignment]


def before_the_sync() -> None:
    os.fsync = die  # type: ignore[assignment]


def between_the_rows_and_the_database() -> None:
    statements.insert = die  # type: ignore[assignment]


def before_the_commit() -> None:
    real = statements.insert

    def insert(*arguments: Any) -> None:
        real(*arguments)
        die()

    statements.insert = insert


MOMENTS = [half_a_write, before_the_sync, between_the_rows_and_the_database, before_the_commit]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_model_that_was_not_complete_is_not_there(moment: Callable[[], None], tmp_path: Path) -> None:
    new_zoo(tmp_path, 3).store.close()
    killed(lambda: Zoo(tmp_path / "zoo").add(made(7), "late"), moment)
    zoo = Zoo(tmp_path / "zoo")
    assert list(zoo) == ["m0", "m1", "m2"]
    report = zoo.check()
    assert report.ok
    assert [problem["what"] for problem in report.problems if problem["what"] != "tail"] == []
    assert any(problem["what"] == "tail" for problem in report.problems)
    zoo.add(made(7), "late")  # overwrites what was left
    assert zoo.check().problems == ()
    for name, seed in (("m0", 0), ("m1", 1), ("m2", 2), ("late", 7)):
        assert same(zoo[name].fingerprint, made(seed))


def test_repair_cuts_a_tail(tmp_path: Path) -> None:
    new_zoo(tmp_path, 3).store.close()
    size = (tmp_path / "zoo" / "exact.f32").stat().st_size
    killed(lambda: Zoo(tmp_path / "zoo").add(made(7), "late"), between_the_rows_and_the_database)
    zoo = Zoo(tmp_path / "zoo")
    assert (tmp_path / "zoo" / "exact.f32").stat().st_size > size
    found = zoo.check(repair=True)
    assert found.ok
    assert found.dropped == ()
    assert (tmp_path / "zoo" / "exact.f32").stat().st_size == size
    assert zoo.check().problems == ()


def test_killed_while_it_is_compacted(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 4)
    zoo.remove("m1")
    zoo.store.close()
    killed(lambda: Zoo(tmp_path / "zoo").compact(), half_a_write)
    zoo = Zoo(tmp_path / "zoo")
    assert [p["what"] for p in zoo.check().problems] == ["leftover"]
    assert zoo.check().ok
    zoo.check(repair=True)
    assert zoo.check().problems == ()
    zoo.compact()
    assert [same(zoo[f"m{k}"].fingerprint, made(k)) for k in (0, 2, 3)] == [True] * 3


def test_twenty_kills_at_random_moments(tmp_path: Path) -> None:
    if not BENCH.exists():
        pytest.skip("bench/zoo_kills.py is not there")
    spec = importlib.util.spec_from_file_location("zoo_kills", BENCH)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    found = bench.kill_many(tmp_path / "zoo", 20, longest=0.2)
    assert {name: found[name] for name in ("lost", "wrong_bytes", "problems", "after_repair")} == {
        "lost": 0, "wrong_bytes": 0, "problems": 0, "after_repair": 0,
    }  # fmt: skip
    assert found["models"] > 0
