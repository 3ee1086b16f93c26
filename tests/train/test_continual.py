"""Tasks one after another: what atoms keep, and what fine-tuning forgets."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sosie.linalg import most_similar
from sosie.models import small_cnn, with_atoms
from sosie.train import Recipe, accuracy
from sosie.train.continual import Continual, Task, ensemble, learn_tasks

RECIPE = Recipe(epochs=28, batch=32, rate=1e-2)
GIVEN: dict[str, Any] = {"recipe": RECIPE, "seed": 0}


def make() -> nn.Module:
    return small_cnn(classes=7, width=8, size=8, atoms=4)


def task(kind: int, classes: int = 2) -> Task:
    """Stripes whose place is the class: of columns, rows, dark columns or dark rows, in noise."""
    generator = torch.Generator().manual_seed(kind)
    x = 0.5 * torch.rand(240, 1, 8, 8, generator=generator)
    y = torch.arange(240) % classes
    for place in range(classes):
        stripe = x[y == place]
        part = slice(2 * place + 1, 2 * place + 3)
        (stripe if kind % 2 == 0 else stripe.mT)[..., part] += 0.6 if kind < 2 else -0.6
        x[y == place] = stripe
    return x[:160], y[:160], x[160:], y[160:]


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return [task(0), task(1, classes=3), task(2)]


@pytest.fixture(scope="module")
def found(tasks: list[Task]) -> Continual:
    return learn_tasks(make, tasks, **GIVEN)


def test_atoms_forget_nothing_and_earlier_networks_stay_to_the_bit(found: Continual, tasks: list[Task]) -> None:
    assert found.forgetting == 0
    before = learn_tasks(make, tasks[:1], **GIVEN).model(0)
    after = found.model(0).state_dict()
    assert before.state_dict().keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.state_dict().items())
    shorter = learn_tasks(make, tasks[:2], **GIVEN)
    assert all(torch.equal(v, found.model(1).state_dict()[n]) for n, v in shorter.model(1).state_dict().items())
    assert float(found.accuracy.diagonal().min()) > 0.8
    for i in range(3):
        expected = accuracy(found.model(i), *tasks[i][2:])
        assert found.accuracy[i:, i].tolist() == [expected] * (3 - i)
        assert bool(found.accuracy[:i, i].isnan().all())


def test_only_atoms_and_the_last_layer_are_a_tasks_own(found: Continual) -> None:
    first, second = found.model(0).state_dict(), found.model(1).state_dict()
    changed = {n for n in first if first[n].shape != second[n].shape or not torch.equal(first[n], second[n])}
    assert changed == {*(f"conv{k}.atoms" for k in range(1, 5)), "fc.weight", "fc.bias"}
    assert list(found.coefficients) == ["conv1", "conv2", "conv3", "conv4"]
    assert torch.equal(found.coefficients["conv2"], first["conv2.coefficients"])
    assert [found.model(k).fc.out_features for k in range(3)] == [2, 3, 2]
    table = found.atoms()
    flat = [state["conv3.atoms"].flatten() for state in (first, second)]
    cosine = torch.nn.functional.cosine_similarity(*flat, dim=0)
    part = table.at("conv3").x
    assert float((part[0] * part[1]).sum() * 4) == pytest.approx(float(cosine), abs=1e-5)
    assert table.cosines().shape == (3, 3)


def test_running_statistics_are_each_tasks_own(tasks: list[Task]) -> None:
    def normed() -> nn.Module:
        convolution, norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        return with_atoms(nn.Sequential(convolution, norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)), 3)

    given = {**GIVEN, "recipe": replace(RECIPE, epochs=1)}
    long, short = learn_tasks(normed, tasks[::2], **given), learn_tasks(normed, tasks[:1], **given)
    one, two, alone = long.model(0)[1], long.model(1)[1], short.model(0)[1]
    assert torch.equal(one.running_mean, alone.running_mean)
    assert not torch.equal(one.running_mean, two.running_mean)
    assert torch.equal(one.weight, two.weight)


def test_fine_tuning_forgets_and_separate_networks_do_not(tasks: list[Task]) -> None:
    # The third task is the first with bright and dark exchanged: one network cannot keep both.
    tuned = learn_tasks(make, tasks, method="fine_tune", **GIVEN)
    assert tuned.forgetting > 0.1
    first, last = tuned.model(0).state_dict(), tuned.model(2).state_dict()
    assert all(torch.equal(first[name], last[name]) for name in first if not name.startswith("fc."))
    apart = learn_tasks(make, tasks, method="separate", **GIVEN)
    assert apart.forgetting == 0
    with pytest.raises(ValueError, match="'fine_tune' shares no coefficients"):
        tuned.atoms()
    with pytest.raises(ValueError, match="shares no coefficients"):
        apart.coefficients  # noqa: B018


def test_not_knowing_the_task_is_harder(found: Continual, tasks: list[Task]) -> None:
    known = ~found.accuracy.isnan()
    assert bool((found.class_accuracy[known] <= found.accuracy[known]).all())
    assert found.class_accuracy[0, 0] == found.accuracy[0, 0]  # one network has no rival
    with torch.no_grad():
        right = 0
        for x, y in zip(*tasks[1][2:], strict=True):
            answers = [found.model(k)(x[None])[0].double().softmax(0) for k in range(3)]
            surest = max(range(3), key=lambda k: float(answers[k].max()))
            right += surest == 1 and int(answers[1].argmax()) == int(y)
    assert float(found.class_accuracy[2, 1]) == pytest.approx(right / len(tasks[1][3]), abs=1.5 / len(tasks[1][3]))
    assert found.class_forgetting >= 0


def test_forgetting_is_the_best_before_less_the_final(found: Continual) -> None:
    nan = float("nan")
    table = torch.tensor([[0.9, nan, nan], [0.95, 0.8, nan], [0.5, 0.9, 0.7]])
    made = Continual("fine_tune", found.template, "fc", {}, ({}, {}, {}), table, table)
    assert made.forgetting == pytest.approx(((0.95 - 0.5) + (0.8 - 0.9)) / 2)
    with pytest.raises(ValueError, match="needs two"):
        _ = Continual("fine_tune", found.template, "fc", {}, ({},), table[:1, :1], table[:1, :1]).forgetting


def test_the_nearest_earlier_task_is_where_atoms_may_start(tasks: list[Task]) -> None:
    again = [tasks[0], tasks[1], tasks[1]]
    given = {
        **GIVEN,
        "recipe": [replace(RECIPE, epochs=count) for count in (8, 8, 1)],
    }  # so short at last that the start shows
    near, first = (learn_tasks(make, again, start=start, **given) for start in ("nearest", "first"))
    assert float(near.atoms().cosines()[2, 1]) > float(near.atoms().cosines()[2, 0])
    assert float(first.atoms().cosines()[2, 1]) < float(first.atoms().cosines()[2, 0])


def test_an_ensemble_of_members(found: Continual, tasks: list[Task]) -> None:
    members = most_similar(found.atoms().cosines(), 2)
    alone, helped = ensemble(found, tasks, members, recipe=Recipe(epochs=20, batch=50, rate=1e-2))
    assert alone.tolist() == found.accuracy[2].tolist()
    assert float(helped.min()) > 0.8
    assert repr(found) == f"<Continual by atoms: 3 tasks, mean accuracy {float(alone.mean()):.3f} after the last>"
    untrained = learn_tasks(make, tasks, **{**GIVEN, "recipe": replace(RECIPE, epochs=1, rate=1e-8)})
    alone, helped = ensemble(untrained, tasks, members, recipe=Recipe(epochs=60, batch=50, rate=1e-2))
    assert float(helped.mean()) > float(alone.mean()) + 0.2  # the members' layers were fitted
    with pytest.raises(ValueError, match="numbers of other tasks"):
        ensemble(found, tasks, torch.tensor([[0], [0], [0]]))
    with pytest.raises(ValueError, match="of 3 tasks"):
        ensemble(found, tasks, members[:2])


def test_the_global_generator_is_left_alone_and_seeds_decide(tasks: list[Task]) -> None:
    given = {**GIVEN, "recipe": replace(RECIPE, epochs=1)}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    runs = [learn_tasks(make, tasks[:2], **{**given, "seed": seed}) for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(3), expected)
    pairs = [[torch.equal(a[n], b[n]) for n in a] for a, b in itertools.combinations([r.own[1] for r in runs], 2)]
    assert all(pairs[0])
    assert not any(pairs[1])


def test_bad_input_is_told_in_words(tasks: list[Task]) -> None:
    images, labels, *test = tasks[0]
    for wrong, words in (
        ((images, labels[1:], *test), "task 1 needs as many labels"),
        ((images, labels + 5, *test), "counted from 0"),
        ((images, labels * 0, *test), "two or more"),
        ((images, labels, test[0], test[1] + 1), "test labels 1 to 2"),
    ):
        with pytest.raises(ValueError, match=words):
            learn_tasks(make, [tasks[0], wrong], **GIVEN)
    with pytest.raises(ValueError, match="no layer of atoms"):
        learn_tasks(lambda: small_cnn(size=8), tasks, **GIVEN)
    with pytest.raises(ValueError, match="one of 'atoms', 'fine_tune', 'separate'"):
        learn_tasks(make, tasks, method="replay", **GIVEN)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 for 3 tasks"):
        learn_tasks(make, tasks, **{**GIVEN, "recipe": [RECIPE, RECIPE]})
    with pytest.raises(ValueError, match="no tasks"):
        learn_tasks(make, [], **GIVEN)
