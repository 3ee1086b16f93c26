"""Gradients at every site from one backward pass are those of each input by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_nets import (
    InPlace,
    N,
    Residual,
    Words,
    Wrapped,
    built,
    by_differences,
    expected_loss,
    images,
    one_by_one,
    rows,
    words,
)
from torch import Tensor, nn

import sosie
from sosie.sketching import sketch

BETAS = (0.1, 0.5, 0.9)
ALONG_THE_WAY = ("c1", "b1", "r1", "c2", "r2", "c3", "flat", "r3", "fc")


def exact(model: nn.Module, data: Any, sites: list[str], **options: Any) -> sosie.sketching.Sketch:
    return sketch(model, data, sites=sites, size=None, **options)


def check(model: nn.Module, batch: Any, site: str, *, beta: float = 0.5, within: float = 1e-9, call: int = 1) -> None:
    found = exact(model, [batch], [site], beta=beta)
    label = site if call == 1 else f"{site}@{call}"
    f, g = one_by_one(model, batch, site, expected_loss(beta), call)
    kept = found.site(label)
    assert (kept.features.rows - f.flatten(1)).abs().max() < within * f.abs().max()
    assert (kept.gradients.rows - g.flatten(1)).abs().max() < within * g.abs().max()
    assert g.abs().max() > 1e-4


@pytest.mark.parametrize(("site", "beta"), [*((site, 0.5) for site in ALONG_THE_WAY), ("c2", 0.1), ("c2", 0.9)])
def test_in_place_operations_and_batch_norm(site: str, beta: float) -> None:
    check(built(InPlace), images(), site, beta=beta)


def test_all_sites_at_once_give_what_each_gives_alone() -> None:
    model, x = built(InPlace), images()
    together = exact(model, [x], list(ALONG_THE_WAY))
    for site in ALONG_THE_WAY:
        f, g = one_by_one(model, x, site, expected_loss(0.5))
        assert torch.allclose(together.site(site).gradients.rows, g.flatten(1), atol=1e-12)
        assert torch.allclose(together.site(site).features.rows, f.flatten(1), atol=1e-12)


def test_float32_is_near() -> None:
    model, x = built(InPlace), images()
    f, g = one_by_one(model, x, "b1", expected_loss(0.5))
    kept = exact(model.float(), [x.float()], ["b1"]).site("b1")
    assert kept.gradients.rows.dtype == torch.float32
    assert (kept.features.rows - f.flatten(1)).abs().max() < 1e-5 * f.abs().max()
    assert (kept.gradients.rows - g.flatten(1)).abs().max() < 1e-5 * g.abs().max()


@pytest.mark.parametrize("call", [1, 2])
def test_a_module_called_twice_around_a_residual_connection(call: int) -> None:
    model = built(Residual)
    found = exact(model, [rows()], ["mix", "mix@2"])
    f, g = one_by_one(model, rows(), "mix", expected_loss(0.5), call)
    label = "mix" if call == 1 else "mix@2"
    assert torch.allclose(found.site(label).features.rows, f, atol=1e-12)
    assert torch.allclose(found.site(label).gradients.rows, g, atol=1e-12)


@pytest.mark.parametrize("sites", [["left", "right"], ["left"], ["right", "head"], ["stem", "left", "right", "head"]])
def test_parallel_branches(sites: list[str]) -> None:
    model = built(Residual)
    found = exact(model, [rows()], sites)
    for site in sites:
        _, g = one_by_one(model, rows(), site, expected_loss(0.5))
        assert torch.allclose(found.site(site).gradients.rows, g, atol=1e-12)


def test_the_very_answer_is_pulled_by_p_less_q() -> None:
    model, x = built(Residual), rows()
    kept = exact(model, [x], ["head"], beta=0.3).site("head")
    z = model(x).detach()
    assert torch.allclose(kept.features.rows, z, atol=1e-12)
    assert torch.allclose(kept.gradients.rows, z.softmax(-1) - (0.3 * z).softmax(-1), atol=1e-12)


class Output(dict):  # type: ignore[type-arg]
    """A dict with attributes, as transformers' ModelOutput is."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: (x, None), lambda out: out[0]),
        (lambda x: {"logits": x, "other": 3}, lambda out: out["logits"]),
        (lambda x: Output(logits=x), lambda out: out.logits),
    ],
    ids=["tuple", "dict", "ModelOutput"],
)
@pytest.mark.parametrize("site", ["inner", "inner.linear", "head"])
def test_whatever_modules_return(wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor], site: str) -> None:
    check(built(lambda: Wrapped(wrap, unwrap)), rows(), site)


