"""The networks of the zoo and their images: what each is, and how it is trained."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from counting import spearman
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from sosie.data import open_images
from sosie.factory import listed_folders
from sosie.files import write_atomically
from sosie.models import atom_layers, build_model, freeze, open_model
from sosie.models.specification import seeded
from sosie.train import Augment, accuracy, fit_side_by_side
from sosie.train import Recipe as TrainingRecipe
from sosie.train.heads import find_head

if TYPE_CHECKING:
    from run import Settings


# What networks are, what they are trained on, and how.


Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Recipe:
    """How networks are trained: by Adam, the rate falling as a cosine, images shifted by up to two pixels."""

    steps: int  # about: whole epochs
    rate: float
    batch: int = 125
    decay: float = 0.01

    def epochs(self, images: int) -> int:
        """So many that every data set gets the same number of steps."""
        return max(1, round(self.steps / -(-images // self.batch)))


@dataclass(frozen=True)
class Architecture:
    """One of sosie's, all of at most 90,000 parameters."""

    name: str  # here
    network: str  # in sosie.models
    options: Options


@dataclass(frozen=True)
class Source:
    """A data set that networks are trained on from scratch: some of its classes, in two halves of equally many."""

    name: str
    classes: int  # the first so many
    half: int  # images


@dataclass(frozen=True)
class Target:
    """A small task that no network was trained on: some classes of a data set, which may be changed first."""

    name: str
    dataset: str
    classes: range
    images: int  # to train on; the rest of the test images to test on
    inverted: bool = False


# Images that stay on the device as bytes, (N, 3, 32, 32), in the order of their files.


NORMALISE = "mean .5 .5 .5 std .25 .25 .25"  # one for all: networks see the data of others
FILES = {  # the first that is there; a part of a set is enough
    ("mnist", "train"): ("mnist-train10k.npz",),
    ("mnist", "test"): ("mnist-test10k.npz",),
    ("fashion-mnist", "train"): ("fashion-mnist-train10k.npz",),
    ("fashion-mnist", "test"): ("fashion-mnist-test10k.npz",),
    ("cifar10", "train"): ("cifar10-train50k-a.npz", "cifar10-train10k.npz"),
    ("cifar10", "test"): ("cifar10-test10k.npz",),
    ("cifar100", "train"): ("cifar100-train49k-a.npz",),
    ("cifar100", "test"): ("cifar100-test10k.npz",),
    ("tiny-imagenet", "train"): ("tiny-imagenet-32-train.npz",),  # papers/pack_tiny_imagenet.py makes these two
    ("tiny-imagenet", "test"): ("tiny-imagenet-32.npz",),
}


