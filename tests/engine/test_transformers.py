"""Hugging Face models through the whole of compare: padding, tokenisers, two halves, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sosie
from sosie.capture import NoRows

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sosie[hf]'")

from tiny_transformers import bert, clip, gpt2, llama, t5, token_batch, vit  # noqa: E402

POOLED = ("mean", "cls", "last")


def images(n: int = 40) -> Tensor:
    return torch.rand(n, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def two_halves(n: int = 40, **masks: Tensor) -> dict[str, Tensor]:
    batch = token_batch(n)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "decoder_input_ids": batch["input_ids"][:, :3],
        **masks,
    }


@pytest.mark.parametrize(
    ("make", "batch", "expected"),
    [
        (bert, token_batch(8), [f"encoder.layer.{i}" for i in range(3)]),
        (gpt2, token_batch(8), [f"h.{i}" for i in range(3)]),
        (llama, token_batch(8), [f"layers.{i}" for i in range(3)]),
        (vit, images(8), [f"{'layers' if hasattr(vit(), 'layers') else 'encoder.layer'}.{i}" for i in range(2)]),
        (t5, two_halves(8), [f"{half}.block.{i}" for half in ("encoder", "decoder") for i in range(2)]),
        (
            clip,
            {**token_batch(8), "pixel_values": images(8)},
            [f"{half}_model.encoder.layers.{i}" for half in ("vision", "text") for i in range(2)],
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_by_default_the_blocks_are_compared(make: Callable[[], nn.Module], batch: Any, expected: list[str]) -> None:
    if make is clip:
        try:
            make()(**batch)
        except RuntimeError as error:
            pytest.skip(f"this transformers does not run CLIP in float64: {error}")
    c = sosie.compare(make(), make(), batch, rows="mean")
    assert list(c.sites_a) == expected
    assert np.isfinite(c.matrix()).all()


def test_embeddings_and_the_models_own_output_are_sites_too() -> None:
    c = sosie.compare(bert(), bert(1), token_batch(), rows="mean", sites_a=["embeddings", "encoder.*.1", "."])
    assert c.sites_a[0] == "embeddings"
    assert c.sites_a[-1] == "output"
    last = sosie.compare(bert(), bert(1), token_batch(), rows="mean", sites_a=["encoder.layer.2"]).matrix()
    np.testing.assert_array_equal(c.matrix()[-1:], last)


# Padding


def alone(model: nn.Module, batch: dict[str, Tensor], rule: str, layers: int) -> dict[str, np.ndarray[Any, Any]]:
    """Rows by transformers' own hidden states, each input run alone, without any padding."""
    found: list[list[Tensor]] = [[] for _ in range(layers)]
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        with torch.no_grad():
            hidden = model(ids[mask == 1][None], output_hidden_states=True).hidden_states
        for k in range(layers):
            tokens = hidden[k + 1][0]
            found[k].append(
                {"mean": tokens.mean(0, keepdim=True), "cls": tokens[:1], "last": tokens[-1:]}.get(rule, tokens)
            )
    return {str(k): torch.cat(rows).numpy() for k, rows in enumerate(found)}


# The last hidden state that GPT-2 and Llama return has gone through one more norm than their last block's.
CASES = [(bert, False, 3), (gpt2, False, 2), (gpt2, True, 2), (llama, True, 2)]


@pytest.mark.parametrize("rule", [*POOLED, "positions"])
@pytest.mark.parametrize(("make", "left", "layers"), CASES, ids=["bert", "gpt2", "gpt2-left", "llama-left"])
def test_padding_is_never_counted(make: Callable[..., nn.Module], left: bool, layers: int, rule: str) -> None:
    a, b = make(0), make(1)
    measures = ["linear_cka", "debiased_cka"]
    plain = token_batch(left=left)
    rows_a, rows_b = (alone(model, plain, rule, layers) for model in (a, b))
    expected = sosie.compare(rows_a, rows_b, measures=measures, exact=True)
    others = [token_batch(left=left, garbage=9), token_batch(left=left, garbage=11, extra=5)]
    for batch in (plain, *others, {**plain, "attention_mask": plain["attention_mask"].bool()}):
        c = sosie.compare(a, b, batch, rows=rule, measures=measures, exact=True)
        for name in measures:
            np.testing.assert_allclose(c.matrix(name)[:layers, :layers], expected.matrix(name), atol=1e-9)


@pytest.mark.parametrize("rule", [*POOLED, "positions"])
def test_batches_of_different_length_make_no_difference(rule: str) -> None:
    whole = token_batch(150, left=True)
    cuts = [slice(0, 70), slice(70, 75), slice(75, 150)]
    batches = [{key: part[c] for key, part in whole.items()} for c in cuts]
    for batch in batches[1:2]:  # few inputs, cut to the longest of them
        unused = int((batch["attention_mask"].sum(0) == 0).sum())
        batch.update({key: part[:, unused:] for key, part in batch.items()})
    found = [sosie.compare(gpt2(0), gpt2(1), data, rows=rule).matrix() for data in ([whole], batches)]
    np.testing.assert_allclose(*found, atol=1e-9)


