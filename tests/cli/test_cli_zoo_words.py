"""What `sosie zoo` says when something is amiss: in the words of the command line, with a next step."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sosie.cli.main import app

FACTORY = "from sosie.models import small_cnn\n\n\ndef net():\n    return small_cnn()\n"


def zoo(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["zoo", *map(str, arguments)], env={"COLUMNS": "100"})


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ready") / "z"
    assert zoo("init", path, "--data", "demo", "--max-rows", 16, "--size", 32).exit_code == 0
    added = zoo("add", path, "one=small_cnn(seed=0)", "two=small_cnn(seed=1)", "--tag", "small", "--task", "clothes")
    assert added.exit_code == 0
    assert zoo("tag", path, "two", "--add", "second").exit_code == 0
    gc.collect()  # closes the zoo, whose log would otherwise go away while it is copied
    return path


@pytest.fixture
def folder(ready: Path, tmp_path: Path) -> Path:
    return shutil.copytree(ready, tmp_path / "z")


def code(folder: Path) -> None:
    """A third model, whose source is Python code."""
    file = folder.parent / "own.py"
    file.write_text(FACTORY)
    assert zoo("add", folder, f"own={file}:net", "--tag", "code").exit_code == 0


def told(*arguments: object) -> str:
    found = zoo(*arguments)
    assert found.exit_code == 1
    return str(found.exception)


def test_messages_fit_the_command_line_too(folder: Path, tmp_path: Path) -> None:
    assert told("init", tmp_path / "n", "--data", "demo", "--max-rows", 100000).endswith("to 2048, got 100000")
    assert told("init", tmp_path / "n", "--data", "demo", "--kinds", "foo").endswith("got foo")
    assert "--data" in told("list", tmp_path / "none")
    assert told("recommend", folder, "--data", "demo", "--by", "foo").endswith("got 'foo'")
    assert "clusters must be a whole number from 1 to 2, got 9" in told("clusters", folder, "-k", 9)


@pytest.mark.parametrize("verb", ["search", "layers", "map", "clusters", "duplicates", "index"])
@pytest.mark.parametrize("kind", ["foo", "exact", "atoms"])
def test_a_kind_that_is_not_there_is_answered_alike(folder: Path, verb: str, kind: str) -> None:
    model = ["two"] if verb in ("search", "layers") else []
    assert (
        told(verb, folder, *model, "--kind", kind) == f"no vectors of kind {kind!r} in {folder}; there are cka, weights"
    )


@pytest.mark.parametrize("verb", ["search", "layers", "map", "clusters", "duplicates", "recommend"])
def test_a_filter_that_nothing_passes_is_a_mistake(folder: Path, verb: str) -> None:
    code(folder)
    start = {"search": [folder, "one"], "layers": [folder, "one"], "recommend": [folder, "--data", "demo"]}
    asked = [verb, *start.get(verb, [folder])]
    assert told(*asked, "--tag", "secnd") == f"{folder}: no model has the tag 'secnd'; there are second, small, code"
    assert told(*asked, "--task", "zzz") == f"{folder}: no model has the task 'zzz'; there are clothes"
    both = told(*asked, "--tag", "code", "--task", "clothes")
    assert both == f"{folder}: no model has the tag 'code' and the task 'clothes'"


def test_an_empty_list_is_an_answer_and_says_what_there_is(folder: Path) -> None:
    found = zoo("list", folder, "--tag", "nosuch")
    assert found.exit_code == 0
    assert found.stdout.splitlines() == [
        "0 of 2 models",
        "no model has the tag 'nosuch'; there are small, second",
    ]
    assert json.loads(zoo("list", folder, "--tag", "nosuch", "--json").stdout) == []


def test_reasons_stand_below_the_table(folder: Path) -> None:
    code(folder)
    found = zoo("recommend", folder, "--data", "demo", "--max-rows", 20)
    assert found.exit_code == 0
    text = " ".join(found.stdout.split())
    assert "- own: its source, " in text
    assert "or say trust=True (--trust) if the zoo's sources are yours" in text
    assert "1 could not be tried." in text
    assert " reason " not in text
    assert zoo("recommend", folder, "--data", "demo", "--max-rows", 20, "--trust").exit_code == 0


def test_to_try_none_is_a_failure(folder: Path) -> None:
    asked = ["recommend", folder, "--data", "demo", "--max-rows", 20, "--probe-layer", 99]
    found = zoo(*asked)
    assert found.exit_code == 1
    assert found.exception is None or isinstance(found.exception, SystemExit)
    assert found.stdout.startswith("No model could be tried.")
    assert "- two: ValueError: no layer 99 to probe: it has " in " ".join(found.stdout.split())
    as_json = zoo(*asked, "--json")
    assert as_json.exit_code == 1
    assert [row["name"] for row in json.loads(as_json.stdout)] == ["one", "two"]


def test_one_is_one(folder: Path, tmp_path: Path) -> None:
    assert zoo("remove", folder, "two").stdout.strip().endswith(": 1 model")
    assert zoo("list", folder).stdout.splitlines()[-1] == "1 of 1 model"
    assert zoo("duplicates", folder).stdout.startswith("None of 1 model is a duplicate.")
    assert zoo("recommend", folder, "--data", "demo", "--max-rows", 20).stdout.startswith("Of 1 model one comes first")
    assert zoo("search", folder, "one").stdout.startswith("No models near one among 0 other models.")
    assert zoo("export", folder, tmp_path / "z.sosiezoo").exit_code == 0
    assert zoo("import", tmp_path / "z.sosiezoo", tmp_path / "copy").stdout.strip().endswith(": 1 model")