@dataclass(frozen=True, eq=False)
class Images:
    """Images as bytes and their labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, some: slice) -> Images:
        return Images(self.images[some], self.labels[some])

    def of(self, classes: Sequence[int]) -> Images:
        """Those of some classes, in turn, so that any beginning is balanced; labels count from 0."""
        each = [(self.labels == c).nonzero().flatten() for c in classes]
        count = min(map(len, each))
        if not count:
            raise ValueError(f"no image of one of the classes {list(classes)}")
        index = torch.stack([one[:count] for one in each], 1).flatten()
        labels = torch.arange(len(classes), device=index.device).repeat(count)
        return Images(self.images[index], labels)


@lru_cache
def whole(settings: Settings, name: str, split: str) -> Images:
    """A data set on the device; grey images get a black border and three equal channels."""
    if settings.synthetic:
        return _random(settings, name, split)
    if name == "tiny-imagenet":
        with np.load(_find(name, split), allow_pickle=False) as found:
            images = torch.from_numpy(found["images"]).permute(0, 3, 1, 2).contiguous()
            labels = torch.from_numpy(found["labels"].astype(np.int64))
    else:
        opened = open_images(f"npz:{_find(name, split)}", split=split)
        assert opened.labels is not None
        images, labels = opened.images, opened.labels.long()
    if images.shape[1] == 1:
        border = (32 - images.shape[-1]) // 2
        images = functional.pad(images, [border] * 4).expand(-1, 3, -1, -1).contiguous()
    return Images(images.to(settings.device), labels.to(settings.device))


def _find(name: str, split: str) -> Path:
    for file in FILES[name, split]:
        for folder in listed_folders("SOSIE_DATA"):
            if (folder / file).is_file():
                return folder / file
    raise FileNotFoundError(f"{' or '.join(FILES[name, split])} is in no folder of SOSIE_DATA: README.md says whence")


def _random(settings: Settings, name: str, split: str) -> Images:
    """Classes differ in their mean, so that something can be learnt."""
    classes, each = 10, 2 * settings.sources[0].half // 3
    generator = torch.Generator().manual_seed(sum(map(ord, name + split)))
    labels = torch.arange(classes).repeat(each)
    drawn = torch.randint(0, 128, (len(labels), 3, 32, 32), generator=generator) + 12 * labels[:, None, None, None]
    return Images(drawn.to(torch.uint8).to(settings.device), labels.to(settings.device))


@lru_cache
def learnt(settings: Settings, source: Source, half: int) -> Images:
    """The first or the second half of what there is to train on."""
    found = whole(settings, source.name, "train").of(range(source.classes))
    if len(found) < 2 * source.half:
        raise ValueError(f"{source.name}: {len(found)} images of {source.classes} classes, not two times {source.half}")
    return found[half * source.half : (half + 1) * source.half]


@lru_cache
def tested(settings: Settings, source: Source) -> Images:
    return whole(settings, source.name, "test").of(range(source.classes))[: settings.tested]


@lru_cache
def task(settings: Settings, target: Target, split: str) -> Images:
    """What a target is learnt from, or tested on."""
    found = whole(settings, target.dataset, split).of(target.classes)
    found = found[: target.images if split == "train" else settings.tested]
    return Images(255 - found.images, found.labels) if target.inverted else found


class Prepare:
    """[0, 1] to normalised; the constants are kept on the device, so that nothing waits for them."""

    def __init__(self, device: str) -> None:
        self.mean, self.std = torch.tensor(0.5, device=device), torch.tensor(0.25, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


# Which networks there are, how they are related, and how each is made, written and read.


COPIES = ("trained_on", "pruned", "rounded")
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A network, and where it comes from."""

    name: str
    architecture: str
    dataset: str  # what it does
    seed: int
    relation: str  # "scratch", "fine_tuned", or one of COPIES
    parent: str | None = None

    @property
    def start(self) -> int:
        """What it is drawn from, and the order of its images: no two networks have that in common but by descent."""
        return zlib.crc32(self.name.encode()) & 0x7FFFFFFF


def scratch_jobs(s: Settings) -> list[Job]:
    return [
        Job(f"{a.name}-{d.name}-s{seed}", a.name, d.name, seed, "scratch")
        for d in s.sources
        for a in s.architectures
        for seed in s.seeds
    ]


def parents(s: Settings) -> list[Job]:
    return [job for job in scratch_jobs(s) if job.seed in s.parents]


def fine_tuned_jobs(s: Settings) -> list[Job]:
    names = [source.name for source in s.sources]
    found = []
    for job in parents(s):
        place = names.index(job.dataset)
        for step in range(1, s.further + 1):
            to = names[(place + step) % len(names)]
            found.append(Job(f"{job.name}-to-{to}", job.architecture, to, job.seed, "fine_tuned", job.name))
    return found


def copy_jobs(s: Settings) -> list[Job]:
    """The kinds in turn, so that each architecture and data set has about as many of each."""
    return [
        Job(f"{job.name}-{kind}", job.architecture, job.dataset, job.seed, kind, job.name)
        for k, job in enumerate(parents(s))
        for kind in [COPIES[k % len(COPIES)]]
    ]


def all_jobs(s: Settings) -> list[Job]:
    return [*scratch_jobs(s), *fine_tuned_jobs(s), *copy_jobs(s)]


def architecture_of(s: Settings, job: Job) -> Architecture:
    return next(each for each in s.architectures if each.name == job.architecture)


def fresh(s: Settings, architecture: Architecture, classes: int, seed: int) -> nn.Module:
    """A network from a seed; those of atoms all have the same coefficients, which are not trained."""
    options = {"classes": classes, **dict(architecture.options)}
    with seeded(seed):
        model = build_model(architecture.network, options)
    layers = atom_layers(model)
    if layers:
        with seeded(s.coefficients):
            shared = atom_layers(build_model(architecture.network, options))
        with torch.no_grad():
            for name, layer in layers.items():
                layer.coefficients.copy_(shared[name].coefficients)
        freeze(model, "coefficients")
    return model.to(s.device)


def with_new_head(s: Settings, job: Job, classes: int, seed: int) -> nn.Module:
    """A trained network whose last layer is drawn anew."""
    model = fresh(s, architecture_of(s, job), classes, seed)
    head = find_head(model)
    state = {name: value for name, value in read(s, job).state_dict().items() if not name.startswith(f"{head}.")}
    missing, unknown = model.load_state_dict(state, strict=False)
    assert {name.rpartition(".")[0] for name in missing} == {head}
    assert not unknown
    return model


