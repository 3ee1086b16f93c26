"""Tokens are really dropped, and masking them in training is the same as removing them."""

from __future__ import annotations

import importlib
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sosie
from sosie.models import DynamicViT, dynamic_vit, open_model, vit, with_dynamic_tokens
from sosie.train import calibrate_tokens

SMALL: dict[str, Any] = {"classes": 3, "size": 16, "patch": 4, "depth": 4, "width": 24, "heads": 3, "channels": 1}


pytestmark = pytest.mark.usefixtures("seeded")


def images(count: int = 6, seed: int = 0) -> Tensor:
    return torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(seed))


def lively(**options: Any) -> DynamicViT:
    """A small one whose attention and gates are not flat."""
    model = dynamic_vit(**{**SMALL, **options})
    assert isinstance(model, DynamicViT)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5 if name.startswith("gates") else 0.3)
    return model.eval()


# What is dropped


def test_each_stage_lets_a_share_pass() -> None:
    model = dynamic_vit(size=224, patch=16, depth=12, width=192)
    assert model.stages == (3, 6, 9)
    assert list(model.counts.values()) == [137, 96, 67]  # ⌊0.7 · 196⌋, ⌊0.49 · 196⌋, ⌊0.343 · 196⌋
    assert list(dynamic_vit(**{**SMALL, "size": 40}).counts.values()) == [
        70,
        49,
        34,
    ]  # 0.7² · 100 in binary is below 49
    model.keep = 0.5
    assert list(model.counts.values()) == [98, 49, 24]


@pytest.mark.parametrize("rule", ["learned", "cka", "eq13"])
def test_blocks_see_as_many_tokens_as_are_counted(rule: Any) -> None:
    model, seen = lively(rule=rule, stages=(1, 3), keep=0.6), []
    calibrate_tokens(model, images(20, seed=1))
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    with torch.no_grad():
        assert model(images()).shape == (6, 3)
    assert seen == [(6, 1 + n, 24) for n in (16, 9, 9, 5)]
    kept = model.kept_positions(images())
    assert [tuple(each.shape) for each in kept.values()] == [(6, 9), (6, 5)]
    assert all(set(late.tolist()) <= set(early.tolist()) for early, late in zip(kept[1], kept[3], strict=True))
    assert all(len(set(row)) == len(row) and row == sorted(row) for each in kept.values() for row in each.tolist())


def flops(model: nn.Module, x: Tensor) -> dict[str, int]:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(x)
    return {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}


def test_flops_are_those_of_a_formula_stage_by_stage() -> None:
    width, hidden, batch = 24, 96, 2
    model = lively(keep=0.5, stages=(1, 2))
    found = flops(model, images(batch))

    def block(patches: int) -> int:
        n = patches + 1
        return 2 * batch * (n * (4 * width * width + 2 * width * hidden) + 2 * n * n * width)

    def gate(patches: int) -> int:
        return 2 * batch * patches * (width * width + width * 12 + 12 * 6 + 6 * 2)

    wanted = [block(16), block(8), block(4), block(4)]
    assert [found[f"DynamicViT.blocks.{k}"] for k in range(4)] == wanted
    gates = [sum(found[f"DynamicViT.gates.{part}.{k}"] for part in ("enter", "decide")) for k in (1, 2)]
    assert gates == [gate(16), gate(8)]
    ends = 2 * batch * (16 * width * 16 + width * 3)  # patches and head
    assert found["Global"] == sum(wanted) + gate(16) + gate(8) + ends
    plain = flops(vit(**SMALL).eval(), images(batch))["Global"]
    assert plain == 4 * block(16) + ends
    assert 0.45 < found["Global"] / plain < 0.6


@pytest.mark.parametrize(
    ("width", "keep", "giga"), [(384, 1.0, 4.6), (384, 0.9, 4.0), (384, 0.8, 3.4), (384, 0.7, 2.9), (256, 0.7, 1.3)]
)
def test_deit_costs_what_was_published(width: int, keep: float, giga: float) -> None:
    """Multiplications as Rao et al. list them for DeiT-S, and for one of width 256 (to 0.1: they counted otherwise)."""
    with torch.device("meta"):
        model = dynamic_vit(classes=1000, size=224, patch=16, depth=12, width=width, keep=keep).eval()
        assert flops(model, torch.empty(1, 3, 224, 224))["Global"] / 2e9 == pytest.approx(giga, abs=0.1)
        tiny = dynamic_vit(classes=1000, size=224, patch=16, depth=12, width=192)
    counts = [round(sum(value.numel() for value in each.parameters()) / 1e6, 1) for each in (model, tiny)]
    assert width != 384 or counts == [22.8, 5.9]  # millions; the second as in Table 1 of the CKA-SR appendix


