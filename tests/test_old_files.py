"""Files of before modules moved open, say what they said then, and can be gone on with.

tests/fixtures/make.py wrote them, and expected.json with what that version of sosie said of each kind of file, by how
near we have to come. A reader here has the name of its maker there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.nets import HERE, SITES, blank, digest, inputs, net, plain, said, train
from torch import nn

import sosie
from sosie.benchmark import SCALES, run_benchmark
from sosie.capture import open_activations
from sosie.data import DataPart
from sosie.history import Recorder, open_run
from sosie.models import open_model, read_weights
from sosie.results import Leaderboard
from sosie.sketching import Sketch, Task2Vec, classify
from sosie.train.federated import Federated
from sosie.train.sparse import load_masked
from sosie.zoo import Zoo

Said = dict[str, Any]
EXPECTED: dict[str, Said] = json.loads((HERE / "expected.json").read_text())
EXACT, NEAR, TRAINED, SINGLE = "0", "1e-12", "1e-9", "1e-6"  # as held; computed; trained further; through float32
TIES = 0.1  # how far apart mutual_knn may be where many rows are equally near
QUANTILES = 1e-9  # of Student's t, in SciPy 1.11; intervals and block_error stand on them
NEWER = {"meaning", "paper", "block_error", "p_floor"}  # fields that values did not have then
READERS: dict[str, Callable[[Path], Said]] = {}


def reader(read: Callable[[Path], Said]) -> Callable[[Path], Said]:
    READERS[read.__name__] = read
    return read


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which may be written to."""
    monkeypatch.setenv("SOSIE_DATA", str(HERE))
    return Path(shutil.copytree(HERE, tmp_path / "files", ignore=shutil.ignore_patterns("*.py", "__pycache__")))


def check(found: Any, wanted: Any, tolerance: float, where: str) -> None:
    """The same all through, but for numbers that may be off by so much, relative to those above 1.

    Caveats that are written anew may have other words than they had then.
    """
    if isinstance(wanted, list) and isinstance(found, list):
        found, wanted = dict(enumerate(found)), dict(enumerate(wanted))
    if isinstance(wanted, dict) and isinstance(found, dict):
        assert found.keys() - NEWER == wanted.keys() - NEWER, where
        for key in wanted.keys() - ({"text"} if tolerance else set()):
            check(found[key], wanted[key], tolerance, f"{where}, {key}")
    elif isinstance(wanted, float) and isinstance(found, float):
        # Rows in one direction are equally near: rounding, which differs between processors, says which comes first.
        tolerance = TIES if "mutual_knn," in where else tolerance
        if re.search(", (low|high|block_error),", where):
            tolerance = max(tolerance, QUANTILES)
        assert abs(found - wanted) <= tolerance * max(1, abs(wanted)), where
    else:
        assert found == wanted, where


# Networks


@reader
def weights(files: Path) -> Said:
    opened = open_model(f"small_cnn@{files / 'a.safetensors'}").model
    x, _ = inputs()
    answers = {name: net(name)(x[:4]) for name in "abcd"}
    assert (opened(x[:4].float()) - answers["a"]).abs().max() < 1e-5
    return {EXACT: digest(net("a").state_dict()), NEAR: answers}


@reader
def gates(files: Path) -> Said:
    path = files / "gates.safetensors"
    model = open_model(f"dynamic_vit(rule='cka')@{path}").model
    return {EXACT: digest(read_weights(path)[0]), SINGLE: model(inputs()[0][:4].float())}


@reader
def masks(files: Path) -> Said:
    model = blank()
    found = load_masked(model, files / "masks.safetensors")
    return {EXACT: [digest(model.state_dict()), found.densities()], NEAR: model(inputs()[0][:4])}


# Comparisons


@reader
def activations(files: Path) -> Said:
    pairs = [[files / f"activations_{name}.{suffix}" for name in "ab"] for suffix in ("npz", "safetensors")]
    opened = [open_activations(pair[0]) for pair in pairs]
    return {
        EXACT: [digest({site.label: each.activation(site.label, 0, each.n) for site in each.sites}) for each in opened],
        NEAR: [said(sosie.compare(*pair, exact=True, precision="float64")) for pair in pairs],
    }


@reader
def comparison(files: Path) -> Said:
    return {EXACT: said(sosie.load(files / "comparison.json"))}


@reader
def comparisons(files: Path) -> Said:
    found = sosie.load(files / "comparisons.json")
    return {EXACT: [said(found), found.matrix("debiased_cka")]}


