"""Task-loss matching: the joint equals that of a plain training loop, alone or among many, and nothing else changes."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import cnn, inputs, mlp
from torch import Tensor, nn

import sosie
from sosie.stats import Moments
from sosie.stitching import TaskLoss
from sosie.stitching.joint import similarity_at_joint
from sosie.stitching.task_loss import cka_of_rows

X = inputs(90).double()
LABELS = torch.randint(3, (90,), generator=torch.Generator().manual_seed(1))
LABELLED = [(X, LABELS)]
AT = "2"  # six features, then tanh and a linear layer to three classes


def nets() -> tuple[nn.Module, nn.Module]:
    return tuple(nn.Sequential(*mlp(seed).double()) for seed in (0, 1))  # type: ignore[return-value]


def train(fit: Any, data: Any = X) -> Any:
    a, b = nets()
    return sosie.stitch(a, AT, b, AT, data, fit=fit)


def by_hand(task: TaskLoss, weight: Tensor, bias: Tensor) -> nn.Linear:
    """The same training in plain PyTorch: one joint, torch's own Adam and loss."""
    a, b = (net.eval().requires_grad_(False) for net in nets())
    joint = nn.Linear(6, 6).double()
    with torch.no_grad():
        joint.weight.copy_(weight)
        joint.bias.copy_(bias)
    order = torch.Generator().manual_seed(task.seed)
    optimiser = torch.optim.Adam(joint.parameters(), lr=task.rate)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, step_size=task.epochs // 3, gamma=0.1)
    for _ in range(task.epochs):
        for index in torch.randperm(len(X), generator=order).split(task.batch):
            outputs = b[3:](joint(a[:3](X[index])))
            targets = b(X[index]).softmax(1) if task.targets == "soft" else LABELS[index]
            loss = F.cross_entropy(outputs, targets) + task.l1 * joint.weight.abs().sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        schedule.step()
    return joint


@pytest.mark.parametrize("text", ["targets='soft'", "targets='labels', seed=5", "l1=0.01, start='procrustes'"])
def test_it_is_a_plain_training_loop(text: str) -> None:
    found = train(f"task_loss(epochs=6, batch=32, rate=0.01, {text})", LABELLED)
    task = TaskLoss(**eval(f"dict(epochs=6, batch=32, rate=0.01, {text})"))
    start = train(task.start).model.joint
    expected = by_hand(task, start.weight, start.bias)
    assert torch.allclose(found.model.joint.weight, expected.weight, atol=1e-10)
    assert torch.allclose(found.model.joint.bias, expected.bias, atol=1e-10)
    assert not torch.allclose(found.model.joint.weight, start.weight, atol=1e-3), "it has moved"


MANY = [
    "task_loss(epochs=3, batch=40, rate=0.01)",
    "task_loss(epochs=3, batch=40, start='random', seed=1)",
    "least_squares",
    "task_loss(epochs=3, batch=40, rank=2, seed=2)",
    "task_loss(epochs=3, batch=40, rank=4, start='random', bias=False)",
    "task_loss(epochs=3, batch=40, l1=0.1, cka=0.5, targets='labels', seed=1)",
    "task_loss(epochs=2, batch=40, start='permutation')",
    "task_loss(epochs=3, batch=40, patience=1, seed=3)",
]


def test_a_joint_trained_among_many_is_the_one_trained_alone() -> None:
    together = train(MANY, LABELLED)
    assert [found.fit for found in together][2] == "least_squares"
    for text, found in zip(MANY, together, strict=True):
        alone = train(text, LABELLED)
        assert torch.allclose(found.model.joint.weight, alone.model.joint.weight, atol=1e-12), text
        assert torch.allclose(found.model.joint.bias, alone.model.joint.bias, atol=1e-12), text
        assert [line.keys() for line in found.history] == [line.keys() for line in alone.history]
        for one, other in zip(found.history, alone.history, strict=True):
            assert one == pytest.approx(other, abs=1e-9), text


def test_joints_that_do_not_fit_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(MANY, LABELLED)
    monkeypatch.setattr("sosie.stitching.task_loss.FOLDED", 2 * 40 * 6 * 8)
    for one, other in zip(train(MANY, LABELLED), expected, strict=True):
        assert torch.allclose(one.model.joint.weight, other.model.joint.weight, atol=1e-12)


def test_what_does_not_fit_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(MANY, LABELLED)
    monkeypatch.setattr("sosie.stitching.task_loss.BUDGET", 90 * 3 * 8)  # B's answers alone
    for one, other in zip(train(MANY, LABELLED), expected, strict=True):
        assert torch.allclose(one.model.joint.weight, other.model.joint.weight, atol=1e-12)