@torch.no_grad()
def pruned(model: nn.Module) -> nn.Module:
    """Half of every layer's weights set to 0, the smallest: without training afterwards."""
    for weight in _weights(model):
        weight[weight.abs() <= weight.abs().flatten().median()] = 0
    return model


@torch.no_grad()
def rounded(model: nn.Module) -> nn.Module:
    """Every layer's weights rounded to 8 bits: to whole multiples of their largest size / 127."""
    for weight in _weights(model):
        step = weight.abs().max() / 127
        weight.copy_((weight / step).round() * step)
    return model


def _weights(model: nn.Module) -> Iterable[Tensor]:
    return (parameter for parameter in model.parameters() if parameter.ndim > 1)


# Files


def path_of(s: Settings, job: Job) -> Path:
    return s.nets / f"{job.name}.safetensors"


def specification(s: Settings, job: Job) -> str:
    """As sosie opens it: the options are read from the file."""
    return f"{architecture_of(s, job).network}@{path_of(s, job)}"


def read(s: Settings, job: Job) -> nn.Module:
    return open_model(specification(s, job)).model.to(s.device)


def write(s: Settings, job: Job, model: nn.Module, about: Record, recipe: Recipe | None) -> None:
    """The numbers, how images are normalised, and what is known: in one file, whole or not at all."""
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    record = {
        **asdict(job),
        "file": path_of(s, job).name,
        "network": architecture_of(s, job).network,
        "options": dict(architecture_of(s, job).options),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "recipe": recipe and asdict(recipe),
        **about,
    }
    metadata = {"normalise": NORMALISE, "record": json.dumps(record)}
    write_atomically(path_of(s, job), lambda path: save_file(state, path, metadata))


def record_of(s: Settings, job: Job) -> Record:
    with safe_open(path_of(s, job), framework="pt") as file:
        found: Record = json.loads(file.metadata()["record"])
    return found


def is_there(s: Settings, job: Job, recipe: Recipe | None) -> bool:
    """Whether it was trained before, by the same recipe."""
    return path_of(s, job).is_file() and record_of(s, job)["recipe"] == (recipe and asdict(recipe))


# Experiments `train` and `finetune`: the zoo's networks, and what becomes of them on tasks that none has seen.


Make = Callable[[Job, Source], nn.Module]


def train(s: Settings) -> dict[str, Any]:
    """All networks, those that are there kept; manifest.json lists them."""
    s.nets.mkdir(parents=True, exist_ok=True)
    before = {job.name: job for job in scratch_jobs(s)}

    def from_scratch(job: Job, source: Source) -> nn.Module:
        return fresh(s, architecture_of(s, job), source.classes, job.start)

    def from_parent(job: Job, source: Source) -> nn.Module:
        assert job.parent is not None
        return with_new_head(s, before[job.parent], source.classes, job.start)

    def as_parent(job: Job, _: Source) -> nn.Module:
        assert job.parent is not None
        model = read(s, before[job.parent])
        return freeze(model, "coefficients") if atom_layers(model) else model

    copies = copy_jobs(s)
    _train(s, scratch_jobs(s), from_scratch, s.scratch, half=0)
    _train(s, fine_tuned_jobs(s), from_parent, s.fine_tune, half=0)
    _train(s, [job for job in copies if job.relation == "trained_on"], as_parent, s.train_on, half=1)
    for job in copies:
        change = {"pruned": pruned, "rounded": rounded}.get(job.relation)
        if change and not is_there(s, job, None):
            source = _source(s, job)
            _write(s, [job], [change(as_parent(job, source))], source, None, 0.0)
    records = [record_of(s, job) for job in all_jobs(s)]
    write_atomically(s.nets / "manifest.json", json.dumps(records, indent=1) + "\n")
    return {"numbers": _summary(s, records), "networks": records}


def _train(s: Settings, jobs: Sequence[Job], make: Make, recipe: Recipe, half: int) -> None:
    """So many at once as go well together, and written down as soon as they are trained."""
    for source in s.sources:
        missing = [job for job in jobs if job.dataset == source.name and not is_there(s, job, recipe)]
        for group in _groups(missing, s.at_once):
            models = [make(job, source) for job in group]
            start = time.perf_counter()
            _fit(s, models, learnt(s, source, half), recipe, [job.start for job in group], f"networks of {source.name}")
            _write(s, group, models, source, recipe, (time.perf_counter() - start) / len(group))


