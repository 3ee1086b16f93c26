import copy
import threading

import pytest
import torch
from stand_ins import Bert, Makes, ModelOutput, Plain, ResNet20, ResNet50, Returns, Skips, Twice
from torch import nn

from sosie.capture import SilentSite, SiteError, as_found, unwrap, watch


@pytest.fixture
def images():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def hooks_of(model):
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    )
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_values_come_by_label_and_in_execution_order(images):
    model = Plain().eval()
    with torch.no_grad(), watch(model, ["head", "features", "features.0"]) as seen:
        out = model(images)
    assert list(seen) == [site.label for site in seen.sites] == ["features.0", "features", "head"]
    torch.testing.assert_close(seen["head"], out)
    torch.testing.assert_close(seen["features.0"], model.features[0](images))
    torch.testing.assert_close(seen.values()[1], model.features(images))
    assert len(seen) == 3
    assert dict(seen.items()).keys() == {"features.0", "features", "head"}


def test_an_in_place_relu_does_not_overwrite_what_was_seen(images):
    model = Plain().eval()
    with torch.no_grad(), watch(model, ["features.0", "features.1"]) as seen:
        for _ in range(3):  # the first forward learns, the others rely on it
            seen.run(images)
            assert bool((seen["features.0"] < 0).any())
            torch.testing.assert_close(seen["features.0"].relu(), seen["features.1"])


def test_only_what_is_overwritten_is_cloned_from_the_second_forward_on(images):
    model = ResNet50().eval()
    made = {}

    def remember(module, args, output):
        made[module] = output.data_ptr()

    handles = [module.register_forward_hook(remember) for module in (model.conv1, model.bn1)]
    with torch.no_grad(), watch(model, ["conv1", "bn1"]) as seen:
        seen.run(images)
        seen.run(images)
        assert seen["conv1"].data_ptr() == made[model.conv1]
        assert seen["bn1"].data_ptr() != made[model.bn1]
    for handle in handles:
        handle.remove()


def test_a_change_made_after_the_forward_is_refused_and_not_handed_over(images):
    model = Plain().eval()
    with torch.no_grad(), watch(model, "head") as seen:
        model(images)
        model(images).zero_()
        with pytest.raises(SiteError, match="'head' was changed in place"):
            seen["head"]
        model(images).zero_()
        assert bool(seen["head"].any())


def test_under_inference_mode_activations_can_still_enter_a_backward(images):
    model = Plain().eval()
    with torch.inference_mode(), watch(model, "features.0") as seen:
        model(images)
    weight = torch.ones(1, requires_grad=True)
    (seen["features.0"] * weight).sum().backward()
    assert weight.grad is not None
    assert bool((seen["features.0"] < 0).any())


def test_gradients_flow_through_what_was_seen(images):
    model = Plain().eval()
    with watch(model, "features.3") as seen:
        model(images)
    seen["features.3"].sum().backward()
    assert model.features[0].weight.grad is not None


def test_a_module_called_twice_gives_two_sites():
    model, x = Twice().eval(), torch.randn(3, 4)
    with torch.no_grad(), watch(model, "mix") as seen:
        model(x)
    torch.testing.assert_close(seen["mix"], model.mix(x))
    torch.testing.assert_close(seen["mix@2"], model.mix(model.mix(x).relu()))
    assert seen["again@2"] is seen["mix@2"]
    assert [(site.module_name, site.call) for site in seen.sites] == [("mix", 1), ("mix", 2)]


def test_one_model_watched_twice_fills_only_the_watch_that_runs(images):
    model = ResNet20().eval()
    with torch.no_grad(), watch(model) as a, watch(model, "fc") as b:
        a.run(images)
        assert len(a) == 9
        with pytest.raises(RuntimeError, match="no forward has finished"):
            b.values()
        b.run(-images)
        kept = a["layer1.0"].clone()
        b.run(images)
        torch.testing.assert_close(a["layer1.0"], kept)
        model(-images)
        assert not torch.equal(a["layer1.0"], kept)


