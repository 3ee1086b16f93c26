"""What becomes of hooks, types and names where models are taken apart, shared and put together again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sosie.models import AtomConv2d, decompose, recompose, share_coefficients, small_cnn
from sosie.weights import decompose_together


def test_hooks_of_layers_of_atoms_come_along() -> None:
    calls: list[str] = []
    model = nn.Sequential(AtomConv2d(2, 3, 3, 4), nn.ReLU())
    layer = model[0]

    def forward(module: nn.Module, args: object, kwargs: object, output: Tensor) -> Tensor:
        calls.append(f"forward of {type(module).__name__}")
        return 2 * output

    layer.register_forward_hook(forward, with_kwargs=True)
    layer.register_forward_pre_hook(lambda module, args: calls.append("before"))
    layer.register_full_backward_hook(lambda module, inside, outside: calls.append("backward"))
    plain, x = recompose(model), torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    calls.clear()
    torch.testing.assert_close(plain(x), model(x))  # twice what the layer gives, in both
    assert calls == ["before", "forward of Conv2d", "before", "forward of AtomConv2d"]
    calls.clear()
    plain(x).sum().backward()
    assert calls == ["before", "forward of Conv2d", "backward"]
    plain[0]._forward_hooks.clear()
    assert layer._forward_hooks, "the model must not lose its own"


@pytest.mark.parametrize(
    ("source", "other", "words"),
    [
        (torch.float32, torch.float64, "conv1 of model 1 is in float64 on cpu, .* coefficients in float32"),
        (torch.float64, torch.bfloat16, "conv1 of model 1 is in bfloat16 on cpu, .* coefficients in float64"),
    ],
)
def test_coefficients_of_one_type_only_are_shared(source: torch.dtype, other: torch.dtype, words: str) -> None:
    a, b, c = (small_cnn(width=4, atoms=4).to(dtype) for dtype in (source, source, other))
    before = c.conv1.coefficients
    with pytest.raises(ValueError, match=words):
        share_coefficients(a, [b, c])
    assert c.conv1.coefficients is before
    share_coefficients(a, [c.to(source)])
    c(torch.rand(1, 1, 28, 28, dtype=source))
    with pytest.raises(ValueError, match=words):
        decompose_together([a, recompose(b).to(other)], 4, match=False)


def test_another_device_is_told() -> None:
    with pytest.raises(ValueError, match=r"on meta, .* on cpu.*model\.to"):
        share_coefficients(small_cnn(width=4, atoms=4), [small_cnn(width=4, atoms=4).to("meta")])


def test_they_are_told_in_a_line() -> None:
    plain = [small_cnn(width=4) for _ in range(2)]
    joint, one = decompose_together(plain, 6, match=False), decompose(plain[0], 6)
    assert repr(joint.table()) == "<AtomTable of 2 models: 4 layers, 198 entries each>"
    worst = max(max(each) for each in joint.errors.values())
    assert repr(joint) == f"<JointAtoms of 2 models: 4 layers of up to 6 atoms, errors up to {worst:.2g}>"
    error = max(one.errors.values())
    assert repr(one) == f"<Decomposition Sequential: 4 layers of up to 6 atoms, errors up to {error:.2g}, 1 left alone>"
