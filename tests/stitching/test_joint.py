"""The layer between two networks: every change of shape follows its rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sosie.capture import Site
from sosie.stitching.joint import Form, Joint

VECTOR, MAP, TOKENS = Form(5), Form(4, (6, 6)), Form(3, (17,), tokens=True)


def joint(source: Form, target: Form, **options) -> Joint:
    made = Joint(source, target, **options)
    random = torch.Generator().manual_seed(0)
    made.weight.data = torch.randn(made.weight.shape, generator=random)
    if made.bias is not None:
        made.bias.data = torch.randn(made.bias.shape, generator=random)
    return made


def site(shape: tuple[int, ...], channels_last: bool) -> Site:
    return Site("conv", "conv", 1, shape, channels_last)


def test_forms_are_read_from_shapes() -> None:
    assert Form.of(site((5,), True)) == VECTOR
    assert Form.of(site((4, 6, 6), False)) == MAP
    assert Form.of(site((17, 3), True)) == TOKENS
    assert str(MAP) == "a map of 4 channels, 6 × 6"
    with pytest.raises(ValueError, match="cannot be stitched"):
        Form.of(site((), True))


def test_maps_by_a_convolution_of_one_pixel() -> None:
    made, x = joint(MAP, Form(7, (6, 6))), torch.randn(2, 4, 6, 6)
    assert torch.allclose(made(x), F.conv2d(x, made.weight[:, :, None, None], made.bias), atol=1e-6)


def test_vectors_and_tokens_by_a_linear_layer() -> None:
    for source, target, x in (
        (VECTOR, Form(2), torch.randn(3, 5)),
        (TOKENS, Form(8, (17,), tokens=True), torch.randn(2, 17, 3)),
    ):
        made = joint(source, target)
        assert torch.allclose(made(x), F.linear(x, made.weight, made.bias), atol=1e-6)
    assert joint(VECTOR, Form(2), bias=False).bias is None


@pytest.mark.parametrize("resize", ["interpolate", "pool"])
def test_maps_of_another_size(resize: str) -> None:
    made, x = joint(MAP, Form(4, (3, 3)), resize=resize), torch.randn(2, 4, 6, 6)
    expected = F.adaptive_avg_pool2d(x, (3, 3)) if resize == "pool" else F.interpolate(x, size=(3, 3), mode="bilinear")
    assert torch.allclose(made.shaped(x), expected)
    assert made(x).shape == (2, 4, 3, 3)


def test_from_a_map_to_tokens_and_back() -> None:
    x = torch.randn(2, 4, 4, 4)
    tokens = joint(Form(4, (4, 4)), TOKENS).shaped(x)
    assert tokens.shape == (2, 17, 4)
    assert torch.allclose(tokens[:, 1:], x.flatten(2).transpose(1, 2)), "row by row"
    assert torch.allclose(tokens[:, 0], x.mean((2, 3)), atol=1e-6), "a class token is made as the mean"
    back = joint(Form(4, (17,), tokens=True), Form(4, (4, 4))).shaped(tokens)
    assert torch.allclose(back, x), "and dropped on the way back"
    without = joint(Form(4, (4, 4)), Form(4, (16,), tokens=True)).shaped(x)
    assert torch.allclose(without, tokens[:, 1:])


def test_to_a_vector_by_the_mean() -> None:
    x, tokens = torch.randn(2, 4, 6, 6), torch.randn(2, 17, 3)
    assert torch.allclose(joint(MAP, Form(2)).shaped(x), x.mean((2, 3)), atol=1e-6)
    assert torch.allclose(joint(TOKENS, Form(2)).shaped(tokens), tokens.mean(1), atol=1e-6)
    volume = torch.randn(2, 4, 3, 3, 3)
    assert torch.allclose(joint(Form(4, (3, 3, 3)), Form(2)).shaped(volume), volume.mean((2, 3, 4)), atol=1e-6)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (VECTOR, MAP, "a vector has no positions"),
        (Form(3, (18,), tokens=True), MAP, "18 tokens are not a square grid"),
        (Form(3, (9,)), Form(3, (4,)), "only maps of two dimensions"),
    ],
)
def test_what_has_no_rule_is_refused(source: Form, target: Form, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Joint(source, target)
    with pytest.raises(ValueError, match=r"resize must be one of .*pool.*crop"):
        Joint(MAP, MAP, resize="crop")  # type: ignore[arg-type]