def test_flattened_rows_refuse_padding_and_lengths_that_differ() -> None:
    with pytest.raises(ValueError, match=r"padded tokens.*'encoder\.layer\.0'.*mean, positions, cls or last"):
        sosie.compare(bert(), bert(1), token_batch())
    ids = token_batch()["input_ids"].clamp(min=3)
    full = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert np.isfinite(sosie.compare(bert(), bert(1), full).matrix()).all()
    shorter = {key: part[:, :5] for key, part in full.items()}
    with pytest.raises(ValueError, match=r"rows of 84 features at first and of 60 now.*rows='mean'"):
        sosie.compare(bert(), bert(1), [full, shorter], measures="mean_cca")


@pytest.mark.parametrize("model", [bert, gpt2])
def test_masks_that_are_added_are_refused(model: Callable[[], nn.Module]) -> None:
    batch = token_batch()
    added = torch.zeros(batch["attention_mask"].shape).masked_fill(batch["attention_mask"] == 0, float("-inf"))
    with pytest.raises(ValueError, match=r"attention_mask has -inf in it.*added to the scores"):
        sosie.compare(model(), model(), {**batch, "attention_mask": added}, rows="mean")
    with pytest.raises(ValueError, match=r"attention_mask has shape \(4, 1, 1, 7\)"):
        sosie.compare(model(), model(), {**batch, "attention_mask": added[:, None, None]}, rows="mean")


# Different numbers of tokens


def test_pooled_rows_compare_models_with_different_numbers_of_tokens() -> None:
    fine, coarse = vit(patch=4), vit(1, patch=8)
    x = images()
    for rule in POOLED:
        c = sosie.compare(fine, coarse, x, rows=rule, measures="linear_cka")
        with torch.no_grad():
            pooled = [_pool(model(x, output_hidden_states=True).hidden_states[1], rule) for model in (fine, coarse)]
        assert c.matrix()[0, 0] == pytest.approx(sosie.measure("linear_cka", *pooled), abs=1e-9)
    with pytest.raises(ValueError, match=r"5 per input at .*; 17 per input at .*rows='mean', for tokens also 'cls'"):
        sosie.compare(fine, coarse, x, rows="positions")


def _pool(hidden: Tensor, rule: str) -> Tensor:
    return {"mean": hidden.mean(1), "cls": hidden[:, 0], "last": hidden[:, -1]}[rule]


def test_two_halves_are_pooled_each_by_its_own_mask() -> None:
    model = t5()
    batch = two_halves()
    lengths = torch.arange(40) % 3 + 1
    mask = (torch.arange(3) < lengths[:, None]).long()
    for rule in POOLED:
        one = sosie.compare(model, model, {**batch, "decoder_attention_mask": mask}, rows=rule).matrix()
        garbage = {**batch, "decoder_input_ids": batch["decoder_input_ids"].masked_fill(mask == 0, 17)}
        two = sosie.compare(model, model, {**garbage, "decoder_attention_mask": mask}, rows=rule).matrix()
        assert one.shape == (4, 4)
        np.testing.assert_allclose(one, two, atol=1e-9)
    counted = sosie.compare(model, model, garbage, rows="mean").matrix()
    assert abs(counted - sosie.compare(model, model, batch, rows="mean").matrix()).max() > 1e-3


def test_positions_of_two_halves_cannot_be_paired_but_those_of_one_can() -> None:
    model = t5()
    with pytest.raises(ValueError, match=r"3 per input at .*decoder\.block\.0.*; 7 per input at .*encoder\.block\.0"):
        sosie.compare(model, model, two_halves(), rows="positions")
    same_length = {**two_halves(), "decoder_input_ids": token_batch(40)["input_ids"]}
    with pytest.raises(ValueError, match=r"input \d+ of a chunk has \d tokens at .*encoder.* and 7 at .*decoder"):
        sosie.compare(model, model, same_length, rows="positions")
    for half, rows in (("encoder", int(two_halves()["attention_mask"].sum())), ("decoder", 40 * 3)):
        sites = {"sites_a": f"{half}.block.?", "sites_b": f"{half}.block.?"}
        c = sosie.compare(model, model, two_halves(), rows="positions", **sites)
        assert c.rows()[0]["n"] == rows


# Text, and each model's own tokeniser

TEXTS = [f"{'a bc def'[: 2 + i % 6]} {'xyz'[i % 3]}{'q' * (i % 4)} {chr(97 + i % 26)}" for i in range(90)]


