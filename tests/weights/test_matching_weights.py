"""A copy with reordered neurons is matched exactly; axes that are not understood are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from permuted_nets import NETS, Shared, Sorted, WrittenInto, members_of, mlp, seeded
from torch import nn

from sosie.capture.batches import example_input
from sosie.models import vit
from sosie.weights import match_weights
from sosie.weights.axes import named_weights, weight_axes
from sosie.weights.matching import checked_axes, function_change, random_orders, with_orders

nets = pytest.mark.parametrize("make", NETS.values(), ids=NETS)


def shuffled(model: nn.Module, seed: int = 3) -> nn.Module:
    """The same network with reordered neurons."""
    axes = checked_axes(model, example_input(model))
    return with_orders(model, axes, random_orders(axes, torch.Generator().manual_seed(seed)))


def equal(model: nn.Module, other: nn.Module) -> bool:
    ours, theirs = named_weights(model), named_weights(other)
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@nets
@pytest.mark.parametrize("seed", [0, 1])
def test_a_permuted_copy_is_recovered(make: Callable[[], nn.Module], seed: int) -> None:
    model = seeded(make(), seed)
    other = shuffled(model, seed + 3)
    assert not equal(model, other)
    found = match_weights(model, other, seed=seed)
    assert equal(found.model_b, model)
    assert found.after == pytest.approx(1, abs=1e-12)
    assert found.before < 0.9
    assert not found.fixed
    x = example_input(model, seed=9)
    with torch.no_grad():
        assert torch.allclose(found.model_b(x), other(x), atol=1e-5)
        assert torch.allclose(found.model_b(x), model(x), atol=1e-5)


@pytest.mark.parametrize("starts", [1, 3, 6])
def test_matching_two_networks_brings_them_nearer(starts: int) -> None:
    a, b = seeded(mlp(), 0), seeded(mlp(), 1)
    found = match_weights(a, b, starts=starts)
    assert found.after > found.before + 0.05
    assert list(found.history[1:]) == sorted(found.history[1:])
    assert len(found.starts) == starts
    assert max(found.starts) == found.after
    assert function_change(b, found.model_b, example_input(b))[0] < 1e-12


def test_matching_finds_the_best_order_of_one_layer() -> None:
    """With one hidden layer the assignment is exact: no other order has a larger inner product."""
    from itertools import permutations

    a, b = (seeded(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), seed) for seed in (0, 1))
    found = match_weights(a, b)
    with torch.no_grad():
        sides = [torch.cat([m[0].weight, m[0].bias[:, None], m[2].weight.T], 1).double() for m in (a, b)]
        best = max(float((sides[0] * sides[1][list(order)]).sum()) for order in permutations(range(5)))
        norms = [sum(float(p.double().square().sum()) for p in m.parameters()) ** 0.5 for m in (a, b)]
        best += float((a[2].bias.double() * b[2].bias.double()).sum())
    assert found.after == pytest.approx(best / (norms[0] * norms[1]), abs=1e-12)


def test_a_seed_gives_the_same_again_and_nothing_is_changed() -> None:
    a, b = seeded(mlp(), 0), seeded(mlp(), 1)
    before = [tensor.clone() for tensor in (*named_weights(a).values(), *named_weights(b).values())]
    state = torch.get_rng_state()
    one, two = match_weights(a, b, seed=5, starts=4), match_weights(a, b, seed=5, starts=4)
    assert torch.equal(state, torch.get_rng_state())
    assert one.history == two.history
    assert all(torch.equal(one.permutations[name], two.permutations[name]) for name in one.permutations)
    after = (*named_weights(a).values(), *named_weights(b).values())
    assert all(map(torch.equal, before, after))


def test_a_layer_used_twice_is_permuted_alike_on_both_sides() -> None:
    model = seeded(Shared())
    axes = weight_axes(model, example_input(model))
    assert list(axes.groups) == ["first.weight[0]"]
    assert ("again.weight", 0) in members_of(axes, "first.weight[0]")
    assert ("again.weight", 1) in members_of(axes, "first.weight[0]")
    assert equal(match_weights(model, shuffled(model)).model_b, model)
    found = match_weights(model, seeded(Shared(), 1))
    assert list(found.history[1:]) == sorted(found.history[1:])


def test_zeros_as_shortcuts_leave_three_groups_in_the_wider_stage() -> None:
    model = NETS["resnet8 with zeros as shortcuts"]()
    axes = weight_axes(model, example_input(model))
    stage = {name: axis.size for name, axis in axes.groups.items() if name.startswith("layer2.0.conv2")}
    assert stage == {"layer2.0.conv2.weight[0]": 4, "layer2.0.conv2.weight[0]#2": 4}
    assert ("layer2.0.conv2.weight", 0) in members_of(axes, "conv1.weight[0]")
    assert not axes.fixed


@pytest.mark.parametrize(
    ("make", "axis", "why"), [(WrittenInto, "first.weight[0]", "copy"), (Sorted, "first.weight[0]", "sort")]
)
def test_what_is_not_understood_is_fixed_and_named(make: Callable[[], nn.Module], axis: str, why: str) -> None:
    model = seeded(make())
    found = match_weights(model, shuffled(model))
    assert why in found.fixed[axis]
    assert any(axis in caveat for caveat in found.caveats)
    assert list(found.permutations) == ["second.weight[0]"]
    assert equal(found.model_b, model)


def test_a_group_that_changes_the_function_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong rule (sorting keeps axes as they are) is detected by the check."""
    from sosie.weights import axes as rules

    monkeypatch.setitem(rules.AXIS_RULES, "sort", rules._same)
    model = seeded(Sorted())
    axes = checked_axes(model, example_input(model))
    assert list(axes.groups) == ["second.weight[0]"]
    assert "changes what the model computes" in axes.fixed["first.weight[0]"]


