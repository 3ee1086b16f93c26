"""Open a model from the text that names it: architectures, libraries, your own files."""

from __future__ import annotations

import functools
import inspect
import json
import random
import re
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from .. import plugins
from ..checks import call_text, check_options, listed, natural, nearest, one_of, parse_call, whole_number
from ..factory import find_file, import_library, load_factory
from ..process_state import OperationMode
from .exported import with_layers
from .weights import PICKLE_SUFFIXES, TORCH_SUFFIXES, fit_weights, load_weights, masked_weights, read_weights

# Architectures by name, entered by a decorator

State = Mapping[str, Tensor]
Factory = TypeVar("Factory", bound=Callable[..., nn.Module])
# A factory; a function that reads its options from a state dict; prefixes of names in a file to ignore
Architecture = tuple[Callable[..., nn.Module], Callable[[State], dict[str, Any]], tuple[str, ...]]

CIFAR_DEPTHS = (20, 32, 44, 56, 110)  # the depths of He et al. 2016; any other 6n + 2 is accepted too
ARCHITECTURES: dict[str, Architecture] = {}


def architecture(
    read_options: Callable[[State], dict[str, Any]], *, name: str = "", ignore: tuple[str, ...] = ()
) -> Callable[[Factory], Factory]:
    """Register a factory under its own name or another."""

    def enter(build: Factory) -> Factory:
        key = name or build.__name__
        if key in ARCHITECTURES:
            raise ValueError(f"an architecture named {key!r} is already defined")
        ARCHITECTURES[key] = build, read_options, ignore
        return build

    return enter


def list_models() -> list[str]:
    """Return the names that `build_model` and `open_model` know, in addition to any `resnet<6n+2>`.

    Installed packages add names by the entry point `sosie.models`.
    """
    families = (f"resnet{depth}" for depth in CIFAR_DEPTHS)
    return sorted({*ARCHITECTURES, *families, *plugins.names("models")}, key=natural)


