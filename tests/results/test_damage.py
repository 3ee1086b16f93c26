"""Damage to any file that sosie reads is noticed: the same numbers as before, or an error that names the file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sosie
from sosie.benchmark.population import BenchmarkFolder
from sosie.capture import open_activations
from sosie.diffing import record
from sosie.engine.partial import Partial
from sosie.files import read_nested, write_nested, write_weights
from sosie.history import Recorder, open_run
from sosie.models import read_weights
from sosie.results import Cost, Costs, Dynamics, Entry, Estimate, Leaderboard, Neighbours
from sosie.sketching import Sketch, Task2Vec
from sosie.train.federated import Federated
from sosie.zoo import Fingerprint, Probe, Zoo
from sosie.zoo.fingerprints import project

FLIPS, CUTS = 40, 6
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def plain(value: Any) -> Any:
    """All that a value holds, to be compared bit by bit."""
    if isinstance(value, (Tensor, np.ndarray)):
        array = value.detach().numpy() if isinstance(value, Tensor) else value
        return str(array.dtype), array.shape, array.tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return [(f.name, plain(getattr(value, f.name))) for f in fields(value)]
    if isinstance(value, Mapping):
        return [(str(key), plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, nn.Module) else repr(value)


def comparison(folder: Path) -> Path:
    return sosie.compare(net(0), net(1), X, null="permutation", draws=20).save(folder / "c.json")


def statistics(folder: Path) -> Path:
    measures = ["debiased_cka", "mean_cca", "mutual_knn"]
    sosie.compare(net(0), net(1), X, measures=measures, resume=folder / "s.safetensors")
    return folder / "s.safetensors"


def dynamics(folder: Path) -> Path:
    values = Estimate(np.random.default_rng(0).random((2, 3, 3)), 8, "moments", "up", (0.0, 1.0), 1.0)
    return Dynamics("a", "a", "weights", ("x", "y"), (0, 1, 2), (0, 1, 2), {"m": values}).save(folder / "d.json")


def costs(folder: Path) -> Path:
    return Costs(("a", "b"), (Cost("m", 8, 2, 10, 20, 0.5, 30, "moments"),), "cpu", "", "").save(folder / "k.json")


def leaderboard(folder: Path) -> Path:
    entry = Entry("m", "activations", "up", ("a note",), {"probing": "too few"}, {"width": "none"})
    return Leaderboard({}, {}, {}, {}, (entry,), {}, {}).save(folder / "l.json")


def answer(folder: Path) -> Path:
    return Neighbours({"query": "a", "k": 1}, ({"name": "b", "value": 0.25},), ("a note",)).save(folder / "n.json")


def sketch(folder: Path) -> Path:
    return sosie.sketch(net(), X, size=8).save(folder / "k.safetensors")


def task2vec(folder: Path) -> Path:
    return Task2Vec("net", {"weight": X[:4], "bias": X[4]}, 40, 3, "parameters", "drawn").save(folder / "t.safetensors")


def stitch(folder: Path) -> Path:
    return sosie.stitch(net(0), "0", net(1), "0", X).save(folder / "j.safetensors")


def joint(path: Path) -> Any:
    found = sosie.Stitch.load(path, net(0), net(1))
    return found.model.joint.state_dict(), found.fit, found.n, found.report


def made_print(seed: int = 0) -> Fingerprint:
    probe = Probe.of(X[:8])
    exact = np.random.default_rng(seed).normal(size=(3, 28))
    exact = (exact / np.linalg.norm(exact, axis=1, keepdims=True)).astype(np.float32)
    short = project(torch.from_numpy(exact), 16, 0).numpy()
    about = {"architecture": "Net", "parameters": 10, "model": f"{seed:016x}", "sosie": "0"}
    labels = {"cka": ("one", "two", "three")}
    return Fingerprint(probe.digest, 8, 16, 0, "flatten", {"cka": short}, labels, exact, {}, about)


def zoo(folder: Path) -> Zoo:
    found = Zoo(folder / "zoo", X[:8], size=16)
    found.add({f"m{k}": made_print(k) for k in range(8)})
    return found


def searched(folder: Path) -> Any:
    found = Zoo(folder)
    return [found.search(made_print(3), k=5, by=by).rows() for by in ("model", "layer")]


def recorded(folder: Path) -> Path:
    model = net()
    with Recorder(folder / "run", model, "weights") as recorder:
        for step in range(3):
            recorder.record(step)
    return folder / "run"


def run(folder: Path) -> Any:
    found = open_run(folder)
    if found.note is not None:
        raise ValueError(f"{folder / 'records'}: {found.note}")  # told, as an interruption is
    return found.steps, [[found.tensor(k, site) for site in found.sites] for k in range(len(found.steps))]


def federated(folder: Path) -> Path:
    state = {name: torch.stack([t, t + 1]) for name, t in net().state_dict().items()}
    values = torch.tensor([0.5, 0.25])
    history = [{"dropped": {}}]
    return Federated("fedavg", state, {}, values, values, None, history, (), net()).save(folder / "f.safetensors")


def unit(folder: Path) -> Path:
    BenchmarkFolder(folder / "bench", {"seed": 0}).write("unit", {"value": [0.5, 0.25]})
    return folder / "bench" / "unit.json"


def unit_tensors(folder: Path) -> Path:
    BenchmarkFolder(folder / "bench", {"seed": 0}).tensors("unit", lambda: {"x": X})
    return folder / "bench" / "unit.safetensors"


def arrays(save: Callable[..., None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save(folder / "a.npz", one=X.numpy(), two=X[:, :4].double().numpy())
        return folder / "a.npz"

    return make


def rows(path: Path) -> Any:
    found = open_activations(path)
    return {site.label: found.rows(site.label, 0, 30) for site in found.sites}


def imported(path: Path) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = Zoo.import_(path, Path(folder) / "zoo")
        return found.list().rows(), [found.store.read(name).blocks for name in found]


def in_nested(folder: Path) -> Path:
    return write_nested(folder / "c.safetensors", "training", 2, {"a": 1}, {"model": {"w": X}, "epoch": 3})


def refuse() -> Any:
    raise AssertionError("made again")


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "comparison": (comparison, sosie.load),
    "dynamics": (dynamics, sosie.load),
    "costs": (costs, sosie.load),
    "leaderboard": (leaderboard, sosie.load),
    "answer": (answer, sosie.load),
    "statistics": (statistics, Partial.load),
    "sketch": (sketch, Sketch.load),
    "task2vec": (task2vec, Task2Vec.load),
    "stitch": (stitch, joint),
    "fingerprint": (lambda folder: made_print().save(folder / "p.safetensors"), Fingerprint.load),
    "probe": (lambda folder: Probe.of(X).save(folder / "q.safetensors"), Probe.load),
    "vectors of a zoo": (
        lambda folder: zoo(folder).folder / "vectors/cka-16.f32",
        lambda path: searched(path.parents[1]),
    ),
    "whole vectors of a zoo": (lambda folder: zoo(folder).folder / "exact.f32", lambda path: searched(path.parent)),
    "exported zoo": (lambda folder: zoo(folder).export(folder / "z.safetensors"), imported),
    "records": (lambda folder: recorded(folder) / "records", lambda path: run(path.parent)),
    "description of records": (lambda folder: recorded(folder) / "run.json", lambda path: run(path.parent)),
    "training checkpoint": (in_nested, lambda path: read_nested(path, "training", 2)),
    "federated": (federated, lambda path: Federated.load(path, net)),
    "unit of a benchmark": (unit, lambda path: BenchmarkFolder(path.parent, {"seed": 0}).json("unit", refuse)),
    "tensors of a benchmark": (
        unit_tensors,
        lambda path: BenchmarkFolder(path.parent, {"seed": 0}).tensors("unit", refuse),
    ),
    "weights": (
        lambda folder: write_weights(folder / "w.safetensors", net().state_dict()),
        lambda p: read_weights(p)[0],
    ),
    "statistics, as compared": (statistics, sosie.compare),
    "extracted activations": (lambda folder: sosie.extract(net(), X, out=folder / "e.safetensors"), rows),
    "golden record": (
        lambda folder: record(net(), X, folder / "r.safetensors"),
        lambda path: sosie.diff(path, net(1)).rows(),
    ),
    "differences": (lambda folder: sosie.diff(net(), net(1), X).save(folder / "f.json"), sosie.load),
    "archive": (arrays(np.savez), rows),
    "compressed archive": (arrays(np.savez_compressed), rows),
}


def damaged(whole: bytes) -> Iterator[tuple[str, bytes]]:
    drawn = random.Random(len(whole))
    for place in drawn.sample(range(len(whole)), min(FLIPS, len(whole))):
        changed = bytearray(whole)
        changed[place] ^= drawn.randrange(1, 256)
        yield f"byte {place} of {len(whole)}", bytes(changed)
    for place in drawn.sample(range(len(whole)), min(CUTS, len(whole))):
        yield f"cut at {place} of {len(whole)}", whole[:place]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_noticed(kind: str, tmp_path: Path) -> None:
    make, read = KINDS[kind]
    path = make(tmp_path)
    whole, before = path.read_bytes(), plain(read(path))
    silent, raw = [], []
    for what, content in damaged(whole):
        path.unlink()  # what was read may still be mapped
        path.write_bytes(content)
        try:
            if plain(read(path)) != before:
                silent.append(what)
        except (ValueError, OSError) as error:
            if path.name not in str(error):
                raw.append(f"{what}: {type(error).__name__}: {error}")
        except Exception as error:
            raw.append(f"{what}: {type(error).__name__}: {error}")
    assert not silent
    assert not raw