@pytest.mark.parametrize("rule", ["mean", "positions", "cls", "last"])
@pytest.mark.parametrize("each", [False, True], ids=["a class a text", "a class a token"])
@pytest.mark.parametrize("site", ["embed", "block.linear2", "block"])
def test_tokens_with_padding(rule: str, each: bool, site: str) -> None:
    model, batch = built(lambda: Words(each=each)), words()
    kept = exact(model, [batch], [site], rows=rule).site(site)
    mask = batch["attention_mask"].bool()
    shown = iter(mask)

    def loss(answer: Tensor) -> Tensor:
        whole = expected_loss(0.5)
        return whole(answer[:, next(shown)]) if each else whole(answer)

    for part, whole in zip((kept.features, kept.gradients), one_by_one(model, batch, site, loss), strict=True):
        taken = [row[m] for row, m in zip(whole, mask, strict=True)]
        pick = {
            "mean": lambda x: x.mean(0, keepdim=True),
            "positions": lambda x: x,
            "cls": lambda x: x[:1],
            "last": lambda x: x[-1:],
        }[rule]
        assert torch.allclose(part.rows, torch.cat([pick(x) for x in taken]), atol=1e-11)


@pytest.mark.parametrize("rule", ["flatten", "mean", "positions"])
def test_maps_become_rows_by_the_rule(rule: str) -> None:
    model, x = built(InPlace), images()
    kept = exact(model, [x], ["b1"], rows=rule).site("b1")
    _, g = one_by_one(model, x, "b1", expected_loss(0.5))
    by_rule = {"flatten": g.flatten(1), "mean": g.mean((2, 3)), "positions": g.movedim(1, -1).reshape(-1, 3)}
    assert torch.allclose(kept.gradients.rows, by_rule[rule], atol=1e-12)


def test_a_hugging_face_transformer_with_padding() -> None:
    pytest.importorskip("transformers")
    from tiny_transformers import bert, token_batch

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.head = bert(), nn.Linear(12, 3).double()

        def forward(self, **batch: Tensor) -> Tensor:
            return self.head(self.bert(**batch).last_hidden_state[:, 0])

    torch.manual_seed(0)
    model, batch = Classifier(), token_batch(6)
    site = "bert.encoder.layer.1"
    kept = exact(model, [batch], [site], rows="positions").site(site)
    _, g = one_by_one(model, batch, site, expected_loss(0.5))
    assert torch.allclose(kept.gradients.rows, g[batch["attention_mask"].bool()], atol=1e-12)
    assert g.abs().max() > 1e-4