def by(cut: Callable[[str], list[str]], seed: int = 0) -> Callable[[list[str]], dict[str, Tensor]]:
    """A toy tokeniser: the pieces' sums of code points, as ids."""

    def tokenise(texts: list[str]) -> dict[str, Tensor]:
        ids = [[3 + (sum(map(ord, piece)) + seed) % 37 for piece in cut(text)] for text in texts]
        longest = max(map(len, ids))
        rows = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
        return {"input_ids": rows, "attention_mask": rows != 0}

    return tokenise


WORDS, LETTERS = by(str.split), by(list)


@pytest.mark.parametrize("rule", POOLED)
@pytest.mark.parametrize("form", [lambda x: x, lambda x: [x[:7], x[7:]], lambda x: [(x, torch.ones(90))]])
def test_each_model_has_its_own_tokeniser(rule: str, form: Callable[[list[str]], Any]) -> None:
    a, b = bert(), gpt2(1)
    c = sosie.compare(a, b, form(TEXTS), rows=rule, prepare_a=WORDS, prepare_b=LETTERS, exact=True)
    expected = sosie.compare(alone(a, WORDS(TEXTS), rule, 3), alone(b, LETTERS(TEXTS), rule, 2), exact=True)
    np.testing.assert_allclose(c.matrix()[:, :2], expected.matrix(), atol=1e-9)


def test_positions_of_different_tokens_are_refused() -> None:
    models = bert(), bert(1)
    with pytest.raises(ValueError, match=r"need paired rows.*4 per input at BertModel \(A\).*; 12 per input at"):
        sosie.compare(*models, TEXTS, rows="positions", prepare_a=WORDS, prepare_b=LETTERS)
    equal_length_where_tried = [*["abc d"] * 20, *["a b", "c d"] * 2]
    no_space = by(lambda text: list(text.replace(" ", "")))
    with pytest.raises(ValueError, match=r"input 0 of a chunk has 2 tokens at .* and 4 at .*rows='mean'"):
        sosie.compare(*models, equal_length_where_tried, rows="positions", prepare_a=WORDS, prepare_b=no_space)
    with pytest.raises(ValueError, match=r"cut the same text into different ones, though as many"):
        sosie.compare(*models, TEXTS, rows="positions", prepare_a=WORDS, prepare_b=by(str.split, seed=1))
    c = sosie.compare(*models, TEXTS, rows="positions", prepare_a=WORDS, prepare_b=by(str.split))
    assert c.rows()[0]["n"] == sum(len(text.split()) for text in TEXTS)


def test_a_mask_that_inputs_makes_is_respected() -> None:
    a, b = bert(), bert(1)
    made = sosie.compare(a, b, TEXTS, rows="mean", inputs=LETTERS).matrix()
    np.testing.assert_allclose(made, sosie.compare(a, b, LETTERS(TEXTS), rows="mean").matrix(), atol=1e-9)


# Nothing is left behind


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("make", [bert, gpt2])
def test_a_model_is_left_as_found(make: Callable[[], nn.Module], breaks: bool) -> None:
    model = make().train()
    list(model.modules())[3].eval()
    frozen = next(model.parameters()).requires_grad_(False)
    training = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    other, config = make(), model.config.to_dict()
    state = torch.get_rng_state()
    rule = "flatten" if breaks else "mean"
    try:
        sosie.compare(model, other, token_batch(), rows=rule)
    except ValueError:
        assert breaks
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == training
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not frozen.requires_grad
    assert sum(not parameter.requires_grad for parameter in model.parameters()) == 1
    assert model.config.to_dict() == config


# A mask beside the ids


@pytest.mark.parametrize("rows", ["mean", "last"])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
def test_a_mask_beside_the_ids_is_the_mask(rows: str, dtype: torch.dtype) -> None:
    batch = token_batch()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = torch.arange(len(ids)) % 3
    expected = sosie.compare(bert(), bert(1), batch, rows=rows).matrix()
    for parts in ((ids, mask.to(dtype)), (ids, mask.to(dtype), labels), (ids, labels, mask.to(dtype))):
        loader = DataLoader(TensorDataset(*parts), batch_size=16)
        np.testing.assert_allclose(sosie.compare(bert(), bert(1), loader, rows=rows).matrix(), expected, atol=1e-12)
    unpadded = sosie.compare(bert(), bert(1), ids, rows=rows).matrix()
    assert np.abs(unpadded - expected).max() > 1e-3


