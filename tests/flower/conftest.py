"""Tests with real flwr, in an environment of its own: `make test-flower`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # before flwr is imported


@pytest.fixture(autouse=True)
def _in_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages say which run and node they are from, which Flower's processes set when they start."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # an older flwr, where the network sets it
        return
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