@pytest.mark.parametrize(
    ("kind", "site", "data"),
    [(InPlace, "b1", images), (InPlace, "flat", images), (Residual, "stem", rows), (Residual, "left", rows)],
)
def test_finite_differences(kind: type[nn.Module], site: str, data: Callable[..., Tensor]) -> None:
    model, x = built(kind), data(3)
    kept = exact(model, [x], [site]).site(site).gradients.rows
    for i in range(3):
        found = by_differences(model, x[i : i + 1], site, 0.5)
        assert (kept[i] - found).abs().max() < 1e-5 * max(1.0, float(found.abs().max()))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread = nn.Linear(6, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        return {"mean": self.mean(hidden), "log_variance": self.spread(hidden)}


@pytest.mark.parametrize("beta", BETAS)
def test_a_gaussian_head_by_sampling_free_expectation(beta: float) -> None:
    """E of (y − μ)² under q is σ²/β: the loss with that expectation put in, differentiated by autograd."""
    model, x = built(Head), rows()
    kept = exact(model, [x], ["body"], output="gaussian", beta=beta).site("body")

    def loss(answer: dict[str, Tensor]) -> Tensor:
        s = answer["log_variance"]
        mean, fixed = answer["mean"].detach(), s.detach().exp() / beta
        # E (y − m)² = variance of q + (mean of q − m)²
        return (0.5 * s + (fixed + (mean - answer["mean"]) ** 2) / (2 * s.exp())).sum()

    _, g = one_by_one(model, x, "body", loss)
    assert torch.allclose(kept.gradients.rows, g, atol=1e-12)
    assert g.abs().max() > 1e-3


def test_a_loss_of_the_users_own() -> None:
    model, x = built(Residual), rows()
    y = torch.arange(N) % 3

    def loss(answer: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(answer, batch[1], reduction="none")

    kept = exact(model, [(x, y)], ["stem"], output=loss).site("stem")
    labels = iter(y)
    _, g = one_by_one(model, x, "stem", lambda z: nn.functional.cross_entropy(z, next(labels)[None]))
    assert torch.allclose(kept.gradients.rows, g, atol=1e-12)


@pytest.mark.parametrize("size", [None, 8])
def test_the_batch_size_does_not_matter(size: int | None) -> None:
    model, x = built(InPlace), images()
    y = torch.arange(N) % 4
    made = [
        sketch(model, [(x[i : i + step], y[i : i + step]) for i in range(0, N, step)], sites=["b1", "fc"], size=size)
        for step in (N, 5, 1)
    ]
    for other in made[1:]:
        made[0].check_shared(other)
        assert torch.equal(made[0].labels, other.labels)
        assert torch.equal(made[0].unsigned_labels, other.unsigned_labels)
        for label in ("b1", "fc"):
            for name in made[0].parts:
                one, two = (getattr(k.site(label), name) for k in (made[0], other))
                for field in ("rows", "total", "squares", "diagonal"):
                    a, b = getattr(one, field), getattr(two, field)
                    assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), (name, field)
            one, two = made[0].site(label), other.site(label)
            assert torch.allclose(one.moment, two.moment, rtol=1e-9)
            assert torch.allclose(one.fourth, two.fourth, rtol=1e-9)
            assert torch.equal(torch.from_numpy(one.pairs.index), torch.from_numpy(two.pairs.index))


@pytest.mark.parametrize("size", [None, 16])
def test_positions_do_not_depend_on_the_batch_size_either(size: int | None) -> None:
    model, x = built(InPlace), images()
    one, two = (sketch(model, x.split(step), sites=["b1"], size=size, rows="positions") for step in (12, 5))
    one.check_shared(two)
    assert torch.allclose(one.site("b1").gradients.rows, two.site("b1").gradients.rows, atol=1e-12)
    batch = words()
    lots = [{key: part[i : i + 5] for key, part in batch.items()} for i in range(0, N, 5)]
    model = built(Words)
    one, two = (sketch(model, data, sites=["block"], size=size, rows="positions") for data in ([batch], lots))
    one.check_shared(two)


def test_what_is_summed_beside_the_rows() -> None:
    model, x = built(InPlace), images()
    found = sketch(model, [x], sites=["c2"], size=4).site("c2")
    f, g = (part.flatten(1) for part in one_by_one(model, x, "c2", expected_loss(0.5)))
    assert torch.allclose(found.moment, g.T @ f)
    assert torch.allclose(found.fourth, (f.square().sum(1) * g.square().sum(1)).square().sum())
    assert torch.allclose(found.hadamard.squares, (f.square().sum(1) * g.square().sum(1)).sum())
    assert torch.allclose(found.features.squares, f.square().sum())
    assert torch.equal(torch.from_numpy(found.pairs.index), torch.arange(N))
    assert torch.allclose(found.pairs.gradients, g)