def test_training_beats_its_start_and_comes_to_the_optimum() -> None:
    found = train("task_loss(epochs=60, rate=0.02, batch=90)")
    start, end = found.history[0], found.history[-1]
    assert end["loss"] < 0.9 * start["loss"] + 0.1 * end["loss"]
    assert found.evaluate(X)["cross_entropy"] < train("least_squares").evaluate(X)["cross_entropy"]
    _, b = nets()
    itself = sosie.stitch(b, AT, b, AT, X, fit="task_loss(epochs=60, rate=0.02, batch=90, start='random')")
    soft = b.eval()(X).softmax(1)
    entropy = -(soft * soft.log()).sum(1).mean().item()
    assert itself.history[-1]["loss"] >= entropy, "no answers lose less than B's own"
    assert itself.history[-1]["loss"] == pytest.approx(entropy, abs=0.02)


def test_history_is_what_the_measures_say() -> None:
    found = train("task_loss(epochs=2, batch=90)")
    a, b = nets()
    start, _, end = found.history
    assert [line["epoch"] for line in found.history] == [0, 1, 2]
    assert [line["step"] for line in found.history] == [0, 1, 2]
    with torch.no_grad():
        moments = Moments.of(a[:3](X), b[:3](X)).joint(0, 0)
        mapped, of_b = found.model.joint(a[:3](X)), b[:3](X)
    missed = (mapped - of_b).square().sum()
    assert end["r2"] == pytest.approx(float(1 - missed / (of_b - of_b.mean(0)).square().sum()), abs=1e-9)
    assert end["r2_about_zero"] == pytest.approx(float(1 - missed / of_b.square().sum()), abs=1e-9)
    assert end["linear_cka"] == pytest.approx(sosie.measure("linear_cka", mapped.numpy(), of_b.numpy()), abs=1e-9)
    least_squares = train("least_squares")
    assert start["r2"] == pytest.approx(least_squares.report["r2"])
    from sosie.linalg import find_fit

    at_start = similarity_at_joint(moments, find_fit("least_squares")(moments), ("mean_cca", "svcca"))
    assert start["mean_cca"] == pytest.approx(at_start["mean_cca"])
    assert start["svcca"] == pytest.approx(at_start["svcca"])
    seldom = train("task_loss(epochs=5, batch=90, record=2)")
    assert ["svcca" in line for line in seldom.history] == [True, False, True, False, True, True]
    assert start["cross_entropy"] == pytest.approx(least_squares.evaluate(X)["cross_entropy"])


def test_frozen_halves_stay_as_they_are() -> None:
    a, b = cnn(0).train(), cnn(1).train()
    b[0].weight.requires_grad_(False)
    states = [{key: value.clone() for key, value in net.state_dict().items()} for net in (a, b)]
    random = torch.get_rng_state()
    x = torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(0))

    def loss(outputs: Tensor, batch: Tensor) -> Tensor:
        assert not any(p.requires_grad for net in (a, b) for p in net.parameters()), "no gradients but the joint's"
        assert not any(module.training for net in (a, b) for module in net.modules())
        return outputs.square().mean()

    sosie.stitch(a, "1", b, "1", x, fit=TaskLoss(epochs=1, loss=loss))
    found = sosie.stitch(a, "1", b, "1", x, fit="task_loss(epochs=2, batch=16, rate=0.1, start='random')")
    for net, state in zip((a, b), states, strict=True):
        assert net.training
        assert net[1].training
        assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
        assert all(parameter.grad is None for parameter in net.parameters())
    assert not b[0].weight.requires_grad
    assert all(parameter.requires_grad for parameter in list(a.parameters()) + list(b.parameters())[1:])
    assert torch.equal(random, torch.get_rng_state())
    assert found.history[-1]["loss"] < found.history[0]["loss"]
    assert found.model.joint.weight.requires_grad


