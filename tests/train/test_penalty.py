"""The penalty against a float64 loop over pairs, its pairs, its sign, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sosie.capture import SiteError, watch
from sosie.measures import MEASURES
from sosie.models import AtomConv2d, cifar_resnet, share_coefficients, vgg11, vit
from sosie.train import Penalty, Recipe, fit


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def block(width: int, inplace: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace))


class Net(nn.Module):
    """A stem that is no module of its own, two stages of blocks, a head."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 12)
        self.one = nn.ModuleList(block(12, inplace) for _ in range(2))
        self.between = nn.Linear(12, 10)
        self.two = nn.ModuleList(block(10, inplace) for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for part in self.one:
            x = part(x)
        x = self.between(x)
        for part in self.two:
            x = part(x)
        return self.head(x)


BLOCKS = ["one.0", "one.1", "two.0", "two.1"]


@torch.no_grad()
def layers(model: Net, x: Tensor) -> dict[str, Tensor]:
    """Every layer by hand, in float64."""
    model = copy.deepcopy(model).double()
    found: dict[str, Tensor] = {}
    x = found["in one"] = torch.tanh(model.stem(x.double()))
    for k, part in enumerate(model.one):
        x = found[f"one.{k}"] = torch.relu(part[0](x))
    x = found["in two"] = model.between(x)
    for k, part in enumerate(model.two):
        x = found[f"two.{k}"] = torch.relu(part[0](x))
    return found


def cka(x: Tensor, y: Tensor) -> Tensor:
    x, y = x - x.mean(0), y - y.mean(0)
    return (x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())


def value(penalty: Penalty, model: nn.Module, x: Tensor) -> float:
    with penalty:
        model(x)
        return float(penalty().detach())


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("rows", [8, None])
def test_it_is_the_sum_over_ordered_pairs_of_each_stage(rows: int | None, inplace: bool) -> None:
    model, x = Net(inplace), inputs(20, 6)
    found = layers(model, x[:rows])
    stages = (["in one", "one.0", "one.1"], ["in two", "two.0", "two.1"])
    expected = sum(cka(found[a], found[b]) for stage in stages for a, b in permutations(stage, 2))
    for _ in range(2):  # what is overwritten is learnt from the first forward
        assert value(Penalty(model, sites=BLOCKS, weight=0.5, rows=rows), model, x) == pytest.approx(
            0.5 * float(expected), abs=1e-6
        )


def test_augmented_is_the_mean_over_all_pairs() -> None:
    model, x = Net(), inputs(20, 6)
    found = layers(model, x)
    penalty = Penalty(model, sites=BLOCKS, weight=1.0, pairs="all", reduce="mean", rows=None)
    each = [float(cka(found[a], found[b])) for a, b in combinations(BLOCKS, 2)]
    assert value(penalty, model, x) == pytest.approx(sum(each) / 6, abs=1e-6)
    assert [row["value"] for row in penalty.last] == pytest.approx(each, abs=1e-6)
    assert [(row["site_a"], row["site_b"]) for row in penalty.last] == list(combinations(BLOCKS, 2))
    listed = Penalty(model, weight=1.0, pairs=[("two.1", "one.0"), ("stem", "head")], rows=None)
    value(listed, model, x)
    assert listed.last[0]["value"] == pytest.approx(float(cka(found["two.1"], found["one.0"])), abs=1e-6)


@pytest.mark.parametrize(
    "measure", ["linear_cka", "debiased_cka", "kernel_alignment", "rbf_cka", "procrustes_distance"]
)
@pytest.mark.parametrize("rows", [7, None])
def test_other_measures_are_those_of_the_measure(measure: str, rows: int | None) -> None:
    model, x = Net(), inputs(20, 6)
    found = {label: each[:rows] for label, each in layers(model, x).items()}
    penalty = Penalty(model, measure, BLOCKS, 1.0, pairs="all", rows=rows)
    total = value(penalty, model, x)
    each = [float(MEASURES[measure].of(found[a].detach(), found[b].detach())) for a, b in combinations(BLOCKS, 2)]
    assert [row["value"] for row in penalty.last] == pytest.approx(each, abs=2e-6)
    sign = 1 if MEASURES[measure].closer == "up" else -1
    assert total == pytest.approx(2 * sign * sum(each), abs=2e-5)


TRAINABLE = [m.name for m in MEASURES.values() if m.differentiable and not m.needs and not m.reads_weights]


@pytest.mark.parametrize("measure", TRAINABLE)
def test_any_differentiable_measure_may_be_used(measure: str) -> None:
    model, x = Net(), inputs(40, 6)
    sites = ["two.0.0", "two.1.0"]  # of one width
    if MEASURES[measure].few_rows == "infinite":  # as it is there: some of the neurons between them are always on
        sites = ["one.0", "two.1.0"]
    with Penalty(model, measure, sites, 1.0, pairs="all", reduce="mean", rows=None) as penalty:
        model(x)
        found = penalty()
    found.backward()
    gradient = model.two[1][0].weight.grad
    assert bool(found.detach().isfinite())
    assert gradient is not None
    assert bool(gradient.isfinite().all())
    assert bool(gradient.any())


def test_rows_by_positions_come_from_covariances() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1))
    x = inputs(6, 2, 5, 5)
    with torch.no_grad():
        a = model[0](x).double()
        b = model[1](a.float()).double()
    a, b = (each.movedim(1, -1).flatten(0, -2) for each in (a, b))
    for measure in ("linear_cka", "debiased_cka", "mean_cca"):
        penalty = Penalty(model, measure, ["0", "1"], 1.0, pairs="all", rows=None, rule="positions")
        value(penalty, model, x)
        assert penalty.last[0]["value"] == pytest.approx(float(MEASURES[measure].of(a, b)), abs=2e-6)


