"""Which networks there are, how they are related, and how each is made, written and read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from data import NORMALISE
from safetensors import safe_open
from safetensors.torch import save_file
from settings import Architecture, Recipe, Settings
from torch import Tensor, nn

from sosie.files import write_atomically
from sosie.models import atom_layers, build_model, freeze, open_model
from sosie.models.specification import seeded
from sosie.train.heads import find_head

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
