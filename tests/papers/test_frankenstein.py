"""Every experiment of the stitching paper runs, on a handful of images; and its figures can be drawn."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from forked import python
from paper_scripts import PAPERS, draw, experiments_of, load, run, small_run, smoke

from sosie.data import open_images
from sosie.factory import find_file

PAPER = PAPERS / "frankenstein"
WEIGHTS = (
    "drfrankenstein-tiny10-cifar10-seed00.safetensors",
    "drfrankenstein-resnet20w1-cifar10-seed00.safetensors",
    "akamaster-resnet56-cifar10.safetensors",
)


@pytest.fixture
def needed() -> None:
    try:
        for name in ("cifar10", "cifar100", "fashion-mnist"):
            open_images(name, split="train", max_rows=1)
        for name in WEIGHTS:
            find_file(name, "SOSIE_WEIGHTS")
    except FileNotFoundError as error:
        pytest.skip(f"the paper's data or weights are not at hand: {error}")


@pytest.mark.usefixtures("needed")
def test_the_smoke_run(tmp_path: Path) -> None:
    results = tmp_path / "results"
    verdicts = smoke(PAPER, results)
    numbers = json.loads((results / "figure-2.json").read_text())["numbers"]
    # The widest of facts, which hold even here: unmatched joints are useless, matched ones are not.
    assert numbers["tiny10_unstitched_cross_entropy"] > 3
    assert numbers["tiny10_task_loss_mean"] > 0.6
    told = small_run(PAPER, results, "--resume", "--only", "figure-2,figure-4")
    assert "figure-2: kept" in told
    (results / "figure-2-ten.json").unlink()
    again = small_run(PAPER, results, "--only", "figure-2-ten")  # each pair was kept
    assert "stitch-resnet20-ten-sgd0-to-sgd1: kept" in again
    assert "cka-resnet20-ten-sgd1-to-sgd0: kept" in again
    assert all(f"{name} " in told for name in verdicts)
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert draw(PAPER, results) == experiments_of(verdicts) - {"baseline-cka"}  # which is numbers alone


def test_a_network_without_batch_norms_starts_as_the_shortcuts_alone() -> None:
    """And keeps its names, so that it is cut at the same sites."""
    code = (
        f"import sys; sys.path[:0] = [{str(PAPER)!r}, {str(PAPERS)!r}]\n"
        "import torch; from torch import nn; from networks import remove_batch_norms\n"
        "from sosie.models import open_model\n"
        "model = open_model(\"resnet20(shortcut='B', seed=1)\").model.train()\n"
        "names = [name for name, _ in model.named_modules()]\n"
        "remove_batch_norms(model)\n"
        "assert [name for name, _ in model.named_modules()] == names\n"
        "assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())\n"
        "x = torch.randn(8, 3, 32, 32)\n"
        "torch.testing.assert_close(model(x)[:2], model(x[:2]))\n"  # an image does not see the others
        "stem = torch.relu(model.conv1(x))\n"
        "torch.testing.assert_close(model.layer1(stem), stem)\n"
        "model(x).sum().backward()\n"
        "print(all(p.grad is not None for p in model.parameters()))"
    )
    assert run("-c", code).strip() == "True"


def test_an_unknown_experiment_is_refused() -> None:
    done = python(PAPER / "run.py", "--only", "figure-9")
    assert done.returncode == 2
    assert "no experiment figure-9; there are figure-2" in done.stderr


def test_with_many_pairs_a_pair_is_a_unit() -> None:
    """Layers of one pair are no independent measurements: with three pairs and more they count once together."""
    intervals = load(PAPER, "intervals")

    def sites(drop: float) -> dict[str, Any]:
        curve = [[0.0, 0.9], [0.8, 0.9 - drop], [0.9, 0.9 - drop]]
        return {site: {"direct": curve, "task_loss": [[0.0, 0.9], [0.9, 0.9]]} for site in ("bn3", "bn5")}

    found = intervals.figure_8([sites(drop) for drop in (0.2, 0.3, 0.4)])["figure-8/direct_drop_at_85_percent"]
    assert found.of == "3 pairs of networks"
    assert (found.low + found.high) / 2 == pytest.approx(0.3)
    assert found.high - 0.3 == pytest.approx(4.303 * 0.1 / 3**0.5, abs=1e-3)
    few = intervals.figure_8([sites(0.2)])["figure-8/direct_drop_at_85_percent"]
    assert few.of == "2 layers of one pair"


def test_lines_between_the_same_maps_are_not_independent() -> None:
    """Every line from one odd map falls: ten lines of five maps say little more than five maps do."""
    ends = list(combinations(range(5), 2))
    lines = [[1.0, 0.5 if 0 in pair else 1.0, 1.0] for pair in ends]
    found = load(PAPER, "intervals").modes({"bn1": {"lines": lines, "fall": 0.2, "kept": 5}})
    interval = found["mode-connectivity/smallest_fall_early"]
    assert interval.of == "5 maps at bn1, left out one by one"
    assert (interval.low, interval.high) == pytest.approx((0.2 - 2.776 * 0.2, 0.2 + 2.776 * 0.2), abs=1e-3)
