"""The zoo whose relations are known: every experiment runs, on a handful of images; what it counts is right."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from paper_scripts import PAPERS, draw, experiments_of, load, run, small_run, smoke

PAPER = PAPERS / "zoo"
START = f"import sys; sys.path[:0] = [{str(PAPER)!r}, {str(PAPERS)!r}]\nfrom pathlib import Path\nimport torch\n"
FULL = "from run import Settings, small; from networks import *\ns = Settings('cpu', Path(), Path())\n"


def test_the_smoke_run(tmp_path: Path) -> None:
    verdicts = smoke(PAPER, tmp_path)
    manifest = json.loads((tmp_path / "nets" / "manifest.json").read_text())
    assert len(manifest) == len(list((tmp_path / "nets").glob("*.safetensors"))) == 30
    wanted = "name file architecture options dataset seed parent relation accuracy seconds"
    assert set(wanted.split()) <= set(manifest[0])
    # A copy rounded to 8 bits is found whatever was learnt, and so is a network that was hardly trained on.
    found = json.loads((tmp_path / "relatives.json").read_text())
    assert found["nearest"]["rounded"]["weights"]["parent"]["share"] == 1
    assert found["nearest"]["fine_tuned"]["atoms"]["family"]["share"] == 1
    # Coefficients that were rounded are not those of others any more: by atoms nobody can be compared.
    assert found["nearest"]["rounded"]["atoms"]["silent"] == found["models"]["rounded"]
    assert found["models"] == {"scratch": 12, "fine_tuned": 12, "trained_on": 2, "pruned": 2, "rounded": 2}
    # What is there stays: nothing is trained again, and results are kept.
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "nets").glob("*.safetensors")}
    assert "relatives: kept" in small_run(PAPER, tmp_path, "--resume", "--only", "relatives")
    small_run(PAPER, tmp_path, "--only", "train")
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "nets").glob("*.safetensors")}
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert draw(PAPER, tmp_path) == experiments_of(verdicts)


def test_the_networks_are_those_of_the_plan() -> None:
    code = START + FULL + (
        "jobs = all_jobs(s); by = {job.name: job for job in jobs}\n"
        "assert len(by) == len(jobs) == 200\n"
        "assert (len(scratch_jobs(s)), len(fine_tuned_jobs(s)), len(copy_jobs(s))) == (80, 80, 40)\n"
        "assert len({job.start for job in jobs}) == 200  # nobody starts as another does\n"
        "for job in fine_tuned_jobs(s): assert job.dataset != by[job.parent].dataset\n"
        "for job in copy_jobs(s): assert job.dataset == by[job.parent].dataset\n"
        "kinds = [sum(job.relation == kind for job in jobs) for kind in COPIES]\n"
        "assert max(kinds) - min(kinds) <= 1, kinds\n"
        "classes = {source.name: source.classes for source in s.sources}\n"
        "for job in scratch_jobs(s):\n"
        "    model = fresh(s, architecture_of(s, job), classes[job.dataset], 0)\n"
        "    assert sum(p.numel() for p in model.parameters()) <= 90_000, job\n"
        "for target in s.targets:  # nobody was trained on their classes\n"
        "    assert target.inverted or min(target.classes) >= classes[target.dataset], target\n"
        "print('as planned')"
    )  # fmt: skip
    assert run("-c", code).strip() == "as planned"


def test_children_are_their_parents_but_for_what_was_changed(tmp_path: Path) -> None:
    code = START + FULL + (
        f"s = small(Settings('cpu', Path(), Path({str(tmp_path)!r}))); a, r = (each for each in s.architectures)\n"
        "for job in scratch_jobs(s):\n"
        "    if job.dataset == 'mnist': write(s, job, fresh(s, architecture_of(s, job), 3, job.start), {}, None)\n"
        "first, second = (job for job in scratch_jobs(s) if job.dataset == 'mnist' and job.architecture == 'atoms')\n"
        "one, two = read(s, first), read(s, second)\n"
        "assert torch.equal(one.conv1.coefficients, two.conv1.coefficients)  # shared\n"
        "assert not torch.equal(one.conv1.atoms, two.conv1.atoms)\n"
        "child = with_new_head(s, first, 5, 7)\n"
        "assert child.fc.weight.shape[0] == 5 and not child.conv1.coefficients.requires_grad\n"
        "assert all(torch.equal(v, child.state_dict()[k]) for k, v in one.state_dict().items() if k[:3] != 'fc.')\n"
        "half = pruned(read(s, first))\n"
        "share = (half.fc.weight == 0).float().mean()\n"
        "assert .5 <= share < .51, share\n"
        "kept = half.fc.weight != 0\n"
        "assert torch.equal(half.fc.weight[kept], one.fc.weight[kept])\n"
        "assert one.fc.weight[kept].abs().min() >= one.fc.weight[~kept].abs().max()  # the smallest are gone\n"
        "near = rounded(read(s, first)); step = one.fc.weight.abs().max() / 127\n"
        "apart = (near.fc.weight - one.fc.weight).abs().max()\n"
        "assert 0 < apart <= step * .5001 and len(near.fc.weight.unique()) <= 255\n"
        "print('as they should be')"
    )  # fmt: skip
    assert run("-c", code).strip() == "as they should be"


def test_a_question_is_counted_by_hand() -> None:
    """Three networks from scratch and a child: who is asked, who could answer, and what chance gives."""
    code = START + (
        "import run as relatives; from run import Known\n"
        "def of(name, architecture, data, relation='scratch', parent=None):\n"
        "    return Known(name, architecture, data, relation, parent, '')\n"
        "some = [of('a', 'cnn', 'x'), of('b', 'cnn', 'x'), of('c', 'net', 'x')]\n"
        "some.append(of('a-y', 'cnn', 'y', 'fine_tuned', 'a'))\n"
        "networks = {each.name: each for each in some}\n"
        "kinds = {name: {'cka'} for name in networks}; kinds['c'] = {'weights'}\n"
        "answers = {'a': 'b', 'b': 'a', 'a-y': 'a'}\n"
        "def ask(question): return relatives._asked(\n"
        "    lambda name, way, among: answers[name], networks, kinds, {'a', None}, question, 'cka')\n"
        "child = ask('fine_tuned')\n"
        "assert child['parent']['n'] == 1 and child['parent']['share'] == 1 and child['parent']['chance'] == 1 / 2\n"
        "assert child['family']['share'] == 1 and child['data']['share'] == 0\n"
        "seeds = ask('scratch')  # c has no such vectors, so that a has only b, and b only a\n"
        "assert seeds['silent'] == 1 and seeds['seed']['n'] == 2 and seeds['seed']['chance'] == 1\n"
        "parents = ask('parents')\n"
        "assert parents['family'] == {**parents['family'], 'n': 1, 'share': 0, 'chance': 1 / 2}\n"
        "rows = [dict(relation='fine_tuned', orphan=False, parent=p, family=f, score=v) for p, f, v in\n"
        "        ((True, True, .9), (False, True, .8), (False, False, .7))]\n"
        "none = [dict(relation='scratch', orphan=True, parent=False, family=False, score=v) for v in (.75, .1)]\n"
        "judged = relatives._judged(rows, none, 'score', .7)\n"
        "assert judged == {'threshold': .7, 'orphans_named': .5, 'parent_precision': 1 / 4, 'parent_recall': 1 / 3,\n"
        "                  'family_precision': 2 / 4, 'family_recall': 2 / 3}, judged\n"
        "assert relatives._best_threshold(rows, none, 'score') == .8\n"
        "print('right')"
    )  # fmt: skip
    assert run("-c", code).strip() == "right"


def test_shares_have_the_interval_of_the_tables() -> None:
    """Newcombe (1998), table I: 81 of 263 by Wilson's score method."""
    found = load(PAPER, "counting").share([True] * 81 + [False] * 182, [0.25] * 263)
    assert (found["low"], found["high"]) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert found["chance"] == 0.25
    assert load(PAPER, "counting").share([], [])["share"] is None