@reader
def statistics(files: Path) -> Said:
    """The first half of the inputs, gone on with to the end; and merged with the second."""
    ways: dict[str, dict[str, Any]] = {
        "moments": {"measures": ["debiased_cka", "procrustes_angle", "mutual_knn"], "interval": True},
        "grams": {"measures": "debiased_cka", "null": "permutation", "draws": 10, "memory": "4KiB", "block": 8},
    }
    whole, merged = {}, {}
    for name, how in ways.items():
        first, second = (files / f"{name}_{part}.safetensors" for part in ("first", "second"))
        merged[name] = said(sosie.compare([first, second]))
        given = {"sites_a": SITES, "sites_b": SITES, "precision": "float64", **how}
        whole[name] = said(sosie.compare(net("a"), net("b"), inputs()[0], resume=first, **given))
    return {NEAR: [whole, merged]}


@reader
def outputs(files: Path) -> Said:
    # Those of then were the defaults; since, churn is only computed where it is named.
    then = sosie.load(files / "outputs.json").measures
    pair = files / "logits_a.npz", files / "logits_b.npz"
    earlier = sosie.compare_outputs(*pair, measures=then, labels=inputs()[1], kind="logits")
    return {EXACT: [said(sosie.load(files / f"{name}.json")) for name in ("outputs", "shifted")], NEAR: said(earlier)}


@reader
def sketches(files: Path) -> Said:
    x, y = inputs()
    first, every = (Sketch.load(files / f"sketch_{name}.safetensors") for name in ("a", "all"))
    kernels = ("features", "gradients", "hadamard", "maps")
    rest = sosie.sketch(net("a"), DataPart([(x[32:], y[32:])], 32), sites=SITES, size=16, kernels=kernels)
    pair = [files / f"sketch_{name}.safetensors" for name in "ab"]
    return {
        EXACT: [repr(first), repr(every), said(sosie.load(files / "unpaired.json"))],
        NEAR: [
            {kernel: said(sosie.compare(*(Sketch.load(path).using(kernel) for path in pair))) for kernel in kernels},
            every.kernel("fc", "features").gram[0],
            classify(first, "features").evaluate(net("a"), [(x, y)]),
        ],
        SINGLE: first.merge(rest).kernel("fc").gram,
    }


@reader
def transfer(files: Path) -> Said:
    return {EXACT: said(sosie.load(files / "transfer.json"))}


@reader
def stitches(files: Path) -> Said:
    x, y = inputs()
    paths = [files / f"stitch_{name}.safetensors" for name in ("fitted", "trained")]
    found = [sosie.Stitch.load(path, net("a"), net("b")) for path in paths]
    joints = [[digest(each.model.joint.state_dict()), each.fit, each.n, each.report, each.history] for each in found]
    return {EXACT: joints, NEAR: [[each.model(x[:4]), each.evaluate([(x, y)])] for each in found]}


@reader
def stitched_sites(files: Path) -> Said:
    return {EXACT: said(sosie.load(files / "stitched_sites.json"))}


@reader
def weights_compared(files: Path) -> Said:
    names = ("maps", "tensors", "atoms")
    return {EXACT: {name: said(sosie.load(files / f"weights_{name}.json")) for name in names}}


@reader
def task_vectors(files: Path) -> Said:
    a, b = (Task2Vec.load(files / f"task2vec_{name}.safetensors") for name in "ab")
    return {EXACT: [digest(a.fisher), repr(a)], NEAR: [a.distance(b), a.distance(b, normalised=True)]}


# Trainings


@reader
def checkpoint(files: Path) -> Said:
    """Whatever network it is given, a training of then ends as it would have."""
    return {TRAINED: dict(train(net("b"), files / "checkpoint.safetensors").state_dict())}


@reader
def federated(files: Path) -> Said:
    found = Federated.load(files / "federated.safetensors", lambda: blank(2))
    held = [digest(found.state), digest(found.shared), found.accuracy, found.before, found.history]
    return {EXACT: [found.method, *held], NEAR: [found.model(1)(inputs()[0][:4]), found.atoms().cosines()]}


RUNS = {"atoms": "c", "weights": "a", "activations": "a"}


@reader
def runs(files: Path) -> Said:
    opened = {what: open_run(files / f"run_{what}") for what in RUNS}
    assert [run.note for run in opened.values()] == [None] * 3
    return {
        EXACT: {what: [run.steps, list(run.sites), _records(run)] for what, run in opened.items()},
        NEAR: {what: said(sosie.dynamics(files / f"run_{what}")) for what in RUNS},
    }


def _records(run: Any) -> list[dict[str, str]]:
    return [digest({site: run.tensor(k, site) for site in run.sites}) for k in range(len(run.steps))]


@reader
def dynamics(files: Path) -> Said:
    one, two = (sosie.load(files / f"{name}.json") for name in ("dynamics", "dynamics_two"))
    return {EXACT: [said(one), one.settled(0.99), one.order(0.99).sites, said(two)]}


# Benchmarks


