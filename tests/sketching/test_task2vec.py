"""Task2Vec against one backward an input, in float64, for every kind of layer; and what it refuses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nets import mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sosie.capture import Chunk
from sosie.engine import compare
from sosie.engine.network import Network
from sosie.files import DamagedFile
from sosie.sketching import Task2Vec, task2vec
from sosie.sketching.fisher import SquaredGradients, drawn_labels


def reference(model: nn.Module, arguments: list[Any]) -> dict[str, Tensor]:
    """Σ_y p(y|x) (∂ log p(y|x) / ∂θ)², averaged over inputs: one backward an input and class."""
    model.eval()
    found = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for each in arguments:
        output = model(**each) if isinstance(each, dict) else model(each)
        log_p = torch.log_softmax(output["logits"] if isinstance(output, dict) else output, 1)[0]
        for y in range(len(log_p)):
            grads = torch.autograd.grad(log_p[y], list(model.parameters()), retain_graph=True, allow_unused=True)
            for name, grad in zip(found, grads, strict=True):
                if grad is not None:
                    found[name] += log_p[y].exp().detach() * grad**2 / len(arguments)
    return found


def singles(x: Tensor) -> list[Tensor]:
    return list(x.split(1))


def agree(found: Task2Vec, expected: dict[str, Tensor], relative: float = 1e-9) -> None:
    assert list(found.fisher) == list(expected)
    for name, value in expected.items():
        off = (found.fisher[name] - value).norm()
        assert off <= relative * value.norm(), f"{name}: off by {off / value.norm():.1e}"


class Convolutions(nn.Module):
    """Stride, padding of every kind, groups, dilation; batch and group norm; what is overwritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.batch = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 12, (3, 2), padding=(2, 1), groups=4, dilation=(2, 1), bias=False)
        self.group = nn.GroupNorm(3, 12)
        self.same = nn.Conv2d(12, 6, 4, padding="same")
        self.around = nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular", groups=6)
        self.line = nn.Conv1d(6, 5, 3, stride=2)
        self.thin = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 4)
        self.batch.running_mean.normal_()
        self.batch.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.batch(self.first(x)), inplace=True)
        x = self.group(self.grouped(x)).relu_()
        x = self.around(self.same(x).tanh_()) + x[:, :6]
        x = self.thin(self.line(x.flatten(2)))
        return self.head(x.mean(2))


class Tokens(nn.Module):
    """Tokens with a padding token, a table of positions, layer norms; the head is the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6, padding_idx=0)
        self.places = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.more = nn.LayerNorm((5, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        hidden = self.words(input_ids) + self.places(places)
        hidden = self.more(hidden + torch.tanh(self.mix(self.norm(hidden))))
        hidden = hidden + self.mix(hidden)
        return {"logits": self.head(hidden.mean(1))}


class ByHand(nn.Module):
    """What no rule covers: free parameters, attention, a weight used by a layer and by hand, time before inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.scale = nn.Parameter(torch.randn(6))
        self.places = nn.Embedding(4, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.twice = nn.Linear(6, 6)
        self.across = nn.Linear(6, 6)
        self.frames = nn.Conv1d(1, 2, 3)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) * self.scale + self.places(torch.arange(4))
        x = x + self.attention(x, x, x)[0]
        x = F.linear(torch.tanh(self.twice(x)), self.twice.weight)
        x = self.across(x.transpose(0, 1)).transpose(0, 1)
        x = torch.tanh(x) + self.frames(x.reshape(-1, 1, 6)).mean((1, 2)).reshape(*x.shape[:2], 1)
        return self.head(x.mean(1))


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(n: int = 11) -> Tensor:
    return torch.randint(0, 7, (n, 5), generator=torch.Generator().manual_seed(2))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("step", [1, 4, 9])