def test_a_mask_beside_the_ids_is_read_by_everything_that_runs_models() -> None:
    batch = token_batch()
    pairs = TensorDataset(batch["input_ids"], batch["attention_mask"])
    a, b = (
        sosie.sketch(bert(), batch, rows="mean", size=None, kernels="features"),
        sosie.sketch(bert(), pairs, rows="mean", size=None, kernels="features"),
    )
    torch.testing.assert_close(a.site("encoder.layer.2").features.rows, b.site("encoder.layer.2").features.rows)
    at = "encoder.layer.0"
    one, other = (sosie.stitch(bert(), at, bert(1), at, data).model.joint.weight for data in (batch, pairs))
    torch.testing.assert_close(one, other)


def test_what_may_be_a_mask_or_labels_is_an_error() -> None:
    batch = token_batch()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for parts in ((ids, ids), (ids, mask, mask)):
        with pytest.raises(ValueError, match=r"BertModel takes an attention_mask, .* [12] beside the ids .*Give dicts"):
            sosie.compare(bert(), bert(1), DataLoader(TensorDataset(*parts), batch_size=16), rows="mean")
    expected = sosie.compare(bert(), bert(1), batch, rows="mean").matrix()
    pairs = TensorDataset(ids, mask, ids)  # labels of a language model
    np.testing.assert_allclose(sosie.compare(bert(), bert(1), pairs, rows="mean").matrix(), expected, atol=1e-12)


def test_a_mask_that_inputs_gives_in_a_tuple_is_read() -> None:
    batch = token_batch()
    pairs = TensorDataset(batch["input_ids"], batch["attention_mask"])
    for rows in ("mean", "positions", "cls", "last"):
        expected = sosie.compare(bert(), bert(1), batch, rows=rows).matrix()
        found = sosie.compare(bert(), bert(1), pairs, rows=rows, inputs=lambda parts: (parts[0], parts[1])).matrix()
        np.testing.assert_allclose(found, expected, atol=1e-12)
    with pytest.raises(ValueError, match="padded tokens"):
        sosie.compare(bert(), bert(1), pairs, inputs=lambda parts: (parts[0], parts[1]))
    options = {"rows": "mean", "size": None, "kernels": "features"}
    one, other = (
        sosie.sketch(bert(), batch, **options),
        sosie.sketch(bert(), pairs, inputs=lambda parts: (parts[0], parts[1]), **options),
    )
    torch.testing.assert_close(one.site("encoder.layer.2").features.rows, other.site("encoder.layer.2").features.rows)


class OwnMask(torch.nn.Module):
    """Words that are mixed, with a mask that has another name than in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.mix(self.words(ids) * mask[..., None]).tanh()


class Hands(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.model(*args)


def test_a_mask_of_unknown_meaning_is_asked_about() -> None:
    batch = token_batch()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    models = OwnMask(), OwnMask()
    with pytest.raises(NoRows, match=r"unknown whether 'mask' of the call marks its padded tokens.*'attention_mask'"):
        sosie.compare(*models, {"ids": ids, "mask": mask}, rows="mean", sites="mix")
    own = {"ids": ids, "attention_mask": mask}
    c = sosie.compare(
        *models, own, rows="mean", sites="mix", inputs=lambda b: (b["ids"], b["attention_mask"]), exact=True,
        measures="linear_cka",
    )  # fmt: skip
    with torch.no_grad():
        hidden = [model.mix(model.words(ids) * mask[..., None]).double() for model in models]
    means = [(each * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for each in hidden]
    assert c.matrix()[0, 0] == pytest.approx(sosie.measure("linear_cka", *means), abs=1e-6)
    everything = sosie.compare(*models, {"ids": ids, "mask": mask}, rows=lambda x: x.flatten(1), sites="mix")
    assert everything.sites_a == ["mix"]
    ones = sosie.compare(*models, {"ids": ids, "mask": torch.ones_like(mask)}, rows="mean", sites="mix")
    assert ones.sites_a == ["mix"]
    with pytest.raises(NoRows, match="'argument 2' of the call"):
        sosie.compare(
            Hands(bert()), Hands(bert(1)), TensorDataset(ids, mask), rows="mean", sites="model.encoder.layer.0",
            inputs=lambda parts: tuple(parts),
        )  # fmt: skip


# Sites without rows


def test_leaves_of_a_llama_are_compared_without_its_rotary_embedding() -> None:
    c = sosie.compare(llama(), llama(1), token_batch(), sites_a="leaves", sites_b="leaves", rows="mean")
    embeddings = [name for name, _ in llama().named_modules() if name.endswith("rotary_emb")]  # one, or one a block
    assert [site for site, _ in c.side_a.left_out] == embeddings
    assert len(c.sites_a) == 1 + 3 * 10 + 1  # embedding, ten leaves a block, norm
    with pytest.raises(NoRows, match=rf"site '{embeddings[0]}' has shape"):
        sosie.compare(llama(), llama(1), token_batch(), sites_a=embeddings[0], rows="mean")
