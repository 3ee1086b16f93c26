"""ONNX files: their named values as sites, in `diff` on both sides, in `compare`, and what is refused."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffed_nets import Net, edited, images, jiggled
from torch import Tensor, nn

import sosie
from sosie.models import open_model

onnx = pytest.importorskip("onnx", reason="ONNX files need onnx: pip install 'sosie[onnx]'")
pytest.importorskip("onnxruntime", reason="ONNX files need onnxruntime: pip install 'sosie[onnx]'")

A = jiggled(Net())
X = images()


def exported(model: nn.Module, path: Path, x: Any = X, **options: Any) -> str:
    """The specification of a file that torch's older exporter writes, for any number of inputs."""
    names = options.pop("input_names", ["x"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = options.pop("dynamic_axes", {name: {0: "inputs"} for name in names})
        x = x if isinstance(x, tuple) else (x[:2] if axes else x,)
        torch.onnx.export(model, x, str(path), dynamo=False, input_names=names, dynamic_axes=axes, **options)
    return f"onnx:{path}"


@pytest.fixture
def spec(tmp_path: Path) -> str:
    return exported(A, tmp_path / "net.onnx")


def with_norm_apart(b: Net) -> None:
    """What keeps the exporter from folding the normalisation into the convolution."""
    for block in (b.block1, b.block2, b.block3):
        block.bn = nn.Sequential(nn.Identity(), Scaled(block.bn))


class Scaled(nn.Module):
    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.slope = nn.Parameter(norm.weight.data / (norm.running_var + norm.eps).sqrt())  # type: ignore[operator]
        self.shift = nn.Parameter(norm.bias.data - norm.running_mean * self.slope)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.slope[:, None, None] + self.shift[:, None, None]


def test_an_exported_model_is_the_same(spec: str) -> None:
    d = sosie.diff(A, spec, X)
    assert d.same, d.verdict
    assert d.verdict == "The same up to float32 rounding at all 4 sites."
    assert [(site.site_a, site.site_b, site.paired) for site in d.sites[:3]] == [
        (name, name, "by name") for name in ("block1", "block2", "block3")
    ]
    assert all(site.made is not None and 0 < site.made < 1e-6 for site in d.sites[:3])
    leaves = sosie.diff(A, spec, X, sites="leaves")
    assert leaves.same, leaves.verdict
    # Convolutions into which the exporter has folded the normalisation are not taken for what they were.
    assert [site.site_b for site in leaves.sites] == [
        "stem", "block1.skip", "block2.skip", "block3.skip", "head", "output"
    ]  # fmt: skip


def test_a_file_for_one_number_of_inputs(tmp_path: Path) -> None:
    for inputs in (1, 5):
        file = exported(A, tmp_path / f"{inputs}.onnx", X[:inputs], dynamic_axes=None)
        for a, b in ((A, file), (file, A)):
            d = sosie.diff(a, b, [X[:7], X[7:]])
            assert d.same, d.verdict
            assert d.sites[-1].inputs == 24 // inputs * inputs
        wrong = edited(A, lambda b: b.block2.skip.weight.data.mul_(1.01))
        assert sosie.diff(wrong, file, X).first == "block2.skip"


def test_the_numbers_are_those_of_onnxruntime(spec: str) -> None:
    import onnxruntime

    wrong = edited(A, lambda b: b.head.weight.data.mul_(1.02))
    session = onnxruntime.InferenceSession(spec.removeprefix("onnx:"), providers=["CPUExecutionProvider"])
    theirs = session.run(None, {"x": X.numpy()})[0].astype(float)
    with torch.no_grad():
        ours = wrong(X).numpy().astype(float)
    d = sosie.diff(wrong, spec, X)
    assert d.sites[-1].error == pytest.approx(np.linalg.norm(ours - theirs) / np.linalg.norm(ours), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "module"),
    [
        (lambda b: b.stem.bias.data.zero_(), "stem"),
        (lambda b: b.block2.conv.weight.data.mul_(1.01), "block2.conv"),
        (lambda b: b.block3.skip.weight.data.add_(0.01), "block3.skip"),
        (lambda b: b.head.weight.data.mul_(1.001), "head"),
    ],
)
def test_the_layer_that_was_exported_wrongly_is_named(change: Any, module: str, tmp_path: Path) -> None:
    a = edited(A, with_norm_apart)
    d = sosie.diff(a, exported(edited(a, change), tmp_path / "b.onnx"), X)
    assert not d.same
    assert d.first == module, d.verdict


def test_two_wrong_layers_are_told_apart(tmp_path: Path) -> None:
    a = edited(A, with_norm_apart)

    def two(b: Any) -> None:
        for each in b.block1.skip.parameters():
            each.data.mul_(1.02)
        for each in b.block3.conv.parameters():
            each.data.mul_(1.01)

    d = sosie.diff(a, exported(edited(a, two), tmp_path / "b.onnx"), X)
    assert d.first == "block1.skip"
    assert d.verdict.endswith("; errors of their own: block3.conv.")
    made = {site.site_a: site.made for site in d.sites}
    assert made["block2"] is not None
    assert made["block2"] < 1e-6  # it inherits its error
    assert made["block3.conv"] == pytest.approx(0.01, rel=0.01)
    assert made["block1.skip"] == pytest.approx(0.02, rel=0.01)


def test_a_file_as_the_reference(spec: str) -> None:
    d = sosie.diff(spec, A, X)
    assert d.same, d.verdict
    assert d.floor.startswith("B with half as many inputs")
    d = sosie.diff(spec, edited(A, lambda b: b.block2.conv.weight.data.mul_(1.01)), X)
    assert (d.same, d.first) == (False, "block2")
    assert d.verdict == "Different from block2 on; whether it makes that error or inherits it is not known."


def test_two_files(spec: str, tmp_path: Path) -> None:
    twin = sosie.diff(spec, exported(A, tmp_path / "twin.onnx"), X)
    assert twin.verdict == "The same, bit for bit, at all 4 sites."
    assert "other last digits at its sites" in twin.floor
    fused = exported(edited(A, with_norm_apart), tmp_path / "apart.onnx")
    d = sosie.diff(spec, fused, X)
    assert d.same, d.verdict
    assert d.sites[-1].error > 0
    wrong = exported(edited(A, lambda b: b.block2.skip.weight.data.mul_(1.001)), tmp_path / "wrong.onnx")
    assert sosie.diff(spec, wrong, X).first == "block2.skip"


def test_compare_takes_a_file(spec: str) -> None:
    c = sosie.compare(A, spec, X, measures="linear_cka")
    assert c.sites_b == ["block1", "block2", "block3"]
    assert np.diag(c.matrix()) == pytest.approx(1, abs=1e-6)


def test_a_record_is_held_against_a_file(spec: str, tmp_path: Path) -> None:
    path = sosie.diffing.record(A, X, tmp_path / "golden.safetensors")
    sosie.assert_same(spec, path)
    wrong = exported(edited(A, lambda b: b.head.weight.data.mul_(1.01)), tmp_path / "wrong.onnx")
    assert sosie.diff(path, wrong).first == "head"


# Graphs of other makers


def graph(nodes: list[Any], weights: dict[str, np.ndarray], path: Path, **options: Any) -> str:
    helper = onnx.helper
    kind = options.get("kind", onnx.TensorProto.FLOAT)
    x = helper.make_tensor_value_info("x", kind, options.get("shape", ["n", 6]))
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    made = helper.make_graph(nodes, "g", [x], [y], tensors)
    opsets = [helper.make_opsetid("", 20), *[helper.make_opsetid(name, 1) for name in options.get("domains", ())]]
    model = helper.make_model(made, opset_imports=opsets, ir_version=9)
    onnx.save(model, str(path), **options.get("save", {}))
    return f"onnx:{path}"


def two_layers(rng: Any) -> tuple[list[Any], dict[str, np.ndarray]]:
    make = onnx.helper.make_node
    nodes = [make("MatMul", ["x", "w1"], ["h"]), make("Relu", ["h"], ["r"]), make("MatMul", ["r", "w2"], ["y"])]
    return nodes, {name: rng.normal(size=(6, 6)).astype(np.float32) for name in ("w1", "w2")}


@pytest.fixture
def layers() -> tuple[list[Any], dict[str, np.ndarray]]:
    return two_layers(np.random.default_rng(0))


def plain(weights: dict[str, np.ndarray]) -> nn.Sequential:
    first, second = (nn.Linear(6, 6, bias=False) for _ in range(2))
    first.weight.data, second.weight.data = (torch.tensor(weights[name].T.copy()) for name in ("w1", "w2"))
    return nn.Sequential(first, nn.ReLU(), second).eval()


ROWS = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))