def test_convolutions_and_norms_match_one_backward_an_input(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(Convolutions), random(9, 3, 12, 10)
    found = task2vec(model, x.split(step), exact=True)
    agree(found, reference(model, singles(x)))
    monkeypatch.setattr("sosie.sketching.fisher.MEMORY", {"cpu": 1})  # an input at a time
    agree(task2vec(model, x.split(step), exact=True), dict(found.fisher), 1e-12)


def test_tied_weights_and_a_layer_called_twice_are_summed_before_they_are_squared() -> None:
    model, ids = made(Tokens), words()
    found = task2vec(model, [{"input_ids": part} for part in ids.split(4)], exact=True)
    assert "head.weight" not in found.fisher  # a parameter counts once, under its first name
    expected = reference(model, [{"input_ids": each} for each in singles(ids)])
    agree(found, expected)
    apart = made(Tokens)  # the same weights, not tied
    apart.head.weight = nn.Parameter(model.words.weight.detach().clone())
    parts = reference(apart, [{"input_ids": each} for each in singles(ids)])
    wrong = parts["words.weight"] + parts["head.weight"]
    assert (wrong - expected["words.weight"]).norm() > 1e-2 * expected["words.weight"].norm()


def test_a_table_of_words_alone_sums_repeated_tokens_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6, padding_idx=3), nn.Flatten(), nn.Tanh(), nn.Linear(30, 3)).double()
    ids = words(20)
    assert any(len(set(row.tolist())) < 5 for row in ids)
    agree(task2vec(model, ids, exact=True), reference(model, singles(ids)))


def test_what_no_rule_covers_takes_one_backward_per_input() -> None:
    model, x = made(ByHand), random(7, 3, 6)
    expected = reference(model, singles(x))
    agree(task2vec(model, x.split(3), exact=True), expected)
    agree(task2vec(model, x, exact=True, parameters=["token", "scale"]), {k: expected[k] for k in ("token", "scale")})


def left_to_autograd(model: nn.Module, x: Tensor) -> set[str]:
    """Parameters whose gradients no rule gave."""
    squares = SquaredGradients(Network(model.eval(), "net"), dict(model.named_parameters()))
    squares.add(Chunk(x, 0, len(x)), lambda answers: [torch.ones_like(answers)])
    return squares.by_input


def test_rules_are_refused_where_autograd_says_otherwise() -> None:
    """The layers of ByHand whose rule would be wrong are known by the first two inputs, and no others."""
    model = made(ByHand)
    found = left_to_autograd(model, random(4, 3, 6))
    ruled = {"frames.weight", "frames.bias", "head.bias", "twice.bias", "unused.weight", "unused.bias"}
    assert found == {name for name, _ in model.named_parameters()} - ruled


def test_rules_cover_the_common_layers() -> None:
    """A wrong rule would be found out and cost only time, so this is where it shows."""
    model = made(Convolutions)
    model.line.register_forward_hook(lambda layer, args, output: 2 * output)  # the user's own, which stays
    assert left_to_autograd(model, random(4, 3, 12, 10)) == set()
    assert left_to_autograd(made(Tokens), words(4)) == set()
    table = nn.Sequential(nn.Embedding(7, 6, padding_idx=0), nn.Flatten(), nn.Linear(30, 3)).double()
    padded = words(4)
    padded[:, 1] = 0
    assert left_to_autograd(table, padded) == set()


