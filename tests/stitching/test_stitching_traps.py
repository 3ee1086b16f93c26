"""Data and models that once made a stitch wrong without an error."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from nets import cnn
from tiny_transformers import bert, token_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sosie
from sosie.stitching import TaskLoss


def mlp(seed: int, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def rows(n: int = 53) -> Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def least_squares(left: Tensor, right: Tensor) -> Tensor:
    """(q, p + 1): the weight, then the bias."""
    ones = torch.cat([left, torch.ones(len(left), 1, dtype=left.dtype)], dim=1)
    return torch.linalg.lstsq(ones, right, driver="gelsd").solution.T


def layer(found: sosie.Stitch) -> Tensor:
    joint = found.model.joint
    return torch.cat([joint.weight, joint.bias[:, None]], dim=1).detach()


@pytest.mark.parametrize("batch", [1, 2, 20, 52, 53])
@pytest.mark.parametrize("once", [False, True])
def test_every_input_counts_whatever_the_batch_size_and_however_often_data_can_be_read(batch: int, once: bool) -> None:
    a, b, x = mlp(0).double(), mlp(1, 6).double(), rows()
    with torch.no_grad():
        expected = least_squares(a[:3](x), b[:3](x))
    given = x.split(batch)
    found = sosie.stitch(a, "2", b, "2", iter(given) if once else list(given), precision="float64")
    assert found.n == len(x)
    assert torch.allclose(layer(found), expected, atol=1e-8)


@pytest.mark.parametrize("batch", [1, 20])
def test_all_sites_read_every_input_once(batch: int) -> None:
    a, b, x = mlp(0).double(), mlp(1, 6).double(), rows()
    whole = sosie.stitch_sites(a, b, x, test=x, sites_a=["0", "2"], sites_b=["0", "2"])
    found = sosie.stitch_sites(a, b, iter(x.split(batch)), test=x, sites_a=["0", "2"], sites_b=["0", "2"])
    assert found["linear_cka"].n == len(x)
    for name in whole.measures:
        np.testing.assert_allclose(found.matrix(name), whole.matrix(name), atol=1e-9, err_msg=name)
    with pytest.raises(ValueError, match="can be read only once"):
        sosie.stitch_sites(a, b, iter(x.split(batch)))


def test_no_inputs_are_told() -> None:
    for stitch in (lambda: sosie.stitch(mlp(0), "2", mlp(1), "2", []), lambda: sosie.stitch_sites(mlp(0), mlp(1), [])):
        with pytest.raises(ValueError, match="no inputs"):
            stitch()


def test_shuffled_data_leave_the_global_random_state_alone() -> None:
    x = rows().float()
    loader = DataLoader(TensorDataset(x, torch.zeros(len(x), dtype=torch.long)), batch_size=8, shuffle=True)
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    for fit in ("least_squares", "task_loss(epochs=1)"):
        sosie.stitch(mlp_as_found(0), "2", mlp_as_found(1), "2", loader, fit=fit).evaluate(loader)
        assert torch.equal(torch.get_rng_state(), before[0]), fit
        assert (np.random.get_state()[1] == before[1]).all()
        assert random.getstate() == before[2]


def mlp_as_found(seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        return mlp(seed)


def test_answers_that_are_nan_agree_with_nothing() -> None:
    a, b, x = cnn(0), cnn(1), torch.rand(24, 1, 6, 6)
    found = sosie.stitch(a, "1", b, "1", x)
    x[5] = torch.nan
    with pytest.raises(ValueError, match="1 of 24 inputs with NaN"):
        found.evaluate(x)


@pytest.mark.parametrize("moved", [-1, 5])
def test_labels_of_other_classes_are_no_accuracy_of_zero(moved: int) -> None:
    x = rows().float()
    y = torch.arange(len(x)) % 3
    found = sosie.stitch(mlp(0), "2", mlp(1), "2", x)
    assert "accuracy" in found.evaluate([(x, y)])
    with pytest.raises(ValueError, match="there are 3 classes"):
        found.evaluate([(x, y + moved)])


class TestPadding:
    """Padded tokens are not rows: their content and number do not matter."""

    site = "encoder.layer.0"

    @pytest.fixture(autouse=True)
    def _transformers(self) -> None:
        pytest.importorskip("transformers")

    @pytest.mark.parametrize("left", [False, True])
    def test_the_joint_is_least_squares_over_tokens(self, left: bool) -> None:
        a, b, batch = bert(0), bert(1), token_batch(left=left, garbage=7, extra=3)
        keep = batch["attention_mask"].bool()
        with torch.no_grad():
            tokens = [model(**batch, output_hidden_states=True).hidden_states[1][keep] for model in (a, b)]
        found = sosie.stitch(a, self.site, b, self.site, [batch], precision="float64")
        assert found.n == int(keep.sum())
        # After a layer norm the rows lack full rank: only the fitted values are determined, not the layer.
        expected, fitted = least_squares(*tokens), layer(found)
        assert torch.allclose(*(tokens[0] @ each[:, :-1].T + each[:, -1] for each in (expected, fitted)), atol=1e-8)

    def test_all_sites_leave_padding_out(self) -> None:
        class Classifier(nn.Module):
            def __init__(self, seed: int) -> None:
                super().__init__()
                self.bert = bert(seed)

            def forward(self, **batch: Tensor) -> Tensor:
                return self.bert(**batch).last_hidden_state[:, 0]

        sites = {"sites_a": ["bert.encoder.layer.0"], "sites_b": ["bert.encoder.layer.0"]}
        few, many = ([token_batch(garbage=7, extra=extra)] for extra in (0, 3))
        one, other = (sosie.stitch_sites(Classifier(0), Classifier(1), d, test=few, **sites) for d in (few, many))
        assert one["linear_cka"].n == int(few[0]["attention_mask"].sum())
        for name in one.measures:
            np.testing.assert_allclose(one.matrix(name), other.matrix(name), atol=1e-6, err_msg=name)

    def test_a_change_of_shape_that_would_count_padding_is_refused(self) -> None:
        class Short(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bert, self.first, self.head = bert(1), nn.Linear(12, 12).double(), nn.Linear(12, 3).double()

            def forward(self, **batch: Tensor) -> Tensor:
                return self.head(self.first(self.bert(**batch).last_hidden_state[:, 0]))

        padded = token_batch()
        with pytest.raises(ValueError, match="padding would count"):
            sosie.stitch(bert(0), self.site, Short(), "first", [padded])
        # It is not counted either if the fit had no padding.
        whole = {**padded, "attention_mask": torch.ones_like(padded["attention_mask"])}
        fitted = sosie.stitch(bert(0), self.site, Short(), "first", [whole])
        assert torch.isfinite(fitted.model(whole)).all()
        with pytest.raises(ValueError, match="padding would count"):
            fitted.model(padded)
        with pytest.raises(ValueError, match="padding would count"):
            sosie.stitch_sites(bert(0), Short(), [whole], test=[padded], sites_a=[self.site], sites_b=["first"])

    def test_similarity_of_padded_tokens_is_refused_as_a_penalty(self) -> None:
        fit = TaskLoss(epochs=1, cka=-1, loss=lambda outputs, _: outputs.mean())
        with pytest.raises(ValueError, match="padding would count"):
            sosie.stitch(bert(0), self.site, bert(1), self.site, [token_batch()], fit=fit)


def test_networks_may_differ_in_precision() -> None:
    x, a, b = rows().float(), mlp(0), mlp(1)
    plain = sosie.stitch(a, "1", b, "1", x)
    coarse = mlp(0).bfloat16()
    for other, prepare, off in ((mlp(0).double(), Tensor.double, 1e-5), (coarse, Tensor.bfloat16, 0.1)):
        found = sosie.stitch(other, "1", b, "1", x, prepare_a=prepare)
        answers = found.model(x)
        assert answers.dtype == torch.float32
        torch.testing.assert_close(answers, plain.model(x), rtol=off, atol=off)
    assert coarse[0].weight.dtype == torch.bfloat16


class Halved(nn.Module):
    """Halves its input, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layers, self.in_place = mlp(0).double(), in_place

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.mul_(0.5) if self.in_place else x * 0.5)
        return out


def test_a_model_that_changes_its_input_in_place_is_stitched() -> None:
    other, x = mlp(1, 6).double(), rows()
    for a_first in (True, False):
        models = [Halved(in_place) for in_place in (True, False)]
        pairs = [((m, "layers.2", other, "2") if a_first else (other, "2", m, "layers.2")) for m in models]
        one, two = (layer(sosie.stitch(*pair, x)) for pair in pairs)
        assert torch.equal(one, two)
    assert torch.equal(x, rows())


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("fit", ["least_squares", "task_loss(epochs=2)"])
def test_a_loader_that_fills_one_buffer_again_and_again(batch: int, fit: str) -> None:
    a, b, x = mlp(0).double(), mlp(1, 6).double(), rows(60)

    def batches() -> Iterator[Tensor]:
        buffer = torch.empty(batch, 5, dtype=torch.float64)
        for part in x.split(batch):
            yield buffer.copy_(part)

    found, expected = (sosie.stitch(a, "2", b, "2", data, fit=fit) for data in (batches(), list(x.split(batch))))
    assert torch.equal(layer(found), layer(expected))