def test_a_graph_without_names_of_modules(layers: Any, tmp_path: Path) -> None:
    """Sites are what layers with weights give; any other named value can be asked for."""
    nodes, weights = layers
    spec = graph(nodes, weights, tmp_path / "g.onnx")
    model = plain(weights)
    d = sosie.diff(model, spec, ROWS, sites_a=["0", "2"])
    assert d.same, d.verdict
    assert [(site.site_a, site.site_b, site.paired) for site in d.sites] == [
        ("0", "h", "in order"), ("2", "y", "in order"), ("output", "output", "the output")
    ]  # fmt: skip
    d = sosie.diff(model, spec, ROWS, map={"1": "r"}, sites_a="1", sites_b="r")
    assert (d.same, d.sites[0].paired) == (True, "by the map")
    wrong = {**weights, "w2": weights["w2"] * np.float32(1.01)}
    assert sosie.diff(model, graph(nodes, wrong, tmp_path / "w.onnx"), ROWS, sites_a=["0", "2"]).first == "y"


def test_names_of_modules_as_the_newer_exporter_writes_them(layers: Any, tmp_path: Path) -> None:
    nodes, weights = layers
    for node, scope in zip(nodes, ("body.first", "body", "body.second"), strict=True):
        above = ["", "body", *([scope] if scope != "body" else []), node.op_type]
        for key, value in (("name_scopes", above), ("class_hierarchy", [f"a.{name or 'Top'}" for name in above])):
            node.metadata_props.add(key=f"pkg.torch.onnx.{key}", value=repr(value))
    model = open_model(graph(nodes, weights, tmp_path / "g.onnx")).model
    assert [name for name, _ in model.named_modules()] == ["", "body", "body.first", "body.second"]


