"""Outputs compared under shifts: the sites are the shifts, and every cell is what it says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sosie
from sosie.data import attack, corrupt
from sosie.data.shifts import open_shifts
from sosie.report import print_comparison
from sosie.results import Comparison, Comparisons
from sosie.train import Recipe, fit

SHIFTS = ["clean", "rotate(severity=5)", "pgd(epsilon=0.2)", "gaussian(epsilon=0.3)"]
SITES = ["clean", "rotate(severity=5)", "pgd(epsilon=0.2) on A", "pgd(epsilon=0.2) on B", "gaussian(epsilon=0.3)"]


@cache
def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(120) % 3
    x = 0.3 * torch.rand(120, 1, 9, 9, generator=generator)
    for k in range(3):
        x[y == k, :, 3 * k : 3 * k + 3] += 0.5
    return x, y


@cache
def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return fit(
        nn.Sequential(nn.Flatten(), nn.Linear(81, 12), nn.ReLU(), nn.Linear(12, 3)),
        *problem(),
        recipe=Recipe(epochs=6),
        seed=seed,
    )


def shifted(*, labels: Tensor | None) -> list[Tensor]:
    x = problem()[0]
    attacked = [attack(net(k), x, labels, "pgd", epsilon=0.2, seed=4) for k in (0, 1)]
    noisy = attack(net(0), x, kind="gaussian", epsilon=0.3, seed=4)
    return [x, corrupt(x, "rotate", severity=5, seed=4), *attacked, noisy]


@torch.no_grad()
def answers(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


@pytest.mark.parametrize("labelled", [True, False])
def test_every_cell_compares_the_answers_to_the_shifted_inputs(labelled: bool) -> None:
    x, y = problem()
    batches = list(zip(x.split(50), y.split(50), strict=True)) if labelled else x.split(50)
    found = sosie.compare_outputs(net(0), net(1), batches, shifts=open_shifts(SHIFTS, seed=4))
    assert isinstance(found, Comparison)
    assert found.sites_a == found.sites_b == SITES
    inputs = shifted(labels=y if labelled else None)
    assert ("error_overlap" in found.measures) == labelled
    for name in found.measures:
        needs = {"labels": y} if name in ("error_overlap", "accuracy_difference", "bad_churn") else {}
        if name == "min_max_normalised_disagreement":
            needs = {"labels": y}
        for i, a in enumerate(inputs):
            for j, b in enumerate(inputs):
                value = found.matrix(name)[i, j]
                if not np.isnan(value):
                    wanted = sosie.measure(name, answers(net(0), a), answers(net(1), b), **needs)
                    assert value == pytest.approx(wanted, abs=1e-5), (name, SITES[i], SITES[j])
    how = found.provenance["settings"]["attacks"]
    assert how == ("away from the labels" if labelled else "away from the output of the attacked model")
    if labelled:
        right = {site: [(answers(net(k), z).argmax(1) == y).double().mean().item() for k in (0, 1)]
                 for site, z in zip(SITES, inputs, strict=True)}  # fmt: skip
        assert found.provenance["accuracy"] == {site: pytest.approx(both) for site, both in right.items()}
        assert right["pgd(epsilon=0.2) on A"][0] < right["clean"][0] - 0.3


def test_the_batch_size_does_not_matter_and_nothing_is_left_behind() -> None:
    x, y = problem()
    model = net(1).train()
    found = []
    for size in (7, 120):
        state = torch.get_rng_state()
        batches = list(zip(x.split(size), y.split(size), strict=True))
        found.append(sosie.compare_outputs(net(0), model, batches, "agreement", shifts=["fog", "fgsm", "spatter"]))
        assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    model.eval()
    assert np.allclose(found[0].matrix(), found[1].matrix())
    assert np.allclose(found[0]["agreement"].low, found[1]["agreement"].low)


def test_normalisation_comes_after_the_shift() -> None:
    x, y = problem()

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(0)

        def forward(self, z: Tensor) -> Tensor:
            return self.net((z - 0.5) / 0.3)

    found = [
        sosie.compare_outputs(*pair, [(x, y)], "jensen_shannon", shifts=["clean", "shot_noise", "pgd"], **how)
        for pair, how in (
            ((Inside(), net(1)), {}),
            ((net(0), net(1)), {"prepare_a": lambda z: (z - 0.5) / 0.3}),
        )
    ]
    assert np.allclose(found[0].matrix(), found[1].matrix(), atol=1e-6)


def test_probabilities_are_attacked_as_such() -> None:
    x, y = problem()
    soft = [nn.Sequential(net(k), nn.Softmax(-1)) for k in (0, 1)]
    found = [
        sosie.compare_outputs(a, b, [(x, y)], "agreement", shifts="pgd").matrix() for a, b in (soft, (net(0), net(1)))
    ]
    assert np.allclose(*found)


def test_several_models_and_a_model_with_itself() -> None:
    x, y = problem()
    found = sosie.compare_outputs(
        [net(0), net(1), net(2), net(0)], [(x, y)], measures="agreement", shifts=["clean", "fgsm"]
    )
    assert isinstance(found, Comparisons)
    alone = sosie.compare_outputs(net(1), net(2), [(x, y)], "agreement", shifts=["clean", "fgsm"])
    assert found[1, 2].sites_a == ["clean", "fgsm on A", "fgsm on B"]
    assert np.array_equal(found[1, 2].matrix(), alone.matrix())
    assert np.array_equal(np.diag(found[0, 3].matrix()), [1, 1, 1])


def test_it_is_saved_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = problem()
    found = sosie.compare_outputs(net(0), net(1), [(x, y)], ["agreement", "jensen_shannon"], shifts=SHIFTS)
    again = sosie.load(found.save(tmp_path / "c.json"))
    assert np.array_equal(again.matrix("agreement"), found.matrix("agreement"))
    page = sosie.write_report(again, tmp_path / "c.html").read_text("utf-8")
    assert "most alike under" in page
    print_comparison(again)
    shown = capsys.readouterr().out
    assert "most alike under" in shown
    assert "depth" not in shown
    for site in SITES:
        assert site in shown


def test_groups_of_shifts() -> None:
    assert len(open_shifts(["clean", "corruptions", "attacks"])) == 21


@pytest.mark.parametrize(
    ("shifts", "message"),
    [
        ([], "no shifts given"),
        (["clean", "clean"], "given twice"),
        (["fogg"], "did you mean 'fog'"),
        (["fog(severity=9)"], "severity must be .* from 1 to 5"),
        (["fog(strength=1)"], "no option 'strength'"),
        (["clean(severity=1)"], "no option 'severity'"),
        (["pgd(eps=1)"], "no option 'eps'"),
    ],
)
def test_what_is_wrong_with_shifts_is_said(shifts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sosie.compare_outputs(net(0), net(1), [problem()], shifts=shifts)


@pytest.mark.parametrize(
    ("pair", "data", "error", "message"),
    [
        (lambda: (torch.zeros(5, 3), torch.zeros(5, 3)), lambda: None, TypeError, "saved predictions"),
        (lambda: (net(0), net(1)), lambda: [(problem()[0] * 3, problem()[1])], ValueError, r"\[0, 1\]"),
        (lambda: (net(0), net(1)), lambda: [["a text"]], TypeError, "shifts change images"),
        (lambda: (nn.Flatten(), nn.Flatten()), lambda: [problem()], ValueError, "attacks need"),
    ],
)
def test_what_cannot_be_shifted_is_said(pair: Any, data: Any, error: type[Exception], message: str) -> None:
    kind = "regression" if message == "attacks need" else "auto"
    with pytest.raises(error, match=message):
        sosie.compare_outputs(*pair(), data(), shifts=["fog", "pgd"], kind=kind)
