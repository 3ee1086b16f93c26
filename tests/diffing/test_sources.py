"""What `diff` can be given: compiled, exported, scripted, traced and quantised models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffed_nets import Net, decoder, edited, images, jiggled, padded_tokens
from torch import Tensor, nn

import sosie
from sosie.models import open_model

A = jiggled(Net())
X = images()
WRONG = edited(A, lambda b: b.block2.conv.weight.data.mul_(1.01))


@pytest.fixture(autouse=True)
def _without_torchs_own_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def program(model: nn.Module, x: Tensor = X) -> Any:
    return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("inputs")},))


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "exported": program,
    "unflattened": lambda model: torch.export.unflatten(program(model)),
    "scripted": torch.jit.script,
    "traced": lambda model: torch.jit.trace(model, X),
    "torch.fx": torch.fx.symbolic_trace,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_faulty_layer_of_a_converted_model_is_named(way: str) -> None:
    d = sosie.diff(A, WAYS[way](copy.deepcopy(A)), X)
    assert d.same, d.verdict
    assert len(d.sites) >= 4
    d = sosie.diff(A, WAYS[way](WRONG), X)
    assert (d.same, d.first) == (False, "block2.conv"), d.verdict
    made = {site.site_a: site.made for site in d.sites}
    expected = {site.site_a: site.made for site in sosie.diff(A, WRONG, X).sites}
    assert made["block2.conv"] == pytest.approx(expected["block2.conv"], rel=1e-2)
    assert any("run alone on A's inputs" in caveat for caveat in d.caveats) == (way in ("scripted", "traced"))


def test_compiled() -> None:
    compiled = torch.compile(WRONG, backend="eager")
    assert sosie.diff(A, compiled, X).first == "block2.conv"
    assert sosie.diff(compiled, WRONG, X).same


def test_models_whose_layers_cannot_be_seen() -> None:
    """Their outputs are compared, and the verdict does not say who makes the error."""
    for sealed in (torch.jit.freeze(torch.jit.script(WRONG)), program(WRONG).module()):
        for a, b in ((A, sealed), (sealed, A)):
            d = sosie.diff(a, b, X)
            assert (d.same, d.first) == (False, "output")
            assert "is not known" in d.verdict
            assert [site.site_a for site in d.sites] == ["output"]
            told = any("give the ExportedProgram itself" in caveat for caveat in d.caveats)
            assert told == isinstance(sealed, torch.fx.GraphModule)
        assert sosie.diff(WRONG, sealed, X).same


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(99, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.out((self.words(input_ids) * attention_mask[..., None]).mean(1))


@pytest.mark.parametrize("named", [(), ("attention_mask",), ("input_ids", "attention_mask")])
def test_an_exported_program_is_given_its_arguments_as_it_takes_them(named: tuple[str, ...]) -> None:
    """By position or by name, whatever the batch is."""
    model = jiggled(Reader())
    ids, mask = padded_tokens()[0].values()
    batch = {"input_ids": ids, "attention_mask": mask}
    args = tuple(part for name, part in batch.items() if name not in named)
    exported = torch.export.export(model, args, {name: batch[name] for name in named})
    for given in (exported, exported.module()):
        for data in (batch, dict(reversed(batch.items())), [(ids, mask)]):
            d = sosie.diff(model, given, data, max_rows=len(ids))
            assert d.same, d.verdict
        with pytest.raises(TypeError, match="takes input_ids, attention_mask, and is given 1 without a name"):
            sosie.diff(model, given, ids, inputs_a=lambda x: (x, mask[: len(x)]))


class Twice(nn.Module):
    """A layer that is called twice, and code that names types."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y = self.inner(y / y.float().square().mean(-1, keepdim=True).sqrt().to(x.dtype))
        return self.last(y + torch.arange(6, dtype=x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_floor_of_an_exported_program_is_that_of_its_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 6, dtype=dtype)
    for model, inputs in ((Twice().to(dtype), x), (A, X))[: 1 + (dtype == torch.float32)]:
        own = program(model, inputs)
        d, expected = sosie.diff(own, model, inputs), sosie.diff(model, model, inputs)
        assert d.floor == expected.floor
        assert d.floor.endswith({torch.float32: "A in float64", torch.bfloat16: "A in float32"}[dtype])
        assert not d.caveats
        assert d.sites[-1].floor == pytest.approx(expected.sites[-1].floor, rel=1e-3)


def test_an_exported_program_keeps_its_mode_and_can_be_compared() -> None:
    module = program(A).module()
    assert module.training
    sosie.diff(A, module, X)
    assert module.training
    c = sosie.compare(A, program(A), X, measures="linear_cka")
    assert c.sites_b == ["block1", "block2", "block3"]


# Quantised


class Quantisable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv1, self.relu, self.conv2 = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.relu(self.conv1(self.quant(x))))
        return self.head(self.dequant(x).flatten(1))


