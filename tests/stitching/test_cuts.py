"""A model cut in two gives the outputs and gradients of the whole, and a cut that leaks is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from cut_nets import BatchSize, Branches, InPlace, Remembers, Takes, UNet, WithBuffer
from stand_ins import Bert, ModelOutput, Plain, ResNet20, ResNet50, Skips, Twice
from torch import nn

from sosie.capture import SilentSite, SiteError, answer_in, watch
from sosie.capture.batches import CallArguments
from sosie.models import cifar_resnet, inception_v1, resnet18, tiny10, vgg11_bn, vit
from sosie.stitching.cuts import Cut, LeakingCut

SIXTY_FOUR = torch.float64


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def images(n: int = 4, side: int = 8) -> torch.Tensor:
    return torch.randn(n, 3, side, side, dtype=SIXTY_FOUR, generator=torch.Generator().manual_seed(3))


def rows(n: int = 4, width: int = 4) -> torch.Tensor:
    return torch.randn(n, width, dtype=SIXTY_FOUR, generator=torch.Generator().manual_seed(4))


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0], [1] * 5, [1, 1, 0, 0, 0]])}


def made(build, *args, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    model = build(*args, **kwargs).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics at 0 and 1 hide whether they are used
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


@contextmanager
def called(model: nn.Module) -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: counts.update([name]))
        for name, module in model.named_modules()
    ]
    yield counts
    for handle in handles:
        handle.remove()


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


TIGHT = [
    (tiny10, {}, "bn3", 27),
    (tiny10, {}, "conv8", 27),
    (cifar_resnet, {"depth": 8}, "layer1.0", 8),
    (cifar_resnet, {"depth": 8, "shortcut": "B"}, "layer2", 8),
    (resnet18, {"stem": "cifar"}, "layer4.1.relu@2", 8),
    (vgg11_bn, {}, "features.9", 32),
    (inception_v1, {"stem": "cifar"}, "inception5a", 8),
    (vit, {"depth": 3, "width": 16, "size": 8}, "blocks.1", 8),
    (vit, {"depth": 3, "width": 16, "size": 8}, "patches", 8),
    (ResNet20, {}, "layer2.1", 8),
    (ResNet50, {}, "bn1", 16),  # an in-place ReLU follows
    (ResNet50, {}, "layer2.1", 16),
    (Plain, {}, "features.0", 8),
    (UNet, {}, "join", 8),
    (BatchSize, {"how": "shape"}, "conv", 8),
    (BatchSize, {"how": "size"}, "conv", 8),
    (BatchSize, {"how": "len"}, "conv", 8),
]


SMALL = [each for each in TIGHT if each[0] not in (resnet18, vgg11_bn, inception_v1)]


@pytest.mark.parametrize(("build", "options", "site", "side"), TIGHT, ids=lambda part: getattr(part, "__name__", None))
def test_the_two_maps_make_the_whole_and_the_task_map_runs_nothing_below(build, options, site, side):
    model, x = made(build, **options), images(3, side)
    cut = Cut(model, site, x)
    cut.check(x)
    assert cut.site.label == site
    with called(model) as counts:
        whole = model(x)
    with called(model) as lower:
        activation = cut.representation(x)
        assert lower == counts  # the forward ends
    lower.clear()
    with called(model) as lower, pytest.raises(KeyboardInterrupt):
        cut._run(_stop, CallArguments((x,), {}))
    with called(model) as upper:
        kept = activation.clone()
        answer = cut.task(activation)
    torch.testing.assert_close(answer, whole, rtol=1e-10, atol=1e-12)
    assert torch.equal(activation, kept)
    assert tuple(activation.shape[1:]) == cut.site.shape
    leaves = {name for name, module in model.named_modules() if not list(module.children())}
    below, above, all_ = (Counter({k: v for k, v in c.items() if k in leaves}) for c in (lower, upper, counts))
    assert below + above == all_
    assert below
    assert above or site == "fc"
    assert not cut.needs_input


@pytest.mark.parametrize(("build", "options", "site", "side"), SMALL, ids=lambda part: getattr(part, "__name__", None))
def test_other_numbers_of_inputs_and_gradients(build, options, site, side):
    model, x = made(build, **options).requires_grad_(False), images(3, side)
    cut = Cut(model, site, x[:1])
    both = images(5, side)[3:]
    x = both.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    activation = cut.representation(x)
    (found,) = torch.autograd.grad(cut.task(activation).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


LEAKING = [
    (cifar_resnet, {"depth": 8}, "layer1.0.conv2", "the output of bn1 goes around it; cut at 'layer1.0'"),
    (cifar_resnet, {"depth": 8}, "layer2.0.bn2", "the output of layer1 goes around it; cut at 'layer2.0'"),
    (resnet18, {"stem": "cifar"}, "layer2.0.bn2", "the output of layer1 goes around it; cut at 'layer2.0'"),
    (ResNet50, {}, "layer1.1.conv2", "the output of layer1.0 goes around it; cut at 'layer1.1'"),
    (inception_v1, {"stem": "cifar"}, "inception3a.branch1", "goes around it; cut at 'inception3a'"),
    (
        vit,
        {"depth": 3, "width": 16, "size": 8},
        "blocks.1.attention",
        "the output of blocks.0 goes .*; cut at 'blocks.1'",
    ),
    (vit, {"depth": 3, "width": 16, "size": 8}, "blocks.0.mlp", "cut at 'blocks.0'"),
    (UNet, {}, "bottom", "the output of down goes around it; cut where all paths have met"),
    (UNet, {}, "up", "the output of down goes around it"),
]


@pytest.mark.parametrize(
    ("build", "options", "site", "says"), LEAKING, ids=lambda part: getattr(part, "__name__", None)
)
def test_a_cut_that_leaks_is_refused_by_name(build, options, site, says):
    model, x = made(build, **options), images(side=16 if build is ResNet50 else 8)
    cut = Cut(model, site, x)
    with pytest.raises(LeakingCut, match=says):
        cut.check(x)
    # It is still the model's output with the activation replaced.
    torch.testing.assert_close(cut.task(cut.representation(x), x), model(x), rtol=1e-10, atol=1e-12)
    assert cut.needs_input
    with pytest.raises(TypeError, match="input"):
        cut.task(cut.representation(x))
    assert hooks_of(model) == 0


def _stop(output):
    raise KeyboardInterrupt


def _cannot(*args):
    raise RuntimeError("does not bear it")


@pytest.mark.parametrize(("build", "options", "site", "side"), SMALL, ids=lambda part: getattr(part, "__name__", None))
def test_where_nothing_can_stand_still_the_whole_forward_runs(build, options, site, side, monkeypatch):
    monkeypatch.setattr(Cut, "_run_above", _cannot)
    model, x = made(build, **options), images(3, side)
    cut = Cut(model, site, x)
    cut.check(x)
    assert cut.needs_input
    torch.testing.assert_close(cut.task(cut.representation(x), x), model(x), rtol=1e-10, atol=1e-12)


def test_the_second_call_of_a_module_is_a_site_of_its_own():
    model, x = made(Twice), rows()
    inner = torch.relu(model.mix(x))
    for site, expected, label in (("mix", model.mix(x), "mix"), ("again@2", model.mix(inner), "mix@2")):
        cut = Cut(model, site, x)
        cut.check(x)
        assert cut.site.label == label
        torch.testing.assert_close(cut.representation(x), expected)
        torch.testing.assert_close(cut.task(expected), model(x))
    zeros = torch.zeros_like(x)
    torch.testing.assert_close(Cut(model, "mix", x).task(zeros), model.out(model.mix(zeros)))
    torch.testing.assert_close(Cut(model, "mix@2", x).task(zeros), model.out(zeros))
    with pytest.raises(SilentSite, match="mix@3"):
        Cut(model, "mix@3", x)


@pytest.mark.parametrize("still", [True, False])
def test_what_comes_after_in_place_changes_neither_the_activation_nor_its_gradient(still, monkeypatch):
    if not still:
        monkeypatch.setattr(Cut, "_run_above", _cannot)
    model, x = made(InPlace), rows()
    cut = Cut(model, "fc", x)
    assert cut._replays == still
    leaf = cut.representation(x).detach().requires_grad_()
    kept = leaf.detach().clone()
    answer = cut.task(leaf, x)
    torch.testing.assert_close(answer, kept.relu() + 1)
    answer.sum().backward()
    assert torch.equal(leaf.detach(), kept)
    torch.testing.assert_close(leaf.grad, (kept > 0).double())


def test_dicts_options_tuples_and_model_outputs():
    model = made(Takes)
    batch = {"a": rows(), "b": rows().flip(0)}
    options = {"scale": 3.0, "shift": None}
    cut = Cut(model, "site", batch, **options)
    cut.check(batch, **options)
    whole = model(batch, **options)
    answer = cut.task(cut.representation(batch, **options))
    assert type(answer) is ModelOutput
    assert list(answer) == list(whole)
    torch.testing.assert_close(answer.logits, whole.logits)
    torch.testing.assert_close(
        cut.task(cut.representation(batch), batch, scale=2.0).logits, model(batch, scale=2.0).logits
    )
    shifted = Cut(model, "site", batch, shift=rows())
    with pytest.raises(LeakingCut, match="the model's argument shift goes around it"):
        shifted.check(batch, shift=rows())
    torch.testing.assert_close(
        shifted.task(cut.representation(batch), batch, shift=rows()).logits, model(batch, shift=rows()).logits
    )


@pytest.mark.parametrize("still", [True, False])
def test_padding_masks_belong_to_both_maps(still, monkeypatch):
    if not still:
        monkeypatch.setattr(Cut, "_run_above", _cannot)
    model, batch = made(Bert), tokens()
    cut = Cut(model, "encoder.layer.0", **batch)
    cut.check(**batch)
    activation = cut.representation(**batch)
    found, expected = cut.task(activation, **batch), model(**batch)
    assert list(found) == list(expected)
    torch.testing.assert_close(found.pooler_output, expected.pooler_output, rtol=1e-10, atol=1e-12)
    with pytest.raises(TypeError, match="input"):
        cut.task(activation)
    unpadded = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    for example in (unpadded, {"input_ids": batch["input_ids"]}):
        later = Cut(model, "encoder.layer.0", **example)
        assert later.needs_input == (example is unpadded or not still)
        found = later.task(activation, **batch)
        torch.testing.assert_close(found.pooler_output, expected.pooler_output, rtol=1e-10, atol=1e-12)
    inner = Cut(model, "encoder.layer.1.attention", **batch)
    with pytest.raises(LeakingCut, match=r"encoder\.layer\.0"):
        inner.check(**batch)


def test_an_input_has_its_own_mask_though_the_first_ones_would_serve_all(monkeypatch):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.site, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x, mask):
            return self.head(self.site(x) * mask)

    monkeypatch.setattr(Cut, "_run_above", _cannot)
    model, x = made(Masked), rows()
    cut = Cut(model, "site", x, torch.ones(4, 4))
    cut.check(x, torch.ones(4, 4))
    assert cut.needs_input
    mask = torch.eye(4)
    torch.testing.assert_close(cut.task(cut.representation(x, mask), x, mask), model(x, mask))


def test_a_module_that_reads_the_mask_below_the_site_does_not_stand_still():
    class Extends(nn.Module):
        def forward(self, mask):
            return mask[..., None].double()

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extend, self.site, self.head = Extends(), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x, attention_mask):
            counts = self.extend(attention_mask)
            return self.head(self.site(x) * counts)

    model, x = made(Masked), torch.stack([rows(5), rows(5).flip(0), rows(5) + 1])
    whole, padded = torch.ones(3, 5), torch.tensor([[1.0] * 5, [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    cut = Cut(model, "site", x, attention_mask=whole)
    assert cut.needs_input
    activation = cut.representation(x, attention_mask=padded)
    torch.testing.assert_close(cut.task(activation, x, attention_mask=padded), model(x, attention_mask=padded))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_transformers_are_cut_between_their_blocks(name):
    pytest.importorskip("transformers")
    import tiny_transformers

    model = getattr(tiny_transformers, name)()
    batch = {"pixel_values": images(side=16)} if name == "vit" else tiny_transformers.token_batch(4)
    block = {"bert": "encoder.layer.1", "gpt2": "h.1", "llama": "layers.1", "vit": "layers.0"}[name]
    attention = {"bert": "attention.self", "gpt2": "attn", "llama": "self_attn", "vit": "attention"}[name]
    for given in (batch, {key: part for key, part in batch.items() if key in ("input_ids", "pixel_values")}):
        cut = Cut(model, block, **given)
        cut.check(**given)
        activation = cut.representation(**given).detach().requires_grad_()
        expected, answer = model(**given), cut.task(activation, **given)
        torch.testing.assert_close(answer_in(answer), answer_in(expected), rtol=1e-9, atol=1e-11)
        answer_in(answer).square().sum().backward()
        assert activation.grad.abs().sum() > 0
    with pytest.raises(LeakingCut, match="goes around it"):
        Cut(model, f"{block}.{attention}", **batch).check(**batch)


def test_a_branch_on_values_is_taken_anew_for_each_activation():
    model, x = made(Branches, "high"), rows()
    cut = Cut(model, "site", x)
    cut.check(x)
    assert not cut.needs_input
    for sign in (1, -1):
        activation = sign * torch.ones_like(x)
        torch.testing.assert_close(cut.task(activation), (model.a if sign > 0 else model.b)(activation))


def test_a_branch_that_goes_around_the_site_leaks():
    model, x = made(Branches, "low"), rows()
    x[0, 0], x[1, 0] = 1, -1
    cut = Cut(model, "site", x)
    with pytest.raises(LeakingCut, match="no layer's output shows how"):
        cut.check(x)
    torch.testing.assert_close(cut.task(cut.representation(x[1:2]), x[1:2]), model(x[1:2]))


def test_what_a_module_remembers_goes_around_the_site():
    model, x = made(Remembers), rows()
    cut = Cut(model, "middle", x)
    with pytest.raises(LeakingCut, match=r"the output of low\.linear goes around it"):
        cut.check(x)
    activation = cut.representation(x)
    expected = model(x)
    model(x.flip(0))
    torch.testing.assert_close(cut.task(activation, x), expected)


def test_a_shape_that_decided_something_is_not_taken_for_another():
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 2, 3, padding=1), nn.Linear(2, 2)

        def forward(self, x):
            x = self.conv(x)
            return self.fc(x.mean((2, 3)) if x.shape[-1] > 4 else x.amax((2, 3)))

    model, small, large = made(Pools), images(side=4), images(side=8)
    cut = Cut(model, "conv", small)
    for x in (small, large):
        torch.testing.assert_close(cut.task(cut.representation(x), x), model(x))


def test_the_cut_shares_the_model_and_follows_it():
    model, x = made(WithBuffer), rows()
    cut = Cut(model, "low", x)
    activation = cut.representation(x)
    state = set(model.state_dict())
    assert set(vars(model)) == set(vars(made(WithBuffer)))
    model.register_buffer("shift", torch.zeros(4, dtype=SIXTY_FOUR))  # as a move to a device does
    with torch.no_grad():
        model.gain.fill_(5)
        model.head.weight.mul_(2)
    torch.testing.assert_close(cut.task(activation), model(x))
    cut.task(activation).sum().backward()
    assert model.gain.grad is not None
    assert model.low.weight.grad is not None  # through the activation
    assert set(model.state_dict()) == state
    model.float()
    torch.testing.assert_close(cut.task(activation.float()), model(x.float()))


def test_the_model_is_left_as_found():
    model, x = made(ResNet20), images()
    model.train()
    model.layer1.eval()
    model.fc.weight.requires_grad_(False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    cut = Cut(model, "layer2.0", x)
    cut.check(x)
    answer = cut.task(cut.representation(x))
    assert torch.equal(torch.get_rng_state(), random)
    assert flags == [module.training for module in model.modules()]
    assert not model.fc.weight.requires_grad
    assert answer.requires_grad
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(answer, model.eval()(x))
    assert "len" not in Twice.forward.__globals__
    with torch.inference_mode():
        torch.testing.assert_close(Cut(model, "layer2.0", x).task(cut.representation(x)), model(x))


@pytest.mark.parametrize("still", [True, False])
@pytest.mark.parametrize("site", ["down", "middle", "up", "last"])
def test_a_model_that_keeps_its_skips_in_a_list_of_its_own(site, still, monkeypatch):
    if not still:
        monkeypatch.setattr(Cut, "_run_above", _cannot)
    model, x = made(Skips), rows(5)
    cut = Cut(model, site, x)
    assert not model.skips
    with watch(model, site) as seen:
        whole = model(x)
    for part in (slice(0, 5), slice(0, 2), slice(2, 5)):
        torch.testing.assert_close(cut.representation(x[part]), seen[site][part])
        assert not model.skips
        torch.testing.assert_close(cut.task(cut.representation(x[part]), x[part]), whole[part])
        assert not model.skips


def test_a_forward_that_looks_at_values_leaves_nothing_on_the_model():
    class Decides(Skips):
        def forward(self, x):
            self.skips.append(self.down(x))
            if self.skips[0].sum() > 1e9:
                raise ValueError
            return super().forward(x - self.skips.pop())

    model, x = made(Decides), rows(5)
    expected = model(x)
    cut = Cut(model, "up", x)
    assert not model.skips
    torch.testing.assert_close(cut.task(cut.representation(x), x), expected)


@pytest.mark.parametrize("still", [True, False])
def test_hooks_are_gone_after_exceptions(still, monkeypatch):
    if not still:
        monkeypatch.setattr(Cut, "_run_above", _cannot)
    model, x = made(ResNet20), images()
    with pytest.raises(RuntimeError):
        Cut(model, "layer2.0", x[:, :2])
    cut = Cut(model, "layer2.0", x)
    with pytest.raises(RuntimeError):
        cut.representation(x[:, :2])
    with pytest.raises(RuntimeError):
        cut.task(cut.representation(x)[:, :3], x)
    assert hooks_of(model) == 0
    torch.testing.assert_close(cut.task(cut.representation(x), x), model(x))


def test_autocast_and_wrapped_models():
    model, x = ResNet20().eval(), images().float()
    cut = Cut(nn.DataParallel(model), "layer2.0", x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        activation = cut.representation(x)
        assert torch.equal(cut.task(activation), model(x))
        assert torch.equal(Cut(model, "fc", x).representation(x), model(x))


def test_a_site_that_the_answer_does_not_use_leaks():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.side, self.main = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.main(x), self.side(x)

    model, x = made(Unused), rows()
    with pytest.raises(LeakingCut, match="main"):
        Cut(model, "side", x).check(x)
    Cut(model, "main", x).check(x)  # the answer is the first part; other outputs do not count


def test_errors_say_what_to_do():
    model, x = made(ResNet20), images()
    with pytest.raises(SiteError, match=r"did you mean 'layer2.0'"):
        Cut(model, "layer2.00", x)
    with pytest.raises(SiteError, match=r"no module is called 'layer\*'"):
        Cut(model, "layer*", x)
    with pytest.raises(SiteError, match="one site"):
        Cut(model, ["layer1", "layer2"], x)
    with pytest.raises(TypeError, match=r"Cut\(model, site, x\)"):
        Cut(model, "layer2")
    with pytest.raises(ValueError, match=r"two different inputs .* these 2 are all equal"):
        Cut(model, "layer2", x).check(x[:1].expand(2, -1, -1, -1))
    with pytest.raises(ValueError, match="no inputs"):
        Cut(model, "layer2", x[:0])
    assert "layer2: task map by the modules above" in repr(Cut(model, "layer2", x))


def test_a_model_that_is_random_in_eval_is_refused():
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return F.dropout(self.linear(x), 0.5, training=True)

    with pytest.raises(ValueError, match="random in eval"):
        Cut(made(Random), "linear", rows())
