"""Files of before modules moved open, say what they said then, and can be gone on with.

tests/fixtures/make.py wrote them, and expected.json with what that version of sosie said of each kind of file, by how
near we have to come. A reader here has the name of its maker there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.nets import FORM, HERE, SITES, blank, digest, inputs, net, plain, said, train

import sosie
from sosie.benchmark import SCALES, run_benchmark
from sosie.capture import open_activations
from sosie.history import Recorder, open_run
from sosie.models import open_model
from sosie.results import Leaderboard
from sosie.sketching import Sketch, Task2Vec, classify
from sosie.train.federated import Federated
from sosie.train.sparse import load_masked
from sosie.zoo import Fingerprint, Zoo

EXPECTED: dict[str, dict[str, Any]] = json.loads((HERE / "expected.json").read_text())
EXACT, NEAR, TRAINED, SINGLE = "0", "1e-12", "1e-9", "1e-6"  # as held; computed; trained further; through float32
Said = dict[str, Any]
READERS: list[Callable[[Path], Said]] = []


def reader(read: Callable[[Path], Said]) -> Callable[[Path], Said]:
    READERS.append(read)
    return read


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which may be written to."""
    monkeypatch.setenv("SOSIE_DATA", str(HERE))
    return Path(shutil.copytree(HERE, tmp_path / "files", ignore=shutil.ignore_patterns("*.py", "__pycache__")))


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_a_file_of_then_says_what_it_said(read: Callable[[Path], Said], files: Path) -> None:
    found, wanted = read(files), EXPECTED[read.__name__]
    assert found.keys() == wanted.keys()
    for tolerance, value in wanted.items():
        check(plain(found[tolerance]), value, float(tolerance), read.__name__)
