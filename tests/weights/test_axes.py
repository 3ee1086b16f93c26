"""The parts of an axis, and the axes of weights as read from one forward."""

from __future__ import annotations

import pytest
import torch
from permuted_nets import members_of
from torch import Tensor, nn

from sosie.capture.batches import example_input
from sosie.weights.axes import (
    Axis,
    NotUnderstood,
    WeightAxes,
    concatenation,
    fix,
    leaves,
    order_of,
    places_of,
    product,
    regroup,
    repeated,
    stretch_of,
    unite,
    weight_axes,
)


def test_flattening_and_its_reverse_keep_the_parts() -> None:
    channels, places = Axis(6), Axis(4, "place")
    (flat,) = regroup([channels, places], [24])
    assert [part.size for part in flat.parts] == [6, 4]
    assert regroup([flat], [6, 4])[0].resolve() is channels
    with pytest.raises(NotUnderstood):
        regroup([Axis(6)], [4, 2])


def test_uniting_a_leaf_with_a_product_cuts_it() -> None:
    whole, first, second = Axis(12), Axis(3), Axis(4)
    unite(whole, product([first, second]))
    assert set(leaves(whole)) == {first, second}
    unite(whole, product([Axis(3), Axis(4)]))
    assert len(set(leaves(whole))) == 2


def test_products_and_concatenations_that_do_not_fit_are_fixed() -> None:
    one, other = product([Axis(2), Axis(3)]), product([Axis(3), Axis(2)])
    unite(one, other)
    assert all(part.reason for part in (*leaves(one), *leaves(other)))
    mixed = concatenation([Axis(2), Axis(4)])
    unite(mixed, product([Axis(2), Axis(3)]))
    assert all(part.reason for part in leaves(mixed))


def test_concatenations_are_cut_where_either_is() -> None:
    one, other = concatenation([Axis(2), Axis(6)]), concatenation([Axis(5), Axis(3)])
    unite(one, other)
    assert [part.size for part in leaves(one)] == [2, 3, 3]
    assert leaves(one) == leaves(other)
    with pytest.raises(ValueError, match="5 and 6 entries"):
        unite(Axis(5), Axis(6))


def test_a_fixed_leaf_fixes_what_it_is_united_with() -> None:
    whole, fixed = product([Axis(2), Axis(3)]), Axis(6, "here")
    unite(fixed, whole)
    assert [part.reason for part in leaves(whole)] == ["here", "here"]
    fix(whole, "later")
    assert [part.reason for part in leaves(whole)] == ["here", "here"]


def test_orders_and_places_against_indexing() -> None:
    a, b, c = Axis(3), Axis(2), Axis(4)
    axis = concatenation([product([a, b]), c])
    orders = {a: torch.tensor([2, 0, 1]), c: torch.tensor([3, 2, 1, 0])}
    numbers = torch.arange(10)
    wanted = torch.cat([numbers[:6].view(3, 2)[orders[a]].flatten(), numbers[6:].flip(0)])
    assert torch.equal(order_of(axis, orders), wanted)
    assert torch.equal(places_of(axis, a)[0], numbers[:6].view(3, 2))
    assert torch.equal(places_of(axis, b)[0], numbers[:6].view(3, 2).T)
    assert torch.equal(places_of(axis, c)[0], numbers[6:, None])


def test_pieces_of_an_axis() -> None:
    whole, rest = Axis(6), Axis(2)
    flat = product([whole, rest])
    stretch_of(flat, 4, 8)
    assert [part.size for part in leaves(whole)] == [2, 2, 2]
    with pytest.raises(NotUnderstood):
        stretch_of(flat, 3, 8)


def test_an_axis_that_is_its_own_factor_is_seen() -> None:
    one = Axis(3)
    assert repeated(product([one, one])) == {one}
    assert not repeated(concatenation([one, one]))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(4, 6), nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.scale
        return self.last(hidden / hidden.norm(dim=1, keepdim=True) + torch.zeros_like(hidden))


def read(model: nn.Module) -> WeightAxes:
    return weight_axes(model, example_input(model))


def test_groups_of_a_forward_in_plain_functions() -> None:
    axes = read(Functional())
    assert list(axes.groups) == ["first.weight[0]"]
    members = [("scale", 0), ("first.weight", 0), ("first.bias", 0), ("last.weight", 1)]
    assert members_of(axes, "first.weight[0]") == members
    assert axes.fixed["unused.weight[0]"] == "not used in the forward"


def test_reading_leaves_the_model_as_it_was() -> None:
    model = Functional().train()
    x = example_input(model)
    before = torch.get_rng_state()
    weight_axes(model, x)
    assert model.training
    assert not model._forward_hooks
    assert not model.first._forward_pre_hooks
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(RuntimeError):
        weight_axes(model, x[:, :2])
    assert not model._forward_hooks


def test_an_example_by_the_first_layer() -> None:
    assert example_input(nn.Linear(7, 2)).shape == (2, 7)
    assert example_input(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 26 * 26, 3))).shape == (
        2,
        1,
        28,
        28,
    )
    assert example_input(nn.Embedding(5, 2)).max() < 5
    assert example_input(nn.LSTM(4, 2), (6, 4)).shape == (2, 6, 4)
    with pytest.raises(ValueError, match="forward ran for no input of shape"):
        example_input(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Linear(5, 2)))


def test_an_example_for_a_transposed_convolution_that_comes_first() -> None:
    assert example_input(nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.Conv2d(4, 2, 3))).shape == (2, 3, 32, 32)
