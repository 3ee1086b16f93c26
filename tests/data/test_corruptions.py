"""Corruptions of any image: what is known of each, repeatable image by image, stronger as severity grows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from sosie.data import CORRUPTIONS, corrupt
from sosie.data.corruptions import Draws, _clouds, read_at, smoothed

RANDOM = [name for name in CORRUPTIONS if name not in ("scale", "brightness", "stripe", "canny_edges")]


def pictures(*shape: int) -> Tensor:
    """Smooth blobs, in [0, 1], black around."""
    generator = np.random.default_rng(0)
    blobs = ndimage.gaussian_filter(generator.random(shape), (0, 0, 2, 2))
    blobs = (blobs - blobs.min()) / (blobs.max() - blobs.min())
    rim = np.zeros(shape)
    rim[..., shape[-2] // 5 : -shape[-2] // 5, shape[-1] // 5 : -shape[-1] // 5] = 1
    return torch.from_numpy(blobs * rim).float()


def test_the_fifteen_of_mnist_c() -> None:
    assert len(CORRUPTIONS) == 15
    assert all(corruption.change.__doc__ for corruption in CORRUPTIONS.values())


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(2, 3, 40, 33), (1, 2, 5, 7), (2, 1, 1, 1), (0, 1, 9, 9)])
def test_any_image_of_any_kind(name: str, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    for given in (x, x.double(), x.half(), (255 * x).byte()):
        before = given.clone()
        found = corrupt(given, name)
        assert found.shape == given.shape
        assert found.dtype == given.dtype
        assert torch.equal(given, before)
        if given.dtype != torch.uint8 and x.numel():
            assert bool((found >= 0).all() & (found <= 1).all())
    if x.numel():
        assert (
            float((corrupt((255 * x).byte(), name) / 255 - corrupt((255 * x).byte() / 255, name)).abs().max()) < 0.003
        )


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_what_is_random_belongs_to_the_image(name: str) -> None:
    x = pictures(6, 1, 28, 28)
    state, whole = torch.get_rng_state(), corrupt(x, name, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(corrupt(x, name, seed=5), whole)
    part = CORRUPTIONS[name](x[[4, 1]], seed=5, index=torch.tensor([4, 1]))
    assert torch.allclose(part, whole[[4, 1]], atol=1e-5)
    assert (not torch.equal(corrupt(x, name, seed=6), whole)) == (name in RANDOM)
    same = corrupt(x[:1].expand(6, 1, 28, 28), name, seed=5)
    assert (len({tuple(image.flatten().tolist()) for image in same}) > 1) == (name in RANDOM)


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name != "canny_edges"])
def test_severity_changes_more(name: str) -> None:
    x = pictures(40, 1, 28, 28)
    changes = [float((corrupt(x, name, severity=k) - x).abs().mean()) for k in (1, 2, 3, 4, 5)]
    assert changes == sorted(changes)
    assert changes[0] > 0
    assert changes[4] > 1.2 * changes[0]


def test_smoothing_and_reading_agree_with_scipy() -> None:
    x = pictures(2, 3, 20, 31).double()
    for sigma in (0.4, 1.0, 2.3):
        wanted = ndimage.gaussian_filter(
            x.numpy(), (0, 0, sigma, sigma), mode="nearest", radius=(0, 0, *[math.ceil(4 * sigma)] * 2)
        )
        assert torch.allclose(smoothed(x, sigma), torch.from_numpy(wanted), atol=1e-12)
    rows, columns = torch.rand(2, 1, 20, 31, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 18
    found = read_at(x[:1], rows, columns)
    for channel in range(3):
        wanted = ndimage.map_coordinates(x[0, channel].numpy(), [rows[0].numpy(), columns[0].numpy()], order=1)
        assert torch.allclose(found[0, channel], torch.from_numpy(wanted), atol=1e-12)


def test_shifts_are_by_whole_pixels_in_all_four_directions() -> None:
    x = pictures(40, 1, 28, 28)
    x[:, :, :3] = x[:, :, -3:] = x[:, :, :, :3] = x[:, :, :, -3:] = 0
    ways = set()
    for before, after in zip(x, corrupt(x, "translate"), strict=True):
        matches = [
            (down, across)
            for down in (-3, 3)
            for across in (-3, 3)
            if torch.allclose(before.roll((down, across), (1, 2)), after, atol=1e-5)
        ]
        assert len(matches) == 1
        ways.add(matches[0])
    assert len(ways) == 4


@pytest.mark.parametrize("name", ["rotate", "shear", "scale"])
def test_geometry_agrees_with_scipy(name: str) -> None:
    x = pictures(12, 1, 28, 28).double()
    c, s = math.cos(0.4), math.sin(0.4)
    matrices = {
        "rotate": [np.array([[c, s], [-s, c]]), np.array([[c, -s], [s, c]])],
        "shear": [np.array([[1, 0], [0.4, 1]]), np.array([[1, 0], [-0.4, 1]])],
        "scale": [np.eye(2) / 0.7],
    }[name]
    seen = set()
    for before, after in zip(x, corrupt(x, name), strict=True):
        offsets = [13.5 - matrix @ [13.5, 13.5] for matrix in matrices]
        wanted = [
            ndimage.affine_transform(before[0].numpy(), matrix, offset, order=1, mode="grid-constant")
            for matrix, offset in zip(matrices, offsets, strict=True)
        ]
        near = [k for k, image in enumerate(wanted) if np.allclose(image, after[0].numpy(), atol=1e-9)]
        assert len(near) == 1
        seen |= set(near)
    assert len(seen) == len(matrices)  # to the left and to the right


def test_noise_has_its_rates() -> None:
    grey = torch.full((20, 1, 50, 50), 0.4)
    shot = corrupt(grey, "shot_noise", severity=1)
    assert torch.allclose(12 * shot, (12 * shot).round(), atol=1e-4)
    assert abs(float(shot.mean()) - 0.4) < 5 * math.sqrt(0.4 / 12 / grey.numel()) + 1e-3
    assert abs(float(shot.var()) - 0.4 / 12) < 1e-3
    salted = corrupt(grey, "impulse_noise")
    for value in (0.0, 1.0):
        assert abs(float((salted == value).float().mean()) - 0.085) < 5 * math.sqrt(0.085 / grey.numel())
    assert abs(float((salted == 0.4).float().mean()) - 0.83) < 0.01


def test_brightness_keeps_hue_and_saturation() -> None:
    colours = torch.tensor([[0.2, 0.4, 0.1], [0.0, 0.0, 0.0], [0.3, 0.3, 0.3], [0.9, 0.45, 0.0]])[:, :, None, None]
    wanted = torch.tensor([[0.45, 0.9, 0.225], [0.5, 0.5, 0.5], [0.8, 0.8, 0.8], [1.0, 0.5, 0.0]])
    assert torch.allclose(corrupt(colours, "brightness")[:, :, 0, 0], wanted)


def test_stripes_are_negatives_of_the_outer_quarters() -> None:
    x = pictures(2, 3, 28, 28)
    found = corrupt(x, "stripe")
    assert torch.equal(found[..., 7:21], x[..., 7:21])
    assert torch.equal(found[..., :7], 1 - x[..., :7])
    assert torch.equal(found[..., 21:], 1 - x[..., 21:])


def test_fog_is_bounded_and_brightens_the_dark() -> None:
    x = torch.zeros(300, 1, 28, 28)
    x[:, :, 0, 0] = 1
    clouds = _clouds(x, Draws(torch.tensor(0), torch.arange(300)))
    assert 0 <= float(clouds.min()) < 0.1
    assert 0.9 < float(clouds.max()) <= 1
    assert abs(float(clouds.mean()) - 0.5) < 0.05
    found = corrupt(x, "fog")
    assert abs(float(found[:, :, 1:].mean()) - 0.75 / 2) < 0.05
    assert float((found[..., 1:, 1:] - found[..., 1:, :-1]).abs().mean()) < 0.02  # no noise of pixels
    assert float(corrupt(torch.zeros(1, 1, 9, 9), "fog").max()) == 0  # nothing bright: nothing to see


def test_spatter_is_grey_mud_on_part_of_the_picture() -> None:
    found = corrupt(torch.ones(50, 3, 28, 28), "spatter")
    muddy = found < 0.5
    assert 0.05 < float(muddy.float().mean()) < 0.4
    assert bool((found[muddy] >= 63 / 255 - 1e-6).all())
    assert torch.equal(found[:, 0], found[:, 2])


@pytest.mark.parametrize("name", ["dotted_line", "zigzag"])
def test_lines_go_across_a_black_picture(name: str) -> None:
    found = corrupt(torch.zeros(60, 1, 28, 28), name)[:, 0]
    columns = found.amax(1)
    if name == "dotted_line":
        assert float(columns[:, [0, 1, 4, 5, 24, 25]].max()) == 0
        assert bool((columns[:, [2, 3, 6, 7, 26, 27]] > 0.7).all())
    else:
        assert float(columns[:, [0, 1, 25, 26, 27]].max()) == 0
        assert float((columns[:, 2:25] > 0.4).float().mean()) > 0.9
    heights = (found * torch.arange(28)[:, None]).sum((1, 2)) / found.sum((1, 2))
    assert float(heights.std()) > 3


def test_motion_draws_a_point_out_to_one_side() -> None:
    x = torch.zeros(80, 1, 41, 41)
    x[:, :, 20, 30] = 1
    found = corrupt(x, "motion_blur")[:, 0]
    assert torch.allclose(found.sum((1, 2)), torch.ones(80), atol=0.02)
    rows, columns = torch.meshgrid(torch.arange(41.0), torch.arange(41.0), indexing="ij")
    down = ((found * rows).sum((1, 2)) - 20, (found * columns).sum((1, 2)) - 30)
    angles = torch.atan2(down[0], -down[1]).abs()
    assert float(angles.max()) <= math.pi / 4 + 0.05
    assert float(angles.max()) > math.pi / 6
    assert bool((down[1] < -1).all())


def test_glass_moves_pixels_and_keeps_their_mean() -> None:
    x = pictures(60, 1, 28, 28)
    found = corrupt(x, "glass_blur")
    assert abs(float(found.mean() / x.mean()) - 1) < 0.02
    assert float((found - smoothed(x, 1.0)).abs().mean()) > 0.01


def test_the_edges_of_a_square_are_its_outline() -> None:
    x = torch.zeros(1, 3, 28, 28)
    x[:, :, 8:20, 8:20] = 1
    found = corrupt(x, "canny_edges")[0, 0]
    assert set(found.unique().tolist()) == {0.0, 1.0}
    rows, columns = torch.meshgrid(torch.arange(28), torch.arange(28), indexing="ij")
    beside = torch.maximum((rows - 13.5).abs(), (columns - 13.5).abs())  # 5.5 just inside, 6.5 just outside
    assert bool(found[(beside < 4.6) | (beside > 7.4)].eq(0).all())
    assert bool((found.sum(0)[10:18] >= 2).all() & (found.sum(1)[10:18] >= 2).all())
    assert float(corrupt(torch.full((1, 1, 9, 9), 0.5), "canny_edges").max()) == 0


def test_a_weak_edge_counts_where_it_goes_on_from_a_strong_one() -> None:
    x = torch.zeros(1, 1, 28, 28)
    x[..., 14:] = torch.linspace(0.12, 0.03, 28)[:, None]  # steepness falls from above 0.2 to above 0.1
    whole, below = (corrupt(part, "canny_edges")[0, 0, 3:-3] for part in (x, x * 0.5))
    assert bool((whole.sum(1) > 0)[:10].all())
    assert float(below.sum()) == 0
    first = corrupt(x, "canny_edges")[0, 0].sum(1)
    assert 20 < int((first > 0).sum()) < 27


@pytest.mark.parametrize(
    ("images", "name", "severity", "message"),
    [
        (torch.zeros(1, 1, 9, 9), "fogg", 3, "did you mean 'fog'"),
        (torch.zeros(1, 1, 9, 9), "fog", 6, "severity must be a whole number from 1 to 5"),
        (torch.zeros(1, 9, 9), "fog", 3, "got \\(1, 9, 9\\)"),
        (torch.full((1, 1, 9, 9), 3.0), "fog", 3, "found 3 to 3"),
        (torch.full((1, 1, 9, 9), math.nan), "fog", 3, "found nan"),
    ],
)
def test_what_is_wrong_is_said(images: Tensor, name: str, severity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(images, name, severity=severity)
