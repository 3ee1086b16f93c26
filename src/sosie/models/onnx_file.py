"""ONNX files as models: onnxruntime runs them, and their named values are sites."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import listed, nearest
from ..factory import find_file, import_library
from .values import Between, Value, ValueModel, visit

FLOATS = {1: torch.float32, 10: torch.float16, 11: torch.float64}  # by ONNX's numbers of types
SCOPES = "pkg.torch.onnx.name_scopes"  # where torch's exporter notes the modules that a node comes from
CLASSES = "pkg.torch.onnx.class_hierarchy"
SESSIONS = 512  # parts of a graph that are kept ready to run
Arrays = Mapping[str, np.ndarray]


def open_onnx(text: str) -> OnnxModel:
    """Open an ONNX file, whose weights may also lie in other files of its folder."""
    path = find_file(text, "SOSIE_WEIGHTS")
    if path.is_dir():
        files = sorted(file.name for file in path.glob("*.onnx"))
        raise ValueError(f"{path} is a folder: name the file, as onnx:{path / (files[0] if files else 'model.onnx')}")
    return OnnxModel(Graph(path))


class Graph:
    """The graph of a file. It computes any of its values from its inputs, or from values that are given in between."""

    def __init__(self, path: Path) -> None:
        self._onnx = import_library("onnx", f"onnx:{path}", extra="onnx")
        self._runtime = import_library("onnxruntime", f"onnx:{path}", extra="onnx")
        self.path = path
        try:
            self.model = self._onnx.load(str(path), load_external_data=False)
        except Exception as error:  # the libraries have errors of their own kinds
            raise ValueError(f"{path} is no ONNX file, or a damaged one: {_first_line(error)}") from error
        graph = self.model.graph
        if not (graph.node and graph.output):
            raise ValueError(f"{path} is no ONNX file, or a damaged one: it has no graph")
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self._check_files()
        self.inputs = {each.name: each for each in graph.input if each.name not in self.weights}
        self.outputs = [each.name for each in graph.output]
        self.makers = {name: node for node in graph.node for name in node.output if name}
        self._session = lru_cache(SESSIONS)(self._new_session)
        self._session(tuple(self.outputs), ())  # what cannot be run is an error now

    def _check_files(self) -> None:
        """Weights outside the file must lie in its folder (or beside the file that a link points to)."""
        homes = (self.path.parent.resolve(), self.path.resolve().parent)
        nodes = (*self.model.graph.node, *(node for function in self.model.functions for node in function.node))
        for tensor in (*self.weights.values(), *(t for node in nodes for t in _constants(node))):
            location = next((each.value for each in tensor.external_data if each.key == "location"), "")
            place = PurePosixPath(location.replace("\\", "/"))
            if not location:
                continue
            file = (self.path.parent / place).resolve()
            if place.is_absolute() or ".." in place.parts or not any(file.is_relative_to(home) for home in homes):
                raise ValueError(f"{self.path} keeps weights in {location!r}, outside its own folder: it is not opened")
            if not file.is_file():
                raise FileNotFoundError(f"{self.path} needs {location!r} beside it, which holds its weights")

    def __call__(self, wanted: Sequence[str], given: Arrays) -> dict[str, np.ndarray]:
        """These values; each is computed from the given ones that are nearest before it."""
        to_type = self._onnx.helper.np_dtype_to_tensor_dtype
        between = tuple(sorted((name, to_type(x.dtype)) for name, x in given.items() if name not in self.inputs))
        session = self._session(tuple(wanted), between)
        needed = {each.name: given[each.name] for each in session.get_inputs()}
        try:
            return dict(zip(wanted, session.run(list(wanted), needed), strict=True))
        except Exception as error:
            raise RuntimeError(f"onnxruntime cannot run {self.path.name}: {_first_line(error)}") from error

    def _new_session(self, wanted: tuple[str, ...], between: tuple[tuple[str, int], ...]) -> Any:
        options = self._runtime.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised
        options.intra_op_num_threads = torch.get_num_threads()
        source: Any = str(self.path)
        if between or list(wanted) != self.outputs:
            source = self._part(wanted, dict(between)).SerializeToString()
            folder = "session.model_external_initializers_file_folder_path"
            options.add_session_config_entry(folder, str(self.path.parent.absolute()))
        try:
            return self._runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ValueError(f"onnxruntime cannot run {self.path}: {_first_line(error)}") from error

    def _part(self, wanted: Sequence[str], between: Mapping[str, int]) -> Any:
        """The model that computes these values, and no more, from the inputs and the values in between."""
        needed: set[str] = set()
        ahead = list(wanted)
        while ahead:
            name = ahead.pop()
            if name not in needed:
                needed.add(name)
                if name in self.makers and name not in between:
                    ahead += _read_by(self.makers[name])
        own, part = self.model.graph, self._onnx.ModelProto()
        part.ir_version = self.model.ir_version
        part.opset_import.extend(self.model.opset_import)
        part.functions.extend(self.model.functions)
        part.graph.name = own.name
        part.graph.node.extend(n for n in own.node if any(x in needed and x not in between for x in n.output))
        for node in part.graph.node:
            node.output[:] = [f"{name} (unused)" if name in between else name for name in node.output]
        part.graph.initializer.extend(tensor for name, tensor in self.weights.items() if name in needed)
        part.graph.sparse_initializer.extend(own.sparse_initializer)
        part.graph.input.extend(each for name, each in self.inputs.items() if name in needed)
        make = self._onnx.helper.make_tensor_value_info
        part.graph.input.extend(make(name, kind, None) for name, kind in between.items() if name in needed)
        part.graph.output.extend(self._onnx.ValueInfoProto(name=name) for name in wanted)
        return part

    def values(self) -> list[str]:
        """The values that depend on the inputs and are numbers with a fraction, or may be, in the graph's order."""
        graph = self._onnx.shape_inference.infer_shapes(self.model).graph
        kinds = {each.name: each.type.tensor_type.elem_type for each in (*graph.value_info, *graph.output)}
        alive = set(self.inputs)
        for node in self.model.graph.node:
            if not alive.isdisjoint(_read_by(node)):
                alive.update(filter(None, node.output))
        return [name for name in self.makers if name in alive and kinds.get(name, 1) in FLOATS]

    def feeds(self, name: str, others: set[str]) -> bool:
        """Whether one of the other values is computed from this one."""
        ahead, seen = [other for other in others if other != name], set[str]()
        while ahead:
            maker = self.makers.get(ahead.pop())
            read = [] if maker is None else [each for each in _read_by(maker) if each not in seen]
            if name in read:
                return True
            seen.update(read)
            ahead += read
        return False

    def has_weights(self, name: str) -> bool:
        """Whether a value comes out of a layer with weights: a convolution, a matrix, an LSTM."""
        constants = {x: t for node in self.model.graph.node for t in _constants(node) for x in node.output}
        tensors = ({**constants, **self.weights}.get(x) for x in self.makers[name].input)
        return any(tensor is not None and len(tensor.dims) > 1 and tensor.data_type in FLOATS for tensor in tensors)

    def batch_size(self) -> int | None:
        """The first length of its first input, if that is fixed."""
        shape = next(iter(self.inputs.values())).type.tensor_type.shape.dim if self.inputs else ()
        return (shape[0].dim_value or None) if shape else None

    def dtype(self) -> torch.dtype:
        """The type of most of its weights."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in (*self.weights.values(), *(t for node in self.model.graph.node for t in _constants(node))):
            if tensor.data_type in FLOATS:
                sizes[FLOATS[tensor.data_type]] += int(np.prod(tensor.dims))
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


class OnnxModel(ValueModel):
    """An ONNX file as a model. Its arguments are the graph's inputs, in their order or by name."""

    jitter = 0.0  # the share of itself by which each number is changed at random

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph, self.own_dtype, self.batch_size = graph, graph.dtype(), graph.batch_size()
        values = graph.values()
        if modules := modules_of(graph, values):
            kinds = {kind: type(kind, (Value,), {}) for _, kind, _ in modules}
            for name, kind, key in modules:
                self.add(name, kinds[kind](key))
        else:  # no word of modules: the default sites are what layers with weights give
            for key in values:
                self.add(key, Value(key) if graph.has_weights(key) else Between(key))
        if all(name.isidentifier() for name in graph.inputs):
            self.forward = self._with_signature()  # type: ignore[method-assign]

    def __deepcopy__(self, memo: Any) -> OnnxModel:
        return OnnxModel(self.graph)

    def jittered(self) -> OnnxModel:
        """The same with other last digits in its inputs and its watched values, as another order of sums would give."""
        other = OnnxModel(self.graph)
        other.jitter = torch.finfo(self.own_dtype).eps
        return other

    def _with_signature(self) -> Any:
        """The forward as one with the names of the inputs."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return OnnxModel.forward(self, *args, **kwargs)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in self.graph.inputs]
        )
        return forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = _Forward(self.graph, self._given(args, kwargs), self.watched(), self.jitter)
        visit(self, run)
        answers = {name: run.read(name) for name in self.graph.outputs}
        return next(iter(answers.values())) if len(answers) == 1 else answers

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The inputs by name, in the types of the graph."""
        known, where = list(self.graph.inputs), self.graph.path.name
        if len(args) > len(known):
            raise TypeError(f"{where} takes {len(known)} inputs ({listed(known)}), got {len(args)}")
        given = dict(zip(known, args, strict=False)) | dict(kwargs)
        if unknown := [name for name in given if name not in known]:
            raise TypeError(
                f"{where} has no input {listed(unknown)}; it has {listed(known)}{nearest(unknown[0], known)}. Choose "
                "what it is given with inputs=, a function from a batch to a dict"
            )
        if missing := [name for name in known if name not in given]:
            raise TypeError(f"{where} also needs {listed(missing)}: give a dict with {listed(known)}")
        return {name: self._array(name, value) for name, value in given.items()}

    def _array(self, name: str, value: Any) -> np.ndarray:
        where = f"the input {name!r} of {self.graph.path.name}"
        kind = self.graph.inputs[name].type
        if not kind.HasField("tensor_type"):
            raise TypeError(f"{where} is no tensor but a {kind.WhichOneof('value')}, which cannot be given")
        array = value.detach().cpu().float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
        array = array.detach().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
        wanted = np.dtype(self.graph._onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))
        if array.dtype.kind == "f" and wanted.kind != "f":
            raise TypeError(f"{where} is {wanted}, got {array.dtype}")
        shape = [d.dim_value or d.dim_param or "?" for d in kind.tensor_type.shape.dim]
        fits = [a == b or isinstance(a, str) for a, b in zip(shape, array.shape, strict=False)]
        if kind.tensor_type.HasField("shape") and not (len(shape) == array.ndim and all(fits)):
            only_batch = len(shape) == array.ndim and all(fits[1:])
            advice = f": give batches of {shape[0]}" if only_batch else ""
            raise ValueError(f"{where} is {shape}, got {list(array.shape)}{advice}".replace("'", ""))
        return np.ascontiguousarray(array, dtype=wanted)


