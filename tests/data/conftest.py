"""Real images, where they are at hand; no folder of the environment is searched unless a test says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
LISTED = os.environ.get("SOSIE_DATA", "")


@pytest.fixture(autouse=True)
def _nothing_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOSIE_DATA", raising=False)
    monkeypatch.delenv("SOSIE_DOWNLOAD", raising=False)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Path:
    for place in [SHARED, *(Path(part) for part in LISTED.split(os.pathsep) if part)]:
        if (place / "cifar10-test10k.npz").is_file():
            monkeypatch.setenv("SOSIE_DATA", str(place))
            return place
    pytest.skip("no cifar10-test10k.npz in a folder shared/data beside the checkout, nor in SOSIE_DATA")
