"""Too few draws for any p ≤ 0.05: a chance level, no p-values, and the reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import sosie


@pytest.mark.parametrize(("draws", "told"), [(18, False), (19, True)])
def test_p_values_need_draws_enough_to_fall_below_the_level(draws: int, told: bool) -> None:
    x = np.random.default_rng(0).normal(size=(60, 5))
    c = sosie.compare({"a": x, "c": x[::-1].copy()}, {"b": x, "d": x**3}, null="permutation", draws=draws)
    row = c.rows()[0]
    assert row["null"] is not None
    assert (row["p"] == pytest.approx(1 / 20)) if told else (row["p"] is None)
    assert any(f"at least 19 draws, got draws={draws}" in text for text in row["caveats"]) is not told


def test_so_do_those_of_weights() -> None:
    torch.manual_seed(0)
    a, b = nn.Linear(8, 4), nn.Linear(8, 3)
    row = sosie.compare_weights(a, b, null="weights", draws=2).rows()[0]
    assert row["p"] is None
    assert row["null"] is not None
    assert "no p-values: p ≤ 0.05 needs at least 19 draws, got draws=2" in row["caveats"]


def test_a_model_without_a_layer_that_says_its_input_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"ReLU .A.: no linear layer or convolution says how large an input is"):
        sosie.compare_weights(nn.ReLU(), nn.ReLU())