def find_architecture(name: str) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture of a name, and the options that the name determines.

    Registered names come first, so `resnet18/34/50/101/152` are the ImageNet family; any other `resnet<6n+2>` is the
    CIFAR family, whose depths 50 and 152 are `cifar_resnet(depth=50)` and `cifar_resnet(depth=152)`.
    """
    key = name.strip().lower().replace("-", "_")
    if key in ARCHITECTURES:
        return ARCHITECTURES[key], {}
    match = re.fullmatch(r"resnet_?(\d{1,4})", key)
    if match:
        return ARCHITECTURES["cifar_resnet"], {"depth": int(match[1])}
    if (build := plugins.load("models", name.strip(), plugins.function)) is not None:
        return ARCHITECTURES.get(key, (build, lambda state: {}, ())), {}
    raise ValueError(
        f"no architecture {name!r} (your own: path/to/file.py:factory@weights.safetensors){nearest(key, list_models())}"
    )


def build_model(name: str, options: Mapping[str, Any] | None = None, state: State | None = None) -> nn.Module:
    """Build a network by name; options that are left out are read from the state dict, if there is one."""
    (build, read_options, _), fixed = find_architecture(name)
    stated = {**fixed, **(options or {})}
    accepted = inspect.signature(build).parameters
    check_options(stated, accepted, name)
    read = read_options(state) if state else {}
    arguments = {key: value for key, value in read.items() if value is not None} | stated
    try:
        return build(**arguments)
    except (TypeError, RuntimeError, AttributeError, ZeroDivisionError) as error:
        described = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ValueError(f"cannot build {name}({described}): {error}") from error


def dimension(state: State, name: str, axis: int) -> int | None:
    """Return the size of a tensor in a state dict along an axis; None if it is missing, which loading reports."""
    tensor = state.get(name)
    return int(tensor.shape[axis]) if tensor is not None and tensor.dim() > axis else None


def count_atoms(state: State) -> int | None:
    """Return the largest number of atoms of a convolution, or None if all are plain."""
    return max((len(tensor) for name, tensor in state.items() if name.endswith(".atoms")), default=None)


def count_blocks(state: State, prefix: str) -> int | None:
    """Return how many different numbers follow `prefix.` in the names."""
    numbers = {match[1] for name in state if (match := re.match(rf"{re.escape(prefix)}\.(\d+)\.", name))}
    return len(numbers) or None


# A model's own input normalisation, applied to images in [0, 1]

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
NAMED = {
    "imagenet": "mean .485 .456 .406 std .229 .224 .225",
    "cifar": "mean .4914 .4822 .4465 std .2023 .1994 .2010",
}


@dataclass(frozen=True)
class Normalise:
    """(x - mean) / std per channel; one number serves every channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"one mean and one std per channel, got {len(self.mean)} and {len(self.std)}")
        if any(not s > 0 for s in self.std):
            raise ValueError(f"every std must be above 0, got {self.std}")

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise floating-point images (…, channels, height, width)."""
        if not x.is_floating_point():
            raise TypeError(f"normalisation needs images in [0, 1], got {x.dtype}: divide by 255 first")
        if x.dim() < 3 or len(self.mean) not in (1, x.shape[-3]):
            raise ValueError(f"normalisation of {len(self.mean)} channels does not fit images {tuple(x.shape)}")
        mean = x.new_tensor(self.mean).view(-1, 1, 1)
        std = x.new_tensor(self.std).view(-1, 1, 1)
        return (x - mean) / std


def parse_normalisation(text: str) -> Normalise | None:
    """Read 'ImageNet mean/std', 'CIFAR mean a b c std d e f', 'mean … std …', '(x*255-127)/128' or 'none'."""
    plain = text.strip().lower()
    if plain in ("none", ""):
        return None
    name = re.fullmatch(r"(imagenet|cifar)(?:-?10)?(?:\s+mean/std)?", plain)
    if name:
        plain = NAMED[name[1]]
    lists = re.fullmatch(rf"(?:\w+\s+)?mean((?:[\s,]+{NUMBER})+)[\s,]+std((?:[\s,]+{NUMBER})+)", plain)
    if lists:
        mean, std = (tuple(float(number) for number in re.findall(NUMBER, part)) for part in lists.groups())
        return Normalise(mean, std)
    affine = re.fullmatch(rf"\(x\s*\*\s*({NUMBER})\s*-\s*({NUMBER})\)\s*/\s*({NUMBER})", plain)
    if affine:
        scale, shift, divisor = map(float, affine.groups())
        if scale > 0 and divisor > 0:
            return Normalise((shift / scale,), (divisor / scale,))
    raise ValueError(
        f"unknown normalisation {text!r}; known are 'ImageNet mean/std', 'mean a b c std d e f', '(x*255-127)/128' and "
        "'none'. State it in the specification, as in resnet20(normalise='none')@file"
    )


# A text model's own tokeniser, applied to lists of strings


@dataclass(frozen=True)
class Tokenise:
    """Turn texts, or a dict with one list of them, into a model's arguments: token ids and a padding mask."""

    tokenizer: Any
    cut: set[int] = field(default_factory=set, repr=False, compare=False)  # hashes of texts that were too long
    text_only: ClassVar[bool] = True  # batches of token ids are passed on unchanged

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token is None:  # as in GPT; any token will do, since it is masked
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def __call__(self, batch: Any) -> Any:
        columns = batch if isinstance(batch, Mapping) else {"": batch}
        texts = [part for part in columns.values() if isinstance(part, list) and isinstance(part[0], str)]
        if len(texts) != 1:
            raise ValueError(f"it is unclear which of {', '.join(columns)} is the text: give a prepare function")
        tokens = self.tokenizer(texts[0], padding=True, truncation=True, return_tensors="pt")
        pieces = zip(texts[0], tokens.encodings or (), strict=False)  # a tokeniser written in Python has none
        self.cut.update(hash(text) for text, encoding in pieces if encoding.overflowing)
        return tokens

    def __repr__(self) -> str:
        return f"{type(self.tokenizer).__name__} of {self.tokenizer.vocab_size} tokens"