def static(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    model.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")  # type: ignore[assignment]
    model.head.qconfig = None  # type: ignore[union-attr, assignment]
    torch.ao.quantization.prepare(model, inplace=True)
    model(X)
    return torch.ao.quantization.convert(model)


def test_static_quantisation() -> None:
    a = jiggled(Quantisable())
    b = static(a)
    d = sosie.diff(a, b, X)
    assert not d.same
    assert not d.caveats  # no word of modes, which have no effect there
    sites = {site.site_a: site for site in d.sites}
    with torch.no_grad():
        own, theirs = a.quant(X), b.quant(X).dequantize()  # type: ignore[operator]
        convolved = b.conv1(torch.quantize_per_tensor(X, b.quant(X).q_scale(), b.quant(X).q_zero_point(), torch.quint8))  # type: ignore[operator]
        exact = a.conv1(X)  # type: ignore[operator]
    assert sites["quant"].made == pytest.approx(float((theirs - own).norm() / own.norm()), rel=1e-4)
    assert sites["conv1"].made == pytest.approx(float((convolved.dequantize() - exact).norm() / exact.norm()), rel=1e-3)
    assert sites["head"].made == pytest.approx(0, abs=1e-6)
    assert sosie.diff(a, b, X, floor=0.05).same
    wrong = copy.deepcopy(b)
    wrong.conv2.scale = b.conv2.scale / 3  # type: ignore[union-attr, operator]
    assert sosie.diff(a, wrong, X, floor=0.05).first == "conv2"


def test_dynamic_quantisation() -> None:
    b = torch.ao.quantization.quantize_dynamic(copy.deepcopy(A), {nn.Linear}, dtype=torch.qint8)
    d = sosie.diff(A, b, X)
    assert (d.same, d.first) == (False, "head")
    assert not d.caveats
    assert sosie.diff(A, b, X, sites="leaves").first == "head"


def test_torchao() -> None:
    quantisation = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install torchao")
    random = torch.Generator().manual_seed(0)
    a = jiggled(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    rows = torch.randn(40, 64, generator=random)
    for settings in (quantisation.Int8WeightOnlyConfig(), quantisation.Int8DynamicActivationInt8WeightConfig()):
        b = copy.deepcopy(a)
        quantisation.quantize_(b, settings)
        d = sosie.diff(a, b, rows)
        assert d.first == "0"
        assert d.verdict.endswith("; errors of their own: 2, 4.")
        made = [site.made for site in d.sites[:5]]
        assert all(0.001 < error < 0.01 for error in made[::2] if error is not None)
        assert made[1] == made[3] == 0
        assert sosie.diff(a, b, rows, floor=0.02).same
        assert sosie.diff(b, copy.deepcopy(b), rows).same


# Folders of transformers


def saved_decoder(folder: Any) -> nn.Module:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'sosie[hf]'")
    model = decoder("llama", "sdpa")
    model.save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    assert (folder / "model.safetensors.index.json").is_file()
    return model


def test_a_folder_in_another_type(tmp_path: Any) -> None:
    model, tokens = saved_decoder(tmp_path / "m"), padded_tokens()
    half = f"hf:{tmp_path / 'm'}(head=True, dtype='bfloat16')"
    assert {p.dtype for p in open_model(half).model.parameters()} == {torch.bfloat16}
    d = sosie.diff(f"hf:{tmp_path / 'm'}(head=True)", half, tokens)
    assert d.same, d.verdict
    assert "inputs are cast" in d.caveats[0]
    assert d.outputs  # it has its head
    assert sosie.diff(model, half, tokens, floor=1e-4).first is not None
    for options, words in (
        ("dtype='int8'", "must be one of 'float32', 'float16'"),
        ("dtyp='x'", "has no option 'dtyp'"),
    ):
        with pytest.raises(ValueError, match=words):
            open_model(f"hf:{tmp_path / 'm'}({options})")


def test_weights_stay_where_accelerate_put_them(tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    model, tokens = saved_decoder(tmp_path / "m"), padded_tokens()
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{k}": "disk" if k else "cpu" for k in range(3)}
    wrong = edited(model, lambda b: b.model.layers[1].mlp.up_proj.weight.data.mul_(1.01))
    on_disk = open_model(f"hf:{tmp_path / 'm'}(head=True, device_map={places!r})").model
    in_memory = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    for placed in (on_disk, in_memory):
        before = {name: p.device for name, p in placed.named_parameters()}
        assert torch.device("meta") in before.values()
        for a, b in ((model, placed), (placed, model)):
            d = sosie.diff(a, b, tokens)
            assert d.same, d.verdict
            assert d.sites[0].error == 0
        assert sosie.diff(wrong, placed, tokens).first == "model.layers.1.mlp.up_proj"
        assert {name: p.device for name, p in placed.named_parameters()} == before


# Made for one number of inputs


class OfTen(Net):
    """As an engine that was built for ten inputs, of which the file says nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(10, 3, 8, 8))


def test_models_that_take_one_number_of_inputs() -> None:
    def program(model: nn.Module, inputs: int) -> Any:
        return torch.export.export(copy.deepcopy(model), (X[:inputs],))

    for inputs in (1, 5, 24):
        for batches in (X, [X[:7], X[7:]]):  # whatever the loader's batches
            assert sosie.diff(A, program(A, inputs), batches).same
            d = sosie.diff(A, program(WRONG, inputs), batches)
            assert (d.same, d.first) == (False, "block2.conv"), d.verdict
            left_out = [caveat for caveat in d.caveats if "left out" in caveat]
            assert left_out == (["the last 4 inputs do not fill a batch of 5: left out"] if inputs == 5 else [])
    assert sosie.diff(program(A, 5).module(), WRONG, X).first == "output"
    of_ten = jiggled(OfTen())
    d = sosie.diff(A, of_ten, [X[:10], X[10:20], X[20:]])
    assert d.same
    assert d.sites[-1].inputs == 20
    with pytest.raises(ValueError, match=r"takes batches of 24, but there are only 10"):
        sosie.diff(A, program(A, 24), X[:10])
    with pytest.raises(ValueError, match=r"takes batches of 5 and .* batches of 3"):
        sosie.diff(program(A, 5), program(A, 3), X)
    with pytest.raises(RuntimeError, match="invalid for input of size") as caught:
        sosie.diff(A, of_ten, X)
    assert any("inputs 0 to 1" in note for note in caught.value.__notes__)


def test_a_trace_with_constants() -> None:
    """Under a dispatch mode torch.jit fails to compare constants."""

    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            scale = float(x.shape[-1]) ** 0.5
            return super().forward(x / scale) / scale

    a = jiggled(Scaled())
    assert sosie.diff(a, torch.jit.trace(a, X, check_trace=False), X).same