def test_a_joint_that_diverges_stops_and_the_others_go_on() -> None:
    fits = ["task_loss(epochs=3, batch=30)", "task_loss(epochs=3, batch=30, rate=3e37)", "task_loss(epochs=3, seed=1)"]
    a, b = (nn.Sequential(*net[:3], nn.ReLU(), net[4]).float() for net in nets())
    with pytest.warns(UserWarning, match=r"rate=3e\+37.*epoch 1, at step [23] of it.*of epoch 0"):
        fine, broken, _ = sosie.stitch(a, AT, b, AT, X.float(), fit=fits)
    start = sosie.stitch(a, AT, b, AT, X.float())
    assert torch.equal(broken.model.joint.weight, start.model.joint.weight), "the best layer so far is the start"
    assert [line["epoch"] for line in broken.history] == [0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = sosie.stitch(a, AT, b, AT, X.float(), fit=fits[0])
    assert torch.allclose(fine.model.joint.weight, alone.model.joint.weight, atol=1e-6)
    assert len(fine.history) == 4


def test_a_loss_that_breaks_late_keeps_the_best_epoch() -> None:
    calls = 0  # three at the start, three per epoch

    def breaks(outputs: Tensor, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return outputs.square().mean() * (math.nan if calls > 7 else 1)

    with pytest.warns(UserWarning, match="the loss is nan in epoch 2, at step 2 of it.*best layer so far, of epoch 1"):
        found = train(TaskLoss(epochs=5, batch=30, rate=0.01, loss=breaks))
    assert found.report["epoch"] == found.history[-1]["epoch"] == 1
    assert bool(found.model.joint.weight.isfinite().all())


@pytest.mark.parametrize("start", ["least_squares", "random", "identity"])
def test_rank(start: str) -> None:
    found = train(f"task_loss(rank=2, start={start!r}, epochs=4, rate=0.01)")
    assert torch.linalg.matrix_rank(found.model.joint.weight) == 2
    assert found.report["rank"] == 2
    if start == "least_squares":
        best = train("reduced_rank(k=2)")
        assert found.history[0]["r2"] == pytest.approx(best.report["r2"]), "the best map of that rank is the start"


def test_without_a_bias() -> None:
    with_bias, *without = train([f"task_loss(epochs=3, bias={bias}, start={start!r})" for bias, start in BIASES])
    assert bool(with_bias.model.joint.bias.any())
    for found, (_, start) in zip(without, BIASES[1:], strict=True):
        assert not bool(found.model.joint.bias.any()), start
    best = train("least_squares(intercept=False)")
    assert without[0].history[0]["r2"] == pytest.approx(best.report["r2"]), "the best map without a bias is the start"


BIASES = [(True, "least_squares"), (False, "least_squares"), (False, "random"), (False, "ridge(strength=0.1)")]


def test_sparsity() -> None:
    dense, sparse = train([f"task_loss(epochs=60, rate=0.02, batch=90, threshold=0.01, l1={l1})" for l1 in (0.0, 0.05)])
    weight = sparse.model.joint.weight
    assert sparse.report["sparsity"] == pytest.approx(float((weight == 0).double().mean()))
    assert sparse.report["sparsity"] > dense.report["sparsity"] + 0.2
    assert weight.abs()[weight != 0].min().item() >= 0.01


def test_a_cka_penalty_drives_cka_down_where_the_loss_does_not_mind() -> None:
    _, b = nets()
    fits = [f"task_loss(start='identity', epochs=100, rate=0.02, cka={cka})" for cka in (0.0, 10.0)]
    kept, driven = sosie.stitch(b, AT, b, AT, X, fit=fits)
    assert driven.history[0]["linear_cka"] == pytest.approx(1)
    assert kept.history[-1]["linear_cka"] > 0.98
    assert driven.history[-1]["linear_cka"] < kept.history[-1]["linear_cka"] - 0.2
    assert driven.history[0]["loss"] == pytest.approx(kept.history[0]["loss"] + 10)


def test_a_last_input_of_its_own_joins_the_batch_before() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one row has no CKA
        found = train("task_loss(epochs=2, batch=30, cka=0.1)", X[:61])
    assert [line["step"] for line in found.history] == [0, 2, 4]


@pytest.mark.parametrize("n", [5, 200])
def test_cka_of_rows_is_linear_cka(n: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, n, 8, generator=g) * 1e6 + 1e6, torch.randn(1, n, 12, generator=g)
    x.requires_grad_()
    found = cka_of_rows(x, y)
    values = found.tolist()
    for k in range(3):
        left, right = (rows.detach().double() - rows.detach().double().mean(0) for rows in (x[k], y[0]))
        norms = (left.T @ left).norm() * (right.T @ right).norm()
        assert values[k] == pytest.approx(float((left.T @ right).norm() ** 2 / norms), abs=1e-5)
    found.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    double = [t.detach().double().requires_grad_() for t in (x[:, :5], y[:, :5])]
    assert torch.autograd.gradcheck(lambda one: cka_of_rows(one * 1e-6, double[1]), (double[0],), eps=1.0)


def test_seeds_decide_and_nothing_else_does() -> None:
    texts = [f"task_loss(start='random', epochs=2, batch=32, seed={seed})" for seed in (0, 1)]
    torch.manual_seed(5)
    one = train(texts[0])
    torch.manual_seed(6)
    again, other = train(texts[0]), train(texts[1])
    assert torch.equal(one.model.joint.weight, again.model.joint.weight)
    assert not torch.allclose(one.model.joint.weight, other.model.joint.weight, atol=1e-3)
    orders = train([f"task_loss(epochs=2, batch=32, seed={seed})" for seed in (0, 1)])
    assert not torch.equal(orders[0].model.joint.weight, orders[1].model.joint.weight), "the order counts too"


def test_patience_keeps_the_best_layer() -> None:
    fit = TaskLoss(epochs=50, rate=0.5, batch=30, patience=2)
    found = train(replace(fit, validation=inputs(40, seed=3).double()))
    losses = [line["validation"] for line in found.history]
    best = losses.index(min(losses))
    assert found.report["epoch"] == best
    assert len(losses) == best + 3, "two epochs without a better one end it"
    assert found.report["validation"] == min(losses)
    assert found.evaluate(inputs(40, seed=3).double())["cross_entropy"] == pytest.approx(min(losses))
    held_out = train(fit)
    assert "validation" in held_out.history[0]
    with pytest.raises(ValueError, match="fewer than 10"):
        train(fit, X[:8])


def test_a_joint_that_has_stopped_stays_as_it_was_while_others_go_on() -> None:
    fits = [f"task_loss(epochs=24, rate=0.3, batch=30, start='random', patience={patience})" for patience in (1, 24)]
    impatient, patient = train(fits)
    assert len(impatient.history) < len(patient.history) == 25
    assert patient.report["epoch"] > len(impatient.history), "it would have got better later"
    assert torch.allclose(impatient.model.joint.weight, train(fits[0]).model.joint.weight, atol=1e-10)
    assert impatient.report == pytest.approx(train(fits[0]).report)


def test_a_users_own_loss() -> None:
    def squared(outputs: Tensor, batch: Any) -> Tensor:
        x, labels = batch
        assert x.shape[1:] == (8,)
        return (outputs - F.one_hot(labels, 3)).square().sum(1).mean()

    fits = [
        TaskLoss(epochs=20, rate=0.02, seed=seed, loss=loss) for seed, loss in ((0, squared), (1, squared), (0, None))
    ]
    *found, plain = train(fits, LABELLED)
    for each in found:
        assert each.history[-1]["loss"] < each.history[0]["loss"]
    assert found[0].history[0]["loss"] == pytest.approx(
        squared(train("least_squares").model(X), (X, LABELS)).item(), abs=1e-9
    )
    assert plain.history == train("task_loss(epochs=20, rate=0.02)", LABELLED).history, "each has its own loss"
    for bad in (lambda outputs, batch: 1.0, lambda outputs, batch: outputs, lambda o, b: torch.zeros(())):
        with pytest.raises(ValueError, match="must return a single number"):
            train(TaskLoss(epochs=1, loss=bad), LABELLED)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("targets", "hard"), ("epochs", 0), ("epochs", 2.5), ("batch", 0), ("rate", 0), ("rate", float("nan")),
        ("l1", -1), ("threshold", "x"), ("cka", float("inf")), ("bias", 1), ("patience", 0), ("seed", -1),
        ("rank", 0), ("record", -1), ("autocast", None), ("start", 3), ("start", "nothing"),
    ],
)  # fmt: skip
def test_bad_options(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option if option != "start" or value == 3 else "nothing.*random"):
        TaskLoss.parse({option: value})


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"no fit is called 'task_los'.*task_loss"):
        train("task_los")
    with pytest.raises(ValueError, match=r"no option 'epoch'; it has .*epochs"):
        train("task_loss(epoch=3)")
    with pytest.raises(ValueError, match="at least one"):
        train([])
    with pytest.raises(TypeError, match="named by a text"):
        train([3])
    with pytest.raises(ValueError, match="whole-numbered"):
        train("task_loss(targets='labels')")
    a, b = nets()
    b[4] = nn.Linear(6, 2).double()
    with pytest.raises(ValueError, match="from 0 to 2, but B answers 2 classes"):
        sosie.stitch(a, AT, b, AT, LABELLED, fit="task_loss(targets='labels')")
    with pytest.raises(ValueError, match="rank must be a whole number from 1 to 6, got 7"):
        train("task_loss(rank=7)")
    with pytest.raises(ValueError, match="undo the rank"):
        train("task_loss(rank=2, l1=0.1)")
    with pytest.raises(ValueError, match="leave targets out"):
        TaskLoss(targets="labels", loss=lambda o, b: o.sum())
    with pytest.raises(TypeError, match=r"loss\(outputs, batch\), got int"):
        train("task_loss(loss=3)")
    assert train("task_loss(epochs=1)", LABELLED).fit == "task_loss(epochs=1)"
