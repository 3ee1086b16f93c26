"""The GPU's Gram matrices against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from sosie.linalg import gram_cuda, gram_stack
from sosie.measures import debiased_cka, kernel_alignment
from sosie.stats import DebiasedAlignment, Grams, UncentredAlignment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


precision = pytest.mark.parametrize("tf32", [True, False])


def _check_available(about: gram_cuda.About = "mean") -> None:
    """A kernel that does not compile would leave the work to plain products, and these tests nothing to look at."""
    pytest.importorskip("triton")
    assert gram_cuda.available(about)


@pytest.mark.parametrize(
    ("blocks", "b", "width"), [(4, 64, 5000), (1, 100, 70_001), (3, 4, 7), (2, 128, 64), (8, 32, 333)]
)
@pytest.mark.parametrize("offset", [0.0, 100.0])
@precision
def test_centred_blocks(tf32: bool, blocks: int, b: int, width: int, offset: float) -> None:
    _check_available()
    stack = torch.randn(blocks, b, width, generator=torch.Generator().manual_seed(0)) + offset
    grams, lengths = gram_cuda.gram_blocks(stack.cuda(), about="mean", tf32=tf32)
    mean = stack.double().mean(1, keepdim=True)
    truth = (stack.double() - mean) @ (stack.double() - mean).transpose(1, 2)
    error = float((grams.cpu().double() - truth).abs().max() / truth.abs().max())
    assert error < (2e-3 if tf32 else 2e-5)
    assert torch.allclose(lengths.cpu().double(), b * mean.square().sum((1, 2)), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("n", [4, 128, 129, 300])
@pytest.mark.parametrize("width", [7, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@precision
def test_rows_less_the_first(tf32: bool, n: int, width: int, dtype: torch.dtype) -> None:
    """At an offset that leaves a number's digits to the spread, if only a few: a thousand times that in float32."""
    _check_available("first")
    random = torch.Generator().manual_seed(0)
    for offset in (0.0, 1e3 if dtype == torch.float32 else 30.0):
        rows = (torch.randn(n, width, generator=random, dtype=torch.float64) + offset).to(dtype)
        grams, lengths = gram_cuda.gram_blocks(rows.cuda()[None], about="first", tf32=tf32)
        centred = rows.double() - rows[:1].double()
        truth = centred @ centred.T
        error = float((grams[0].cpu().double() - truth).abs().max() / truth.abs().max())
        assert error < (2e-3 if tf32 else 2e-5)
        assert float(lengths[0]) == pytest.approx(float(rows[0].double().square().sum()), rel=1e-4)


def test_rows_less_the_first_in_several_blocks_and_turned() -> None:
    _check_available("first")
    stack = torch.randn(3, 500, 150, generator=torch.Generator().manual_seed(0)).transpose(1, 2) + 10
    grams, lengths = gram_cuda.gram_blocks(stack.cuda(), about="first", tf32=False)
    centred = stack.double() - stack[:, :1].double()
    torch.testing.assert_close(grams.cpu().double(), centred @ centred.mT, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(lengths.cpu(), stack[:, 0].square().sum(1), rtol=1e-4, atol=0)


def test_only_the_first_row_is_taken_off_many() -> None:
    with pytest.raises(ValueError, match="129 rows about 'mean': 128 rows at most"):
        gram_cuda.gram_blocks(torch.ones(1, 129, 8, device="cuda"), about="mean", tf32=True)


@pytest.mark.parametrize("shape", [(4, 64, 5120), (2, 64, 7), (1, 130, 4096)])
def test_without_triton(shape: tuple[int, int, int]) -> None:
    stack = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(gram_stack(stack.cuda()).cpu(), stack @ stack.transpose(1, 2))


def test_cka_is_right_under_an_offset() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3000, generator=random)
    y = x[:, :2000] + 0.5 * torch.randn(200, 2000, generator=random)
    truth = Grams.of(x.double(), y.double())
    for offset in (0.0, 100.0):
        found = Grams.of((x + offset).cuda(), y.cuda())
        expected = float(debiased_cka(truth.alignment(DebiasedAlignment)))
        assert float(debiased_cka(found.alignment(DebiasedAlignment))) == pytest.approx(expected, abs=1e-4)
    plain = Grams.of(x.cuda(), y.cuda())
    expected = float(kernel_alignment(truth.alignment(UncentredAlignment)))
    assert float(kernel_alignment(plain.alignment(UncentredAlignment))) == pytest.approx(expected, abs=1e-4)
