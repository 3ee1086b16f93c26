import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_ins import Bert
from torch import nn

from sosie.capture import RULES, NoRows, Site, rows_per_input, to_rows, watch

MAP = Site("conv", "conv", 1, (3, 4, 5), channels_last=False)
TOKENS = Site("block", "block", 1, (4, 3), channels_last=True)
SIGNAL = Site("conv1d", "conv1d", 1, (3, 4), channels_last=False)
VECTOR = Site("fc", "fc", 1, (6,), channels_last=True)


@pytest.fixture
def maps():
    return torch.arange(120.0).reshape(2, 3, 4, 5)


@pytest.fixture
def tokens():
    return torch.arange(24.0).reshape(2, 4, 3)


@pytest.fixture
def mask():
    return torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def test_flatten_is_a_view(maps):
    rows = to_rows(maps, "flatten", site=MAP, inputs=2)
    assert rows.shape == (2, 60)
    assert rows.data_ptr() == maps.data_ptr()


def test_mean_pools_space_or_tokens(maps, tokens):
    torch.testing.assert_close(to_rows(maps, "mean", site=MAP, inputs=2), maps.mean((2, 3)))
    torch.testing.assert_close(to_rows(tokens, "mean", site=TOKENS, inputs=2), tokens.mean(1))
    signal = tokens.transpose(1, 2)
    torch.testing.assert_close(to_rows(signal, "mean", site=SIGNAL, inputs=2), tokens.mean(1))


def test_positions_are_ordered_by_input_then_position(maps, tokens):
    rows = to_rows(maps, "positions", site=MAP, inputs=2)
    assert rows.shape == (40, 3)
    torch.testing.assert_close(rows[20 + 7], maps[1, :, 1, 2])
    torch.testing.assert_close(to_rows(tokens, "positions", site=TOKENS, inputs=2), tokens.reshape(8, 3))
    torch.testing.assert_close(
        to_rows(tokens.transpose(1, 2), "positions", site=SIGNAL, inputs=2), tokens.reshape(8, 3)
    )
    swin = Site("swin", "swin", 1, (4, 5, 3), channels_last=True)
    torch.testing.assert_close(to_rows(maps.permute(0, 2, 3, 1), "positions", site=swin, inputs=2), rows)


def test_a_grid_is_positions_of_the_pooled_map(maps):
    pooled = torch.nn.functional.adaptive_avg_pool2d(maps, 2)
    rows = to_rows(maps, "grid(2)", site=MAP, inputs=2)
    torch.testing.assert_close(rows, to_rows(pooled, "positions", site=MAP, inputs=2))
    swin = Site("swin", "swin", 1, (4, 5, 3), channels_last=True)
    torch.testing.assert_close(to_rows(maps.permute(0, 2, 3, 1), "grid(2)", site=swin, inputs=2), rows)
    torch.testing.assert_close(to_rows(maps, "grid(1)", site=MAP, inputs=2), maps.mean((2, 3)))
    assert rows_per_input(MAP, "grid(2)") == 4
    assert to_rows(maps.half(), "grid(2)", site=MAP, inputs=2).dtype == torch.float32


def test_a_grid_needs_a_map_that_is_large_enough(maps, tokens):
    with pytest.raises(NoRows, match=r"has 4 × 5 positions, fewer than rule 'grid\(5\)'.*Take rows='grid\(4\)'"):
        to_rows(maps, "grid(5)", site=MAP, inputs=2)
    with pytest.raises(NoRows, match=r"'block' has shape \(2, 4, 3\), which is no feature map"):
        to_rows(tokens, "grid(2)", site=TOKENS, inputs=2)
    with pytest.raises(NoRows, match="no feature map"):
        to_rows(torch.ones(2, 6), "grid(2)", site=VECTOR, inputs=2)
    with pytest.raises(ValueError, match=r"no row rule 'grid\(0\)': there are .*, grid\(4\), or a function"):
        to_rows(maps, "grid(0)", site=MAP, inputs=2)


def test_one_token(tokens):
    torch.testing.assert_close(to_rows(tokens, "cls", site=TOKENS, inputs=2), tokens[:, 0])
    torch.testing.assert_close(to_rows(tokens, "last", site=TOKENS, inputs=2), tokens[:, -1])


