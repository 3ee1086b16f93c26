"""`sosie zoo` as a user meets it."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from test_cli import run, run_here
from typer.testing import CliRunner, Result

from sosie.cli.main import app
from sosie.models import open_model
from sosie.results import cell
from sosie.zoo import Zoo

MODELS = ["small_cnn(seed=0)", "two=small_cnn(seed=1)"]


def zoo(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["zoo", *map(str, arguments)])


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ready") / "z"
    made = zoo("init", path, "--data", "demo", "--max-rows", 16, "--size", 32, "--kinds", "cka,weights")
    assert made.exit_code == 0, made.output
    assert "16 inputs of hash" in made.stdout
    assert zoo("add", path, *MODELS, "--tag", "small", "--task", "clothes").exit_code == 0
    gc.collect()  # closes the zoo, whose log would otherwise go away while it is copied
    return path


@pytest.fixture
def folder(ready: Path, tmp_path: Path) -> Path:
    return shutil.copytree(ready, tmp_path / "z")


def test_add_and_list(folder: Path) -> None:
    found = zoo("list", folder).stdout
    for text in ("small_cnn(seed=0)", "two", "small_cnn", "38,314", "clothes", "small", "2 of 2 models"):
        assert text in found, text
    again = zoo("add", folder, *MODELS, "three=small_cnn(seed=2)")
    assert again.exit_code == 0
    assert again.stdout.count("there already") == 2
    rows = json.loads(zoo("list", folder, "--tag", "small", "--json").stdout)
    assert [row["name"] for row in rows] == ["small_cnn(seed=0)", "two"]
    assert rows[1]["source"] == "small_cnn(seed=1)"
    assert "0 of 3 models" in zoo("list", folder, "--task", "digits").stdout


def test_one_that_fails_is_told_and_the_rest_goes_on(folder: Path) -> None:
    found = zoo("add", folder, "bad=smal_cnn", "three=small_cnn(seed=2)", "two=small_cnn(seed=7)")
    assert found.exit_code == 1
    assert "did you mean 'small_cnn'" in found.output
    assert "--replace" in found.output
    assert "3 models" in found.stdout
    assert "did you mean 'small_cnn'" in zoo("list", folder, "--failed").stdout
    assert zoo("add", folder, "two=small_cnn(seed=7)", "--replace").exit_code == 0


def test_names_are_shown_and_never_acted_on(folder: Path) -> None:
    assert zoo("add", folder, "[red]<b>=small_cnn(seed=3)", "--tag", "[bold]").exit_code == 0
    found = zoo("list", folder).stdout
    assert "[red]<b>" in found
    assert "[bold]" in found
    refused = run_here("zoo", "add", str(folder), "../evil=small_cnn(seed=3)")
    assert refused.returncode == 1
    assert "separators" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_tag_remove_compact(folder: Path) -> None:
    assert "two: small, new" not in zoo("tag", folder, "two", "--add", "new", "--drop", "small").stdout
    assert Zoo(folder)["two"].tags == ("new",)
    assert zoo("remove", folder, "two").exit_code == 0
    assert list(Zoo(folder)) == ["small_cnn(seed=0)"]
    assert "MiB given back" in zoo("compact", folder).stdout
    missing = run_here("zoo", "remove", str(folder), "twoo")
    assert missing.returncode == 1
    assert missing.stderr.strip() == f"error: no model 'twoo' in {folder}; there are small_cnn(seed=0)"


def test_check_and_repair(folder: Path) -> None:
    assert "2 models, whole" in zoo("check", folder).stdout
    os.truncate(folder / "exact.f32", (folder / "exact.f32").stat().st_size - 1)
    found = zoo("check", folder)
    assert found.exit_code == 1
    assert "'two': exact.f32 was cut off" in found.stdout
    assert "--repair" in found.stdout
    repaired = zoo("check", folder, "--repair")
    assert repaired.exit_code == 0
    assert "dropped two" in repaired.stdout
    assert "1 model, whole" in zoo("check", folder).stdout


def test_a_lost_probe_set_is_put_back(folder: Path) -> None:
    (folder / "probe.safetensors").unlink()
    for arguments in ([], ["--repair"], ["--data", "demo"]):
        found = zoo("check", folder, *arguments)
        assert found.exit_code == 1
        assert "puts it back" in found.stdout
        assert "drops the models" not in found.stdout
    assert "1 problem; repaired" in zoo("check", folder, "--repair", "--data", "demo").stdout
    assert "2 models, whole" in zoo("check", folder).stdout


def test_a_fingerprint_that_is_not_added(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "new.safetensors"
    found = zoo("fingerprint", folder, "small_cnn(seed=5)", "--out", file)
    assert found.exit_code == 0, found.output
    assert "cka, weights" in found.stdout
    assert len(Zoo(folder)) == 2
    assert zoo("add", folder, file, "five=small_cnn(seed=5)").exit_code == 0
    one, other = Zoo(folder)["new"], Zoo(folder)["five"]
    assert (one.digest, one.architecture) == (other.digest, other.architecture)


def test_names_with_signs_in_them(folder: Path) -> None:
    found = zoo("add", folder, "net(1)=small_cnn(seed=2)", "lr=0.1=small_cnn(seed=3)", "small_cnn(seed=4)")
    assert found.exit_code == 0, found.output
    assert list(Zoo(folder))[2:] == ["net(1)", "lr=0.1", "small_cnn(seed=4)"]
    assert Zoo(folder)["lr=0.1"].source == "small_cnn(seed=3)"
    twice = zoo("add", folder, "a=small_cnn(seed=2)", "a=small_cnn(seed=3)")
    assert "two models are called 'a'" in str(twice.exception)


def test_weights_by_a_pattern(folder: Path, tmp_path: Path) -> None:
    for seed in (5, 6):
        save_file(open_model(f"small_cnn(seed={seed})").model.state_dict(), tmp_path / f"run={seed}.safetensors")
    found = zoo("add", folder, f"small_cnn@{tmp_path}/run=*.safetensors")
    assert found.exit_code == 0, found.output
    assert list(Zoo(folder))[2:] == ["run=5", "run=6"]
    assert Zoo(folder)["run=6"].source == f"small_cnn@{tmp_path}/run=6.safetensors"
    assert "one name, 'x'" in str(zoo("add", folder, f"x=small_cnn@{tmp_path}/*.safetensors").exception)
    lone = zoo("add", folder, tmp_path / "run=5.safetensors")
    assert f"ARCHITECTURE@{tmp_path}" in lone.output
    assert "Damaged" not in lone.output


def test_a_name_that_will_not_do_is_told_before_anything_is_added(folder: Path) -> None:
    found = zoo("add", folder, "three=small_cnn(seed=2)", "../x=small_cnn(seed=3)", "four=small_cnn(seed=4)")
    assert "separators" in str(found.exception)
    assert len(Zoo(folder)) == 2


def test_a_failed_one_is_forgotten(folder: Path) -> None:
    zoo("add", folder, "bad=smal_cnn", "worse=smal_cnn")
    assert zoo("remove", folder, "bad", "two").exit_code == 0
    assert [row["name"] for row in Zoo(folder).failed()] == ["worse"]
    assert list(Zoo(folder)) == ["small_cnn(seed=0)"]


def test_a_parent_that_is_not_there_is_noted(folder: Path) -> None:
    assert "no model 'tow' is in the zoo" in zoo("add", folder, "x=small_cnn(seed=2)", "--parent", "tow").output
    assert "note" not in zoo("add", folder, "y=small_cnn(seed=3)", "--parent", "two").output


def test_export_and_import(folder: Path, tmp_path: Path) -> None:
    assert "wrote" in zoo("export", folder, tmp_path / "z.sosiezoo").stdout
    found = zoo("import", tmp_path / "z.sosiezoo", tmp_path / "copy")
    assert found.exit_code == 0, found.output
    assert list(Zoo(tmp_path / "copy")) == list(Zoo(folder))


def test_mistakes_are_told_in_words(folder: Path, tmp_path: Path) -> None:
    for arguments, said in (
        (["list", tmp_path / "none"], "sosie zoo init"),
        (["init", folder, "--data", "demo"], "is a zoo already"),
        (["init", tmp_path / "none", "--data", "demo", "--rows", "positions"], "one row per input"),
        (["check", tmp_path / "none", "--repair", "--data", "demo"], "no zoo in"),
        (["add", folder, "small_cnn", "small_cnn"], "NAME=MODEL"),
        (["tag", folder, "two"], "--add TAG"),
        (["import", tmp_path / "none", tmp_path / "copy"], "no file"),
    ):
        found = zoo(*arguments)
        assert found.exit_code == 1
        assert said in str(found.exception), said


def test_workers(folder: Path) -> None:
    found = run("zoo", "add", str(folder), "three=small_cnn(seed=2)", "bad=smal_cnn", "--workers", "2")
    assert found.returncode == 1
    assert "did you mean 'small_cnn'" in found.stderr
    assert "3 models" in found.stdout


@pytest.mark.parametrize(
    ("verb", "arguments", "said"),
    [
        ("search", ["two", "-k", "1"], "Of 1 model small_cnn(seed=0) is nearest to two"),
        ("layers", ["small_cnn(seed=1)", "--sites", "conv1,conv2", "-k", "1"], "Of 2 models two at conv1 is nearest"),
        ("map", [], "2 models in the plane by cka"),
        ("clusters", ["-k", "2"], "2 models in 2 clusters"),
        ("duplicates", ["--threshold", "0.5"], "duplicate"),
        ("family", ["two"], "small_cnn(seed=0) is most like two"),
        ("recommend", ["--data", "demo", "--max-rows", "30", "--probe-layer", "-2"], "comes first by probe_accuracy"),
    ],
)
def test_questions(folder: Path, tmp_path: Path, verb: str, arguments: list[str], said: str) -> None:
    asked = zoo(verb, folder, *arguments, "--out", tmp_path / "a.json", "--html", tmp_path / "a.html")
    assert asked.exit_code == 0, asked.output
    assert said in " ".join(asked.stdout.split())
    assert json.loads((tmp_path / "a.json").read_text())["format"] == "sosie-answer"
    assert "<script" in (tmp_path / "a.html").read_text()
    again = CliRunner().invoke(app, ["report", str(tmp_path / "a.json")])
    assert said in " ".join(again.stdout.split())
    rows = json.loads(zoo(verb, folder, *arguments, "--json").stdout)
    assert rows == json.loads((tmp_path / "a.json").read_text())["rows"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("arguments", [["family", "two"], ["search", "two"], ["map"], ["list"]])
def test_a_narrow_terminal_cuts_no_number(folder: Path, arguments: list[str], width: int) -> None:
    verb, *model = arguments
    rows = json.loads(zoo(verb, folder, *model, "--json").stdout)
    full = {cell(v) for row in rows for v in row.values() if is_number(v)}
    found = CliRunner().invoke(app, ["zoo", verb, str(folder), *model], env={"COLUMNS": str(width)})
    table = found.stdout.partition("───")[2].splitlines()[1 : 1 + len(rows)]
    shown = {word for line in table for word in line.split() if word.lstrip("-")[0].isdigit()}
    assert shown
    assert shown <= full


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def test_questions_that_have_no_answer(folder: Path) -> None:
    for arguments, said in (
        (["search", folder, "tow"], "did you mean 'two'"),
        (["search", folder, "two", "--kind", "atoms"], "no vectors of kind 'atoms'"),
        (["map", folder, "--tag", "none"], "has the tag 'none'; there are small"),
        (["index", folder], "an index is for 1,000"),
    ):
        found = run_here("zoo", *map(str, arguments), cwd=folder)
        assert found.returncode != 0
        assert said in found.stderr
        assert "Traceback" not in found.stderr