# Models of other libraries, which are imported only when needed

LIBRARY_WEIGHTS = "DEFAULT"  # as in `torchvision:resnet18@DEFAULT`: the library downloads its own weights


def open_torchvision(name: str, options: dict[str, Any], pretrained: bool) -> tuple[nn.Module, Normalise | None, str]:
    """Return a torchvision model, its normalisation, and a remark on random parts of its weights."""
    models = import_library("torchvision.models", f"torchvision:{name}")
    try:
        if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters and not pretrained:
            options = {"weights_backbone": None, **options}  # the default would download some
        model = models.get_model(name, weights="DEFAULT" if pretrained else None, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"torchvision:{name}: {error}") from error
    try:
        transform = models.get_model_weights(name).DEFAULT.transforms()
    except (ValueError, AttributeError):  # a model without weights
        transform = None
    mean, std = getattr(transform, "mean", None), getattr(transform, "std", None)
    backbone = options.get("weights_backbone")
    exception = "" if backbone is None or pretrained else f" except weights_backbone={backbone!r}"
    return model, Normalise(tuple(mean), tuple(std)) if mean and std else None, exception


def open_timm(name: str, options: dict[str, Any], pretrained: bool) -> tuple[nn.Module, Normalise | None, str]:
    """Return a timm model, its normalisation, and a remark on random parts of its weights."""
    timm = import_library("timm", f"timm:{name}")
    try:
        model = timm.create_model(name, pretrained=pretrained, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"timm:{name}: {error}") from error
    facts = getattr(model, "pretrained_cfg", None) or {}
    known = "mean" in facts and "std" in facts and options.get("in_chans", len(facts["mean"])) == len(facts["mean"])
    new_head = options.get("num_classes", facts.get("num_classes")) != facts.get("num_classes")
    exception = " with a random head" if new_head and pretrained else ""
    return model, Normalise(tuple(facts["mean"]), tuple(facts["std"])) if known else None, exception


