"""The experiments of the gradients paper run, on a handful of images; what is written down of them fits together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paper_scripts import PAPERS, draw, pack, run

PAPER = PAPERS / "gradients"
START = f"import sys; sys.path[:0] = [{str(PAPER)!r}, {str(PAPERS)!r}]\n"


def test_an_experiment_runs_and_can_be_drawn(tmp_path: Path) -> None:
    pack(tmp_path, "cifar10", (32, 32, 3))
    results = tmp_path / "results"
    options = ("--small", "--device", "cpu", "--results", str(results), "--only", "bounds")
    run(PAPER / "run.py", *options, SOSIE_DATA=str(tmp_path))
    found = json.loads((results / "bounds.json").read_text())
    assert found["numbers"]["equation_39_held"] == 1  # nothing is dropped in it
    verdicts = {each["name"]: each["outcome"] for each in json.loads((results / "verdicts.json").read_text())}
    assert verdicts["equation-39-additive"] == "reproduced"
    assert verdicts["figure-1-both-first"] == "not run"
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert draw(PAPER, results) == {"bounds"}


def test_the_three_desiderata_are_counted() -> None:
    code = START + (
        "import json, run as d\n"
        "at = lambda value: {'mean': value, 'chance': 0.5}\n"
        "pairs = {'cifar10-cifar10': .9, 'cifar100-cifar100': .8, 'mnist-mnist': .95,\n"
        "         'cifar10-cifar100': .7, 'cifar10-mnist': .6, 'cifar100-mnist': .5}\n"
        "good = {p: {'s': at(v), 't': at(v)} for p, v in pairs.items()}\n"
        "good['cifar100-cifar100']['t'] = at(.65)\n"  # below a pair of different data sets
        "print(json.dumps(d.desiderata(good)))"
    )
    found = json.loads(run("-c", code))
    assert (found["first_at"], found["second_at"], found["third_at"], found["all_at"]) == (1, 2, 2, 1)
    assert found["strangers_farthest_from_chance"] == pytest.approx(0.2)
    assert found["strangers_above_chance"] == pytest.approx(0.1)


def test_algorithm_1_is_sosies_scores_where_nothing_is_sketched(tmp_path: Path) -> None:
    """And from sketches it is the sums over the product of S F Fᵀ Sᵀ and S G Gᵀ Sᵀ."""
    code = START + (
        "import sosie, torch; from run import NORM_KERNELS as KERNELS, SCORES, both_ways\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        "model = nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4))\n"
        "data = [(torch.randn(20, 3, 2, 2), torch.arange(20) % 4) for _ in range(2)]\n"
        "made = lambda size: sosie.sketch(model, data, sites=['1', '2'], size=size, kernels=KERNELS)\n"
        "exact = both_ways(lambda: made(None))\n"
        "for score in SCORES:\n"
        "    torch.testing.assert_close(*(torch.tensor(exact[way][score]) for way in ('ours', 'algorithm_1')))\n"
        "few = made(8)\n"
        "f, g = few.site('2').features.rows.double(), few.site('2').gradients.rows.double()\n"
        "kernel = (f @ f.T) * (g @ g.T)\n"
        "found = both_ways(lambda: few)['algorithm_1']\n"
        "assert abs(found['mean_embedding'][1] - float(kernel.mean().sqrt()) * 8 / 40) < 1e-9\n"
        "assert abs(found['kernel_trace'][1] - float(kernel.trace().sqrt()) / 40) < 1e-9\n"
        "assert abs(found['mean_over_norm'][1] * float(kernel.norm()) - float(kernel.sum().sqrt()) * 40) < 1e-9\n"
        "print('alike')"
    )
    assert run("-c", code).strip() == "alike"
