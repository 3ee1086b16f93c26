"""The networks in a sosie zoo, without a word about who comes from whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from data import tested
from networks import Job, all_jobs, path_of, specification
from settings import Settings

from sosie import Zoo
from sosie.factory import listed_folders

PUBLISHED = {  # files of SOSIE_WEIGHTS, and what opens them; networks of 224 × 224 images are left out
    "akamaster-resnet20-cifar10": "resnet20",
    "akamaster-resnet32-cifar10": "resnet32",
    "akamaster-resnet56-cifar10": "resnet56",
    **{f"drfrankenstein-resnet20w1-cifar10-seed{k:02}": "resnet20" for k in range(2)},
    **{f"drfrankenstein-tiny10-cifar10-seed{k:02}": "tiny10" for k in range(12)},
}


@dataclass(frozen=True)
class Known:
    """What is true of a network, and the zoo is not told."""

    name: str
    architecture: str
    dataset: str
    relation: str
    parent: str | None
    specification: str

    @property
    def root(self) -> str:
        """The network from scratch that it comes from: itself, or its parent."""
        return self.parent or self.name

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.relation,) if self.relation == "published" else (self.relation, "ours")


def known(s: Settings) -> dict[str, Known]:
    """All networks by name: ours, and the published ones that are there."""
    if missing := [job.name for job in all_jobs(s) if not path_of(s, job).is_file()]:
        raise FileNotFoundError(f"{len(missing)} networks, {missing[0]} the first, are not in {s.nets}: --only train")
    found = [_known(s, job) for job in all_jobs(s)]
    for name, network in PUBLISHED.items() if not s.synthetic else ():
        for folder in listed_folders("SOSIE_WEIGHTS"):
            if (folder / f"{name}.safetensors").is_file():
                kind = "-".join(name.split("-")[:2])  # who published it, and the architecture
                text = f"{network}@{folder / name}.safetensors"
                found.append(Known(name, kind, "cifar10", "published", None, text))
                break
    return {each.name: each for each in found}


def _known(s: Settings, job: Job) -> Known:
    return Known(job.name, job.architecture, job.dataset, job.relation, job.parent, specification(s, job))


def filled(s: Settings, networks: dict[str, Known]) -> Zoo:
    """A zoo of these networks; those that it has already stay."""
    zoo = Zoo(s.nets / "zoo", data=[probe(s)], inputs=s.probes)
    if gone := [name for name in zoo if name not in networks]:
        zoo.remove(*gone)
    facts = {each.name: {"tags": each.tags} for each in networks.values()}
    done = zoo.add({name: each.specification for name, each in networks.items()}, facts=facts, workers=s.workers)
    if done.failed:  # trained anew since
        again = {name: networks[name].specification for name in done.failed}
        done = zoo.add(again, facts={name: facts[name] for name in again}, replace=True)
    if done.failed:
        raise RuntimeError(f"{len(done.failed)} networks have no fingerprint: {done.failed}")
    return zoo


def probe(s: Settings) -> torch.Tensor:
    """The first test images of all data sets, in turn."""
    each = -(-s.probes // len(s.sources))
    images = torch.stack([tested(s, source).images[:each] for source in s.sources], 1).flatten(0, 1)
    if len(images) < s.probes:
        raise ValueError(f"{len(images)} images to probe with, {s.probes} are wanted")
    return images[: s.probes].cpu().float() / 255