def open_hugging_face(text: str, *, head: bool = False) -> tuple[nn.Module, Normalise | Tokenise | None, str]:
    """Open `folder`, or `org/name@revision` of the Hub: safetensors only, no code that comes with the weights.

    Without its head a model ends at its last hidden states; `(head=True)` gives the model as it was saved.
    `(dtype='bfloat16')` converts the weights as they are read, and with `(device_map='auto')` accelerate places them; a
    dict of modules and devices does so by hand. The second item is an image model's normalisation or a text model's
    tokeniser, the third the name with what was downloaded.
    """
    match = _HUB.fullmatch(text) if not Path(text).expanduser().is_dir() else None
    name, _, revision = match.groups() if match else (text, "", None)
    options = parse_call(f"hf{match['options'] or ''}")[1] if match else {}
    check_options(options, ("head", "dtype", "device_map"), f"hf:{name}")
    path, source = _find_or_download(name, revision)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json: hf: needs a folder written by save_pretrained")
    if not any(path.glob("*.safetensors")):
        pickles = sorted(file.name for file in path.iterdir() if file.suffix in (*PICKLE_SUFFIXES, *TORCH_SUFFIXES))
        content = f"only {', '.join(pickles)}, which sosie does not unpickle" if pickles else "no weights at all"
        raise ValueError(
            f"{path} has no .safetensors file but {content}. If you trust it, convert it with "
            f"AutoModel.from_pretrained({str(path)!r}).save_pretrained(folder)"
        )
    transformers = import_library("transformers", f"hf:{text}", extra="hf")
    safely = {"local_files_only": True, "trust_remote_code": False}
    # As the file has them, which transformers 5 does unasked.
    old = transformers.__version__.startswith("4.")
    loading: dict[str, Any] = {"torch_dtype": "auto"} if old else {}
    if "dtype" in options:
        loading = {"torch_dtype" if old else "dtype": _float_type(options["dtype"], f"hf:{name}")}
    if "device_map" in options:
        import_library("accelerate", f"hf:{name} with device_map=")
        loading["device_map"] = options["device_map"]
    try:
        with _silent(transformers.utils.logging):  # what its report on loading says is checked below
            kind = _saved_kind(transformers, path) if options.get("head", head) else transformers.AutoModel
            model, facts = kind.from_pretrained(
                str(path), use_safetensors=True, output_loading_info=True, **safely, **loading
            )
            has_words = (path / "tokenizer.json").is_file() or (path / "vocab.txt").is_file()
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), **safely) if has_words else None
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"hf:{text} comes with code of its own, which sosie does not run: if you trust it, open the model "
                "yourself and compare the module"
            ) from error
        raise ValueError(f"hf:{text} cannot be opened: {error}") from error
    # A pooler is often not saved, and only the model's pooled output depends on it.
    missing = sorted(name for name in facts["missing_keys"] if "pooler" not in name.split("."))
    if missing:
        raise ValueError(
            f"hf:{text} has no weights for {listed(missing, 3)}, which would be random: do they fit its config.json?"
        )
    if unused := _blocks_without_place(model, facts["unexpected_keys"]):
        raise ValueError(f"hf:{text} has weights of {listed(unused, 3)}, which its config.json has no place for")
    if tokenizer and (most := getattr(model.config, "max_position_embeddings", None)):
        tokenizer.model_max_length = min(tokenizer.model_max_length, most)  # many are saved without a limit
    return model, _image_normalisation(path / "preprocessor_config.json") or (tokenizer and Tokenise(tokenizer)), source


def _float_type(name: Any, wanted_by: str) -> torch.dtype:
    kinds = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.float16, torch.bfloat16)}
    return kinds[one_of(str(name).removeprefix("torch."), f"dtype of {wanted_by}", kinds)]


def _find_or_download(name: str, revision: str | None) -> tuple[Path, str]:
    """Return the folder of that name, or else the files of a repository of the Hub, and what to call it."""
    try:
        if revision is None:
            return find_file(name, "SOSIE_WEIGHTS"), Path(name).name or name
    except FileNotFoundError as error:
        if not _REPOSITORY.fullmatch(name):
            raise FileNotFoundError(f"{error}. A model of the Hugging Face Hub is hf:org/name") from error
    if not _REPOSITORY.fullmatch(name):
        raise ValueError(f"{name!r} is not a repository of the Hugging Face Hub: write hf:org/name@revision")
    whole = name if revision is None else f"{name}@{revision}"
    hub = import_library("huggingface_hub", f"hf:{whole}", extra="hf")
    wanted = ["*.json", "*.safetensors", "*.txt", "*.model"]  # no code, no pickles
    try:
        folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # the Hub's errors are of both kinds; its own texts are a page long
        raise FileNotFoundError(
            f"hf:{whole}: there is no folder {name} here, and the Hugging Face Hub did not give it "
            f"({type(error).__name__}): check the name, the revision and the network, or download it elsewhere and "
            "name its folder"
        ) from error
    return folder, f"{name.partition('/')[2]}@{revision or folder.name[:8]}"


def _saved_kind(transformers: Any, path: Path) -> Any:
    """Return the class that a model was saved from, one of transformers' own, or AutoModel if the folder has none."""
    config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], None)
    return kind if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) else transformers.AutoModel