class Mixed(nn.Module):
    """A layer that sees the inputs in another order, so that its rule finds each gradient, but for another input."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.turned(x.flip(0))).flip(0))


def test_rules_are_held_against_autograd_in_one_pass_and_input_by_input() -> None:
    model, x = made(Mixed), random(4, 6)
    agree(task2vec(model, x, exact=True), reference(model, singles(x)))
    calls: list[int] = []
    model.register_forward_hook(lambda layer, args, output: calls.append(len(output)))
    assert left_to_autograd(model, x) == {"turned.weight", "turned.bias"}
    assert calls == [2, 1, 1, 4, 1, 1, 1, 1]  # two inputs to try the rules, also one by one; then all


def test_softmax_regression_by_hand() -> None:
    """log p(y) has gradient (onehot(y) − p) xᵀ; its expected square is p (1 − p) x²."""
    model = nn.Linear(3, 4).double()
    x = random(6, 3)
    found = task2vec(model, x, exact=True)
    p = torch.softmax(model(x), 1).detach()
    torch.testing.assert_close(found.fisher["bias"], (p * (1 - p)).mean(0), rtol=1e-12, atol=0)
    by_hand = torch.stack([torch.outer(q * (1 - q), each**2) for q, each in zip(p, x, strict=True)]).mean(0)
    torch.testing.assert_close(found.fisher["weight"], by_hand, rtol=1e-12, atol=0)


def test_one_draw_is_the_square_for_some_class_and_many_draws_the_expectation() -> None:
    model, x = mlp().double(), random(5, 8)
    log_p = torch.log_softmax(model(x[:1]), 1)[0]
    squares = [torch.autograd.grad(log_p[y], model[4].bias, retain_graph=True)[0] ** 2 for y in range(3)]
    one = task2vec(model, x[:1], draws=1).fisher["4.bias"]
    assert sum(torch.allclose(one, square, rtol=1e-9, atol=0) for square in squares) == 1
    exact, many = (task2vec(model, x, **how).vector for how in ({"exact": True}, {"draws": 2000}))
    assert (many - exact).norm() < 0.05 * exact.norm()
    few = task2vec(model, x, draws=2).vector
    assert (few - exact).norm() > (many - exact).norm()


def test_drawn_labels_follow_p() -> None:
    log_p = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64).log().expand(40_000, 4)
    shares = torch.bincount(drawn_labels(log_p, 0, seed=3, draw=1), minlength=4) / 40_000
    assert shares[1] == 0
    # Three standard errors of a share of 0.6 over 40,000 draws are 0.0074.
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.0, 0.6, 0.3]), rtol=0, atol=0.0075)


def test_batch_size_does_not_matter_and_the_seed_does() -> None:
    model, x = made(Convolutions), random(12, 3, 12, 10)
    first = task2vec(model, x, draws=2, seed=5)
    for step in (1, 5, 7):
        torch.testing.assert_close(
            task2vec(model, x.split(step), draws=2, seed=5).vector, first.vector, rtol=1e-9, atol=0
        )
    assert task2vec(model, x, draws=2, seed=6).distance(first) > 1e-6
    assert task2vec(model, x, draws=2, seed=5, max_rows=7).n == 7
    torch.testing.assert_close(
        task2vec(model, x, seed=5, max_rows=7).vector, task2vec(model, x[:7], seed=5).vector, rtol=1e-12, atol=0
    )


def test_inference_mode_around_it_changes_nothing() -> None:
    model, x = mlp().double(), random(6, 8)
    expected = task2vec(model, x, exact=True)
    with torch.inference_mode():
        assert torch.equal(task2vec(model, x + 0, exact=True).vector, expected.vector)


def test_no_activation_outlives_its_chunk() -> None:
    """Hooks on the graph that led back to its end kept every layer's input of every chunk for good."""
    model, x = mlp().double(), random(12, 8)
    kept: list[weakref.ref[Any]] = []

    def mark(layer: nn.Module, args: Any, output: Tensor) -> None:
        token = nn.Identity()  # lives as long as the graph
        output.register_hook(lambda gradient, token=token: None)
        kept.append(weakref.ref(token))

    model[1].register_forward_hook(mark)
    task2vec(model, x.split(3))
    assert len(kept) == 7  # two inputs to try the rules, also one by one; then four chunks
    assert not any(each() for each in kept)


def test_float32_is_near_float64() -> None:
    model, x = made(Convolutions), random(9, 3, 12, 10)
    expected = task2vec(model, x, exact=True).fisher
    agree(task2vec(model.float(), x.float(), exact=True), dict(expected), 1e-4)


def test_data_in_pairs_prepare_and_inputs() -> None:
    model, x = mlp().double(), random(8, 8)
    expected = task2vec(model, x / 2, exact=True).vector
    pairs = DataLoader(TensorDataset(x, torch.zeros(8)), batch_size=3)
    for found in (
        task2vec(model, pairs, exact=True, prepare=lambda v: v / 2),
        task2vec(model, [{"a": x}], exact=True, inputs=lambda batch: batch["a"] / 2),
    ):
        torch.testing.assert_close(found.vector, expected, rtol=1e-9, atol=0)


