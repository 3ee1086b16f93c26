"""Task-loss matching on maps, tokens and vectors, across shapes, and on networks that make it hard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import cnn
from torch import Tensor, nn

import sosie
from sosie.models import small_cnn, vit
from sosie.stitching import TaskLoss

FIT = ["task_loss(epochs=3, batch=16, rate=0.01)", "task_loss(epochs=3, batch=16, start='random', seed=1)"]


def images(n: int = 40, size: int = 6) -> Tensor:
    return torch.rand(n, 1, size, size, generator=torch.Generator().manual_seed(0))


def check(found: list[Any], x: Any) -> None:
    """The trained network is evaluated: the losses agree, up to the change of the layer in its last epoch."""
    assert found[1].history[-1]["loss"] < found[1].history[0]["loss"], "a random start can only get better"
    for each in found:
        assert each.evaluate(x)["cross_entropy"] == pytest.approx(each.history[-1]["loss"], abs=0.05)


class Views(nn.Module):
    """Does an operation that fails for channels-last maps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.relu, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv(x))
        return self.head(x.view(len(x), -1))


def test_maps() -> None:
    x = images()
    check(sosie.stitch(cnn(0), "1", cnn(1), "1", x, fit=FIT), x)
    check(sosie.stitch(Views(0), "conv", Views(1), "conv", x, fit=FIT), x)


def test_maps_that_do_not_fit_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = [*FIT, "task_loss(epochs=3, batch=16, cka=0.1)"]
    expected = sosie.stitch(cnn(0), "1", cnn(1), "1", images(), fit=fits)
    monkeypatch.setattr("sosie.stitching.task_loss.BUDGET", 40 * 5 * 4)  # B's answers alone
    for one, other in zip(sosie.stitch(cnn(0), "1", cnn(1), "1", images(), fit=fits), expected, strict=True):
        assert torch.allclose(one.model.joint.weight, other.model.joint.weight, atol=1e-5)


def test_other_widths_and_sizes() -> None:
    x = images(40, 28)
    torch.manual_seed(0)
    conv, transformer = small_cnn(), vit(size=28, patch=7, channels=1, width=16, depth=2, heads=2, classes=10)
    site = next(s for s in sosie.compare(conv, conv, x[:8]).sites_a if "conv2" in s or "relu2" in s)
    block = sosie.compare(transformer, transformer, x[:8]).sites_a[0]
    check(sosie.stitch(transformer, block, conv, site, x, fit=FIT), x)
    check(sosie.stitch(conv, site, transformer, block, x, fit=FIT), x)
    check(sosie.stitch(conv, site, conv, sosie.compare(conv, conv, x[:8]).sites_a[-1], x, fit=FIT), x)


def test_the_start_in_the_stack_is_the_stitched_network() -> None:
    """Folding and unfolding rows gives the same as the joint itself."""
    x = images(40, 28)
    torch.manual_seed(0)
    conv, transformer = small_cnn(), vit(size=28, patch=7, channels=1, width=16, depth=2, heads=2, classes=10)
    site = next(s for s in sosie.compare(conv, conv, x[:8]).sites_a if "conv2" in s or "relu2" in s)
    block = sosie.compare(transformer, transformer, x[:8]).sites_a[0]
    for one, at, other, to in ((conv, site, transformer, block), (transformer, block, conv, site)):
        closed, *trained = sosie.stitch(one, at, other, to, x, fit=["least_squares", "task_loss(epochs=1)"])
        expected = closed.evaluate(x)["cross_entropy"]
        assert trained[0].history[0]["cross_entropy"] == pytest.approx(expected, abs=1e-5)