def _groups(jobs: Sequence[Job], at_once: int) -> Iterator[Sequence[Job]]:
    return (jobs[k : k + at_once] for k in range(0, len(jobs), at_once))


def _fit(
    s: Settings, models: Sequence[nn.Module], images: Images, recipe: Recipe, seeds: Sequence[int], what: str
) -> None:
    fit_side_by_side(
        models,
        images.images,
        images.labels,
        recipe=TrainingRecipe(
            epochs=recipe.epochs(len(images)),
            batch=recipe.batch,
            rate=recipe.rate,
            optimiser="adam",
            decay=recipe.decay,
            schedule="cosine",
            augment=Augment(pad=2, mirror=False),
            prepare=Prepare(s.device),
            mixed=s.mixed,
        ),
        seeds=seeds,
        at_once=s.at_once,
        task=what,
    )


def _write(
    s: Settings, jobs: Sequence[Job], models: Sequence[nn.Module], source: Source, recipe: Recipe | None, seconds: float
) -> None:
    for job, model in zip(jobs, models, strict=True):
        reached = _accuracy(s, model, tested(s, source))
        if not all(bool(value.isfinite().all()) for value in model.state_dict().values()):
            raise ValueError(f"{job.name} has diverged: lower the rate in run.py")
        about = {"classes": source.classes, "accuracy": reached, "seconds": round(seconds, 2)}
        write(s, job, model, about, recipe)


def _accuracy(s: Settings, model: nn.Module, images: Images) -> float:
    return accuracy(model.eval(), images.images, images.labels, batch=1000, prepare=Prepare(s.device))


def _source(s: Settings, job: Job) -> Source:
    return next(each for each in s.sources if each.name == job.dataset)


def _summary(s: Settings, records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How many, how large, and how well they do what they were trained for, over what guessing gives."""
    own = [each for each in records if each["relation"] == "scratch"]
    numbers = {
        "networks": len(records),
        "largest_parameters": max(each["parameters"] for each in records),
        "megabytes": sum(path_of(s, job).stat().st_size for job in all_jobs(s)) / 1e6,
        "least_over_chance": min(each["accuracy"] * each["classes"] for each in own),
    }
    for source in s.sources:
        reached = [each["accuracy"] for each in own if each["dataset"] == source.name]
        numbers[f"accuracy_{source.name}"] = sum(reached) / len(reached)
    return numbers


# What fine-tuning really gives


def finetune(s: Settings) -> dict[str, Any]:
    """Every network from scratch, fine-tuned whole on every target: accuracy on images it has not seen."""
    return _finetune(s, 0)


def finetune_again(s: Settings) -> dict[str, Any]:
    """The same with another head and another order of the images: how far the truth agrees with itself."""
    found, first = _finetune(s, 1), _finetune(s, 0)["accuracies"]
    agreed = [spearman(first[name], reached) for name, reached in found["accuracies"].items()]
    found["numbers"]["agreement"] = sum(each or 0.0 for each in agreed) / len(agreed)
    return found


def _finetune(s: Settings, seed: int) -> dict[str, Any]:
    jobs = scratch_jobs(s)
    found = {target.name: _reached(s, target, jobs, seed) for target in s.targets}
    numbers = {f"mean_{name}": sum(reached) / len(reached) for name, reached in found.items()}
    numbers |= {f"spread_{name}": max(reached) - min(reached) for name, reached in found.items()}
    return {"numbers": numbers, "models": [job.name for job in jobs], "accuracies": found}


def _reached(s: Settings, target: Target, jobs: Sequence[Job], seed: int) -> list[float]:
    """The accuracy of each network on one target; a file of its own, so that a run that was ended can go on."""
    key = {"target": repr(target), "recipe": repr(s.real), "seed": seed, "models": [job.name for job in jobs]}
    path = s.nets / f"finetune-{target.name}-{seed}.json"
    if path.is_file() and (kept := json.loads(path.read_text("utf-8")))["of"] == key:
        return list(kept["accuracies"])
    images, unseen = task(s, target, "train"), task(s, target, "test")
    reached = []
    for group in _groups(jobs, s.at_once):
        models = [with_new_head(s, job, len(target.classes), 10_000 + seed) for job in group]
        _fit(s, models, images, s.real, [seed] * len(group), f"fine-tuning for {target.name}")
        reached += [round(_accuracy(s, model, unseen), 5) for model in models]
        if s.device.startswith("cuda"):
            torch.cuda.synchronize()
    write_atomically(path, json.dumps({"of": key, "accuracies": reached}) + "\n")
    return reached