def test_the_class_token_never_goes() -> None:
    model, seen = lively(keep=0.3, stages=(1, 2)), []
    for decide in model.gates.decide.values():
        decide[-1].bias.data = torch.tensor([60.0, -60.0])  # drop everything
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        model(images())
    for (_, before), (after, _) in pairwise(seen):
        assert torch.equal(before[:, 0], after[:, 0])
    with torch.no_grad():
        found = model.train()(images())
        tokens = model.blocks[0](model.embed(images()))[:, :1]  # from there on it is alone
        alone = model.answer(model.blocks[3](model.blocks[2](model.blocks[1](tokens))))
    torch.testing.assert_close(found, alone)


# Masked as if removed


def test_training_on_masks_is_evaluation_without_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)  # with another, two gates may be as good as equal: then rounding decides
    model, counts = lively(keep=0.6), iter([9, 5, 3])

    def best(log_probabilities: Tensor, before: Tensor | None = None) -> Tensor:
        scores = log_probabilities[..., 1].clone()
        if before is not None:
            scores[before == 0] = -math.inf
        return torch.zeros_like(scores).scatter(1, scores.topk(next(counts)).indices, 1.0)

    monkeypatch.setattr(importlib.import_module("sosie.models.vit"), "draw", best)
    with torch.no_grad():
        torch.testing.assert_close(model.train()(images()), model.eval()(images()), rtol=0, atol=1e-5)
        model.keep = 1.0
        assert (model(images()) - model.train()(images())).abs().max() == 0
        whole = model(images())
        model.keep = 0.6
        assert (model.eval()(images()) - whole).abs().max() > 1e-3


# The plain network


def test_keeping_everything_is_the_plain_network_bit_for_bit() -> None:
    torch.manual_seed(3)
    plain = vit(**SMALL)
    torch.manual_seed(3)
    model = dynamic_vit(**SMALL, keep=1.0)
    for mode in (True, False):
        a, b = plain.train(mode)(images()), model.train(mode)(images())
        assert torch.equal(a, b)
    a.sum().backward()
    b.sum().backward()
    mine = dict(model.named_parameters())
    assert all(torch.equal(value.grad, mine[name].grad) for name, value in plain.named_parameters())