def test_a_part_of_a_watched_model_can_be_watched_too(images):
    model = ResNet20().eval()
    with torch.no_grad(), watch(model, "fc") as whole, watch(model.layer1, "0") as part:
        whole.run(images)
        with pytest.raises(RuntimeError, match="no forward has finished"):
            part.values()
        part.run(torch.randn(2, 4, 8, 8))
        assert whole["fc"].shape == (2, 10)
        assert part["0"].shape == (2, 4, 8, 8)


def test_a_call_from_outside_the_models_forward_is_not_seen(images):
    model = ResNet20().eval()
    with torch.no_grad(), watch(model, "fc") as seen:
        seen.run(images)
        before = seen["fc"].clone()
        model.fc(torch.randn(2, 4))
        torch.testing.assert_close(seen["fc"], before)
        assert list(seen) == ["fc"]


def test_each_forward_starts_afresh(images):
    model = Twice().eval()
    x = torch.randn(3, 4)
    with torch.no_grad(), watch(model, "leaves") as seen:
        model(x)
        first = seen["mix"].clone()
        model(2 * x)
        assert list(seen) == ["mix", "mix@2", "out"]
        assert not torch.equal(seen["mix"], first)


def test_every_forward_ends():
    torch.manual_seed(0)
    model, parts = Skips(), torch.randn(3, 5, 4)
    with torch.no_grad(), watch(model, ["middle", "up"]) as seen:
        for x in parts:
            seen.run(x)
            torch.testing.assert_close(seen["middle"], model.middle(model.down(x)), rtol=0, atol=0)
            assert not model.skips
    with torch.no_grad(), watch(model, "down") as seen:
        for x in parts:
            seen.run(x)
    assert not model.skips
    assert model(parts[0][:2]).shape == (2, 3)


def test_a_forward_ends_before_the_error_of_a_site_is_raised():
    model, x = Skips(), torch.ones(3, 4)

    def refuse(site, activation):
        raise ValueError(f"no more of {site.label}")

    with torch.no_grad(), watch(model, ["middle", "up"], sink=refuse) as seen:
        with pytest.raises(ValueError, match="no more of middle"):
            seen.run(x)
        assert not model.skips
        with pytest.raises(ValueError, match="no more of middle"):
            model(x)
        assert not model.skips
        with pytest.raises(RuntimeError, match="no forward has finished"):
            seen.values()


def test_a_models_own_except_clause_does_not_catch_the_error_of_a_site():
    class Forgiving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.inner(x)
            except Exception:
                return x * 0

    def refuse(site, activation):
        raise ValueError("refused it")

    with (
        torch.no_grad(),
        watch(Forgiving(), "inner", sink=refuse) as seen,
        pytest.raises(ValueError, match="refused"),
    ):
        seen.run(torch.ones(2, 4))


def test_the_error_of_a_site_comes_before_one_that_the_model_raises_later():
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            self.inner(x)
            raise RuntimeError("later")

    def refuse(site, activation):
        raise ValueError("sooner")

    with torch.no_grad(), watch(Strict(), "inner", sink=refuse) as seen, pytest.raises(ValueError, match="sooner"):
        seen.run(torch.ones(2, 4))


def test_a_site_that_fires_only_sometimes_is_an_error():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.a(x) if x.sum() > 0 else self.b(x)

    with torch.no_grad(), watch(Branch(), "a") as seen:
        seen.run(torch.ones(1, 2))
        with pytest.raises(SilentSite, match="first forward but not in this one: a"):
            seen.run(-torch.ones(1, 2))
        with pytest.raises(RuntimeError, match="did not finish"):
            seen["a"]
        seen.run(torch.ones(1, 2))
        assert seen["a"].shape == (1, 2)
    with torch.no_grad(), watch(Branch(), "leaves") as seen:
        seen.run(torch.ones(1, 2))
        with pytest.raises(SiteError, match="'b' fired now but not in the first forward"):
            seen.run(-torch.ones(1, 2))


