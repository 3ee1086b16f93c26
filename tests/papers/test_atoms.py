"""Every experiment of the atoms paper runs, on a handful of images; what is written down of it fits together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paper_scripts import PAPERS, draw, experiments_of, run, small_run, smoke

PAPER = PAPERS / "atoms"
COUNT = 300  # images of each set: three of each of 100 classes


def pack(folder: Path) -> None:
    """Random images under the names that the study asks for."""
    random = np.random.default_rng(0)
    for name, classes, shape in (("cifar100", 100, (32, 32, 3)), ("cifar10", 10, (32, 32, 3)), ("mnist", 10, (28, 28))):
        for split in ("train", "test"):
            images = random.integers(0, 256, (COUNT, *shape), dtype=np.uint8)
            np.savez(folder / f"{name}-{split}1k.npz", images=images, labels=np.arange(COUNT) % classes)
    np.savez(folder / "tiny-imagenet-32.npz", images=random.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8))


def test_the_smoke_run(tmp_path: Path) -> None:
    pack(tmp_path)
    results = tmp_path / "results"
    verdicts = smoke(PAPER, results, SOSIE_DATA=str(tmp_path))
    # Proposition 1 is a theorem, and atoms of other starts have nothing in common however they are trained.
    assert verdicts["figure-4a-bound"]["outcome"] == "reproduced"
    assert verdicts["figure-9a-untrained"]["outcome"] == "reproduced"
    kept = small_run(PAPER, results, "--resume", "--only", "figure-4a", SOSIE_DATA=str(tmp_path))
    assert "figure-4a: kept" in kept
    again = small_run(
        PAPER,
        results,
        "--only",
        "table-1,table-3,figure-2-seeds,figure-4-table-long,figure-9a",
        SOSIE_DATA=str(tmp_path),
    )
    parts = ("table-1-pretrain-seed0", "table-3-cifar100_20-local", "figure-2-six-seed1", "figure-4-table-long-learnt")
    parts = (*parts, "figure-2-seed1", "figure-9a-seed1")
    for part in parts:  # what is done is not run again
        assert f"{part}: kept" in again
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    more = {"table-1-short", "figure-2-seeds", "figure-4-table-long"}
    assert draw(PAPER, results) == experiments_of(verdicts) | more


def test_all_pairs_at_once_are_what_sosie_measures_pair_by_pair() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PAPER)!r})\n"
        "import torch, sosie; from networks import Site, BANDWIDTH\n"
        "torch.manual_seed(0); x = torch.randn(3, 40, 6); x[1] = x[0] + 0.3 * x[1]; x[2, :, 5] = 0\n"
        "centred = (x - x.mean(1, keepdim=True)).double(); site = Site(x, centred @ centred.mT)\n"
        "for name in ('cca', 'linear_cka', 'debiased_cka', 'rbf_cka'):\n"
        "    ours = site.measured(name)\n"
        "    for i, j in ((0, 1), (1, 2)):\n"
        "        theirs = sosie.measure('cca_r2' if name == 'cca' else name, x[i].double(), x[j].double())\n"
        "        theirs = theirs**0.5 if name == 'cca' else theirs\n"
        "        assert abs(float(ours[i, j]) - theirs) < 1e-6, (name, i, j, float(ours[i, j]), theirs)\n"
        "    assert abs(float(ours[0, 0]) - 1) < 1e-9\n"
        "print('alike')"
    )
    assert run("-c", code).strip() == "alike"


LEARNT = f"""
import sys; sys.path[:0] = [{str(PAPER)!r}, {str(PAPERS)!r}]
from dataclasses import replace
from pathlib import Path
import torch
from run import Settings, small
import federated
from sosie.train.federated.simulation import Server
settings = small(Settings('cpu', Path('r'), Path('c')))
torch.set_num_threads(1)
"""


def test_coefficients_of_another_set_get_a_head_of_their_own(tmp_path: Path) -> None:
    """A head that was trained on ten of its hundred classes would start clients at a loss far above chance."""
    pack(tmp_path)
    code = LEARNT + (
        "trained, fresh = federated.pretrained(settings, 3), federated.make(settings, 'small_cnn', 100, 9, 3)\n"
        "for name, x in fresh.state_dict().items():\n"
        "    same = torch.equal(x, trained.state_dict()[name])\n"
        "    assert same == name.startswith('fc.'), (name, same)\n"
        "print(trained.fc.out_features, {p.requires_grad for n, p in trained.named_parameters() if 'coeff' in n})"
    )
    assert run("-c", code, SOSIE_DATA=str(tmp_path)).strip() == "100 {False}"


def test_every_client_that_meets_nobody_trains_as_long_as_others_do_on_average(tmp_path: Path) -> None:
    pack(tmp_path)
    code = LEARNT + (
        "few = replace(settings.federation, rounds=10, share=0.2, epochs=3)\n"
        "settings = replace(settings, federation=few)\n"
        "clients = federated.clients_of(settings, 'cifar100', 5, 0)\n"
        "train = Server.train\n"
        "def count(self, phase, who, own, when, own_epochs=None):\n"
        "    epochs[who] += self.recipe.epochs if own_epochs is None else own_epochs\n"
        "    return train(self, phase, who, own, when, own_epochs)\n"
        "Server.train = count\n"
        "for method in ('local', 'pretrain', 'fedavg'):\n"
        "    epochs = torch.zeros(len(clients))\n"
        "    federated.learn(settings, clients, 'cifar100', method, 0)\n"
        "    print(int(epochs.min()), int(epochs.max()), float(epochs.mean()))\n"
    )
    *alone, together = run("-c", code, SOSIE_DATA=str(tmp_path)).splitlines()
    assert alone == ["9 9 9.0"] * 2  # 10 rounds of a fifth of the clients, 3 epochs each, and 3 at the end
    assert together.endswith(" 9.0")
    assert not together.startswith("9 9")


def test_a_site_follows_every_layer_of_atoms() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PAPER)!r})\n"
        "from pathlib import Path; from networks import make, sites_of; from run import Settings\n"
        "s = Settings('cpu', Path('r'), Path('c'))\n"
        "print(len(sites_of(make(s, 'alexnet', 10, 6, 0))), len(sites_of(make(s, 'vgg11', 10, 6, 0))))"
    )
    assert run("-c", code).strip() == "5 8"


def test_every_result_has_its_figure() -> None:
    results = {path.stem for path in (PAPER / "results").glob("*.json")} - {"verdicts"}
    assert results == {path.stem for path in (PAPER / "results").glob("*.svg")}
