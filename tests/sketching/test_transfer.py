"""Transfer scores against kernels written out in float64, on small networks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import inputs, mlp
from torch import Tensor, nn

import sosie
from sosie.data import DataPart
from sosie.results import TRANSFER, Comparison, Comparisons, least_first, over_sites, sites_least_first
from sosie.sketching.scores import _ratio, scores_of
from sosie.sketching.sketches import Pairs, Part, SiteSketch, TensorSketch

BETA = 0.5
SITES = ["0", "3", "4"]


def rows_at(model: nn.Module, site: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and gradients of the tempered cross-entropy, by autograd and nothing of sosie's."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        kept.append(output.clone())
        return kept[0].clone()  # the next layer may work in place

    hook = dict(model.named_modules())[site].register_forward_hook(keep)
    answer = model(x)
    hook.remove()
    q = (BETA * answer).softmax(-1).detach()
    loss = -(q * answer.log_softmax(-1)).sum()
    (gradient,) = torch.autograd.grad(loss, kept[0])
    return kept[0].detach().flatten(1), gradient.flatten(1)


def truth(model: nn.Module, x: Tensor, sites: list[str]) -> dict[str, np.ndarray]:
    """Every score from K = (F Fᵀ) ∘ (G Gᵀ)."""
    found: dict[str, list[float]] = {name: [] for name in TRANSFER}
    for site in sites:
        f, g = rows_at(model, site, x)
        kernel, n = (f @ f.T) * (g @ g.T), len(x)
        mean, norm, trace = kernel.mean().sqrt(), kernel.norm() / n**2, kernel.trace().sqrt() / n
        scores = (mean, norm, trace, mean / norm, mean / trace, (mean / norm).log())
        for name, value in zip(TRANSFER, scores, strict=True):
            found[name].append(float(value))
    return {name: np.array(column) for name, column in found.items()}


def single(model: nn.Module, x: Tensor, **options: Any) -> Comparison:
    found = sosie.transfer(model, [x[:70], x[70:]], **options)
    assert isinstance(found, Comparison)
    return found


@pytest.fixture
def net() -> nn.Module:
    return mlp(0).double().eval()


@pytest.mark.parametrize("size", [None, 64])
def test_scores_are_those_of_the_kernel_where_all_rows_are_in_the_sample(net: nn.Module, size: int | None) -> None:
    x = inputs(150).double()
    found, expected = single(net, x, sites=SITES, size=size), truth(net, x, SITES)
    assert list(found.values) == list(TRANSFER)
    for name, column in expected.items():
        np.testing.assert_allclose(found.matrix(name)[:, 0], column, rtol=1e-10, err_msg=name)
        assert found[name].low is None  # nothing was sampled
        assert found[name].closer == "down"


def test_the_norm_of_the_kernel_comes_from_sampled_pairs_within_its_error(net: nn.Module) -> None:
    x = inputs(2000).double()
    expected = truth(net, x, SITES)
    inside = []
    for seed in range(12):
        found = single(net, x, sites=SITES, size=32, seed=seed)
        for name in ("mean_embedding", "kernel_trace", "mean_over_trace"):
            np.testing.assert_allclose(found.matrix(name)[:, 0], expected[name], rtol=1e-10, err_msg=name)
        for name in ("kernel_norm", "mean_over_norm", "log_mean_over_norm"):
            low, high = found[name].low, found[name].high
            assert low is not None
            assert high is not None
            assert (low < found[name].value).all()
            inside.append((low[:, 0] < expected[name]) & (expected[name] < high[:, 0]))
        np.testing.assert_allclose(found.matrix("kernel_norm")[:, 0], expected["kernel_norm"], rtol=0.15)
        assert "512 sampled rows" in found["kernel_norm"].statistic
    assert 0.85 <= np.mean(inside) < 1  # of intervals that promise 95 %


@pytest.mark.parametrize("n", [600, 2000])
def test_the_stated_error_is_the_spread_over_samples(net: nn.Module, n: int) -> None:
    """Also where most rows are in the sample, which leaves little to chance."""
    x, values, reach = inputs(n).double(), [], []
    for seed in range(30):
        found = single(net, x, sites=["0"], size=32, seed=seed)["kernel_norm"]
        assert found.low is not None
        assert found.high is not None
        values.append(np.log(found.value.item()))
        reach.append(np.log(found.high.item() / found.low.item()) / 2 / 1.96)
    assert 0.65 < np.std(values) / np.mean(reach) < 1.5


def test_every_row_kept_gives_the_norm_of_all_pairs(net: nn.Module) -> None:
    x = inputs(2000).double()
    found = single(net, x, sites=SITES, size=None)
    np.testing.assert_allclose(found.matrix("kernel_norm")[:, 0], truth(net, x, SITES)["kernel_norm"], rtol=1e-10)


def wide(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 1100), nn.Tanh(), nn.Linear(1100, 4)).double()


def test_wide_sites_have_their_mean_embedding_from_a_sketch_within_its_error() -> None:
    net, x = wide(), inputs(150).double()
    expected = truth(net, x, ["1"])["mean_embedding"][0]
    found = [single(net, x, sites=["1"], size=128, seed=seed)["mean_embedding"] for seed in range(20)]
    values = np.array([one.value.item() for one in found])
    assert np.std(values) > 0
    assert abs((values**2).mean() / expected**2 - 1) < 0.1  # no bias in the square
    for one in found:
        assert one.low is not None
        assert one.high is not None
        assert "TensorSketches of 128 columns" in one.statistic
    inside = [
        one.low.item() < expected < one.high.item() for one in found if one.low is not None and one.high is not None
    ]
    assert np.mean(inside) >= 0.9
    all_rows = single(net, x, sites=["1"], size=None)
    np.testing.assert_allclose(all_rows.matrix("mean_embedding").item(), expected, rtol=1e-10)


def test_the_error_of_a_sketched_mean_embedding_covers_rank_one_and_high_rank() -> None:
    """The stated error of log ‖μ‖, 1 / √(columns · copies / 2), against the spread over seeds."""
    columns = 64
    generator = torch.Generator().manual_seed(0)
    for rank in (1, 40):
        f, g = (torch.randn(rank, 40, generator=generator, dtype=torch.float64) for _ in range(2))
        truly = (g.T @ f).norm()
        ratios, stated = [], 0.0
        for seed in range(200):
            sketch = TensorSketch(40, columns, seed)
            total = sketch.product(sketch.features(f), g).sum(1)
            part = Part(torch.zeros(2, 2, columns), total, f.new_zeros(()), torch.zeros(2))
            zero = f.new_zeros(())
            pairs = Pairs(f[:1], g[:1], np.arange(1), 1, 0)
            site = SiteSketch(40, None, None, part, None, fourth=zero, moment=None, pairs=pairs, trace=zero)
            value, stated = scores_of(site, 1, exact=False, label="here").values["mean_embedding"]
            ratios.append(np.log(value / float(truly)))
        assert 0.3 * stated < np.std(ratios) < 1.3 * stated, rank


def test_scores_do_not_change_when_a_layer_is_scaled_and_the_next_scaled_back(net: nn.Module) -> None:
    x, scaled = inputs(150).double(), copy.deepcopy(net)
    assert isinstance(scaled, nn.Sequential)
    with torch.no_grad():
        for parameter in scaled[0].parameters():
            parameter.mul_(1000)  # the ReLU lets the factor through
        scaled[2].weight.div_(1000)
    plain, other = (single(model, x, sites=["0", "1"], size=64) for model in (net, scaled))
    for name in TRANSFER:
        np.testing.assert_allclose(other.matrix(name), plain.matrix(name), rtol=1e-9, err_msg=name)
    with torch.no_grad():
        scaled[2].weight.mul_(2)  # not scaled back: another function
    changed = single(scaled, x, sites=["0"], size=64)
    assert abs(changed.matrix("mean_embedding")[0, 0] / plain.matrix("mean_embedding")[0, 0] - 1) > 0.1


def test_all_but_the_mean_embedding_depend_on_the_number_of_rows(net: nn.Module) -> None:
    x = inputs(100).double()
    once, twice = (single(net, data, sites=SITES, size=None) for data in (x, torch.cat([x, x])))
    for name, factor in {
        "mean_embedding": 1,
        "kernel_norm": 1 / 2,
        "kernel_trace": 2**-0.5,
        "mean_over_norm": 2,
    }.items():
        np.testing.assert_allclose(twice.matrix(name), factor * once.matrix(name), rtol=1e-10, err_msg=name)
        told = any("number of rows" in caveat.text for caveat in once[name].caveats)
        assert told == (name != "mean_embedding")


def test_the_contradiction_of_the_paper_is_told_where_the_ratio_is(net: nn.Module) -> None:
    found = single(net, inputs(100).double(), sites=SITES)
    for name in TRANSFER:
        told = any("reads this both ways" in caveat.text for caveat in found[name].caveats)
        assert told == (name in ("mean_over_norm", "log_mean_over_norm"))


def test_a_mean_embedding_that_is_no_more_than_noise_says_so(net: nn.Module) -> None:
    def loss(answer: Tensor, batch: Any) -> Tensor:
        sign = torch.randint(0, 2, (len(answer),), generator=torch.Generator().manual_seed(3)) * 2 - 1
        return answer[:, 0] * sign  # pulls up or down as the coin falls

    noise = sosie.transfer(net, [inputs(400).double()], sites=["0"], output=loss)
    real = sosie.transfer(net, [inputs(400).double()], sites=["0"])
    assert isinstance(noise, Comparison)
    assert isinstance(real, Comparison)
    assert any("unrelated directions" in caveat.text for caveat in noise["mean_embedding"].caveats)
    assert not real["mean_embedding"].caveats
    assert noise.matrix("mean_over_trace")[0, 0] < 2


def test_several_models_are_ranked_by_the_mean_embedding(net: nn.Module, tmp_path: Path) -> None:
    loud = copy.deepcopy(net)
    assert isinstance(loud, nn.Sequential)
    with torch.no_grad():
        loud[4].weight.mul_(3)
    data = [inputs(150).double()]
    found = sosie.transfer([loud, net], data, sites=SITES)
    assert isinstance(found, Comparisons)
    assert found.names == ("Sequential (1)", "Sequential (2)", "the data")
    means = [truth(model, data[0], SITES)["mean_embedding"].mean() for model in (loud, net)]
    assert means[1] < means[0]
    order = least_first(found)
    assert [one.side_a.name for one in order] == ["Sequential (2)", "Sequential (1)"]
    np.testing.assert_allclose([over_sites(one, "mean_embedding") for one in order], means[::-1], rtol=1e-10)
    column = order[0].matrix("mean_embedding")[:, 0]
    assert [column[k] for k in sites_least_first(order[0])] == sorted(column)
    found.save(tmp_path / "t.json")
    again = sosie.load(tmp_path / "t.json")
    assert isinstance(again, Comparisons)
    np.testing.assert_array_equal(
        again["Sequential (1)", "the data"].matrix("kernel_norm"), order[1].matrix("kernel_norm")
    )


def test_sketches_of_one_model_on_several_data(net: nn.Module, tmp_path: Path) -> None:
    data = [[inputs(150).double()], [inputs(120, seed=4).double() * 3]]
    sketches = [sosie.sketch(net, part, sites=SITES, size=64) for part in data]
    found = sosie.transfer([sketches[0], str(sketches[1].save(tmp_path / "k.safetensors"))])
    assert isinstance(found, Comparisons)
    assert found.names == ("Sequential", "the data (1)", "the data (2)")
    for k, part in enumerate(data):
        one = found["Sequential", f"the data ({k + 1})"]
        np.testing.assert_allclose(
            one.matrix("mean_embedding")[:, 0], truth(net, part[0], SITES)["mean_embedding"], rtol=1e-10
        )
    halves = [
        sosie.sketch(net, DataPart([data[0][0][lot]], lot.start), sites=SITES, size=64)
        for lot in (slice(0, 90), slice(90, 150))
    ]
    merged = sosie.transfer(halves[0].merge(halves[1]))
    assert isinstance(merged, Comparison)
    for name in TRANSFER:
        np.testing.assert_allclose(
            merged.matrix(name), found["Sequential", "the data (1)"].matrix(name), rtol=1e-9, err_msg=name
        )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda net, x: sosie.transfer(net), "data"),
        (lambda net, x: sosie.transfer([], [x]), "no models"),
        (lambda net, x: sosie.transfer([net, mlp(1).double()], iter([x])), "read again"),
        (lambda net, x: sosie.transfer([net, net], [x]), "given twice"),
        (lambda net, x: sosie.transfer(sosie.sketch(net, [x], kernels="features")), "no gradients"),
        (lambda net, x: sosie.transfer(sosie.sketch(net, [x]), [x]), "sketches need no data"),
        (lambda net, x: sosie.transfer(sosie.sketch(net, [x]), seed=1), "sketches need no data"),
        (lambda net, x: sosie.transfer(sosie.sketch(wide(), [x], kernels="gradients", sites=["1"])), "hadamard"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_told(net: nn.Module, call: Callable[[nn.Module, Tensor], Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call(net, inputs(60).double())


def test_a_site_without_gradient_is_undefined_in_words(net: nn.Module) -> None:
    found = sosie.transfer(net, [inputs(60).double()], sites=SITES, output=lambda answer, batch: 0 * answer.sum(1))
    assert isinstance(found, Comparison)
    assert (found.matrix("mean_embedding") == 0).all()
    assert np.isnan(found.matrix("mean_over_norm")).all()
    assert "all gradients at this site are 0" in found["mean_over_norm"].caveats[-1].text


def test_intervals_of_ratios_join_both_errors() -> None:
    assert _ratio((2.0, 0.3), (4.0, 0.4)) == pytest.approx((0.5, 0.5))
    assert np.isnan(_ratio((2.0, 0.3), (0.0, 0.0))[0])
    found = single(mlp(0).double().eval(), inputs(2000).double(), sites=["0"], size=32)
    plain, log = found["mean_over_norm"], found["log_mean_over_norm"]
    for edge in ("low", "high"):
        np.testing.assert_allclose(np.log(getattr(plain, edge)), getattr(log, edge), rtol=1e-12)


def test_projected_rows_keep_sums_exact_and_say_what_they_cost() -> None:
    net, x = wide(), inputs(150).double()
    expected = truth(net, x, ["1"])
    found = single(net, x, sites=["1"], size=64, memory=1_500_000)
    np.testing.assert_allclose(found.matrix("kernel_trace")[:, 0], expected["kernel_trace"], rtol=1e-10)
    for name in TRANSFER:
        told = any("projected to" in caveat.text for caveat in found[name].caveats)
        assert told == ("norm" in name)
    assert abs(found.matrix("mean_embedding").item() / expected["mean_embedding"].item() - 1) < 0.5
    assert found["mean_embedding"].low is not None  # of a sketch, not of the projected sum