def test_everything_is_left_as_found_after_an_exception_too(images):
    model = ResNet20()
    before = copy.deepcopy({k: v for k, v in vars(model).items() if k != "_modules"})
    with pytest.raises(RuntimeError, match="channels"), watch(model, "leaves") as seen:
        seen.run(torch.randn(2, 5, 8, 8))
    with pytest.raises(KeyboardInterrupt), watch(model, sink=_interrupt) as seen:
        model(images)
    with watch(model) as seen:
        model(images)
        assert hooks_of(model) == 13
    assert hooks_of(model) == 0
    assert {k: v for k, v in vars(model).items() if k != "_modules"}.keys() == before.keys()
    assert seen["layer1.0"].shape == (2, 4, 8, 8)
    with pytest.raises(RuntimeError, match="watch is over"):
        seen.run(images)


def _interrupt(site, activation):
    raise KeyboardInterrupt


def test_a_failed_forward_can_be_followed_by_a_good_one(images):
    model = ResNet20().eval()
    with torch.no_grad(), watch(model) as seen:
        with pytest.raises(RuntimeError):
            seen.run(torch.randn(2, 5, 8, 8))
        with pytest.raises(RuntimeError, match="no forward has finished"):
            seen.values()
        seen.run(images)
        assert len(seen.values()) == 9


def test_the_sink_gets_the_live_tensor_before_it_is_overwritten(images):
    model = Plain().eval()
    with (
        torch.no_grad(),
        watch(model, ["features.0", "head"], sink=lambda site, x: (site.label, x.min())) as seen,
    ):
        seen.run(images)
        seen.run(images)
    assert seen["features.0"][0] == "features.0"
    assert seen["features.0"][1] < 0


def test_no_activation_outlives_its_hook_when_there_is_a_sink(images):
    import weakref

    alive = []
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    def gram(site, x):
        alive.append(weakref.ref(x))
        # The activation before the last is the input of this one; those further back must be gone.
        assert all(old() is None for old in alive[:-2])
        return x @ x.T

    with torch.no_grad(), watch(model, "leaves", sink=gram) as seen:
        seen.run(torch.randn(3, 4))
    assert [value.shape for value in seen.values()] == [(3, 3)] * 6


def test_a_product_in_the_sink_is_not_made_in_bfloat16():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(3, 4)
    gram = watch(model, "leaves", sink=lambda site, a: (a.float() @ a.float().T).dtype)
    with torch.no_grad(), gram as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
        assert (x @ x.T).dtype == torch.bfloat16  # what the sink would have got
    assert seen.values() == [torch.float32, torch.float32]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: (x, x * 2),
        lambda x: [None, (x, x * 2)],
        lambda x: {"loss": x * 2, "last_hidden_state": x},
        lambda x: {"aux": x * 2, "logits": x},
        lambda x: {"aux": x * 2, "out": x},
        lambda x: {"logits": None, "first": x, "second": x * 2},
        lambda x: ModelOutput(hidden=x * 2, logits=x),
        lambda x: ModelOutput(loss=None, hidden_states=(x, x * 2)),
    ],
)
def test_outputs_of_any_structure(make):
    x = torch.randn(3, 4)
    model = Returns(make)
    with torch.no_grad(), watch(model, "inner") as seen:
        model(x)
    torch.testing.assert_close(seen["inner"], x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda x: "text", r"'inner' \(Makes\) returned str, which holds no tensor"),
        (lambda x: None, "returned NoneType"),
        (lambda x: {"a": None}, "returned dict"),
        (lambda x: x.argmax(1), r"'inner' \(Makes\) returned a tensor of int64"),
        (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "nested tensor"),
    ],
)
def test_outputs_that_are_no_activations_are_refused_by_name_and_left_out_of_broad_selections(make, says):
    model, x = Returns(make), torch.randn(3, 4)
    with pytest.raises(SiteError, match=says), watch(model, "inner") as seen:
        model(x)
    with watch(model, "leaves") as seen:
        model(x)
        model(x)
    assert list(seen) == ["last"]
    assert "returned" in seen.left_out["inner"]


