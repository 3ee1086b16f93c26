"""Classes from a sketch: against kernel ridge regression done elsewhere, and by hand where nothing collides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import mlp
from torch import Tensor, nn

import sosie
from sosie.data import DataPart, open_images
from sosie.factory import find_file
from sosie.sketching import Classifiers, Sketch, classifiers, classify
from sosie.sketching.classifiers import best, ridge_of_gram, ridge_of_rows

SITES = ["0", "1", "3"]
ALL = ["features", "gradients", "hadamard", "hadamard_of_sketches", "sum", "maps"]
LINEAR = [kernel for kernel in ALL if kernel != "hadamard_of_sketches"]


def labelled(n: int, seed: int = 0, apart: float = 3.0) -> tuple[Tensor, Tensor]:
    """Three classes around centres of their own, of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    centres = apart * torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), n, replacement=True, generator=generator)
    return centres[labels] + torch.randn(n, 8, generator=generator, dtype=torch.float64), labels


def batches(x: Tensor, y: Tensor, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def sketched(model: nn.Module, data: Any, size: int | None = 128, **options: Any) -> Sketch:
    return sosie.sketch(model, data, **{"sites": SITES, "size": size, "kernels": ALL, **options})


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return mlp().double()


@pytest.fixture(scope="module")
def train() -> list[tuple[Tensor, Tensor]]:
    return batches(*labelled(300))


@pytest.fixture(scope="module")
def test() -> list[tuple[Tensor, Tensor]]:
    return batches(*labelled(100, seed=5))


def by_autograd(model: nn.Module, site: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features at a site and the gradients there of the loss under the tempered prediction, by other means."""
    layers, at = list(model), int(site) + 1  # type: ignore[call-overload]
    f = nn.Sequential(*layers[:at])(x).detach().clone().requires_grad_()
    logits = nn.Sequential(*layers[at:])(f.clone())
    q = (0.5 * logits).softmax(1).detach()
    (g,) = torch.autograd.grad(-(q * logits.log_softmax(1)).sum(), f)
    return f.detach(), g


@pytest.mark.parametrize("kernel", ["features", "hadamard"])
def test_every_row_kept_is_kernel_ridge_regression(kernel: str, model: nn.Module, train: Any, test: Any) -> None:
    ridge = pytest.importorskip("sklearn.kernel_ridge").KernelRidge
    x, y, new = torch.cat([x for x, _ in train]), torch.cat([y for _, y in train]), torch.cat([x for x, _ in test])
    found = classify(sketched(model, train, size=None), kernel, alpha=0.3).scores(model, test)
    for site in ("0", "3"):
        (f, g), (f_new, g_new) = by_autograd(model, site, x), by_autograd(model, site, new)
        if kernel == "hadamard":
            f, f_new = ((a[:, :, None] * b[:, None]).flatten(1) for a, b in ((f, g), (f_new, g_new)))
        mean, one_hot = f.mean(0), nn.functional.one_hot(y).double()
        gram, across = (f - mean) @ (f - mean).T, (f_new - mean) @ (f - mean).T
        outside = ridge(alpha=0.3, kernel="precomputed").fit(gram, one_hot - one_hot.mean(0)).predict(across)
        expected = torch.from_numpy(outside) + one_hot.mean(0)
        torch.testing.assert_close(found[site], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("kernel", [kernel for kernel in ALL if kernel != "hadamard"])
def test_where_no_rows_share_a_bucket_nothing_changes(kernel: str, stack: int, model: nn.Module, test: Any) -> None:
    x, y = labelled(8)
    options: dict[str, Any] = {"kernels": [k for k in ALL if k != "hadamard"]}
    draws = (sketched(model, batches(x, y), size=256, stack=stack, seed=seed, **options) for seed in range(50))
    apart = next(k for k in draws if int((k.counts > 0).sum()) == 8 * stack)
    # A product of sketches in a stack of two has every row twice, at half of its length: the same with half the α.
    halved = stack if kernel == "hadamard_of_sketches" else 1
    expected = classify(sketched(model, batches(x, y), size=None, **options), kernel, alpha=0.2).scores(model, test)
    found = classify(apart, kernel, alpha=0.2 / halved).scores(model, test)
    for site in SITES:
        torch.testing.assert_close(found[site], expected[site], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("memory", [None, 400_000])
@pytest.mark.parametrize("kernel", ALL)
def test_new_rows_are_projected_as_those_of_the_sketch(kernel: str, memory: int | None) -> None:
    """The formula of the paper, with rows of a new input from a sketch of it alone, whose sum is the row itself."""
    model = mlp(width=200).double()
    x, y = labelled(150)
    k = sketched(model, batches(x, y), size=32, sites=["0"], memory=memory)
    assert (k.site("0").folded is None) == (memory is None)
    found = classify(k, kernel, alpha=0.5)
    new = labelled(3, seed=7)[0]
    alone = [sketched(model, [row[None]], size=32, sites=["0"], memory=memory).site("0") for row in new]
    shares = torch.bincount(y) / 150

    def rows(name: str, site: Any) -> Tensor:
        part = getattr(site, name)
        return torch.cat([*part.total]) / 2**0.5 if name == "hadamard" else part.total

    if kernel == "hadamard_of_sketches":
        f, g = k.site("0").features.rows, k.site("0").gradients.rows
        raw = (f @ f.T) * (g @ g.T)
        off = torch.eye(32, dtype=torch.float64) - k.counts[:, None] / 150
        across = torch.stack([(f @ rows("features", a)) * (g @ rows("gradients", a)) for a in alone], 1)
        across, gram = off @ (across - raw.sum(1)[:, None] / 150), off @ raw @ off.T
        labels = k.unsigned_labels - k.counts[:, None] * shares
    else:
        names = ["features", "gradients"] if kernel == "sum" else [kernel]
        mean = torch.cat([rows(name, k.site("0")) for name in names]) / 150
        centred = k.kernel("0", kernel).rows
        across = centred @ torch.stack([torch.cat([rows(name, a) for name in names]) - mean for a in alone], 1)
        gram, labels = centred @ centred.T, k.labels - k.ones[:, None] * shares
    expected = across.T @ torch.linalg.solve(gram + 0.5 * torch.eye(32, dtype=torch.float64), labels) + shares
    torch.testing.assert_close(found.scores(model, [new])["0"], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kernel", ["features", "gradients", "maps"])
def test_a_projected_kernel_alone_is_projected_again(kernel: str, train: Any, test: Any) -> None:
    model = mlp(width=200).double()
    k = sketched(model, train, size=32, sites=["0"], kernels=kernel, memory=220_000 if kernel != "features" else 20_000)
    assert k.site("0").folded is not None
    assert classify(k, kernel).evaluate(model, test)["0"] > 0.7


@pytest.mark.parametrize("columns", [5, 60])
def test_rows_and_kernel_give_the_same_weights(columns: int) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, targets = (torch.randn(40, k, generator=generator, dtype=torch.float64) for k in (columns, 3))
    for balanced in (False, True):
        if balanced:
            rows, targets = rows - rows.mean(0), targets - targets.mean(0)
        weights, errors, _ = ridge_of_rows(rows, targets, None, balanced=balanced)
        duals, of_gram, _ = ridge_of_gram(rows @ rows.T, targets, None, balanced=balanced)
        torch.testing.assert_close(weights, rows.T @ duals, rtol=1e-9, atol=1e-12)
        assert best(errors) == pytest.approx(best(of_gram), rel=1e-12)
        assert list(errors.values()) == pytest.approx(list(of_gram.values()), rel=1e-6)
        solved = rows.T @ torch.linalg.solve(rows @ rows.T + best(errors) * torch.eye(40, dtype=torch.float64), targets)
        torch.testing.assert_close(weights, solved, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("columns", [5, 60])
@pytest.mark.parametrize("balanced", [False, True])
def test_the_error_is_that_of_rows_left_out(columns: int, balanced: bool) -> None:
    """Row by row: without it, and with the means taken anew where rows had them taken off."""
    generator = torch.Generator().manual_seed(4)
    rows, targets = (torch.randn(40, k, generator=generator, dtype=torch.float64) for k in (columns, 3))
    targets = targets + rows[:, :3]
    if balanced:
        rows, targets = rows - rows.mean(0), targets - targets.mean(0)
    _, errors, _ = ridge_of_rows(rows, targets, None, balanced=balanced)
    for alpha, error in list(errors.items())[8::4]:
        total = 0.0
        for k in range(40):
            others = torch.arange(40) != k
            x, t = rows[others], targets[others]
            x_mean, t_mean = (x.mean(0), t.mean(0)) if balanced else (torch.zeros(columns), torch.zeros(3))
            x, t = x - x_mean, t - t_mean
            weights = x.T @ torch.linalg.solve(x @ x.T + alpha * torch.eye(39, dtype=torch.float64), t)
            total += float((targets[k] - t_mean - (rows[k] - x_mean) @ weights).square().sum())
        assert error == pytest.approx(total / float(targets.square().sum()), rel=1e-6)
    assert errors[best(errors)] == min(errors.values())


@pytest.mark.parametrize("kernel", ALL)
def test_a_sketch_of_fewer_buckets_than_rows_tells_classes_apart(
    kernel: str, model: nn.Module, train: Any, test: Any
) -> None:
    fitted = classify(sketched(model, train), kernel)
    assert list(fitted.alphas) == SITES
    assert all(site.errors[site.alpha] < 1 for site in fitted.sites.values())
    for site in fitted.sites.values():
        assert min(site.errors) < site.alpha < max(site.errors) or kernel == "sum"  # gradients are small
    for data in (train, test):
        assert min(fitted.evaluate(model, data).values()) > 0.7  # half of them are of one class


@pytest.mark.parametrize("kernel", ALL)
def test_labels_have_signs_just_where_rows_have_them(
    kernel: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs cancel in the product of two sketches, and nowhere else."""
    k = sketched(model, batches(*labelled(500)), size=256, sites=["0"])
    new = batches(*labelled(500, seed=5))
    right = classify(k, kernel).evaluate(model, new)["0"]
    others = frozenset(LINEAR) if kernel in LINEAR else frozenset()
    monkeypatch.setattr(classifiers, "UNSIGNED", others)
    wrong = classify(k, kernel).evaluate(model, new)["0"]
    assert right > 0.9
    assert wrong < 0.6  # half of them are of one class


def test_merged_sketches_and_other_batches_give_the_same(model: nn.Module, train: Any, test: Any) -> None:
    halves = sketched(model, train[:2]).merge(sketched(model, DataPart(train[2:], 128)))
    x, y = (torch.cat(parts) for parts in zip(*test, strict=True))
    for kernel in ALL:
        whole, merged = classify(sketched(model, train), kernel, alpha=1.0), classify(halves, kernel, alpha=1.0)
        a, b = whole.scores(model, test), merged.scores(model, batches(x, y, 7))
        for site in SITES:
            torch.testing.assert_close(a[site], b[site], rtol=1e-8, atol=1e-9)
        assert whole.evaluate(model, test, sites="1") == {"1": float((a["1"].argmax(1) == y).double().mean())}


def test_tiny10_needs_signs_for_features_and_none_for_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path(__file__).resolve().parents[3] / "shared"
    for name, folder in (("SOSIE_DATA", "data"), ("SOSIE_WEIGHTS", "weights")):
        monkeypatch.setenv(name, os.pathsep.join([str(shared / folder), os.environ.get(name, "")]))
    tiny = "drfrankenstein-tiny10-cifar10-seed00.safetensors"
    try:
        find_file(tiny, "SOSIE_WEIGHTS")
        train, test = (open_images("cifar10", split=split, max_rows=n) for split, n in (("train", 3000), ("test", 500)))
    except FileNotFoundError as error:
        pytest.skip(f"Tiny-10 or CIFAR-10 is not at hand: {error}")
    k = sosie.sketch(f"tiny10@{tiny}", train.batches(250), sites="bn6", kernels=["features", "gradients"])

    def accuracy(kernel: str) -> float:
        return classify(k, kernel).evaluate(f"tiny10@{tiny}", test.batches(250))["bn6"]

    assert accuracy("features") > 0.55
    assert accuracy("hadamard_of_sketches") > 0.45
    monkeypatch.setattr(classifiers, "UNSIGNED", frozenset({"features"}))
    assert accuracy("features") < 0.3
    assert accuracy("hadamard_of_sketches") < 0.3


@pytest.fixture(scope="module")
def fitted(model: nn.Module, train: Any) -> Classifiers:
    return classify(sketched(model, train), "hadamard", alpha=1.0)


def test_what_cannot_be_fitted_is_said(model: nn.Module, train: Any) -> None:
    k = sketched(model, train)
    with pytest.raises(ValueError, match="this sketch has no labels"):
        classify(sketched(model, [x for x, _ in train]))
    for alpha in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="alpha must be a number above 0"):
            classify(k, alpha=alpha)
    with pytest.raises(ValueError, match="alpha=1e-30 is lost in the rounding"):
        classify(k, alpha=1e-30)
    with pytest.raises(ValueError, match="no kernel is called 'rbf'"):
        classify(k, "rbf")
    with pytest.raises(ValueError, match="'midpoint' cannot classify"):
        classify(k, "midpoint")
    with pytest.raises(ValueError, match="all 300 labels of this sketch are the same"):
        classify(sketched(model, [(x, torch.zeros_like(y)) for x, y in train]))
    for kernel in ("hadamard", "hadamard_of_sketches", "gradients"):
        with pytest.raises(ValueError, match=r"needs? .*sketch.* of"):
            classify(sketched(model, train, kernels="features"), kernel)
    with pytest.raises(ValueError, match=r"^0: all rows are the same"):
        classify(sketched(model, [(torch.ones_like(x), y) for x, y in train]), "features")


def test_what_cannot_be_asked_is_said(fitted: Classifiers, model: nn.Module, test: Any) -> None:
    with pytest.raises(ValueError, match="is not the model that was sketched"):
        fitted.evaluate(mlp(seed=1).double(), test)
    with pytest.raises(ValueError, match="by the rule 'flatten', not 'mean'"):
        fitted.evaluate(model, test, rows="mean")
    with pytest.raises(ValueError, match="no classifier for 2"):
        fitted.evaluate(model, test, sites=["1", "2"])
    with pytest.raises(ValueError, match=r"of another output, 'logits, beta 0.5' and not 'logits, beta 0.25'"):
        fitted.evaluate(model, test, beta=0.25)
    with pytest.raises(ValueError, match="have no labels"):
        fitted.evaluate(model, [x for x, _ in test])
    with pytest.raises(ValueError, match="classes that are not in the sketch: 5"):
        fitted.evaluate(model, [(x, torch.full_like(y, 5)) for x, y in test])


def test_rows_by_a_function_are_asked_for_again(model: nn.Module, train: Any, test: Any) -> None:
    def halves(activation: Tensor) -> Tensor:
        return activation[:, ::2]

    made = classify(sketched(model, train, rows=halves, kernels="features"), "features")
    with pytest.raises(ValueError, match="by a function, halves"):
        made.evaluate(model, test)
    assert made.evaluate(model, test, rows=halves)["0"] > 0.7


def test_inputs_of_another_size_are_refused() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    x, y = torch.randn(40, 1, 8, 8), torch.arange(40) % 2
    made = classify(sosie.sketch(net, [(x, y)], sites="0", size=None), "features")
    with pytest.raises(ValueError, match="rows of 32 features for these inputs, but of 72"):
        made.evaluate(net, [(x[..., :6, :6], y)])


def test_a_file_classifies_as_the_sketch_does(fitted: Classifiers, model: nn.Module, test: Any, tmp_path: Path) -> None:
    again = Sketch.load(fitted.sketch.save(tmp_path / "k.safetensors"))
    assert classify(again, "hadamard", alpha=1.0).evaluate(model, test) == fitted.evaluate(model, test)
