"""The example app with six clients of shipped images, in process and in Flower's own simulation."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr has an environment of its own: make test-flower")

from in_process import InProcess, arrays_of, metrics_of

from sosie.train.federated.flower import AtomStrategy, upload

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flower"
CLIENTS, ROUNDS = 6, 2


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module("atoms_app.client")
    for name in [name for name in sys.modules if name.startswith("atoms_app")]:
        del sys.modules[name]


def test_six_clients_two_rounds(example: ModuleType) -> None:
    grid = InProcess(example.app, CLIENTS)
    strategy = AtomStrategy(report_atoms=True, min_available_nodes=CLIENTS)
    result = strategy.start(grid, upload(example.make_model()), num_rounds=ROUNDS)
    training = [reply for reply in grid.replies if reply.content.array_records][-CLIENTS:]
    training.sort(key=lambda reply: reply.metadata.src_node_id)
    weights = [metrics_of(reply)["num-examples"] for reply in training]
    assert sum(weights) == 2000
    assert len(set(weights)) > 1
    for name, array in result.arrays.items():
        sent = [arrays_of(reply)[name].numpy().astype(float) for reply in training]
        np.testing.assert_array_equal(array.numpy(), np.average(sent, axis=0, weights=weights).astype(np.float32))
    assert not any(done.dropped for done in strategy.rounds.values())

    # Clients 0 to 2 have other classes than 3 to 5; nodes are numbered backwards.
    similar = strategy.rounds[ROUNDS].atoms.cosines().numpy()[::-1, ::-1]
    assert similar[:3, :3].min() > similar[:3, 3:].max()
    assert similar[3:, 3:].min() > similar[:3, 3:].max()
    assert list(strategy.rounds[ROUNDS].clusters(2).values()) == [0, 0, 0, 1, 1, 1]
    assert result.evaluate_metrics_clientapp[ROUNDS]["accuracy"] > 0.5  # chance among a client's classes: 0.2


def test_in_the_simulation_of_flower(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the simulation of flwr needs ray: pip install 'flwr[simulation]'")
    script = (
        "from flwr.simulation import run_simulation\n"
        "from atoms_app.server import app as server\n"
        "from atoms_app.client import app as client\n"
        f"run_simulation(server, client, {CLIENTS}, backend_config={{'client_resources': {{'num_cpus': 1}}}})\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLE), *sys.path])}
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
    )
    assert found.returncode == 0, found.stderr
    for number in range(1, ROUNDS + 1):
        assert f"round {number}: {CLIENTS} clients, dropped none" in found.stdout, found.stdout + found.stderr