def test_weights_of_a_plain_network_fit() -> None:
    plain = vit(**SMALL).double().eval()
    model = with_dynamic_tokens(plain, keep=0.5, stages=(2,), seed=5)
    assert (model.keep, model.stages, model.heads, model.training) == (0.5, (2,), 3, False)
    x = images().double()
    with torch.no_grad():
        assert not torch.equal(model(x), plain(x))
        model.keep = 1.0
        assert torch.equal(model(x), plain(x))
    again = with_dynamic_tokens(model, keep=0.5, stages=(2,), seed=5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    other = dynamic_vit(**SMALL, keep=1.0).double().eval()
    missing, unexpected = other.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith(("gates.", "likeness", "_extra_state")) for name in missing)
    assert torch.equal(other(x), plain(x))
    with pytest.raises(TypeError, match="vision transformers"):
        with_dynamic_tokens(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_gradients_reach_every_gate_through_attention_alone() -> None:
    model = lively(keep=0.7).train()
    nn.functional.cross_entropy(model(images(16)), torch.arange(16) % 3).backward()
    assert [name for name, value in model.gates.named_parameters() if not value.grad.abs().max() > 0] == []


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_counts_tokens_in_single(autocast: bool) -> None:
    model, seen = lively(), []
    model = model.train() if autocast else model.train().bfloat16()
    model.gates.register_forward_hook(lambda module, args, out: seen.append(out))
    x = images() if autocast else images().bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = model(x)
        assert model.eval()(x).dtype == torch.bfloat16
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    assert {each.dtype for each in seen} == {torch.float32}


# Which tokens


def kept_with(model: DynamicViT, x: Tensor, beside: Tensor) -> list[Tensor]:
    return [each[: len(x)] for each in model.kept_positions(torch.cat([x, beside])).values()]


def test_the_calibrated_rule_looks_at_the_image_alone() -> None:
    model, x = lively(), images(5)
    calibrate_tokens(model, images(40, seed=9))

    def same(rule: Any) -> bool:
        model.rule = rule
        runs = [kept_with(model, x, 0.2 * images(12, seed=seed) + seed % 2) for seed in (1, 2)]
        return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

    assert same("learned")
    assert same("cka")
    assert not same("eq13")
    model.rule, model.gamma = "cka", 1000.0
    left = torch.arange(16)
    for k, kept in enumerate(model.kept_positions(x).values()):
        # With so large a gamma: of the positions still there those that are least like the others.
        left = left[model.likeness[k, left].argsort()[: (11, 7, 5)[k]]].sort().values
        assert torch.equal(kept, left.expand(5, -1))
    model.gamma = 0.0
    plain = list(model.kept_positions(x).values())
    model.rule = "learned"
    assert all(torch.equal(a, b) for a, b in zip(plain, model.kept_positions(x).values(), strict=True))


# Files and the command line


def test_options_come_from_the_file_and_stated_ones_win(tmp_path: Path) -> None:
    model = lively(keep=0.6, stages=(1, 3), rule="cka", gamma=0.25)
    file = tmp_path / "w.safetensors"
    save_file(model.state_dict(), file)
    opened = open_model(f"dynamic_vit@{file}").model
    assert (opened.keep, opened.stages, opened.rule, opened.gamma, opened.heads) == (0.6, (1, 3), "cka", 0.25, 3)
    with pytest.raises(ValueError, match=r"the similarity of tokens: sosie\.train\.calibrate_tokens"):
        opened(images())
    calibrate_tokens(model, images(20, seed=1))
    save_file(model.state_dict(), file)
    opened = open_model(f"dynamic_vit@{file}").model
    assert opened.calibrated_on == 20
    assert torch.equal(opened(images()), model(images()))
    stated = open_model(f"dynamic_vit(keep=1.0, rule='learned')@{file}").model
    assert (stated.keep, stated.rule, stated.stages) == (1.0, "learned", (1, 3))
    save_file(vit(**SMALL).state_dict(), file)
    with pytest.raises(ValueError, match=r"missing in the file: .*gates\.enter\.1"):
        open_model(f"dynamic_vit(heads=3)@{file}")


@pytest.mark.parametrize("odd", [[0.7, 1, 0], [0.7, 1, 9, 3, 0], [0.7, 1, -1, 3, 0], [math.nan] * 5])
def test_options_that_no_network_wrote_are_refused(odd: list[float], tmp_path: Path) -> None:
    state = {**lively().state_dict(), "_extra_state": torch.tensor(odd)}
    with pytest.raises(ValueError, match="but a dynamic_vit saves five numbers"):
        lively().load_state_dict(state)
    save_file(state, tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match="but a dynamic_vit saves five numbers"):
        open_model(f"dynamic_vit@{tmp_path / 'odd.safetensors'}")


def test_the_share_survives_half_precision() -> None:
    state = lively(keep=0.7).half().state_dict()
    assert state["_extra_state"][0] == 0.7


@pytest.mark.parametrize("rows", ["flatten", "mean", "cls"])
def test_it_compares_with_the_plain_network(rows: str) -> None:
    model, plain = lively(keep=0.5), vit(**SMALL).eval()
    data = list(images(32).split(16))
    found = sosie.compare(model, plain, data, measures=["debiased_cka"], rows=rows)
    assert found.sites_a == [f"blocks.{k}" for k in range(4)]
    assert found.matrix("debiased_cka").shape == (4, 4)
    own = sosie.compare(model, model, data, measures=["debiased_cka"], rows=rows).matrix("debiased_cka")
    assert own.diagonal() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.0}, "keep must be .* at most 1, got 0.0: the share"),
        ({"keep": 1.5}, "keep must be .* got 1.5"),
        ({"keep": 0.1}, "leaves none of 16 patches after 3 stages"),
        ({"rule": "best"}, "rule must be one of 'learned', 'cka', 'eq13', got 'best'"),
        ({"stages": (4,)}, r"stages=\(4,\): one or more of the blocks 0 to 3"),
        ({"stages": (2, 1)}, "ascending"),
        ({"stages": ()}, "one or more"),
        ({"depth": 1}, "one or more"),
        ({"stages": (1.5,)}, "one or more"),
        ({"gamma": math.nan}, "gamma.*must be finite"),
    ],
)
def test_errors_say_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dynamic_vit(**{**SMALL, **options})
