"""Padding masks: which are read, which are refused, and which sites they speak of."""

import numpy as np
import pytest
import torch

from sosie.capture import Site, TokenMasks, mask_of

X = torch.ones(2, 3)
IDS = torch.ones(2, 3, dtype=torch.int64)


def test_the_mask_is_found():
    assert mask_of({"attention_mask": X}) is X
    assert mask_of(({"attention_mask": X.numpy()}, X)).shape == (2, 3)
    for batch in ({"x": X}, (X, X), X, ["a", "b"], {"attention_mask": None}):
        assert mask_of(batch) is None


@pytest.mark.parametrize("kind", [bool, np.int64, np.float32, np.uint8])
def test_a_mask_of_zeros_and_ones_may_be_of_any_type(kind):
    mask = np.array([[1, 1, 0], [1, 0, 0]]).astype(kind)
    assert (mask_of({"attention_mask": mask}) != 0).sum().item() == 3


def test_a_mask_of_another_shape_is_refused_rather_than_passed_by():
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 1, 3\)"):
        mask_of({"attention_mask": torch.ones(2, 1, 1, 3)})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[0.0, 0.0, float("-inf")], [0.0] * 3], "has -inf in it"),
        ([[0.0, -1e9, -1e9], [0.0] * 3], r"has -1e\+09 in it"),
        ([[0.0] * 3, [0.0] * 3], "is 0 everywhere, in float32"),
        ([[1.0, float("nan"), 0.0], [1.0] * 3], "has nan in it"),
        ([[0.5, 1.0, 0.0], [1.0] * 3], "has 0.5 in it"),
    ],
)
def test_a_mask_that_is_added_to_the_scores_is_refused(values, says):
    with pytest.raises(ValueError, match=f"attention_mask {says}.*1 .or True. at tokens"):
        mask_of({"attention_mask": torch.tensor(values)})


def site(name, shape=(3, 4)):
    return Site(name, name, 1, shape, channels_last=True)


def test_one_mask_is_for_every_site_with_tokens():
    masks = TokenMasks.of({"attention_mask": X})
    assert masks.at(site("layer.0"), torch.ones(2, 3, 4)) is X
    assert masks.at(site("heads"), torch.ones(2, 3, 4, 4)) is X
    assert TokenMasks.of(X).at(site("layer.0"), torch.ones(2, 3, 4)) is None


def test_the_first_that_has_a_mask_decides():
    other = torch.zeros(2, 3, dtype=torch.bool)
    assert TokenMasks.of({"x": X}, {"attention_mask": X}, {"attention_mask": other}).tokens is X


def test_each_half_of_a_model_has_its_mask():
    batch = {"attention_mask": X, "decoder_input_ids": IDS[:, :2]}
    masks = TokenMasks.of(batch)
    assert masks.at(site("encoder.block.0"), torch.ones(2, 3, 4)) is X
    assert masks.at(site("decoder.block.0"), torch.ones(2, 2, 4)).tolist() == [[True, True], [True, True]]
    assert masks.at(site("decoder.bert.encoder.layer.0"), torch.ones(2, 2, 4)).shape == (2, 2)
    padded = torch.tensor([[1, 0], [1, 1]])
    masks = TokenMasks.of({**batch, "decoder_attention_mask": padded})
    assert masks.at(site("decoder.block.0"), torch.ones(2, 2, 4)) is padded
    assert masks.at(site("lm_head"), torch.ones(2, 2, 4)) is padded, "by its length"
    assert masks.at(site("shared"), torch.ones(2, 3, 4)) is X
    with pytest.raises(ValueError, match="decoder_attention_mask has -1"):
        TokenMasks.of({**batch, "decoder_attention_mask": -padded})


def test_a_site_that_may_belong_to_either_half_is_refused_where_it_matters():
    batch = {"attention_mask": X, "decoder_input_ids": IDS}
    assert TokenMasks.of(batch).at(site("lm_head"), torch.ones(2, 3, 4)) is X
    padded = TokenMasks.of({**batch, "decoder_attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])})
    with pytest.raises(ValueError, match=r"site 'lm_head' may see the encoder's tokens or the decoder's, 3 per input"):
        padded.at(site("lm_head"), torch.ones(2, 3, 4))


def test_the_mask_of_a_text_does_not_speak_of_an_image():
    masks = TokenMasks.of({"attention_mask": X, "pixel_values": torch.ones(2, 3, 8, 8)})
    assert masks.at(site("vision_model.layers.0"), torch.ones(2, 5, 4)) is None
    assert masks.at(site("text_model.layers.0"), torch.ones(2, 3, 4)) is X
    assert masks.at(site("patches"), torch.ones(2, 4, 8, 8)) is None
