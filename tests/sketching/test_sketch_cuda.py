"""The same sketches on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_nets import InPlace, Words, built, images, words
from torch import Tensor, nn

import sosie
from sosie.benchmark import linear_probe
from sosie.data import DataPart
from sosie.sketching import Sketch, classify, sketch
from sosie.stats import tensors_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("rule", ["flatten", "positions"])
def test_same_sketch_as_on_a_cpu(size: int | None, rule: str) -> None:
    model, x, y = built(InPlace), images(40), torch.arange(40) % 3
    sites = ["b1"] if rule == "positions" else ["b1", "fc"]
    here, there = (
        sketch(model, [(x[:25], y[:25]), (x[25:], y[25:])], sites=sites, size=size, rows=rule, device=device)
        for device in (None, "cuda")
    )
    here.check_shared(there)
    there = there.to("cpu")
    for site in sites:
        for part in here.parts:
            one, two = getattr(here.site(site), part), getattr(there.site(site), part)
            assert torch.allclose(one.rows, two.rows, atol=1e-9)
            assert torch.allclose(one.squares, two.squares)
        assert torch.allclose(here.site(site).moment, there.site(site).moment, atol=1e-9)
        assert torch.equal(here.kernel(site).gram.isfinite(), there.kernel(site).gram.isfinite())
    assert next(model.parameters()).device.type == "cpu"


def test_tokens_whose_mask_is_on_the_gpu() -> None:
    model, batch = built(Words).cuda(), {key: part.cuda() for key, part in words().items()}
    there = sketch(model, [batch], sites=["block"], size=8, rows="positions")
    here = sketch(model.cpu(), [words()], sites=["block"], size=8, rows="positions")
    here.check_shared(there)
    assert torch.allclose(here.site("block").gradients.rows, there.site("block").gradients.rows.cpu(), atol=1e-9)


def test_what_is_not_finite_is_named_though_looked_at_later() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(torch.arange(len(x), device=x.device)[:, None] == 13, torch.nan, x)

    model = nn.Sequential(nn.Linear(6, 4), Broken(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="NaN or infinite for some of the inputs 20 to 39"):
        sketch(model, [torch.rand(12, 6), torch.rand(8, 6), torch.rand(20, 6)], size=8, device="cuda")


@pytest.fixture(scope="module")
def both() -> tuple[Sketch, Sketch, nn.Module, list[tuple[Tensor, Tensor]]]:
    """One model sketched on a CPU and on a GPU, and left there; with data that have labels."""
    model, x, y = built(InPlace), images(60), torch.arange(60) % 3
    data = [(x[i : i + 20], y[i : i + 20]) for i in (0, 20, 40)]
    here, there = (sketch(model, data, sites=["b1", "fc"], size=16, device=device) for device in (None, "cuda"))
    return here, there, model, data


def test_a_sketch_stays_where_it_was_made(both: Any, tmp_path: Path) -> None:
    here, there, model, data = both
    assert here.device.type == "cpu"
    assert there.device.type == "cuda"
    assert {t.device for t in tensors_of(there)} == {there.device}
    assert {t.device.type for t in tensors_of(there.to("cpu"))} == {"cpu"}
    assert there.to("cuda") is there
    assert here.model == there.model
    for name in ("ones", "counts", "fingerprint", "labels", "unsigned_labels"):
        assert torch.allclose(getattr(here, name), getattr(there, name).cpu())
    again = Sketch.load(there.save(tmp_path / "k.safetensors"))
    assert torch.equal(again.site("b1").gradients.rows, there.site("b1").gradients.rows.cpu())
    with torch.inference_mode():
        assert sketch(model, data, sites=["fc"], size=16, device="cuda").device.type == "cuda"


@pytest.mark.parametrize("kernel", ["hadamard", "features", "sum", "midpoint", "hadamard_of_sketches"])
def test_compared_wherever_they_are(both: Any, kernel: str) -> None:
    here, there = both[:2]
    names = ["linear_cka", "normalized_bures", "kernel_alignment"]
    names += ["debiased_cka"] if kernel in ("hadamard", "features", "sum") else []
    expected = sosie.compare(here.using(kernel), here.using(kernel), measures=names)
    for pair in ((there, there), (here, there), (there, here)):
        found = sosie.compare(*(k.using(kernel) for k in pair), measures=names)
        for name in names:
            assert np.allclose(found.matrix(name), expected.matrix(name), atol=1e-6, equal_nan=True)


def test_compared_without_common_rows(both: Any) -> None:
    here, there, model, data = both
    other = sketch(model, data, sites=["b1", "fc"], size=16, seed=1)
    names = ["linear_cka", "spectral_bures_distance", "bures_distance"]
    expected = sosie.compare_unpaired(here.using("features"), other.using("features"), measures=names)
    for a, b in ((there, other), (there, other.to("cuda")), (here, other.to("cuda"))):
        found = sosie.compare_unpaired(a.using("features"), b.using("features"), measures=names)
        for name in names:
            assert np.allclose(found.matrix(name), expected.matrix(name), atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("size", [16, None])
def test_parts_are_merged_wherever_they_are(both: Any, size: int | None) -> None:
    model, data = both[2:]
    whole = sketch(model, data, sites=["b1"], size=size)
    first, last = (
        sketch(model, DataPart(part, start), sites=["b1"], size=size, device=device)
        for part, start, device in ((data[:2], 0, "cuda"), (data[2:], 40, None))
    )
    for found, device in (
        (first.merge(last), "cuda"),
        (last.merge(first), "cpu"),
        (first.merge(last.to("cuda")), "cuda"),
    ):
        assert {t.device.type for t in tensors_of(found)} == {device}
        whole.check_shared(found)
        assert torch.allclose(found.site("b1").features.rows.cpu(), whole.site("b1").features.rows, atol=1e-9)
        assert torch.allclose(found.site("b1").pairs.gradients.cpu(), whole.site("b1").pairs.gradients, atol=1e-9)
        assert torch.equal(found.labels.cpu(), whole.labels)


@pytest.mark.parametrize("kernel", ["hadamard", "features", "hadamard_of_sketches"])
def test_classified_on_the_gpu(both: Any, kernel: str) -> None:
    here, there, model, data = both
    a, b = classify(here, kernel), classify(there, kernel)
    assert a.alphas == pytest.approx(b.alphas, rel=1e-5)
    for device in (None, "cuda"):
        one, two = a.scores(model, data, device=device), b.scores(model, data, device=device)
        assert all(torch.allclose(one[site], two[site], atol=1e-6) for site in one)
        assert a.evaluate(model, data, device=device).keys() == b.evaluate(model, data, device=device).keys()


def test_transfer_scores_on_the_gpu(both: Any) -> None:
    here, there, model, data = both
    exact = [sketch(model, data, sites=["b1", "fc"], size=None, device=device) for device in (None, "cuda")]
    for one, two in ((here, there), exact):
        a, b = sosie.transfer(one), sosie.transfer(two)
        for name in a.measures:
            assert np.allclose(a.matrix(name), b.matrix(name), rtol=1e-5, equal_nan=True)


def test_a_probe_on_the_gpu(both: Any) -> None:
    model, data = both[2:]
    here, there = (linear_probe(model, data, data, sites=["b1"], device=device) for device in (None, "cuda"))
    assert here == pytest.approx(there, abs=0.05)