@pytest.mark.parametrize("rows", [5, None])
@pytest.mark.parametrize("measure", ["linear_cka", "debiased_cka"])
def test_gradients(rows: int | None, measure: str) -> None:
    model, x = Net().double(), inputs(6, 6).double().requires_grad_()

    def total(given: Tensor) -> Tensor:
        with Penalty(model, measure, BLOCKS, 1.0, rows=rows) as penalty:
            model(given)
            return penalty()

    assert torch.autograd.gradcheck(total, x)
    assert torch.autograd.gradgradcheck(total, x)


def test_neither_the_order_of_the_batch_nor_that_of_the_pairs_matters() -> None:
    model, x = Net(), inputs(20, 6)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    pairs = list(combinations(BLOCKS, 2))
    given = [(pairs, x), (pairs, x[order]), ([(b, a) for a, b in reversed(pairs)], x)]
    found = [value(Penalty(model, weight=1.0, pairs=each, rows=None), model, batch) for each, batch in given]
    assert found[1:] == pytest.approx([found[0]] * 2, abs=1e-6)


def shown_stages(penalty: Penalty, model: nn.Module, x: Tensor) -> list[set[str]]:
    value(penalty, model, x)
    found: list[set[str]] = []
    for row in penalty.last:
        both = {row["site_a"], row["site_b"]}
        home = next((stage for stage in found if row["site_a"] in stage), None)
        found.append(both) if home is None else home.update(both)
    return found


def test_stages_of_a_residual_network_a_plain_one_and_a_transformer() -> None:
    torch.manual_seed(0)
    images = inputs(4, 3, 32, 32)
    resnet = Penalty(model := cifar_resnet(depth=14), weight=1.0, rows=4)
    with resnet:
        model(images)
        resnet()
        pairs = [(row["site_a"], row["site_b"]) for row in resnet.last]
    # What goes into layer2 is what layer1.1 gave: one column for both.
    assert pairs[:3] == [("input of layer1.0", "layer1.0"), ("input of layer1.0", "layer1.1"), ("layer1.0", "layer1.1")]
    assert pairs[3:6] == [("layer1.1", "layer2.0"), ("layer1.1", "layer2.1"), ("layer2.0", "layer2.1")]
    assert len(pairs) == 9
    model = vit(depth=3, width=64)
    assert shown_stages(Penalty(model, weight=1.0, rows=4), model, images) == [
        {"input of blocks.0", "blocks.0", "blocks.1", "blocks.2"}
    ]
    model = vgg11(hidden=16)
    with Penalty(model, sites=nn.Conv2d, weight=1.0, rows=4) as penalty:
        model(images)
        penalty()
        pairs = [(row["site_a"], row["site_b"]) for row in penalty.last]
    assert ("input of features.6", "features.6") in pairs
    assert ("features.6", "features.8") in pairs
    assert ("features.6", "features.11") not in pairs  # another width


