"""The same sketches on a GPU."""

from __future__ import annotations

import pytest
import torch
from gradient_nets import InPlace, Words, built, images, words
from torch import Tensor, nn

from sosie.engine.sketching import sketch

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
    assert torch.allclose(here.site("block").gradients.rows, there.site("block").gradients.rows, atol=1e-9)


def test_what_is_not_finite_is_named_though_looked_at_later() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(torch.arange(len(x), device=x.device)[:, None] == 13, torch.nan, x)

    model = nn.Sequential(nn.Linear(6, 4), Broken(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="NaN or infinite for some of the inputs 20 to 39"):
        sketch(model, [torch.rand(12, 6), torch.rand(8, 6), torch.rand(20, 6)], size=8, device="cuda")