def test_the_model_is_left_as_found_after_an_error_too() -> None:
    model = made(Convolutions).train()
    model.batch.eval()
    model.first.weight.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()

    def boom(v: Tensor) -> Tensor:
        if len(v) == 2:
            raise RuntimeError("no more")
        return v

    x = random(8, 3, 12, 10)
    task2vec(model, x)
    with pytest.raises(RuntimeError, match="no more"):
        task2vec(model, [x[:6], x[6:]], prepare=boom)
    assert model.training
    assert not model.batch.training
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["first.weight"]
    assert all(p.grad is None for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()


def test_filters_are_means_over_all_but_the_first_dimension() -> None:
    model, x = made(Convolutions), random(5, 3, 12, 10)
    whole, filters = (task2vec(model, x, average=average) for average in ("parameters", "filters"))
    assert filters.fisher["first.weight"].shape == (8,)
    torch.testing.assert_close(filters.fisher["first.weight"], whole.fisher["first.weight"].mean((1, 2, 3)))
    assert torch.equal(filters.fisher["first.bias"], whole.fisher["first.bias"])
    with pytest.raises(ValueError, match="averages differ"):
        whole.distance(filters)


def test_distances_are_cosine_distances() -> None:
    one, two = (Task2Vec(str(v), {"w": torch.tensor(v, dtype=torch.float64)}, 1, 2, "parameters", "") for v in
                ([3.0, 0.0, 4.0, 0.0], [0.0, 2.0, 0.0, 0.0]))  # fmt: skip
    assert one.distance(one) == 0
    assert one.distance(two) == pytest.approx(1, abs=1e-15)
    other = Task2Vec("other", {"w": torch.tensor([1.0, 2.0, 2.0, 0.0], dtype=torch.float64)}, 1, 2, "parameters", "")
    assert one.distance(other) == pytest.approx(1 - 11 / 15, abs=1e-15)
    # Divided by the sum: (3/4, 0, 4/6) and (1/4, 1, 2/6); the entry that is 0 in both is left out.
    a, b = np.array([3 / 4, 0, 2 / 3]), np.array([1 / 4, 1, 1 / 3])
    cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
    assert one.distance(other, normalised=True) == pytest.approx(1 - cosine, abs=1e-15)
    with pytest.raises(ValueError, match="0 throughout"):
        one.distance(Task2Vec("flat", {"w": torch.zeros(4, dtype=torch.float64)}, 1, 2, "parameters", ""))


def head(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, classes))


def test_heads_that_differ_can_be_left_out() -> None:
    x = random(20, 8).float()
    ten, three = (task2vec(head(classes), x) for classes in (10, 3))
    with pytest.raises(ValueError, match=r"2\.weight \(\(10, 6\) and \(3, 6\)\), 2\.bias .* leave_out='fc\.\*'"):
        ten.distance(three)
    ten, three = (task2vec(head(classes), x, leave_out="2.*") for classes in (10, 3))
    assert list(ten.fisher) == ["0.weight", "0.bias"]
    assert 0 < ten.distance(three) < 1
    deeper = task2vec(nn.Sequential(head(3), nn.Linear(3, 2)), x)
    with pytest.raises(ValueError, match=r"0\.weight \(\(6, 8\) and absent\)"):
        ten.distance(deeper)


def test_saved_and_read_again(tmp_path: Path) -> None:
    found = task2vec(mlp(), random(6, 8).float(), seed=4)
    path = found.save(tmp_path / "a" / "t.safetensors")
    again = Task2Vec.load(path)
    assert again.distance(found) == 0
    assert list(again.fisher) == list(found.fisher)
    total = float(found.vector.sum())
    assert repr(again) == repr(found)
    assert f"Sequential: 207 entries in 6 tensors, sum {total:.4g}, 6 inputs, 3 classes, 1 drawn" in repr(found)
    assert [p.name for p in path.parent.iterdir()] == ["t.safetensors"]
    with pytest.raises(DamagedFile, match="holds a sosie task2vec"):
        compare(path, path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DamagedFile):
        Task2Vec.load(path)


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (nn.ReLU(), random(4, 3), "no parameters"),
        (nn.Linear(3, 1), random(4, 3).float(), r"at least two classes.*shape \(4, 1\)"),
        (nn.Linear(3, 5), random(4, 2, 3).float(), r"shape \(4, 2, 5\)"),
        (nn.Sequential(nn.Linear(3, 5), nn.Softmax(1)), random(4, 3).float(), "probabilities, not logits"),
        (nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), random(4, 3).float(), "running statistics"),
        (np.zeros((4, 3)), random(4, 3), "is not a model"),
    ],
)
def test_what_has_no_fisher_information_is_said_in_words(model: Any, x: Tensor, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        task2vec(model, x)


def test_bad_options_are_said_in_words() -> None:
    model, x = mlp(), random(4, 8).float()
    for options, words in (
        ({"draws": 0}, "draws must be a whole number of at least 1"),
        ({"average": "layers"}, "'parameters', 'filters'"),
        ({"leave_out": "9.weight"}, "no parameter is called '9.weight'; did you mean"),
        ({"leave_out": "*"}, "no parameters are left"),
        ({"max_rows": 0}, "max_rows must be"),
    ):
        with pytest.raises(ValueError, match=words):
            task2vec(model, x, **options)
    with pytest.raises(ValueError, match="NaN or infinite"):
        task2vec(model, x * float("nan"))