def test_a_module_called_twice_is_two_layers() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(torch.tanh(self.mix(x)))

    model = Twice()
    penalty = Penalty(model, sites="mix", weight=1.0)
    value(penalty, model, inputs(9, 6))
    assert {row["site_b"] for row in penalty.last} == {"mix", "mix@2"}
    assert len(penalty.last) == 3


# Which way it pushes


@pytest.mark.parametrize("measure", ["linear_cka", "procrustes_distance"])
def test_a_positive_weight_pushes_the_way_it_says(measure: str) -> None:
    x = inputs(64, 6)

    def trained(make: Any, steps: int = 30) -> tuple[float, float]:
        torch.manual_seed(1)
        model = Net()
        penalty = make(model)
        optimiser = torch.optim.Adam([p for m in penalty._models for p in m.parameters()], 0.01)
        seen = []
        with penalty:
            for _ in range(steps):
                for each in penalty._models:
                    each(x)
                loss = penalty()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                seen.append(sum(row["value"] for row in penalty.last))
        sign = 1 if MEASURES[measure].closer == "up" else -1
        return sign * seen[0], sign * seen[-1]

    options: dict[str, Any] = {"every": 1, "rows": None}
    before, after = trained(lambda m: Penalty(m, measure, BLOCKS, 1.0, **options))
    assert after < before - 0.1
    before, after = trained(lambda m: Penalty([m, other()], measure, BLOCKS, 1.0, **options))
    assert after < before - 0.1
    before, after = trained(lambda m: Penalty(m, measure, BLOCKS, 1.0, target=other(), **options))
    assert after > before + 0.1


def other() -> Net:
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) / 3)
    return model


@pytest.mark.parametrize("rows", [8, None])
def test_a_target_is_run_on_the_same_inputs_and_left_as_it_was(rows: int | None) -> None:
    model, teacher, x = Net(), other(), inputs(20, 6)
    teacher.train()
    own, theirs = layers(model, x[:rows]), layers(teacher, x[:rows])
    expected = sum(1 - float(cka(own[label], theirs[label])) for label in BLOCKS)
    penalty = Penalty(model, sites=BLOCKS, weight=2.0, target=teacher, rows=rows)
    with penalty:
        model(x)
        found = penalty()
    found.backward()
    assert float(found.detach()) == pytest.approx(2 * expected, abs=1e-5)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert teacher.training
    with watch(teacher, BLOCKS) as seen, torch.no_grad():
        seen.run(x)
    given = Penalty(model, sites=BLOCKS, weight=2.0, target=dict(seen.items()), rows=rows)
    assert value(given, model, x) == pytest.approx(2 * expected, abs=1e-5)
    other_site = Penalty(model, weight=1.0, pairs=[("one.0", "two.1")], target=teacher, rows=rows)
    assert value(other_site, model, x) == pytest.approx(1 - float(cka(own["one.0"], theirs["two.1"])), abs=1e-6)
    short = Penalty(model, sites="one.0", weight=1.0, target={"one.0": torch.ones(7, 12)}, rows=rows)
    with pytest.raises(ValueError, match=r"\(7, 12\) for a batch of 20"):
        value(short, model, x)


def test_members_of_an_ensemble_are_compared_at_the_same_site() -> None:
    members, x = [Net(), other(), copy.deepcopy(other())], inputs(20, 6)
    every = [layers(member, x) for member in members]
    expected = 2 * sum(float(cka(a[label], b[label])) for label in BLOCKS for a, b in combinations(every, 2))
    with Penalty(members, sites=BLOCKS, weight=1.0, rows=None) as penalty:
        for member in members:
            member(x)
        found = penalty()
    assert float(found.detach()) == pytest.approx(expected, abs=1e-5)
    found.backward()
    assert all(member.two[1][0].weight.grad is not None for member in members)
    # The second and the third are equal, at every layer: 1, and finite gradients.
    assert penalty.last[2]["value"] == pytest.approx(1, abs=1e-6)
    assert all(bool(p.grad.isfinite().all()) for m in members for p in m.parameters() if p.grad is not None)


