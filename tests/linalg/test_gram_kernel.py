"""The GPU's kernel compiles, which needs no GPU: where it does not, slower products would quietly take its place."""

from __future__ import annotations

import inspect

import pytest

from sosie.linalg.gram_cuda import COLUMNS, STAGES, TILE, WARPS, About

triton = pytest.importorskip("triton", reason="needs Triton, which comes with builds of torch for GPUs")
HOPPER = 90
POINTERS, NUMBERS = ("stack", "parts"), ("b", "width", "span", "stride_block", "stride_row", "pairs")


@pytest.mark.parametrize(
    ("about", "precision"),
    [
        ("mean", "tf32"),
        ("mean", "tf32x3"),
        ("nothing", "tf32x3"),
        ("first", "tf32"),
        ("first", "tf32x3"),
        ("first", "bf16"),
    ],
)
def test_it_compiles_for_tensor_cores(about: About, precision: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sosie.linalg.gram_kernel import gram

    constants = {
        "ROWS": TILE,
        "COLUMNS": COLUMNS[about],
        "ABOUT": about,
        "ALONE": about != "first",
        "PRECISION": precision,
    }
    types = dict.fromkeys(POINTERS, "*fp32") | dict.fromkeys(NUMBERS, "i32")
    if "constexprs" in inspect.signature(ASTSource).parameters:
        source = ASTSource(gram, types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    else:  # until Triton 3.2
        source = ASTSource(gram, types, constants=constants)
    options = {"num_warps": WARPS, "num_stages": STAGES}
    made = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)
    assert "wgmma" in made.asm["ptx"]
