"""The command line as a user meets it: a process, its output, its exit code, the files it leaves."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import python

import sosie
from sosie.cli import main
from sosie.cli.options import split
from sosie.data import open_images
from sosie.models import open_model
from sosie.train import Recipe, accuracy, fit

MODELS = ["small_cnn(seed=0)", "small_cnn(seed=1)"]


def run(
    *arguments: str, cwd: Path | None = None, script: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    program = ["-m", "sosie"] if script is None else [script]
    return python(*program, *arguments, cwd=cwd, env={**os.environ, "COLUMNS": "100", **environment})


def run_here(*arguments: str, cwd: Path = Path()) -> subprocess.CompletedProcess[str]:
    """The same command line in this process: no start to wait for."""
    words, (out, err) = ["sosie", *arguments], (io.StringIO(), io.StringIO())
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main.run()
    code = ended.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def test_help_and_version() -> None:
    command = [sys.executable, "-m", "sosie"]
    found = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert found.returncode == 0
    assert "compare" in found.stdout
    assert "\x1b[" not in found.stdout, "colours in a pipe"
    assert subprocess.check_output([*command, "--version"], text=True).strip() == f"sosie {sosie.__version__}"


def test_measures() -> None:
    found = run_here("measures")
    assert found.returncode == 0
    assert "debiased_cka" in found.stdout
    facts = json.loads(run_here("measures", "--json").stdout)
    assert {f["name"] for f in facts} == {f["name"] for f in sosie.list_measures()}
    one = run_here("measures", "debiased").stdout
    assert "https://" in one
    assert "linear_cka" not in one.split()
    assert "did you mean 'linear_cka'" in run_here("measures", "linear_ckaa").stderr


def test_sites_shows_labels_and_shapes() -> None:
    found = run_here("sites", "small_cnn")
    assert found.returncode == 0, found.stderr
    assert "conv1" in found.stdout
    assert "16" in found.stdout
    assert "for an input of 1x28x28" in found.stdout
    wrong = run_here("sites", "small_cnn", "--shape", "3xbig", cwd=Path())
    assert wrong.returncode == 1
    assert "3x32x32" in wrong.stderr


def test_compare_and_report(tmp_path: Path) -> None:
    found = run_here(
        "compare", *MODELS, "--data", "demo", "--measures", "debiased_cka,mutual_knn(k=5)", "--sites", "conv*,fc",
        "--max-rows", "128", "--out", "c.json", "--html", "c.html", cwd=tmp_path,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "small_cnn-seed0 and small_cnn-seed1" in " ".join(found.stdout.split())
    assert "\x1b[" not in found.stdout, "colours in a pipe"
    assert found.stderr == "", "progress in a pipe"
    c = sosie.load(tmp_path / "c.json")
    assert c.sites_a == ["conv1", "conv2", "conv3", "conv4", "fc"]
    assert c.measures == ["debiased_cka", "mutual_knn(k=5)"]
    direct = sosie.compare(*MODELS, "demo", max_rows=128, sites_a=["conv*", "fc"], sites_b=["conv*", "fc"])
    np.testing.assert_allclose(c.matrix("debiased_cka"), direct.matrix(), atol=1e-6)
    assert "<html" in (tmp_path / "c.html").read_text("utf-8")
    again = run("report", "c.json", "--html", "again.html", "--plot", "p.svg", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "p-debiased_cka-heatmap.svg").exists()
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "c.html").read_bytes()


def test_groups_of_inputs(tmp_path: Path) -> None:
    clips = [f"clip {k * k % 23}" for k in range(64)]
    (tmp_path / "clips.txt").write_text("\n".join(clips) + "\n", "utf-8")
    found = run_here(
        "compare", *MODELS, "--data", "demo", "--measures", "predictivity(folds=4)", "--sites", "fc",
        "--max-rows", "64", "--groups", "clips.txt", "--out", "c.json", cwd=tmp_path,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "inputs come in groups" in found.stdout
    direct = sosie.compare(*MODELS, "demo", measures="predictivity(folds=4)", sites="fc", max_rows=64, groups=clips)
    np.testing.assert_array_equal(sosie.load(tmp_path / "c.json").matrix(), direct.matrix())


def test_a_users_own_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def net():\n    return torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))\n"
        "def batches():\n    return [torch.randn(50, 8, generator=torch.Generator().manual_seed(0))]\n"
    )
    found = run_here(
        "compare", "mine.py:net", "mine.py:net", "--data", "mine.py:batches", "--out", "c.json", cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert sosie.load(tmp_path / "c.json").matrix().shape == (3, 3)


def test_several_models_and_saved_statistics(tmp_path: Path) -> None:
    found = run_here("compare", *MODELS, "small_cnn(seed=2)", "--data", "demo", "--max-rows", "64", "--sites", "fc",
                "--out", "all.json", "--html", "all.html", cwd=tmp_path)  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert len(sosie.load(tmp_path / "all.json")) == 3
    saved = ["--data", "demo", "--max-rows", "64", "--sites", "fc", "--resume", "s.safetensors"]
    part = run_here("compare", *MODELS, *saved, cwd=tmp_path)
    assert part.returncode == 0, part.stderr
    merged = run_here("compare", "s.safetensors", "--out", "m.json", cwd=tmp_path)
    assert merged.returncode == 0, merged.stderr
    assert sosie.load(tmp_path / "m.json")["debiased_cka"].n == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "small_cn", "small_cnn", "--data", "demo"], "small_cnn"),
        (["compare", *MODELS, "--data", "dem"], "demo"),
        (["compare", *MODELS], "needs data"),
        (["compare", *MODELS, "--data", "demo", "--measures", "linear_ck"], "did you mean linear_cka"),
        (["compare", *MODELS, "--data", "demo", "--sites", "conv9"], "did you mean"),
        (["compare", *MODELS, "--data", "demo", "--rows", "middle"], "there are flatten"),
        (["compare", "small_cnn@none.safetensors", "small_cnn", "--data", "demo"], "none.safetensors"),
        (["report", "none.json"], "none.json"),
        (["compare", "a.npz", "b.npz"], "no file a.npz"),
        (["compare", *MODELS, "--data", "demo", "--out", "."], "is a folder"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    found = (
        run_here(*arguments, "--max-rows", "64", cwd=tmp_path)
        if arguments[0] == "compare"
        else run_here(*arguments, cwd=tmp_path)
    )
    assert found.returncode == 1
    assert found.stderr.startswith("error: ")
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_traceback_on_request() -> None:
    assert run_here("report", "none.json").stderr.startswith("error: ")
    assert "Traceback" in run("report", "none.json", SOSIE_DEBUG="1").stderr


def test_a_model_that_raises_is_told_with_where(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import torch\nclass Bad(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = torch.nn.Linear(784, 2)\n"
        "    def forward(self, x):\n        raise ZeroDivisionError('by my model')\n"
    )
    found = run_here("compare", "bad.py:Bad", "small_cnn", "--data", "demo", cwd=tmp_path)
    assert found.returncode == 1
    assert "ZeroDivisionError: by my model" in found.stderr
    assert "while running bad:Bad on inputs 60 to 63" in found.stderr


def test_a_weights_file_that_is_a_pickle_is_refused(tmp_path: Path) -> None:
    import pickle

    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    (tmp_path / "w.pt").write_bytes(pickle.dumps(Evil()))
    found = run_here("compare", "small_cnn@w.pt", "small_cnn", "--data", "demo", cwd=tmp_path)
    assert found.returncode == 1
    assert not marker.exists(), "the pickle ran"
    assert "error: " in found.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ")
def test_interruption_exits_cleanly_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time, torch\ndef batches():\n"
        "    for k in range(1000):\n        open('started', 'w').close()\n        time.sleep(0.05)\n"
        "        yield torch.rand(16, 1, 28, 28)\n"
    )
    files = ["--out", "c.json", "--html", "c.html"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sosie", "compare", *MODELS, "--data", "slow.py:batches", *files],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted; no file is left half-written" in errors
    assert "Traceback" not in errors
    assert {p.name for p in tmp_path.iterdir()} - {"__pycache__"} == {"slow.py", "started"}


def test_the_demo_says_and_keeps_what_its_networks_give(tmp_path: Path) -> None:
    # Of fewer images: most of the time goes into comparing 12 × 12 layers on 1,000.
    (tmp_path / "fewer.py").write_text(
        "import functools\nimport sosie.data\nfrom sosie.cli.main import run\n"
        "sosie.data.open_images = functools.partial(sosie.data.open_images, max_rows=200)\nrun()\n"
    )
    done = run("demo", "--epochs", "1", "--out", "tried.html", cwd=tmp_path, script="fewer.py")
    assert done.returncode == 0, done.stderr
    assert "the same 200 images" in done.stdout
    for name in ("tried.html", "tried-stitched.html"):
        assert "<html" in (tmp_path / name).read_text("utf-8")
    train, test = (open_images("demo", split=split, max_rows=200) for split in ("train", "test"))
    networks = []
    for letter, seed in (("a", 0), ("b", 1)):
        networks.append(open_model(f"small_cnn@{tmp_path / f'tried-{letter}.safetensors'}").model)
        assert f"small_cnn-seed{seed}: {accuracy(networks[-1], *test.read(0, 200)):.1%} of 200" in done.stdout
        again = fit(open_model(f"small_cnn(seed={seed})").model, *train.read(0, 200), recipe=Recipe(1), seed=seed)
        for name, weight in again.state_dict().items():  # all of it can be repeated
            assert torch.equal(weight, networks[-1].state_dict()[name]), name
    kept = sosie.load(tmp_path / "tried.json")
    last = sosie.compare(*networks, test.batches(250), measures=kept.measures, sites_a=kept.sites_a[-1:])
    for name in kept.measures:
        np.testing.assert_allclose(last.matrix(name), kept.matrix(name)[-1:], rtol=0, atol=1e-6)


def test_lists() -> None:
    assert split("a, b(k=1,l=[2,3]),c") == ["a", "b(k=1,l=[2,3])", "c"]
    assert split("a[1,2],b") == ["a[1,2]", "b"]
    assert split(None) is None
    with pytest.raises(ValueError, match="empty list"):
        split(" , ")


@pytest.mark.skipif(
    not hasattr(torch.distributed.ProcessGroup, "get_group_store"), reason="not shared with a torch this old"
)
def test_several_processes_of_torchrun_write_one_result(tmp_path: Path) -> None:
    compare = ["compare", *MODELS, "--data", "demo", "--max-rows", "300", "--batch", "64"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sosie"]
    found = python(*launch, *compare, "--out", "two.json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("wrote two.json") == 1
    assert run_here(*compare, "--out", "one.json", cwd=tmp_path).returncode == 0
    one, two = (sosie.load(tmp_path / f"{count}.json") for count in ("one", "two"))
    assert two.provenance["processes"] == 2
    np.testing.assert_allclose(two.values["debiased_cka"].value, one.values["debiased_cka"].value, rtol=0, atol=1e-12)


def test_what_was_meant_is_named(tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"")
    for name in ("bert", "bert/model.safetensors"):
        found = run_here("sites", name, cwd=tmp_path)
        assert "a folder of transformers is hf:bert" in found.stderr
    found = run_here("dynamics", "bert", "bert", cwd=tmp_path)
    assert "bert is not a recorded run: it has no run.json; a checkpoint of transformers is hf:bert" in found.stderr
    found = run_here("compare", *MODELS, cwd=tmp_path)
    assert "needs data: compare(model_a, model_b, data); --data on the command line" in found.stderr


@pytest.mark.parametrize(
    ("option", "file", "right"),
    [("--html", "x.svg", "--plot"), ("--html", "x.json", "--out"), ("--out", "x.html", "--html")],
)
def test_a_file_that_another_option_writes_is_refused(tmp_path: Path, option: str, file: str, right: str) -> None:
    found = run_here("weights", *MODELS, option, file, cwd=tmp_path)
    assert found.returncode == 2
    assert right in found.stderr
    assert not any(tmp_path.iterdir())