def test_weights_of_members_and_of_a_target() -> None:
    def chain(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 4))

    a, b = chain(0), chain(1)
    maps = [(m[0].weight.T.double(), (m[0].weight.T @ m[2].weight.T).double()) for m in (a, b)]
    expected = sum(float(cka(x.detach(), y.detach())) for x, y in zip(*maps, strict=True))
    with Penalty([a, b], "wcka", weight=1.0, every=2) as penalty:
        found = penalty()  # no forward is needed
        assert float(penalty()) == 0
    assert float(found.detach()) == pytest.approx(2 * expected, abs=1e-6)
    found.backward()
    assert a[0].weight.grad is not None
    assert not any(module._forward_hooks for module in a.modules())
    cosine = torch.cosine_similarity(a[2].weight.flatten(), b[2].weight.flatten(), dim=0)
    with Penalty(a, "weight_cosine", "2", 1.0, target=b) as penalty:
        assert float(penalty().detach()) == pytest.approx(1 - float(cosine.detach()), abs=1e-6)
    atoms = [nn.Sequential(AtomConv2d(2, 3, 3, 4)) for _ in range(2)]
    with pytest.raises(ValueError, match="do not share their coefficients"):
        Penalty(atoms, "atom_cosine")
    with pytest.raises(ValueError, match="do not share their coefficients"):
        Penalty(atoms[0], "atom_cosine", target=atoms[1])
    share_coefficients(atoms[0], atoms[1:])
    cosine = torch.cosine_similarity(*(each[0].atoms.flatten() for each in atoms), dim=0)
    with Penalty(atoms, "atom_cosine", weight=1.0, reduce="mean") as penalty:
        assert float(penalty().detach()) == pytest.approx(float(cosine.detach()), abs=1e-6)
    with pytest.raises(ValueError, match="give several, or target"):
        Penalty(a, "wcka")
    with pytest.raises(SiteError, match="Conv2d"):
        Penalty([nn.Sequential(nn.Conv2d(1, 1, 3), nn.Linear(3, 3)) for _ in range(2)], "wcka")


# Degenerate layers


def test_a_constant_layer_counts_nothing_and_is_named() -> None:
    model, x = Net(), inputs(20, 6)
    with torch.no_grad():
        model.one[1][0].bias.fill_(-1e3)  # a dead ReLU: 0 for all inputs
        model.between.weight.zero_()  # and equal rows, not 0, from there on
    for rows in (8, None):
        penalty = Penalty(model, sites=BLOCKS, weight=1.0, rows=rows)
        penalty.__enter__()
        model(x)
        found = penalty()
        found.backward()
        with pytest.warns(UserWarning, match=r"'one.1' in 1"):
            penalty.__exit__(None, None, None)
        expected = layers(model, x[:rows])
        assert float(found.detach()) == pytest.approx(2 * float(cka(expected["in one"], expected["one.0"])), abs=1e-6)
        assert set(penalty.constant) == {"one.1", "input of two.0", "two.0", "two.1"}
        assert penalty.last[-1]["value"] is None
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        model.zero_grad()
    with pytest.warns(UserWarning, match="constant"):
        value(Penalty(model, "procrustes_distance", BLOCKS, 1.0), model, x)


def test_equal_layers_have_similarity_1_and_finite_gradients() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Identity(), nn.Identity())
    with Penalty(model, sites=["0", "1", "2"], weight=1.0, pairs="all") as penalty:
        model(inputs(9, 6))
        found = penalty()
    found.backward()
    assert float(found.detach()) == pytest.approx(6, abs=1e-6)
    assert float(model[0].weight.grad.abs().max()) < 1e-5


# What it refuses