class _Forward:
    """One run of a graph: the values that are watched, computed anew once one before them is replaced."""

    def __init__(self, graph: Graph, given: Arrays, watched: Sequence[str], jitter: float) -> None:
        self._jitter, self._random = jitter, np.random.default_rng(0)
        self.graph, self.given = graph, {name: self._jittered(array) for name, array in given.items()}
        wanted = list(dict.fromkeys([*graph.outputs, *watched]))
        self._known = graph(wanted, self.given)
        self._read: dict[str, Tensor] = {}
        self._replaced = False

    def read(self, key: str) -> Tensor:
        if key not in self._read:
            array = self._known[key] if not self._replaced else self.graph([key], self.given)[key]
            self._read[key] = torch.from_numpy(self._jittered(np.array(array)))
            if self._jitter and key not in self.graph.outputs:
                self.replace(key, self._read[key])
        return self._read[key]

    def _jittered(self, array: np.ndarray) -> np.ndarray:
        if not self._jitter or array.dtype.kind != "f":
            return array
        factors = 1 + self._jitter * self._random.uniform(-1, 1, array.shape)
        return (array * factors).astype(array.dtype)

    def replace(self, key: str, tensor: Tensor) -> None:
        self.given[key] = tensor.detach().cpu().numpy()
        self._replaced = True
        self._read[key] = tensor


