"""What others do to a zoo: folders that are swapped, fingerprints that say strange things, disks that refuse."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_prints import made, new_zoo, same

from sosie.zoo import Fingerprint, Zoo, upkeep
from sosie.zoo.store import ZooGone


def test_a_folder_that_was_replaced_is_not_written_to(tmp_path: Path) -> None:
    """Rows of the old zoo would go into the files of the new one."""
    old = new_zoo(tmp_path, 2)
    shutil.move(old.folder, tmp_path / "elsewhere")
    new = new_zoo(tmp_path, 6)
    with pytest.raises(ZooGone, match="replaced by another zoo"):
        old.add(made(50), "late")
    with pytest.raises(ZooGone, match="replaced by another zoo"):
        len(old)
    assert new.check().ok
    assert len(new) == 6


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 2)
    shutil.rmtree(zoo.folder)
    for ask in (lambda: len(zoo), lambda: zoo.search("m0"), lambda: zoo.add(made(9), "late"), zoo.compact):
        with pytest.raises(ZooGone, match="moved or deleted"):
            ask()


def said(seed: int, **about: Any) -> Fingerprint:
    found = made(seed)
    return replace(found, about=found.about | about)


STRANGE = {
    "half a character in a site": replace(made(10), labels={"cka": ("\ud800", "b", "c")}),
    "half a character in a note": said(12, notes=["\udfff"]),
    "half a character in a reason": replace(made(14), absent={"weights": "\ud800"}),
    "more parameters than SQL counts": said(16, parameters=2**70),
    "infinitely many parameters": said(18, parameters=float("inf")),
    "parameters in words": said(20, parameters="many"),
    "a number that JSON has not": said(22, loss=float("nan")),
    "a thing that JSON has not": said(24, loss=object()),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_fingerprint_that_cannot_be_kept_is_recorded_and_the_rest_goes_on(tmp_path: Path, what: str) -> None:
    zoo = new_zoo(tmp_path, 1)
    found = zoo.add({"strange": STRANGE[what], "good": made(1)})
    assert (found.added, list(found.failed)) == (("good",), ["strange"])
    assert [row["name"] for row in zoo.failed()] == ["strange"]


def test_weights_that_nobody_knows_are_not_the_same(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    zoo.add({"a": said(2, model=None), "b": said(4, model=None)})
    assert zoo["a"].digest == "unknown"
    assert zoo.store.relatives(zoo["a"].id)["same_weights"] == []
    assert len(zoo.duplicates()) == 0


def test_filters_may_come_in_any_form(tmp_path: Path) -> None:
    """A generator was empty when it was asked for the second time, and what it gave was kept for others."""
    zoo = new_zoo(tmp_path, 4)
    zoo.tag("m2", add="x")
    assert zoo.search("m0", tag=(tag for tag in ["x"])).names == ["m2"]  # type: ignore[arg-type]
    found = zoo.search("m0", tag={"x"})  # type: ignore[arg-type]
    assert found.names == ["m2"]
    assert type(found).load(found.save(tmp_path / "found.json")).asked["tag"] == ["x"]
    with pytest.raises(ValueError, match="500 at most"):
        zoo.list(tag=["x"] * 1200)


@pytest.mark.parametrize("wrong", [{"limit": -1}, {"limit": 2.5}, {"offset": -1}, {"offset": "x"}])
def test_parts_of_a_list(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole number of at least 0"):
        new_zoo(tmp_path, 1).list(**wrong)


def test_wrong_questions(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 3)
    with pytest.raises(ValueError, match="no site of m0; it has layer0"):
        zoo.search("m0", site=[])
    with pytest.raises(FileNotFoundError, match=r"no file missing\.safetensors"):
        zoo.search("missing.safetensors")
    with pytest.raises(ValueError, match="facts of 'typo', but no model of that name"):
        zoo.add({"new": made(9)}, facts={"typo": {"tags": ["a"]}})
    assert "new" not in zoo


def test_a_zoo_that_changes_while_it_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has the models of one moment, whatever happens to their files."""
    zoo = new_zoo(tmp_path, 4)
    write = upkeep.assemble

    def write_late(*arguments: Any) -> None:
        zoo.remove("m2")
        zoo.compact()
        zoo.add(made(9), "late")
        write(*arguments)

    monkeypatch.setattr(upkeep, "assemble", write_late)
    zoo.export(tmp_path / "all.sosiezoo")
    copy = Zoo.import_(tmp_path / "all.sosiezoo", tmp_path / "copy")
    assert list(copy) == ["m0", "m1", "m2", "m3"]
    assert all(same(copy[f"m{k}"].fingerprint, made(k)) for k in range(4))


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """As a quota: SQLite does not say that the disk is full."""
    zoo = new_zoo(tmp_path, 3)
    with files_of_at_most(60_000), pytest.raises(OSError, match="may be full, over its quota, or failing"):
        zoo.add({f"m{k}": made(k) for k in range(10, 60)})
    assert zoo.check().ok
    zoo.add(made(99), "later")
    assert Zoo(zoo.folder).check().ok


KILLED = """
import os, sys
from pathlib import Path
from made_prints import new_zoo
zoo = new_zoo(Path(sys.argv[1]), 3)
os.kill(os.getpid(), 9)
"""
READS = "import sys; from sosie.zoo import Zoo; print(list(Zoo(sys.argv[1])))"


def ran(code: str, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(
        [*before, sys.executable, "-c", code, str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_read_only_folder_is_not_shown_without_its_last_changes(tmp_path: Path) -> None:
    """What a killed writer left in the log is not in the database yet."""
    ran(KILLED, tmp_path)
    folder = tmp_path / "zoo"
    assert (folder / "zoo.sqlite-wal").stat().st_size > 0
    (folder / "zoo.sqlite-shm").unlink()
    as_nobody: tuple[str, ...] = ()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root can write everywhere, and there is no setpriv")
        as_nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path.is_relative_to(tempfile.gettempdir()):
            path.chmod(path.stat().st_mode | 0o055)
    if ran("import sosie", folder, *as_nobody).returncode:
        pytest.skip("nobody can run this Python but root")
    found = ran(READS, folder, *as_nobody)
    folder.chmod(0o755)
    assert "its last changes are still in zoo.sqlite-wal" in found.stderr, found