def test_a_model_output_is_a_site_too():
    model = Bert().eval()
    with torch.no_grad(), watch(model, [".", "encoder"]) as seen:
        out = model(torch.ones(2, 5, dtype=torch.long))
    torch.testing.assert_close(seen["output"], out["last_hidden_state"])
    assert seen["."] is seen["output"]


def test_a_padded_batch_keeps_its_shape_in_torchs_own_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), watch(model, ["layers.0", "layers.0.linear1"]) as seen:
        model(torch.randn(2, 5, 8), src_key_padding_mask=padding)
    assert seen["layers.0"].shape == (2, 5, 8)
    assert seen["layers.0.linear1"].shape == (2, 5, 16)
    assert torch.backends.mha.get_fastpath_enabled()


def test_unknown_labels_offer_the_nearest(images):
    model = ResNet20().eval()
    with watch(model) as seen:
        with pytest.raises(RuntimeError, match="no forward has finished"):
            seen["layer1.0"]
        model(images)
    with pytest.raises(KeyError, match=r"did you mean 'layer1.0'"):
        seen["layer1.00"]
    with pytest.raises(KeyError, match="no site 'fc'"):
        seen["fc"]
    assert "layer1.0" in seen
    assert "9 sites" in repr(seen)


def test_wrapped_models_are_watched_inside(images):
    model = ResNet20().eval()
    wrapped = nn.DataParallel(model)
    assert unwrap(wrapped) is model
    with torch.no_grad(), watch(wrapped, "layer1.0") as seen:
        seen.run(images)
    assert [site.label for site in seen.sites] == ["layer1.0"]
    with pytest.raises(TypeError, match=r"need a torch\.nn\.Module, got dict"):
        unwrap({})


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.body(x))


def _compiled_whole(model):
    return torch.compile(model, backend="eager")


def _compiled_in_place(model):
    model.compile(backend="eager")
    return model


def _compiled_part(model):
    model.body = torch.compile(model.body, backend="eager")
    return model


def _compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize("how", [_compiled_whole, _compiled_in_place, _compiled_part, _compiled_forward])
def test_compiled_models_fire_after_their_first_call(how):
    torch._dynamo.reset()
    original, x = Small().eval(), torch.randn(3, 4)
    model = how(copy.deepcopy(original))
    with torch.no_grad():
        model(x)
        with watch(original, ["body.0", "fc"]) as expected:
            expected.run(x)
        with watch(model, ["body.0", "fc"]) as seen:
            for call in (seen.run, seen.run, model):
                call(x)
                assert list(seen) == ["body.0", "fc"]
                torch.testing.assert_close(seen.values(), expected.values())
        assert hooks_of(model) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_model_is_refused():
    model = torch.jit.trace(Small().eval(), torch.randn(3, 4))
    with pytest.raises(TypeError, match="TorchScript module, whose layers cannot be watched"), watch(model):
        pass


def test_makes_is_a_leaf():
    model = nn.Sequential(Makes(lambda x: x), nn.ReLU())
    with watch(model, "0") as seen:
        model(torch.ones(1, 2))
    assert seen.sites[0].shape == (2,)


def test_a_model_that_calls_itself_is_one_forward() -> None:
    class Augmented(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, inner: bool = False):
            if inner:
                return self.layer(x)
            return self(x, True) + self(-x, True)

    model, x = Augmented().eval(), torch.randn(5, 4)
    with as_found(model), watch(model, ["layer", "layer@2", "output"]) as seen:
        seen.run(x)
        assert torch.equal(seen["layer"], model.layer(x))
        assert torch.equal(seen["layer@2"], model.layer(-x))
        assert torch.equal(seen["output"], model.layer(x) + model.layer(-x))


def test_a_thread_that_calls_the_model_for_itself_is_not_watched() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(5, 4)
    answers = []
    with as_found(model), watch(model, ["0"]) as seen:
        seen.run(x)
        thread = threading.Thread(target=lambda: answers.append(model(10 * x)))
        thread.start()
        thread.join()
        assert torch.equal(seen["0"], model[0](x))
    assert torch.equal(answers[0], model(10 * x))