def test_padding_is_respected(tokens, mask):
    tokens[1, 2:] = float("nan")  # what stands in the padding must not matter
    mean = to_rows(tokens, "mean", site=TOKENS, inputs=2, mask=mask)
    torch.testing.assert_close(mean, torch.stack([tokens[0].mean(0), tokens[1, :2].mean(0)]))
    positions = to_rows(tokens, "positions", site=TOKENS, inputs=2, mask=mask.bool())
    torch.testing.assert_close(positions, torch.cat([tokens[0], tokens[1, :2]]))
    last = to_rows(tokens, "last", site=TOKENS, inputs=2, mask=mask)
    torch.testing.assert_close(last, torch.stack([tokens[0, 3], tokens[1, 1]]))
    signal = to_rows(tokens.transpose(1, 2), "mean", site=SIGNAL, inputs=2, mask=mask)
    torch.testing.assert_close(signal, mean)


def test_padding_on_the_left_is_respected(tokens):
    left = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    cls = to_rows(tokens, "cls", site=TOKENS, inputs=2, mask=left)
    torch.testing.assert_close(cls, torch.stack([tokens[0, 2], tokens[1, 1]]))
    torch.testing.assert_close(to_rows(tokens, "last", site=TOKENS, inputs=2, mask=left), tokens[:, -1])


def test_flatten_refuses_padding_but_not_a_mask_of_ones(tokens, mask):
    with pytest.raises(ValueError, match=r"padded tokens.*'block'.*mean, positions, cls or last"):
        to_rows(tokens, "flatten", site=TOKENS, inputs=2, mask=mask)
    assert to_rows(tokens, "flatten", site=TOKENS, inputs=2, mask=torch.ones(2, 4)).shape == (2, 12)


def test_padding_is_left_out_of_tokens_in_parts_or_the_site_is(tokens, mask):
    parts, by_part = torch.randn(2, 4, 5, 3), Site("chars", "chars", 1, (4, 5, 3), channels_last=True)
    mean = to_rows(parts, "mean", site=by_part, inputs=2, mask=mask)
    torch.testing.assert_close(mean, torch.stack([parts[0].mean((0, 1)), parts[1, :2].mean((0, 1))]))
    scores, of_tokens = torch.randn(2, 4), Site("scores", "scores", 1, (4,), channels_last=True)
    square, maps = torch.randn(2, 4, 4, 3), Site("maps", "maps", 1, (4, 4, 3), channels_last=True)
    for activation, site, rules in [
        (parts, by_part, ("positions", "flatten", "cls")),
        (scores, of_tokens, RULES),
        (square, maps, RULES),
    ]:
        for rule in rules:
            with pytest.raises(NoRows, match=f"'{site.label}' has shape .* unknown which .* padded tokens"):
                to_rows(activation, rule, site=site, inputs=2, mask=mask)
        assert len(to_rows(activation, "mean", site=site, inputs=2, mask=torch.ones(2, 4))) == 2
    assert to_rows(torch.ones(2, 6), "mean", site=VECTOR, inputs=2, mask=mask).shape == (2, 6), "features"


def test_a_mask_for_other_tokens_is_refused(tokens):
    with pytest.raises(
        ValueError, match=r"site 'block' has 4 tokens for each of 2 inputs, but the padding mask is \(2, 5\)"
    ):
        to_rows(tokens, "mean", site=TOKENS, inputs=2, mask=torch.ones(2, 5))


@pytest.mark.parametrize("rule", ["mean", "cls", "last"])
def test_an_input_of_padding_alone_is_refused(tokens, rule):
    nothing = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    with pytest.raises(ValueError, match="'block': input 1 of the batch has no token"):
        to_rows(tokens, rule, site=TOKENS, inputs=2, mask=nothing)