# The modules that a graph was exported from, of which the file may tell


def modules_of(graph: Graph, values: Sequence[str]) -> list[tuple[str, str, str]]:
    """The name of each module, that of its class, and the value that it gives, innermost first.

    A module gives the value that is read outside of it and that its other such values go into (masks, attention
    weights). Where that is not one value, the module is left out.
    """
    homes = {id(node): _homes(node) for node in graph.model.graph.node}
    readers: dict[str, list[Any]] = {}
    for node in graph.model.graph.node:
        for name in _read_by(node):
            readers.setdefault(name, []).append(node)
    found: dict[str, list[tuple[str, str, str]]] = {}
    for key in values:
        if _is_fused(graph.makers[key]):
            continue
        for name, kind in reversed(homes[id(graph.makers[key])].items()):
            elsewhere = any(name not in homes[id(node)] for node in readers.get(key, ()))
            if elsewhere or key in graph.outputs:
                found.setdefault(name, []).append((name, kind, key))
    places = {key: k for k, key in enumerate(values)}
    last = ([each for each in some if not graph.feeds(each[2], {key for *_, key in some})] for some in found.values())
    return sorted((some[0] for some in last if len(some) == 1), key=lambda each: places[each[2]])


def _homes(node: Any) -> dict[str, str]:
    """The modules that a node comes from, outermost first, with their classes, as torch's exporters write them."""
    about = {each.key: each.value for each in node.metadata_props}
    if SCOPES in about:
        names, kinds = (re.findall(r"'([^']*)'", about.get(key, "")) for key in (SCOPES, CLASSES))
        inner = zip(names[1:-1], kinds[1:-1], strict=False)  # between the model and the operation
        # torch's exporter writes a later call of a module as `mix@1`
        return {name.replace("@", "_call_"): kind.rpartition(".")[2] for name, kind in inner}
    if not node.name.startswith("/"):
        return {}
    homes, name = {}, ""
    last = ""
    for piece in node.name.split("/")[1:-1]:  # the layers of a `Sequential` carry its name once more
        name = f"{name.removesuffix(last)}{piece}" if last and piece.startswith(f"{last}.") else f"{name}.{piece}"
        name, last = name.removeprefix("."), piece
        homes[name] = re.sub(r"\d+", "N", name)
    return homes


def _is_fused(node: Any) -> bool:
    """Whether an exporter folded the normalisation into a convolution, whose weights it then renames.

    Its value is neither that of the convolution nor, by its name, that of the normalisation.
    """
    return node.op_type == "Conv" and node.name.startswith("/") and node.input[1].startswith("onnx::Conv")


def _read_by(node: Any) -> list[str]:
    """What a node reads, and the graphs inside it."""
    inner = (graph for each in node.attribute for graph in (*each.graphs, *([each.g] if each.HasField("g") else [])))
    return [*filter(None, node.input), *(name for graph in inner for each in graph.node for name in _read_by(each))]


def _constants(node: Any) -> Iterator[Any]:
    """The tensors that a node holds, and the graphs inside it."""
    for each in node.attribute:
        yield from [*each.tensors, *([each.t] if each.HasField("t") else [])]
        for graph in (*each.graphs, *([each.g] if each.HasField("g") else [])):
            yield from graph.initializer
            for inner in graph.node:
                yield from _constants(inner)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