def test_attention_has_heads_and_entries_within_them() -> None:
    model = seeded(vit(size=8, patch=4, width=16, depth=1, heads=2, classes=3))
    axes = checked_axes(model, example_input(model, (3, 8, 8)))
    assert not axes.fixed
    sizes = [axis.size for name, axis in axes.groups.items() if "attention" in name]
    assert sizes == [2, 8, 8]  # heads; entries of queries and keys; entries of values


def test_bad_input_is_an_error_in_words() -> None:
    model = mlp()
    wider = nn.Sequential(nn.Linear(9, 17), *list(model)[1:])
    with pytest.raises(ValueError, match=r"0.weight is \(16, 9\) in A and \(17, 9\) in B"):
        match_weights(model, wider)
    with pytest.raises(ValueError, match=r"only A has 6\.weight, 6\.bias"):
        match_weights(model, nn.Sequential(*list(mlp())[:-1]))
    broken = mlp()
    with torch.no_grad():
        broken[2].weight[0, :3] = torch.nan
    with pytest.raises(ValueError, match=r"2\.weight of B has 3 of 192 values that are NaN"):
        match_weights(model, broken)
    with pytest.raises(ValueError, match="starts must be a whole number of at least 1"):
        match_weights(model, model, starts=0)
    with pytest.raises(TypeError, match=r"need a torch.nn.Module, got OrderedDict"):
        match_weights(model, model.state_dict())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give input_shape="):
        match_weights(*[nn.Sequential(nn.LayerNorm(4), nn.GRU(4, 3))] * 2)
    with pytest.raises(ValueError, match="all parameters of A are 0"):
        match_weights(_zeros(), mlp())


def _zeros() -> nn.Module:
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def test_an_answer_that_never_varies_is_a_caveat() -> None:
    model = mlp()
    with torch.no_grad():
        model[6].weight.zero_()
    assert "the same answer" in match_weights(model, model).caveats[-1]