def _blocks_without_place(model: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Return the numbered blocks that the weights have and the model, whose others they are, has not."""
    modules, prefix = dict(model.named_modules()), f"{getattr(model, 'base_model_prefix', '')}."
    wanted = {match[1].removeprefix(prefix) for name in unexpected if (match := re.match(r"(.+?\.\d+)\.", name))}
    have = modules.keys() | {name.removeprefix(prefix) for name in modules}
    return sorted((name for name in wanted - have if name.rpartition(".")[0] in have), key=natural)


@contextmanager
def _silent(logging: Any) -> Iterator[None]:
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _image_normalisation(path: Path) -> Normalise | None:
    """Return the normalisation of an image model's own processor; None for text models."""
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not facts.get("do_normalize", True) or "image_mean" not in facts or "image_std" not in facts:
        return None
    return Normalise(tuple(facts["image_mean"]), tuple(facts["image_std"]))


Prepare = Callable[[Any], Any]  # normalises images or tokenises texts

_FILE = re.compile(r"(?P<file>.+?\.py):(?P<rest>.*)", re.DOTALL)
_HUB = re.compile(r"(?P<name>.+?)(?P<options>\(\s*\w+\s*=[^()]*\))?(?:@(?P<revision>[^@()]+))?", re.DOTALL)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_LIBRARY = re.compile(r"(?P<library>torchvision|timm|hf|onnx):(?P<rest>.+)", re.DOTALL)
_CALL = re.compile(r"(?P<call>[^@(]+(?:\(.*?\))?)(?:@(?P<weights>.+))?", re.DOTALL)


@dataclass(frozen=True)
class NamedModel:
    """A model in eval mode with a short name and its own normalisation of images in [0, 1], its tokeniser, or None.

    `weights` is where the weights came from when the model was opened; `weights_of` checks that this is still true.
    """

    model: nn.Module
    name: str
    prepare: Prepare | None
    spec: str
    weights: str = ""
    versions: tuple[int, ...] = ()  # of the parameters, which torch increments at every change


def with_name(thing: Any, prepare: Any = None) -> tuple[Any, str, Any]:
    """Return the model, its name and how its inputs are prepared; a `NamedModel` brings the last two."""
    if isinstance(thing, NamedModel):
        return thing.model, thing.name, prepare or thing.prepare
    return thing, type(thing).__name__, prepare


def weights_of(thing: Any) -> str:
    """Return where the weights come from, as "random weights (seed 0)"; "" if unknown or no longer true."""
    untouched = isinstance(thing, NamedModel) and thing.versions == _versions(thing.model)
    return thing.weights if untouched else ""


def _versions(model: nn.Module) -> tuple[int, ...]:
    return tuple(-1 if p.is_inference() else p._version for p in model.parameters())


def open_model(spec: str, *, seed: int = 0, head: bool = False) -> NamedModel:
    """Open the model that a specification names, in eval mode.

    - `tiny10@weights.safetensors`: sosie's architecture; options that are left out are read from the file
    - `resnet20(width=2, shortcut='B')`: options as Python literals; random weights from `seed`
    - any name that an installed package offers under the entry point `sosie.models`, a function that returns a module
    - `path/to/file.py:factory@weights.safetensors`: your own, which returns a module or a program of
      `torch.export`, or (module, prepare)
    - `torchvision:resnet18`, `timm:…`: random, `@DEFAULT` for the library's own weights, or `@file`; models with
      weights get the library's normalisation
    - `hf:folder`: a folder written by transformers' save_pretrained, with its tokeniser; `hf:folder(head=True)`, or
      `head` here: with the head that was saved; `hf:org/name@revision`: a repository of the Hugging Face Hub, of which
      nothing but weights and settings is downloaded, and no code
    - `onnx:file.onnx`: an ONNX file, which onnxruntime runs on the CPU; its named values are the sites

    `seed` and `normalise` are options of sosie's and of the libraries' models, others go to the architecture:
    `tiny10(seed=1, normalise='cifar')`. Files are searched for as given, then in the folders of SOSIE_WEIGHTS. The
    global random state does not change.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(
            f"a model specification is text such as 'tiny10@weights.safetensors', got {reprlib.repr(spec)}"
        )
    spec = spec.strip()
    file, library = _FILE.fullmatch(spec), _LIBRARY.fullmatch(spec)
    if file:
        model, name, prepare, weights = _open_file(file["file"], file["rest"], seed)
    elif library:
        model, name, prepare, weights = _open_library(library["library"], library["rest"], seed, head)
    else:
        model, name, prepare, weights = _open_built_in(spec, seed)
    return NamedModel(model.eval(), name, prepare, spec, weights, _versions(model))


def _open_built_in(spec: str, seed: int) -> tuple[nn.Module, str, Prepare | None, str]:
    call, weights = _split(spec)
    suffix = Path(call).suffix.lower()
    if suffix == ".py":
        raise ValueError(f"{call!r} names no function: write {call}:factory")
    if suffix in (".safetensors", *TORCH_SUFFIXES, *PICKLE_SUFFIXES):
        raise ValueError(
            f"{call!r} names no architecture: write tiny10@{call}, or path/to/file.py:factory@{call}{_hint(call)}"
        )
    if suffix == ".pt2":
        raise ValueError(
            f"{call!r} is a program of torch.export, and torch.export.load unpickles, which can run any code: sosie "
            f"never does it. If you trust the file, give torch.export.load({call!r}) in Python, or write a function "
            "that returns it, path/to/file.py:factory"
        )
    if hint := _hint(call):
        raise ValueError(f"{call!r} names no architecture{hint}")
    name, options = parse_call(call)
    (_, _, ignore), _ = find_architecture(name)
    seed = options.pop("seed", seed)
    stated = options.pop("normalise", None)
    label = _label(name, options)
    if weights is None:
        with seeded(seed):
            model = build_model(name, options)
        return model, f"{label}-seed{seed}", _parse(stated, spec), f"random weights (seed {seed})"
    path = find_file(weights, "SOSIE_WEIGHTS")
    state, metadata = read_weights(path)
    state = {key: value for key, value in masked_weights(state).items() if not key.startswith(ignore)}
    with seeded(seed):
        model = build_model(name, options, state)
    fit_weights(model, state, source=str(path))
    prepare = _parse(stated or metadata.get("normalise"), path)
    return model, _short_name(label, path), prepare, f"weights of {path.name}"


def _hint(text: str) -> str:
    """Return how to name an ONNX file, or a folder of transformers (or a file in it), given without its prefix."""
    path = Path(text).expanduser()
    if path.suffix.lower() == ".onnx":
        return f"; an ONNX file is onnx:{text}"
    folder = path if path.is_dir() else path.parent
    return f"; a folder of transformers is hf:{folder}" if path.exists() and (folder / "config.json").is_file() else ""


def _open_file(file: str, rest: str, seed: int) -> tuple[nn.Module, str, Prepare | None, str]:
    call, weights = _split(rest) if rest.strip() else ("", None)
    factory = load_factory(f"{file}:{call}")
    with _globally_seeded(seed):
        result = factory()
    model, prepare = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    model = with_layers(model)
    if not isinstance(model, nn.Module) or not (prepare is None or callable(prepare)):
        pair = f"({type(model).__name__}, {type(prepare).__name__})"
        got = type(result).__name__ if result is model else pair
        raise TypeError(f"{call} in {file} must return an nn.Module or (nn.Module, prepare), it returned {got}")
    if weights is None:
        return model, f"{Path(file).stem}:{call}", prepare, ""  # only the factory knows the source of the weights
    path = find_file(weights, "SOSIE_WEIGHTS")
    metadata = load_weights(model, path)
    prepare = prepare or _parse(metadata.get("normalise"), path)
    return model, _short_name(call, path), prepare, f"weights of {path.name}"


def _open_library(library: str, rest: str, seed: int, head: bool) -> tuple[nn.Module, str, Prepare | None, str]:
    prepare: Prepare | None
    if library == "onnx":
        from .onnx_file import open_onnx

        return open_onnx(rest), Path(rest).stem, None, f"weights of {Path(rest).name}"
    if library == "hf":
        with seeded(seed):
            model, prepare, name = open_hugging_face(rest, head=head)
        return model, name, prepare, f"weights of {name}"
    call, weights = _split(rest)
    name, options = parse_call(call)
    seed = options.pop("seed", seed)
    stated = options.pop("normalise", None)
    if refused := options.keys() & {"weights", "pretrained", "checkpoint_path"}:
        plain = f"{library}:{name}"
        raise ValueError(f"weights are named as {plain}@{LIBRARY_WEIGHTS} or @file, not by the option {min(refused)}")
    pretrained = weights == LIBRARY_WEIGHTS
    with seeded(seed):
        open_library = open_torchvision if library == "torchvision" else open_timm
        model, normalisation, exception = open_library(name, options, pretrained)
    label = f"{library}-{_label(name, options)}"
    if weights is None:
        return model, f"{label}-seed{seed}", _parse(stated, rest), f"random weights (seed {seed}){exception}"
    if pretrained:
        random_part = f"{exception} (seed {seed})" if exception else ""
        prepare = _parse(stated, rest) if stated else normalisation
        return model, label, prepare, f"{library}'s own weights{random_part}"
    path = find_file(weights, "SOSIE_WEIGHTS")
    metadata = load_weights(model, path)
    stated = stated or metadata.get("normalise")
    return model, _short_name(name, path), _parse(stated, path) if stated else normalisation, f"weights of {path.name}"


def _label(name: str, options: dict[str, Any]) -> str:
    return call_text(name, options) if options else name


def _split(text: str) -> tuple[str, str | None]:
    """Split `call` or `call@weights`."""
    match = _CALL.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot read {text!r}: write name, name@weights or name(width=2)@weights.safetensors")
    return match["call"].strip(), match["weights"]


def _parse(text: Any, source: str | Path) -> Prepare | None:
    try:
        return parse_normalisation(str(text)) if text else None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _short_name(call: str, path: Path) -> str:
    """Return the name of the weights file, preceded by the architecture if the file does not contain it."""
    plain = call.partition("(")[0]
    known = plain.replace("_", "").replace("-", "").lower() in path.stem.replace("_", "").replace("-", "").lower()
    return path.stem if known and plain == call else f"{call}@{path.stem}"


def seeded(seed: int) -> AbstractContextManager[Any]:
    """Seed what this thread draws from torch's global generators, without touching these.

    The numbers are those that `torch.manual_seed` would give; another thread may draw from the global generators
    meanwhile.
    """
    return _OwnGenerators(whole_number(seed, "seed", least=0, most=2**32 - 1))


class _OwnGenerators(OperationMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._of = functools.cache(lambda device: torch.Generator(device).manual_seed(seed))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            given = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), kwargs.get("device"))
            device = torch.device("cpu" if given is None else given)
            if device.type != "meta" and _takes_generator(func.overloadpacket):
                return func.overloadpacket(*args, **{**kwargs, "generator": self._of(device)})
        return func(*args, **kwargs)


@functools.cache
def _takes_generator(packet: Any) -> bool:
    schemas = (getattr(packet, name)._schema for name in packet.overloads())
    return any(argument.name == "generator" for schema in schemas for argument in schema.arguments)


_SEEDING = threading.RLock()


@contextmanager
def _globally_seeded(seed: int) -> Iterator[None]:
    """Seed a user's own function, which may draw from NumPy and Python too, or set a seed itself.

    This sets the global states, for one model at a time, and restores them; draws of other threads meanwhile come from
    this seed.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with _SEEDING, torch.random.fork_rng(devices=devices):
        python, array = random.getstate(), np.random.get_state()
        # torch.manual_seed would also queue a seed for devices that are not set up yet
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
