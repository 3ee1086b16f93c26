"""The networks of the gradients paper are trained from a script, kept, and found again; on a handful of images."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import python
from paper_scripts import pack
from torch.nn import functional

from sosie.data import open_images
from sosie.models import open_model, parse_normalisation
from sosie.train import accuracy

PAPER = Path(__file__).resolve().parents[2] / "papers" / "gradients"
DATA_SETS = runpy.run_path(str(PAPER / "train.py"))["DATA_SETS"]


def train(data: Path, results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (PAPER / "train.py", "--small", "--device", "cpu", "--results", results)
    return python(*command, *arguments, env={**os.environ, "SOSIE_DATA": str(data)})


def test_a_network_is_trained_once_and_opens_as_it_was_tested(tmp_path: Path) -> None:
    pack(tmp_path, "mnist", (28, 28))
    results = tmp_path / "results"
    done = train(tmp_path, results, "--only", "mnist,resnet18")
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((results / "networks.json").read_text())
    [row] = written["networks"]
    assert (row["dataset"], row["architecture"], row["seed"]) == ("mnist", "resnet18", 0)
    assert (row["trained_on"], row["recipe"]["epochs"]) == ("16 images of mnist-train1k", 1)
    assert written["numbers"] == {"mnist_resnet18_accuracy": row["accuracy"]}

    # The file alone says what the network is: its stem, its classes, its normalisation.
    path = results / "nets" / row["file"]
    found = open_model(f"resnet18@{path}")
    assert found.prepare == parse_normalisation(DATA_SETS["mnist"].normalise)
    packed = np.load(tmp_path / "mnist-test1k.npz")
    images = functional.pad(torch.from_numpy(packed["images"][:16])[:, None], [2, 2, 2, 2]).repeat(1, 3, 1, 1)
    labels = torch.from_numpy(packed["labels"][:16])
    assert accuracy(found.model, images, labels, prepare=found.prepare) == row["accuracy"]
    untrained = open_model("resnet18(classes=10, stem='cifar', seed=0)").model
    moved = [
        not torch.equal(now, before)
        for now, before in zip(found.model.parameters(), untrained.parameters(), strict=True)
    ]
    assert all(moved)

    stamp = path.stat().st_mtime_ns
    (results / "networks.json").unlink()
    again = train(tmp_path / "no-images", results, "--only", "mnist,resnet18")  # none are needed any more
    assert again.returncode == 0, again.stdout + again.stderr
    assert path.stat().st_mtime_ns == stamp
    assert json.loads((results / "networks.json").read_text()) == written


def test_side_by_side_one_that_fails_leaves_the_others(tmp_path: Path) -> None:
    pack(tmp_path, "cifar10", (32, 32, 3))
    done = train(tmp_path, tmp_path / "results", "--only", "cifar10,cifar100,resnet18", "--workers", "2")
    assert done.returncode == 1
    assert "failed: cifar100 resnet18 0" in done.stderr
    assert "cifar100 (train) was not found" in done.stdout
    rows = json.loads((tmp_path / "results" / "networks.json").read_text())["networks"]
    assert [row["dataset"] for row in rows] == ["cifar10"]


def test_training_normalises_as_the_opened_network_does() -> None:
    networks = runpy.run_path(str(PAPER / "train.py"))
    normalise = parse_normalisation(DATA_SETS["cifar100"].normalise)
    assert normalise is not None
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(networks["_resident"](normalise, "cpu")(x), normalise(x))


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    done = train(tmp_path, tmp_path, "--only", "svhn")
    assert done.returncode == 2
    assert "nothing is called svhn; there are cifar10" in done.stderr


@pytest.mark.parametrize("name", list(DATA_SETS))
def test_the_normalisation_is_that_of_the_images(name: str) -> None:
    try:
        images = open_images(name, split="train").images
    except FileNotFoundError as error:
        pytest.skip(f"the images are not at hand: {error}")
    border = 2 if images.shape[1] == 1 else 0
    x = functional.pad(images, [border] * 4).transpose(0, 1).flatten(1)
    normalise = parse_normalisation(DATA_SETS[name].normalise)
    assert normalise is not None
    means = torch.stack([row.double().mean() / 255 for row in x]).tolist()
    assert normalise.mean == pytest.approx(means * (3 // len(means)), abs=0.003)
    if name != "cifar10":  # where the public code's are smaller than the pixels' own
        deviations = torch.stack([row.double().std() / 255 for row in x]).tolist()
        assert normalise.std == pytest.approx(deviations * (3 // len(means)), abs=0.003)
