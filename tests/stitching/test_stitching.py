"""Stitched networks: the joint is the exact fit, and the whole network computes what its parts do."""

from __future__ import annotations

import pytest
import torch
from nets import cnn
from torch import Tensor, nn

import sosie
from sosie.capture import SiteError
from sosie.models import small_cnn, vit
from sosie.stitching.cuts import LeakingCut


def images(n: int = 96, size: int = 6, seed: int = 0) -> Tensor:
    return torch.rand(n, 1, size, size, generator=torch.Generator().manual_seed(seed))


def labelled(n: int = 96, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    x = images(n, seed=seed)
    y = cnn(0).eval()(x).argmax(1).detach()
    return list(zip(x.split(40), y.split(40), strict=True))


def pixels(activation: Tensor) -> Tensor:
    return activation.movedim(1, -1).reshape(-1, activation.shape[1]).double()


def test_a_network_stitched_to_itself_is_itself() -> None:
    model = cnn(0)
    for fit in ("least_squares", "identity", "permutation", "procrustes"):
        found = sosie.stitch(model, "3", model, "3", labelled(), fit=fit).evaluate(labelled(64, seed=1))
        assert found["relative_accuracy"] == 1, fit
        assert found["agreement_b"] == found["agreement_a"] == 1, fit
        assert found["n"] == 64


def test_the_joint_is_least_squares_over_all_pixels() -> None:
    a, b, x = cnn(0).double(), cnn(1).double(), images().double()
    found = sosie.stitch(a, "1", b, "3", [x[:50], x[50:]])
    with torch.no_grad():
        left, right = pixels(a.eval()[:2](x)), pixels(b.eval()[:4](x))
    ones = torch.cat([left, torch.ones(len(left), 1)], dim=1)
    expected = torch.linalg.lstsq(ones, right).solution
    assert torch.allclose(found.model.joint.weight, expected[:-1].T, atol=1e-8)
    assert torch.allclose(found.model.joint.bias, expected[-1], atol=1e-8)
    assert found.n == 96 * 36
    residual = (right - ones @ expected).square().sum() / (right - right.mean(0)).square().sum()
    assert found.report["r2"] == pytest.approx(float(1 - residual), abs=1e-9)


def test_it_shows_itself_in_a_line() -> None:
    found = sosie.stitch(cnn(0), "1", cnn(1), "3", images(8))
    assert repr(found) == f"Stitch(Sequential up to '1', Sequential from '3' on, fit='least_squares', n={8 * 36})"


def test_the_stitched_network_is_its_parts_in_a_row() -> None:
    a, b, x = cnn(0), cnn(1), images()
    found = sosie.stitch(a, "1", b, "1", x)
    with torch.no_grad():
        by_hand = b.eval()[2:](found.model.joint(a.eval()[:2](x)))
        assert torch.allclose(found.model(x), by_hand, atol=1e-5)
    found.model(x).sum().backward()
    assert found.model.joint.weight.grad is not None, "the joint can be trained further"


def test_shuffled_channels_are_put_right_by_a_permutation() -> None:
    a, b = cnn(0), cnn(0)
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for tensor in (b[0].weight, b[0].bias, b[1].weight, b[1].bias, b[1].running_mean, b[1].running_var):
            tensor.copy_(tensor[order].clone())
        b[3].weight.copy_(b[3].weight[:, order].clone())
    found = sosie.stitch(a, "1", b, "1", labelled(), fit="permutation")
    assert found.model.joint.weight.round().argmax(1).tolist() == order.tolist()
    assert found.evaluate(labelled())["agreement_b"] == 1
    wrong = sosie.stitch(a, "1", b, "1", labelled(), fit="identity")
    assert wrong.evaluate(labelled())["cross_entropy"] > found.evaluate(labelled())["cross_entropy"]


def test_everything_is_left_as_found() -> None:
    a, b = cnn(0).train(), cnn(1).train()
    state = {key: value.clone() for key, value in b.state_dict().items()}
    sosie.stitch(a, "1", b, "1", labelled()).evaluate(labelled())
    assert a.training
    assert b.training
    assert all(torch.equal(value, state[key]) for key, value in b.state_dict().items()), "batch norm is not touched"
    assert all(p.requires_grad for p in b.parameters())
    assert not a[1]._forward_hooks


def test_across_sizes_and_architectures() -> None:
    torch.manual_seed(0)
    x = images(48, size=28)
    conv, transformer = small_cnn(), vit(size=28, patch=7, channels=1, width=16, depth=2, heads=2, classes=10)
    site = next(s for s in sosie.compare(conv, conv, x[:8]).sites_a if "conv2" in s or "relu2" in s)
    block = sosie.compare(transformer, transformer, x[:8]).sites_a[0]
    for one, at, other, to in ((conv, site, transformer, block), (transformer, block, conv, site)):
        found = sosie.stitch(one, at, other, to, x)
        assert found.model(x).shape == (48, 10)
        assert 0 <= found.evaluate(x)["agreement_b"] <= 1


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.two(self.one(x).relu()))


def test_what_cannot_be_stitched_is_refused() -> None:
    x = torch.randn(30, 6)
    with pytest.raises(LeakingCut, match="two"):
        sosie.stitch(Residual(), "one", Residual(), "two", x)
    with pytest.raises(SiteError):
        sosie.stitch(Residual(), "onne", Residual(), "head", x)
    with pytest.raises(ValueError, match="no fit is called"):
        sosie.stitch(Residual(), "one", Residual(), "head", x, fit="least_square")
    with pytest.raises(TypeError, match="int is not a model"):
        sosie.stitch(3, "one", Residual(), "head", x)
    with pytest.raises(ValueError, match="reduced_rank needs a value for k"):
        sosie.stitch(Residual(), "one", Residual(), "head", x, fit="reduced_rank")


class Batchwise(nn.Module):
    """Subtracts the mean of the batch, so that an answer depends on the other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.one(x - x.mean(0)))


def test_caveats_name_random_weights_and_inputs_that_are_mixed() -> None:
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    plain, mixing = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), Batchwise()
    assert sosie.stitch(plain, "0", plain, "0", x).caveats == ()
    for found in sosie.stitch(mixing, "one", plain, "0", x, fit=["least_squares", "identity"]):
        (text,) = found.caveats
        assert "Batchwise mixes the inputs of a batch, at first at 'one'" in text
    spec = "small_cnn(seed=1)"
    found = sosie.stitch(spec, "relu1", spec, "relu1", torch.rand(8, 1, 28, 28))
    assert [text for text in found.caveats if "random weights" in text] == [
        "small_cnn-seed1 has random weights (seed 1)"
    ]
