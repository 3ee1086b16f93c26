"""What can be answered without torch is: importing it takes longer than the answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sosie
from sosie.cli.measures import FACTS
from sosie.data import open_data

ASK = """
import sys
from sosie.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as left:
    assert not left.code, left
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo") / "nets"
    sosie.Zoo(folder, open_data("demo", max_rows=8)).add({"one": "small_cnn(seed=0)"}, task="clothes")
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["measures"],
        ["measures", "--json"],
        ["zoo", "list"],
        ["zoo", "list", "--task", "none"],
    ],
    ids=" ".join,
)
def test_torch_is_not_imported(arguments: list[str], zoo: Path) -> None:
    arguments = [*arguments, str(zoo)] if arguments[0] == "zoo" else arguments
    done = subprocess.run([sys.executable, "-c", ASK, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_facts_that_are_listed_are_those_of_the_measures() -> None:
    assert json.loads(FACTS.read_text("utf-8")) == json.loads(json.dumps(sosie.list_measures())), "run make docs"
