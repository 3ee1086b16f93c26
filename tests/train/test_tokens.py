"""What is added to the loss of a network that drops tokens, and a small one trained from start to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import sosie
from sosie.data import open_images
from sosie.models import DynamicViT, dynamic_vit, open_model, vit, with_dynamic_tokens
from sosie.models.vit import mean_of_others, token_cka
from sosie.train import Penalty, Recipe, TokenPenalty, accuracy, calibrate_tokens, fit
from sosie.train.tokens import answer_loss, ratio_loss, token_loss

SMALL: dict[str, Any] = {"classes": 3, "size": 16, "patch": 4, "depth": 4, "width": 24, "heads": 3, "channels": 1}


pytestmark = pytest.mark.usefixtures("seeded")


def images(count: int = 8) -> Tensor:
    return torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def dynamic(**options: Any) -> DynamicViT:
    model = dynamic_vit(**{**SMALL, **options})
    assert isinstance(model, DynamicViT)
    return model


def test_the_ratio_loss_by_hand() -> None:
    first = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0]])
    then = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]])
    assert float(ratio_loss([first], [0.5])) == pytest.approx((0.25**2 + 0) / 2)
    wanted = (0.05**2 + 0.2**2 + 0.24**2 + 0.49**2) / 4
    assert float(ratio_loss([first, then], [0.7, 0.49])) == pytest.approx(wanted)
    assert float(ratio_loss([torch.ones(3, 4)], [1.0])) == 0
    with pytest.raises(ValueError, match="2 stages and 1 shares"):
        ratio_loss([first, then], [0.5])


def test_the_losses_of_a_teacher_by_hand() -> None:
    even, sure = torch.zeros(5, 2), torch.tensor([[0.9, 0.1]]).log().expand(5, 2)
    assert float(answer_loss(even, sure)) == pytest.approx(0.368064, abs=1e-6)  # ln 2 − 0.325083, the entropy of 0.9
    assert float(answer_loss(sure, even)) == pytest.approx(0.510826, abs=1e-6)  # ½ ln(0.25 / 0.09)
    assert float(answer_loss(sure, sure)) == pytest.approx(0, abs=1e-7)
    tokens, teacher = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)
    teacher[0, 0], teacher[1, 2] = 2.0, 100.0
    kept = torch.tensor([[1.0, 1, 0], [1, 1, 0]])
    assert float(token_loss(tokens, teacher, kept)) == pytest.approx(4 / 4)
    assert float(token_loss(tokens, teacher, torch.zeros(2, 3))) == 0
    with pytest.raises(ValueError, match=r"teacher \(2, 3, 5\).*or tokens=0"):
        token_loss(tokens, torch.zeros(2, 3, 5), kept)


def test_the_penalty_is_the_sum_of_its_terms() -> None:
    model, teacher = dynamic(keep=0.6).train(), vit(**SMALL)
    seen: list[Tensor] = []
    with TokenPenalty(model, teacher, ratio=3.0, answers=0.25, tokens=0.125, weight=2.0) as penalty:
        model.gates.register_forward_hook(lambda module, args, out: seen.append(out))
        norm = model.norm.register_forward_hook(lambda module, args, out: seen.append(out))
        logits = model(images())
        found = penalty()
    norm.remove()
    *decisions, tokens = seen
    told: list[Tensor] = []
    teacher.norm.register_forward_hook(lambda module, args, out: told.append(out))
    with torch.no_grad():
        said = teacher.eval()(images())
    shares = [9 / 16, 5 / 16, 3 / 16]
    wanted = 2 * (
        3 * ratio_loss(decisions, shares)
        + 0.25 * answer_loss(logits, said)
        + 0.125 * token_loss(tokens[:, 1:], told[0][:, 1:], decisions[-1])
    )
    torch.testing.assert_close(found, wanted)
    assert set(penalty.last) == {"ratio", "answers", "tokens", "kept"}
    assert penalty.last["kept"].tolist() == pytest.approx([float(each.detach().mean()) for each in decisions])
    found.backward()
    assert [name for name, value in model.gates.named_parameters() if not value.grad.abs().max() > 0] == []
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_the_ratio_loss_alone_moves_the_gates() -> None:
    for keep in (0.9, 0.3):
        model = dynamic(keep=keep, stages=(1,)).train()
        optimiser = torch.optim.Adam(model.gates.parameters(), 1e-2)
        with TokenPenalty(model) as penalty:
            for _ in range(40):
                model(images(32))
                optimiser.zero_grad()
                penalty().backward()
                optimiser.step()
        assert float(penalty.last["kept"]) == pytest.approx(keep, abs=0.12)


def test_what_cannot_be_trained_is_refused() -> None:
    model = dynamic()
    with pytest.raises(TypeError, match="need a dynamic_vit, got VisionTransformer"):
        TokenPenalty(vit(**SMALL))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep=1 drops no tokens"):
        TokenPenalty(dynamic(keep=1.0))
    with pytest.raises(ValueError, match="the model itself"):
        TokenPenalty(model, model)
    with pytest.raises(ValueError, match="from 0 on"):
        TokenPenalty(model, ratio=-1)
    for odd in ({"ratio": float("nan")}, {"tokens": float("inf")}):
        with pytest.raises(ValueError, match="from 0 on"):
            TokenPenalty(model, **odd)
    with TokenPenalty(model, vit(**(SMALL | {"classes": 5}))) as penalty:
        model.train()(images())
        with pytest.raises(ValueError, match=r"the student answers \(8, 3\) and the teacher \(8, 5\)"):
            penalty()
    with TokenPenalty(model) as penalty:
        model.eval()(images())
        with pytest.raises(ValueError, match=r"call model\.train\(\)"):
            penalty()
    with TokenPenalty(model, nn.Sequential(nn.Flatten(), nn.Linear(256, 3)), tokens=0) as penalty:
        model.train()(images())  # a teacher of another kind has answers, if no tokens
        penalty()


def test_calibration_measures_whole_images_and_leaves_the_model() -> None:
    model = dynamic(stages=(1, 3)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = calibrate_tokens(model, images(20))
    assert model.training
    assert model.calibrated_on == 20
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"likeness", "_extra_state"}
    with torch.no_grad():
        tokens = model.blocks[:3](model.embed(images(20)))[:, 1:]
    torch.testing.assert_close(found[1].double(), mean_of_others(token_cka(tokens)))
    biased = calibrate_tokens(model, images(20), debiased=False)
    assert (biased > found).all()
    as_bytes = (images(20) * 255).to(torch.uint8)
    torch.testing.assert_close(
        calibrate_tokens(model, as_bytes, prepare=lambda x: 2 * x - 1), calibrate_tokens(model, as_bytes / 127.5 - 1)
    )


def test_what_cannot_be_calibrated_is_refused() -> None:
    single = dynamic(patch=16, keep=1, stages=(1,))
    with pytest.raises(ValueError, match="one patch"):
        calibrate_tokens(single, images())
    model, odd = dynamic(), images()
    odd[3, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="tokens are NaN or infinite"):
        calibrate_tokens(model, odd)
    assert not model.calibrated_on
    assert not model.likeness.any()


def test_layers_can_be_made_less_alike_on_the_way() -> None:
    model = dynamic().train()
    with Penalty(model, rows=None, every=1) as penalty:
        model(images())
        penalty().backward()
    assert len(penalty.last) == 5 * 4 // 2  # one stage: four blocks and what goes into the first
    assert {row["site_b"] for row in penalty.last} == {f"blocks.{k}" for k in range(4)}


def test_a_small_one_from_start_to_end(tmp_path: Path) -> None:
    demo = open_images("demo")
    x, y = demo.images[:400], demo.labels[:400]
    plain = vit(size=28, patch=7, channels=1, depth=3, width=32, heads=2)
    fit(plain, x, y, recipe=Recipe(epochs=6, rate=3e-3), seed=0)
    model = with_dynamic_tokens(plain, keep=0.6, stages=(1, 2))
    untrained = functional.cross_entropy(model(x / 255), y)
    with TokenPenalty(model, plain) as penalty:
        fit(model, x, y, recipe=Recipe(epochs=4, rate=2e-3), seed=0, penalty=penalty)
    assert functional.cross_entropy(model(x / 255), y) < untrained
    assert accuracy(model, x, y) > 0.3
    assert float((penalty.last["kept"] - torch.tensor([9, 5]) / 16).abs().max()) < 0.2
    model.rule = "cka"
    calibrate_tokens(model, x[:64])
    file = tmp_path / "small.safetensors"
    save_file(model.state_dict(), file)
    opened = open_model(f"dynamic_vit@{file}")
    assert opened.model.rule == "cka"
    assert torch.equal(opened.model(x[:9] / 255), model(x[:9] / 255))
    found = sosie.compare(opened, plain, [x[:64] / 255], measures=["debiased_cka"], rows="cls")
    assert found.sites_a == ["blocks.0", "blocks.1", "blocks.2"]
    assert found.matrix("debiased_cka")[0, 0] > 0.5