def test_scores_tell_apart_as_scikit_learn_says() -> None:
    counting = load(PAPER, "counting")
    metrics = pytest.importorskip("sklearn.metrics", reason="held against scikit-learn")
    random = np.random.default_rng(0)
    for _ in range(5):
        truth = (random.integers(0, 4, 30) > 1).tolist()
        scores = random.integers(0, 9, 30).tolist()
        sides = [[score for score, is_one in zip(scores, truth, strict=True) if is_one == which] for which in (1, 0)]
        assert counting.auroc(*sides) == pytest.approx(metrics.roc_auc_score(truth, scores), abs=1e-12)


def test_drawing_at_random_is_what_all_draws_give() -> None:
    counting = load(PAPER, "counting")
    values = [0.3, 0.9, 0.5, 0.5, 0.1]
    for drawn in (1, 2, 5):
        every = [max(some) for some in itertools.combinations(values, drawn)]
        assert counting.random_best(values, drawn) == pytest.approx(np.mean(every), abs=1e-12)
    with pytest.raises(ValueError, match="6 drawn of 5"):
        counting.random_best(values, 6)


def test_ranks_are_those_of_scipy_and_the_interval_covers() -> None:
    from scipy import stats

    counting = load(PAPER, "counting")
    random = np.random.default_rng(1)
    x = random.normal(size=80)
    y = np.round(x + random.normal(size=80), 1)  # with ties
    assert counting.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert counting.kendall(x, y) == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-12)
    assert counting.spearman([1, 1, 1], [1, 2, 3]) is None
    low, high = counting.bootstrapped([(x, y)], 500, seed=0)
    assert low < counting.spearman(x, y) < high
    assert low > 0
    # Fisher's interval of a correlation of that size is about as wide.
    fisher = np.tanh(np.arctanh(counting.spearman(x, y)) + np.array([-1.96, 1.96]) / np.sqrt(77))
    assert high - low == pytest.approx(fisher[1] - fisher[0], rel=0.4)


def test_regret_is_counted_by_hand() -> None:
    regret = load(PAPER, "counting").regret
    truth, score = np.array([0.5, 0.9, 0.7]), np.array([3.0, 1.0, 2.0])
    assert regret(truth, score, 1) == pytest.approx(0.4)
    assert regret(truth, score, 2) == pytest.approx(0.2)
    assert regret(truth, score, 3) == 0