class Masked(nn.Module):
    """Averages the tokens that are not padding: B's upper part needs the mask of every input."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.mix, self.head = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.mix(self.embed(input_ids)).tanh() * attention_mask[..., None]
        return {"logits": self.head(hidden.sum(1) / attention_mask.sum(1, keepdim=True))}


def tokens(n: int = 40) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 6, (n, 1), generator=g)
    return {
        "input_ids": torch.randint(20, (n, 5), generator=g),
        "attention_mask": (torch.arange(5) < lengths).long(),
    }


def test_what_b_takes_from_its_input_goes_with_every_joint() -> None:
    x = tokens()
    fits = [*FIT, "least_squares", "task_loss(epochs=3, batch=16, start='random')"]
    together = sosie.stitch(Masked(0), "mix", Masked(1), "mix", x, fit=fits)
    assert together[0].model.upper.cut.needs_input
    closed, trained = together[2], together[0]
    assert trained.history[0]["loss"] == pytest.approx(closed.evaluate(x)["cross_entropy"], abs=1e-5)
    for text, found in zip(fits, together, strict=True):
        alone = sosie.stitch(Masked(0), "mix", Masked(1), "mix", x, fit=text)
        assert torch.allclose(found.model.joint.weight, alone.model.joint.weight, atol=1e-5), text
    shared = sosie.stitch(Masked(0), "mix", Masked(1), "mix", x, fit=[fits[0], fits[3]])
    assert torch.allclose(shared[0].model.joint.weight, trained.model.joint.weight, atol=1e-5)


def test_positions_count_where_neither_network_pads() -> None:
    def tokeniser(lengths: list[int]) -> Any:
        def prepare(texts: list[str]) -> dict[str, Tensor]:
            ids = torch.tensor([[ord(c) % 20 for c in text] for text in texts])
            own = torch.tensor([[lengths[ord(text[0]) % 2]] for text in texts])
            return {"input_ids": ids, "attention_mask": (torch.arange(5) < own).long()}

        return prepare

    texts = ["abcde", "bcdea", "cdeab", "deabc", "aabbc", "bbccd", "ccdde", "ddeea"]
    found = sosie.stitch(
        Masked(0), "mix", Masked(1), "mix", [texts], prepare_a=tokeniser([2, 5]), prepare_b=tokeniser([5, 3])
    )
    assert isinstance(found, sosie.Stitch)
    assert found.n == 4 * 2 + 4 * 3


def test_label_spaces_may_differ() -> None:
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, classes)) for classes in (7, 3))
    x, y = torch.randn(40, 5), torch.randint(7, (40,))
    check(sosie.stitch(a, "0", b, "0", [(x, y)], fit=FIT), x)


def test_networks_that_are_no_classifiers_need_a_loss() -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Unflatten(1, (2, 3))) for _ in range(2)]
    x = torch.randn(40, 5)
    with pytest.raises(ValueError, match="needs a network B that answers"):
        sosie.stitch(nets[0], "0", nets[1], "0", x, fit="task_loss")

    def squared(outputs: Tensor, batch: Tensor) -> Tensor:
        assert outputs.shape == (len(batch), 2, 3)
        return outputs.square().mean()

    fits = [TaskLoss(epochs=3, batch=16, rate=0.01, start=start, loss=squared) for start in ("least_squares", "random")]
    found = sosie.stitch(nets[0], "0", nets[1], "0", x, fit=fits)
    assert all(each.history[-1]["loss"] < each.history[0]["loss"] for each in found)
    assert "cross_entropy" not in found[0].history[0]


def test_bfloat16() -> None:
    x = images()
    plain, narrow = sosie.stitch(
        cnn(0), "1", cnn(1), "1", x, fit=["task_loss(epochs=2)", "task_loss(epochs=2, autocast=True)"]
    )
    assert narrow.model.joint.weight.dtype == torch.float32
    assert narrow.history[-1]["loss"] == pytest.approx(plain.history[-1]["loss"], abs=0.02)
    assert not torch.equal(narrow.model.joint.weight, plain.model.joint.weight)


def test_data_are_read_once() -> None:
    reads = 0

    class Loader:
        def __iter__(self) -> Any:
            nonlocal reads
            reads += 1
            yield from images().split(15)

    sosie.stitch(cnn(0), "1", cnn(1), "1", Loader(), fit=[*FIT, "least_squares"])
    assert reads == 1
    one_shot = sosie.stitch(cnn(0), "1", cnn(1), "1", iter(images().split(15)), fit=FIT[0])
    assert one_shot.n == 40 * 36
