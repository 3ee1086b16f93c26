"""Many models, fingerprinted here and elsewhere: workers die, models fail, nothing is added twice."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import CONTEXT
from made_prints import INPUTS, SIZE, made, new_zoo, same
from torch import nn

import sosie.zoo.tasks
from sosie.models import open_model
from sosie.zoo import Added, Zoo, fingerprint
from sosie.zoo.tasks import default_name

FACTORIES = """
import os, signal
from pathlib import Path
from torch import nn

HERE = Path(__file__).parent

def net(width=5):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 4))

def fatal():
    os.kill(os.getpid(), signal.SIGKILL)

def fatal_once():
    if not (HERE / "died").exists():
        (HERE / "died").touch()
        fatal()
    return net()

def failing():
    raise RuntimeError("no <b>weights</b> today")
"""


@pytest.fixture
def factories(tmp_path: Path) -> str:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return str(path)


def net(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))


class Remote(Executor):
    """An executor of no kind that we know, whose workers cannot see the folder; it counts, and may break."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.sent, self.breaks_at = 0, breaks_at

    def submit(self, what: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        from dataclasses import replace

        (task,) = arguments
        self.sent += 1
        found: Future[Any] = Future()
        assert isinstance(task, bytes), "a model travels as bytes"
        if self.breaks_at is not None and self.sent > self.breaks_at:
            found.set_exception(BrokenExecutor("a worker died"))
        else:
            found.set_result(what(replace(pickle.loads(task), probe_path="/not/here")))
        return found


@pytest.mark.parametrize("kind", ["none", "threads", "remote"])
def test_any_executor_adds_the_same(kind: str, factories: str, tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    remote = Remote()
    executor = {"none": None, "threads": ThreadPoolExecutor(2), "remote": remote}[kind]
    models = {"a": net(0), "b": net(1), "c": f"{factories}:net", "bad": f"{factories}:failing", "print": made(1)}
    found = zoo.add(models, executor=executor, tags="x")
    assert isinstance(found, Added)
    assert (set(found.added), found.there, set(found.failed)) == ({"a", "b", "c", "print"}, (), {"bad"})
    assert "RuntimeError: no <b>weights</b> today" in found.failed["bad"]
    assert [row["name"] for row in zoo.failed()] == ["bad"]
    assert "&lt;b&gt;" in zoo.failed()._repr_html_()
    wanted = fingerprint(net(1), INPUTS, size=SIZE)
    assert same(zoo["b"].fingerprint, wanted)
    assert (zoo["c"].source, zoo["c"].architecture) == (f"{factories}:net", "net")
    if kind == "remote":
        assert remote.sent == 2 * 4  # each was sent once more, with the inputs
    again = zoo.add(models, executor=executor)
    assert isinstance(again, Added)
    assert (again.added, set(again.there), set(again.failed)) == ((), {"a", "b", "c", "print"}, {"bad"})
    assert zoo.check().problems == ()


def test_models_may_come_one_by_one(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    asked: list[int] = []

    def models() -> Iterator[tuple[str, nn.Module]]:
        for k in range(4):
            assert len(zoo) == k  # each is written before the next is asked for
            asked.append(k)
            yield f"m{k}", net(k)

    zoo.add(models())
    assert asked == [0, 1, 2, 3]
    assert len(zoo) == 4


def test_one_that_fails_is_recorded_and_raised(factories: str, tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    with pytest.raises(RuntimeError, match="today"):
        zoo.add(f"{factories}:failing", "late")
    assert [(row["name"], row["source"]) for row in zoo.failed()] == [("late", f"{factories}:failing")]
    zoo.add(net(0), "late")
    assert len(zoo.failed()) == 0  # it was added after all
    with pytest.raises(ValueError, match="for several models"):
        zoo.add(net(0), "x", workers=2)
    with pytest.raises(ValueError, match="not both"):
        zoo.add({"x": net(0)}, workers=2, executor=Remote())


def test_the_very_model_is_not_fingerprinted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sosie.zoo import tasks

    zoo = new_zoo(tmp_path)
    zoo.add(net(0), "a")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was in the zoo")

    monkeypatch.setattr(tasks, "fingerprint", never)
    assert zoo.add({"a": net(0)}, tags="x") == Added((), ("a",), {})
    assert zoo["a"].tags == ("x",)
    with pytest.raises(AssertionError, match="it was in the zoo"):
        zoo.add(net(1), "a")


def test_the_same_weights_with_another_function_or_at_other_sites_are_not_the_same_model(tmp_path: Path) -> None:
    zoo, net = new_zoo(tmp_path), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    other = nn.Sequential(net[0], nn.ReLU(), net[2])
    zoo.add(net, "net", sites=["2"])
    with pytest.raises(ValueError, match=r"the same weights but other modules.*replace=True"):
        zoo.add(other, "net", sites=["2"])
    with pytest.raises(ValueError, match=r"other sites \(2; these are 0, 2\).*replace=True"):
        zoo.add(net, "net", sites=["0", "2"])
    found = zoo.add({"net": other})
    assert "other modules" in found.failed["net"]
    assert zoo.add({"net": net}).there == zoo.add({"net": net}, sites=["2"]).there == ("net",)
    assert zoo.add({"net": other}, replace=True).added == ("net",)


def test_a_zoo_of_before_knows_its_models_by_their_weights(tmp_path: Path) -> None:
    zoo, net = new_zoo(tmp_path), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    zoo.add(net, "net", sites=["2"])
    with zoo.store.writing() as connection:  # as zoos were before they kept modules and sites
        connection.execute("UPDATE models SET about = json_remove(about, '$.about.modules', '$.about.sites')")
    assert zoo.add({"net": net}).there == zoo.add({"net": net}, sites="2").there == ("net",)
    assert "other sites" in zoo.add({"net": net}, sites="0").failed["net"]


def test_saved_fingerprints_are_added_as_they_are(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    made(1).save(tmp_path / "one.safetensors")
    assert zoo.add(tmp_path / "one.safetensors").name == "one"
    assert same(zoo["one"].fingerprint, made(1))
    (tmp_path / "bad.safetensors").write_bytes(b"\0" * 64)
    found = zoo.add({"bad": str(tmp_path / "bad.safetensors")})
    assert isinstance(found, Added)
    assert "safetensors" in found.failed["bad"]


def test_somebody_elses_executor_that_breaks(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    found = zoo.add({f"m{k}": net(k) for k in range(6)}, executor=Remote(breaks_at=4))
    assert isinstance(found, Added)
    assert not set(found.added) & set(found.failed)
    assert set(found.added) | set(found.failed) == {f"m{k}" for k in range(6)}
    assert found.failed
    assert all("broke" in reason for reason in found.failed.values())
    assert {row["name"] for row in zoo.failed()} == set(found.failed)
    rest = zoo.add({f"m{k}": net(k) for k in range(6)})
    assert isinstance(rest, Added)
    assert set(rest.added) == set(found.failed)
    assert len(zoo.failed()) == 0


def test_what_cannot_travel_is_named(tmp_path: Path) -> None:
    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    zoo = new_zoo(tmp_path)
    found = zoo.add({"a": net(0), "local": Local()}, executor=Remote())
    assert isinstance(found, Added)
    assert found.added == ("a",)
    assert "cannot be sent to another process" in found.failed["local"]


class Blaming(Executor):
    """A cluster that gives up whatever is on its way while a bad model is."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any]] = []

    def submit(self, function: Any, /, task: Any, **_: Any) -> Future[Any]:
        self.waiting.append((found := Future(), task))
        if len(self.waiting) > 3 or self.alone:
            lot, self.waiting = self.waiting, []
            bad = any(pickle.loads(one).name == "bad" for _, one in lot)
            for future, one in lot:
                future.set_exception(RuntimeError("killed")) if bad else future.set_result(function(one))
        return found

    alone = False


def test_a_cluster_that_blames_those_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo, cluster = new_zoo(tmp_path), Blaming()
    first = sosie.zoo.tasks._run

    def run(executor: Any, tasks: Any, window: int, *more: Any) -> Any:
        cluster.alone = window == 1
        return first(executor, tasks, window, *more)

    monkeypatch.setattr("sosie.zoo.tasks._run", run)
    found = zoo.add({name: net(k) for k, name in enumerate(["a", "bad", "b", "c"])}, executor=cluster)
    assert set(found.added) == {"a", "b", "c"}
    assert found.failed == {"bad": "RuntimeError: killed"}


@pytest.mark.skipif(sys.platform == "win32", reason="workers are killed by a signal")
def test_workers_of_ours_that_die(factories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kills its worker always, one once: the first is named, the second tried again, the others not harmed."""
    monkeypatch.setattr("sosie.zoo.tasks.get_context", lambda _: CONTEXT)  # spawned ones import torch: test_cli_zoo.py
    zoo = new_zoo(tmp_path)
    models = {
        "once": f"{factories}:fatal_once",
        "a": f"{factories}:net",
        "b": net(1),
        "c": net(2),
        "always": f"{factories}:fatal",  # when the first has died: four are on their way at a time
    }
    found = zoo.add(models, workers=2)
    assert isinstance(found, Added)
    assert set(found.added) == {"once", "a", "b", "c"}
    assert set(found.failed) == {"always"}
    assert "died twice" in found.failed["always"]
    assert same(zoo["b"].fingerprint, fingerprint(net(1), INPUTS, size=SIZE))
    assert zoo.check().problems == ()


@pytest.mark.skipif(sys.platform == "win32", reason="workers are killed by a signal")
def test_a_process_pool_of_somebody_elses(factories: str, tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    models = {"a": net(0), "fatal": f"{factories}:fatal", "b": net(1), "c": net(2)}
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        found = zoo.add(models, executor=pool)
    assert isinstance(found, Added)
    assert "fatal" in found.failed
    assert set(found.added) | set(found.failed) == set(models)
    assert set(zoo) == set(found.added)
    assert zoo.check().problems == ()


def test_names_made_of_specifications() -> None:
    assert default_name("tiny10@runs/a/seed3.safetensors") == "seed3"
    assert default_name("small_cnn(seed=1)") == "small_cnn(seed=1)"
    assert default_name("runs/nets.py:factory") == "runs-nets.py:factory"
    assert default_name("torchvision:resnet18@DEFAULT") == "torchvision:resnet18@DEFAULT"
    assert default_name("hf:runs/tuned") == "tuned"
    assert default_name("hf:org/name@v2") == "name@v2"
    assert default_name(open_model("small_cnn(seed=1)")) == "small_cnn-seed1"


def test_a_fork_has_a_connection_of_its_own(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 2)
    child = os.fork() if hasattr(os, "fork") else pytest.skip("no fork here")
    if child == 0:
        status = 1
        try:
            zoo.add(made(4), "child")
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "child" in zoo
    assert Zoo(tmp_path / "zoo").check().problems == ()