def test_bad_arguments() -> None:
    model = Net()
    for match, options in {
        "needs at least 3": {"rows": 2},
        "needs at least 4": {"measure": "debiased_cka", "rows": 3},
        "rows must be .* got 0": {"rows": 0},
        "every must be .* got 0": {"every": 0},
        "weight=-1": {"weight": -1.0},
        "weight=nan": {"weight": float("nan")},
        "reduce must be one of": {"reduce": "max"},
        "pairs .* got 'near'": {"pairs": "near"},
        "pairs='same' compares": {"pairs": "same"},
        "no row rule": {"rule": "sum"},
        "not differentiable.*take": {"measure": "mutual_knn"},
        "target is the model itself": {"target": model},
    }.items():
        with pytest.raises(ValueError, match=match):
            Penalty(model, **options)
    with pytest.raises(KeyError, match="linear_cka"):
        Penalty(model, "linear_ckaa")
    with pytest.raises(SiteError, match=r"one\.0"):
        Penalty(model, sites="one.9")
    with pytest.raises(ValueError, match="twice"):
        Penalty([model, model])


def test_bad_batches_and_sites() -> None:
    model, x = Net(), inputs(20, 6)
    with pytest.raises(ValueError, match="batch of 5 inputs is smaller than rows=8"):
        value(Penalty(model), model, x[:5])
    with pytest.raises(ValueError, match="2 rows is constant"):
        value(Penalty(model, rows=None), model, x[:2])
    with pytest.raises(SiteError, match=r"one layer only \('one.0'\)"):
        value(Penalty(model, sites="one.0", pairs="all"), model, x)
    with pytest.raises(ValueError, match=r"mean_cca of 8 rows is 1 whatever.*rule='mean'"):
        value(Penalty(model, "mean_cca"), model, x)
    penalty = Penalty(model, "mean_cca", BLOCKS, 1.0, rows=20)
    assert 0 < value(penalty, model, x) < 12
    with Penalty(model, sites=BLOCKS) as penalty:
        with torch.no_grad():
            model(x)
        with pytest.raises(SiteError, match=r"'one.0' fired under no_grad"):
            penalty()
    with torch.no_grad():  # to look at it is no error
        assert value(Penalty(model, sites=BLOCKS), model, x) > 0
    with Penalty(model) as penalty, pytest.raises(RuntimeError, match="no forward has finished"):
        penalty()
    with pytest.raises(RuntimeError, match="not attached"):
        penalty()


def test_a_loss_that_is_no_number_names_step_and_site() -> None:
    model, x = Net(), inputs(20, 6)
    with Penalty(model, sites=BLOCKS, every=2) as penalty:
        for _ in range(2):
            model(x)
            penalty()
        with torch.no_grad():
            model.two[0][0].weight.fill_(torch.inf)
        model(x)
        with pytest.raises(ValueError, match=r"step 3 is NaN or infinite; not finite at 'two.0', .*'two.1'"):
            penalty()
    model = Net()
    with pytest.raises(
        ValueError, match=r"step 1 .* finite, the largest 0.\d+ of 'one.0' and 'one.1': take a smaller w"
    ):
        value(Penalty(model, sites=BLOCKS, weight=1e39), model, x)


def test_training_with_it_lowers_similarity() -> None:
    x = torch.rand(96, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    y = torch.arange(96) % 3
    seen = {}
    for weight in (0.0, 3.0):
        torch.manual_seed(0)
        model = cifar_resnet(depth=8, classes=3, width=0.5)
        with Penalty(model, "debiased_cka", weight=weight, every=1, rows=None) as penalty:
            fit(model, x, y, recipe=Recipe(epochs=4, batch=32), seed=0, penalty=penalty)
        with Penalty(model, "debiased_cka", weight=1.0, rows=None) as look, torch.no_grad():
            model(x)
            seen[weight] = float(look())
    assert seen[3.0] < seen[0.0] - 0.2


def test_steps_that_are_not_due_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net(), inputs(20, 6)
    with warnings.catch_warnings(), Penalty(model, sites=BLOCKS, every=3) as penalty:
        warnings.simplefilter("error")
        due = []
        noted = []
        hooks = penalty._hooks[0]
        keep = hooks._keep
        monkeypatch.setattr(hooks, "_keep", lambda *given: (noted.append(given[0]), keep(*given))[1])
        for _ in range(7):
            before = len(noted)
            model(x)
            found = penalty()
            due.append(bool(found.detach() > 0))
            assert (len(noted) > before) == due[-1]
            assert found.requires_grad == due[-1]
            assert not hooks._calls
    assert due == [True, False, False, True, False, False, True]