@reader
def costs(files: Path) -> Said:
    return {EXACT: said(sosie.load(files / "costs.json"))}


TINY = replace(
    SCALES["smoke"], name="tiny", data=("npz:inputs.npz",), train=64, test=64, architectures=((1, 6), (2, 6)), seeds=3,
    epochs=(1, 3), corruptions=("impulse_noise",), calibrated=(1, 6), random=3, converged=2, checkpoints=2,
    converged_epochs=4, numbers=(16,), paired_rows=32, draws=20,
)  # fmt: skip


@reader
def benchmark(files: Path) -> Said:
    """Run again nothing is done again: seconds, too, are those of then."""
    leaderboard = Leaderboard.load(files / "benchmark" / "leaderboard.json")
    again = run_benchmark(["linear_cka", "wcka"], scale=TINY, folder=files / "benchmark")
    return {EXACT: [said(leaderboard), said(again)]}


# Zoos


@reader
def zoo(files: Path) -> Said:
    opened = Zoo(files / "zoo")
    assert opened.check().ok
    answers = {path.stem: sosie.load(path) for path in (files / "answers").iterdir()}
    held = {"list": said(opened.list()), "failed": said(opened.failed()), "plain": said(opened.list(tag="plain"))}
    for row in (*held["list"], *held["plain"]):
        del row["notes"]  # which lists have since
    held |= {name: [found.asked, said(found), found.notes] for name, found in answers.items()}
    return {EXACT: held, NEAR: _asked(opened, files), SINGLE: _with_another(opened)}


@reader
def archive(files: Path) -> Said:
    return {NEAR: _asked(Zoo.import_(files / "zoo.sosiezoo", files / "new"), files)}


def _asked(opened: Zoo, files: Path) -> Said:
    """What is nearest, of each kind; to a fingerprint of then, too."""
    found = {kind: said(opened.search("a", kind=kind)) for kind in ("cka", "weights")}
    return {**found, "atoms": said(opened.search(files / "fingerprint.safetensors", kind="atoms"))}


def _with_another(opened: Zoo) -> list[Any]:
    """What is nearest once a fourth model is there."""
    opened.add(net("d"), name="d")
    return [said(opened.search("c", kind=kind)) for kind in ("cka", "weights", "atoms")]


@reader
def index(files: Path) -> Said:
    pytest.importorskip("faiss")
    opened = Zoo(files / "zoo_indexed")
    found = opened.search("m0", k=3, kind="weights", by="layer", site="l0", index=True)
    return {EXACT: opened.index("weights"), NEAR: [said(found), found.notes]}


# All of them


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_file_of_then_says_what_it_said(kind: str, files: Path) -> None:
    found, wanted = READERS[kind](files), EXPECTED[kind]
    assert found.keys() == wanted.keys()
    for tolerance, value in wanted.items():
        check(plain(found[tolerance]), value, float(tolerance), kind)


def test_every_reader_has_a_file() -> None:
    assert READERS.keys() == EXPECTED.keys()


def test_another_number_is_noticed() -> None:
    check({"a": [1.0]}, {"a": [1.0 + 1e-13]}, 1e-12, "")
    for found in ({"a": [1.0]}, {"a": [1.0 + 1e-11, 2]}, {"a": [None]}, {"b": [1.0 + 1e-11]}):
        with pytest.raises(AssertionError):
            check(found, {"a": [1.0 + 1e-11]}, 1e-12, "")


@pytest.mark.parametrize("what", RUNS)
def test_a_run_of_then_is_recorded_on(what: str, files: Path) -> None:
    model: nn.Module = net(RUNS[what])
    probe = {"data": inputs()[0][:8], "sites": SITES} if what == "activations" else {}
    before = _records(open_run(files / f"run_{what}"))
    with Recorder(files / f"run_{what}", model, what, dtype=torch.float64, **probe) as recorder:
        recorder.record(3)
    run = open_run(files / f"run_{what}")
    assert run.steps == [0, 1, 2, 3]
    assert _records(run)[:3] == before
    for site in run.sites:  # the network that it began with; another processor rounds activations otherwise
        torch.testing.assert_close(run.tensor(3, site), run.tensor(0, site), rtol=1e-12, atol=1e-14)
    assert sosie.dynamics(files / f"run_{what}").settled(0.99).keys() == set(run.sites)


def test_a_benchmark_of_then_takes_another_measure(files: Path) -> None:
    found = run_benchmark("mean_cca", scale=TINY, folder=files / "benchmark")
    before = {row["measure"]: row for row in EXPECTED["benchmark"][EXACT][0]}
    after = {row["measure"]: row for row in said(found)}
    assert after.keys() == before.keys() | {"mean_cca"}
    assert all(after[name] | {"rank": 0} == row | {"rank": 0} for name, row in before.items())