def test_a_value_beside_the_main_one_is_not_taken_for_it(layers: Any, tmp_path: Path) -> None:
    """A mask that the first layer computes and the second uses again is not what the first layer gives."""
    nodes, weights = layers
    make = onnx.helper.make_node
    nodes = [
        make("MatMul", ["x", "w1"], ["m"], name="/first/mask/MatMul"),
        make("Relu", ["m"], ["h"], name="/first/Relu"),
        make("MatMul", ["h", "w2"], ["k"], name="/second/MatMul"),
        make("Add", ["k", "m"], ["y"], name="/second/Add"),
    ]
    model = open_model(graph(nodes, weights, tmp_path / "g.onnx")).model
    assert model.first.key == "h"  # type: ignore[union-attr]


def test_inputs_by_name_and_in_the_types_of_the_graph(layers: Any, tmp_path: Path) -> None:
    model = open_model(graph(*layers, tmp_path / "g.onnx")).model
    wanted = model(ROWS)
    for given in (ROWS.double(), ROWS.numpy(), ROWS.numpy().astype(np.float64)):
        assert torch.equal(model(given), wanted)
        assert torch.equal(model(x=given), wanted)
    assert torch.equal(copy.deepcopy(model)(ROWS), wanted)
    for wrong, words in (
        ({"z": ROWS}, r"g.onnx has no input z; it has x"),
        ({}, "also needs x"),
        ({"x": ROWS[:, :5]}, r"the input x of g.onnx is \[n, 6\], got \[20, 5\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            model(**wrong)
    with pytest.raises(TypeError, match=r"takes 1 inputs \(x\), got 2"):
        model(ROWS, ROWS)
    fixed = open_model(graph(*layers, tmp_path / "f.onnx", shape=[4, 6])).model
    with pytest.raises(ValueError, match=r"is \[4, 6\], got \[20, 6\]: give batches of 4"):
        fixed(ROWS)
    assert sosie.diff(plain(layers[1]), f"onnx:{tmp_path / 'f.onnx'}", list(ROWS.split(4)), sites_a=["0", "2"]).same


def test_whole_numbers_are_not_made_of_others(tmp_path: Path) -> None:
    nodes = [onnx.helper.make_node("Gather", ["w", "x"], ["y"])]
    weights = {"w": np.eye(7, dtype=np.float32)}
    model = open_model(graph(nodes, weights, tmp_path / "e.onnx", kind=onnx.TensorProto.INT64, shape=["n"])).model
    assert torch.equal(model(torch.arange(3, dtype=torch.int32)), torch.eye(7)[:3])
    with pytest.raises(TypeError, match="is int64, got float32"):
        model(torch.arange(3.0))


def test_half_precision(layers: Any, tmp_path: Path) -> None:
    """Only the weights are half: the file takes and gives float32, and inputs are not rounded on the way."""
    make, nodes, weights = onnx.helper.make_node, [], layers[1]
    names = ["x", "h", "y"]
    for k, weight in enumerate(("w1", "w2")):
        nodes += [
            make("Cast", [names[k]], [f"c{k}"], to=onnx.TensorProto.FLOAT16),
            make("MatMul", [f"c{k}", weight], [f"p{k}"]),
            make("Cast", [f"p{k}"], [names[k + 1]], to=onnx.TensorProto.FLOAT),
        ]
    half = graph(nodes, {name: array.astype(np.float16) for name, array in weights.items()}, tmp_path / "h.onnx")
    model = plain(weights)
    model[1] = nn.Identity()
    d = sosie.diff(model, half, ROWS)
    assert d.same, d.verdict
    assert "float16 rounding" in d.verdict
    assert not sosie.diff(model, half, ROWS, floor=1e-5).same


# Files


def test_weights_in_other_files_of_the_folder(layers: Any, tmp_path: Path) -> None:
    beside = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    (tmp_path / "in").mkdir()
    spec = graph(*layers, tmp_path / "in" / "g.onnx", save=beside)
    d = sosie.diff(plain(layers[1]), spec, ROWS, sites_a=["0", "2"])
    assert d.same, d.verdict
    path = tmp_path / "in" / "g.onnx"
    model = onnx.load(str(path), load_external_data=False)
    for place in ("../weights.bin", "/etc/hostname", "a/../../weights.bin"):
        for tensor in model.graph.initializer:
            next(each for each in tensor.external_data if each.key == "location").value = place
        path.write_bytes(model.SerializeToString())
        with pytest.raises(ValueError, match="outside its own folder: it is not opened"):
            open_model(spec)
    (tmp_path / "in" / "weights.bin").rename(tmp_path / "weights.bin")
    (tmp_path / "in" / "link.bin").symlink_to(tmp_path / "weights.bin")
    for place, words in (("link.bin", "outside its own folder"), ("gone.bin", "needs 'gone.bin' beside it")):
        for tensor in model.graph.initializer:
            next(each for each in tensor.external_data if each.key == "location").value = place
        path.write_bytes(model.SerializeToString())
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            open_model(spec)


def test_files_that_cannot_be_run(layers: Any, tmp_path: Path) -> None:
    nodes, weights = layers
    strange = [onnx.helper.make_node("Frobnicate", ["x"], ["y"], domain="acme")]
    with pytest.raises(ValueError, match=r"onnxruntime cannot run .*s\.onnx: .*Frobnicate"):
        open_model(graph(strange, {}, tmp_path / "s.onnx", domains=["acme"]))
    whole = Path(graph(nodes, weights, tmp_path / "g.onnx").removeprefix("onnx:")).read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"no file of this kind" * 9):
        (tmp_path / "broken.onnx").write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.onnx"):
            open_model(f"onnx:{tmp_path / 'broken.onnx'}")
    with pytest.raises(FileNotFoundError, match=r"no file .*there\.onnx"):
        open_model(f"onnx:{tmp_path / 'there.onnx'}")
    with pytest.raises(ValueError, match="is a folder: name the file"):
        open_model(f"onnx:{tmp_path}")