def test_padding_does_not_change_a_models_rows():
    model = Bert().eval()
    ids = torch.randint(1, 20, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    other = ids.masked_fill(mask == 0, 7)
    with torch.no_grad(), watch(model) as seen:
        for rule in ("mean", "positions", "cls", "last"):
            model(ids, attention_mask=mask)
            one = [
                to_rows(x, rule, site=s, inputs=2, mask=mask) for s, x in zip(seen.sites, seen.values(), strict=True)
            ]
            model(other, attention_mask=mask)
            two = [
                to_rows(x, rule, site=s, inputs=2, mask=mask) for s, x in zip(seen.sites, seen.values(), strict=True)
            ]
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("rule", RULES)
def test_two_dimensions_are_rows_under_every_rule(rule):
    x = torch.randn(2, 6)
    assert to_rows(x, rule, site=VECTOR, inputs=2, mask=torch.tensor([[1, 0], [1, 1]])) is not None
    torch.testing.assert_close(to_rows(x, rule, site=VECTOR, inputs=2), x)
    assert to_rows(x[:, 0], rule, site=VECTOR, inputs=2).shape == (2, 1)
    assert rows_per_input(VECTOR, rule) == 1


@pytest.mark.parametrize("rule", ["cls", "last"])
def test_a_feature_map_has_no_tokens(maps, rule):
    with pytest.raises(ValueError, match=r"'conv' is a feature map of shape \(2, 3, 4, 5\), and rule '.*' needs"):
        to_rows(maps, rule, site=MAP, inputs=2)


def test_a_first_dimension_that_does_not_count_inputs_is_refused(tokens):
    with pytest.raises(ValueError, match=r"'block' has shape \(2, 4, 3\) for 4 inputs.*function"):
        to_rows(tokens, "flatten", site=TOKENS, inputs=4)
    rows = to_rows(tokens, lambda x: x.transpose(0, 1).flatten(1), site=TOKENS, inputs=4)
    assert rows.shape == (4, 6)
    with pytest.raises(ValueError, match=r"shape \(\) for 4 inputs"):
        to_rows(torch.tensor(1.0), "mean", site=TOKENS, inputs=4)


def test_a_functions_result_is_checked(tokens):
    with pytest.raises(ValueError, match=r"features\); at site 'block' it returned \(4, 3\) for .* \(2, 4, 3\)"):
        to_rows(tokens, lambda x: x[0], site=TOKENS, inputs=2)
    with pytest.raises(ValueError, match="it returned int"):
        to_rows(tokens, lambda x: 3, site=TOKENS, inputs=2)


def test_unknown_rules_are_refused(tokens):
    for call in (
        lambda: to_rows(tokens, "tallest", site=TOKENS, inputs=2),
        lambda: rows_per_input(TOKENS, "tallest"),
    ):
        with pytest.raises(ValueError, match=f"no row rule 'tallest': there are {', '.join(RULES)}"):
            call()


def test_rows_per_input(tokens):
    assert {rule for rule in RULES if rows_per_input(MAP, rule) != 1} == {"positions"}
    for rule in RULES:
        assert len(to_rows(tokens, rule, site=TOKENS, inputs=2)) == 2 * rows_per_input(TOKENS, rule)
    assert rows_per_input(MAP, "positions") == 20
    assert rows_per_input(TOKENS, "positions") == 4
    assert rows_per_input(SIGNAL, "positions") == 4
    assert rows_per_input(MAP, lambda x: x) == 1


@pytest.mark.parametrize("rule", ["flatten", "mean", "positions"])
def test_half_precision_is_widened_and_double_stays(maps, rule):
    assert to_rows(maps.half(), rule, site=MAP, inputs=2).dtype == torch.float32
    assert to_rows(maps.bfloat16(), rule, site=MAP, inputs=2).dtype == torch.float32
    assert to_rows(maps.double(), rule, site=MAP, inputs=2).dtype == torch.float64


def test_a_mean_in_half_precision_is_neither_rounded_nor_overflows():
    even = torch.tensor([2048.0, 2050.0], dtype=torch.float16).reshape(1, 2, 1)
    assert to_rows(even, "mean", site=TOKENS, inputs=1).item() == 2049.0  # float16 has no odd numbers here
    large = torch.full((1, 1, 64, 64), 60000.0, dtype=torch.float16)
    site = Site("conv", "conv", 1, (1, 64, 64), channels_last=False)
    assert to_rows(large, "mean", site=site, inputs=1).item() == 60000.0
    tokens = torch.full((1, 9, 1), 60000.0, dtype=torch.float16)
    keep = torch.tensor([[1] * 8 + [0]])
    assert to_rows(tokens, "mean", site=TOKENS, inputs=1, mask=keep).item() == 60000.0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_the_mean_rule_is_the_mean_of_the_positions(n, channels, space):
    site = Site("s", "s", 1, (channels, *space), channels_last=False)
    x = torch.randn(n, channels, *space, dtype=torch.float64)
    positions = to_rows(x, "positions", site=site, inputs=n)
    assert len(positions) == n * rows_per_input(site, "positions")
    pooled = positions.reshape(n, -1, channels).mean(1)
    torch.testing.assert_close(pooled, to_rows(x, "mean", site=site, inputs=n))


def test_rows_of_a_recurrent_net_with_time_first_are_refused_by_name():
    model = nn.Sequential(nn.LSTM(3, 4))
    with torch.no_grad(), watch(model, "0") as seen:
        model(torch.randn(5, 2, 3))
    with pytest.raises(ValueError, match=r"site '0' has shape \(5, 2, 4\) for 2 inputs"):
        to_rows(seen["0"], "flatten", site=seen.sites[0], inputs=2)
