"""A Dask cluster makes the fingerprints: workers die, and nothing is lost or added twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_prints import new_zoo, same
from test_zoo_adding import FACTORIES

from sosie.zoo import Zoo
from sosie.zoo.tasks import dask_cluster

distributed = pytest.importorskip("distributed", reason="needs sosie[dask]")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import dask

    # Given up at the second death, so that innocents are blamed, too.
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, silence_logs=50
        ) as found,
    ):
        yield found


def test_workers_that_die_are_survived(cluster: Any, tmp_path: Path) -> None:
    """One model kills every worker that takes it, one the first: the first is given up, all others are added once."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    names = {f"n{k}": f"net(width={4 + k})" for k in range(6)} | {"always": "fatal", "once": "fatal_once"}
    models = {name: f"{tmp_path / 'factories.py'}:{made}" for name, made in names.items()}
    zoo = new_zoo(tmp_path / "z")
    with dask_cluster(cluster.scheduler_address) as executor:
        found = zoo.add(models, executor=executor)
        assert set(found.added) == set(models) - {"always"}
        assert "KilledWorker" in found.failed["always"]
        again = zoo.add({name: spec for name, spec in models.items() if name != "always"}, executor=executor)
    assert not again.added
    assert len(zoo) == len(models) - 1
    assert zoo.check().ok
    here = new_zoo(tmp_path / "here")
    here.add({name: models[name] for name in ("n0", "once")})
    for name in here:
        assert same(zoo[name].fingerprint, here[name].fingerprint)


def test_nobody_at_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosie.zoo.tasks.PATIENCE", 0.5)
    with pytest.raises(OSError, match=r"no Dask scheduler at tcp://127\.0\.0\.1:9"), dask_cluster("tcp://127.0.0.1:9"):
        pass


def test_on_the_command_line(cluster: Any, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from sosie.cli.main import app

    folder = new_zoo(tmp_path).folder
    (tmp_path / "factories.py").write_text(FACTORIES)
    add = ["zoo", "add", str(folder), f"a={tmp_path / 'factories.py'}:net", "--dask", cluster.scheduler_address]
    assert CliRunner().invoke(app, add).exit_code == 0
    assert list(Zoo(folder)) == ["a"]
    both = CliRunner().invoke(app, [*add, "--workers", "2"])
    assert "not both" in str(both.exception)
