"""The networks, the images, training of many at once, and how alike they are: by atoms, by what they represent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sosie.benchmark.trials import bootstrap, pearson, percentile_interval, spearman
from sosie.capture import watch
from sosie.data import open_images
from sosie.factory import listed_folders
from sosie.linalg import centred, double_centred, u_centred
from sosie.measures import atom_grassmann
from sosie.models import alexnet, atom_layers, freeze, small_cnn, vgg11
from sosie.stats import AtomTable
from sosie.train.many_networks import Stack, stacked_state, without_numbers

if TYPE_CHECKING:
    from run import Settings


# How networks are trained, and what they are asked about. What the paper has instead is in [brackets].


@dataclass(frozen=True)
class Recipe:
    """How networks are trained: SGD with momentum at a constant rate, no augmentation, no weight decay."""

    epochs: int
    batch: int = 64
    rate: float = 0.01
    momentum: float = 0.9
    images: int | None = None  # a network, at most
    clip: float | None = None  # the gradient of a network to this length, where training diverged without


@dataclass(frozen=True)
class Probes:
    """What networks are asked about, to be compared by what they represent."""

    images: int = 1000  # as the paper's federated study; flattened for CKA
    positions: int = 16_384  # rows for CCA: images × places of a channel, drawn once for all networks of a study


# The networks: AlexNet, VGG-11 and the clients' small one, made of atoms, in copies that share what they should.


State = dict[str, Tensor]


def make(settings: Settings, kind: str, classes: int, atoms: int, seed: int) -> nn.Module:
    """A network on the device, its parameters drawn from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "alexnet":
            model = alexnet(classes=classes, hidden=settings.hidden, dropout=0, atoms=atoms)
        elif kind == "vgg11":
            model = vgg11(classes=classes, dropout=0, atoms=atoms)
        else:  # the clients', and all of the smoke run
            model = small_cnn(classes=classes, width=settings.width, channels=3, size=32, atoms=atoms)
    return model.to(settings.device)


def sites_of(model: nn.Module) -> dict[str, str]:
    """The ReLU that follows each layer of atoms, by the layer's name: where representations are read."""
    names = [name for name, _ in model.named_modules()]
    after = {}
    for name in atom_layers(model):
        after[name] = names[names.index(name) + 1]
        assert isinstance(model.get_submodule(after[name]), nn.ReLU)
    return after


def copies(base: nn.Module, count: int, *, redraw: int | None = None) -> list[nn.Module]:
    """Networks with the base's coefficients, held fixed, and its atoms; `redraw`: atoms of their own, from a seed."""
    found = [freeze(copy.deepcopy(base), "coefficients") for _ in range(count)]
    if redraw is not None:
        for k, model in enumerate(found):
            draw_atoms(model, redraw + k)
    return found


def draw_atoms(model: nn.Module, seed: int) -> nn.Module:
    """New atoms of the size of the old ones, layer by layer: only their directions are other."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in atom_layers(model).values():
            fresh = torch.randn(layer.atoms.shape, generator=generator).to(layer.atoms)
            layer.atoms.copy_(fresh * layer.atoms.norm() / fresh.norm())
    return model


def atoms_of(state: State) -> State:
    """Atoms of all networks by layer, (networks, m, height, width)."""
    return {name.removesuffix(".atoms"): x for name, x in state.items() if name.endswith(".atoms")}


def part(state: State, which: slice | list[int]) -> State:
    return {name: x[which] for name, x in state.items()}


def joined(states: Sequence[State]) -> State:
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


# Images that stay on the device as bytes; tasks, and what each of many networks is trained on.


MEAN, STD = (0.5075, 0.4867, 0.4411), (0.2673, 0.2565, 0.2762)  # of CIFAR-100; for all, since networks see others too
TINY = "tiny-imagenet-32.npz"  # papers/pack_tiny_imagenet.py makes it
NETS = Path(__file__).parent / "nets"


@dataclass(frozen=True, eq=False)
class Pool:
    """Images (N, 3, 32, 32) as bytes, and their classes."""

    images: Tensor
    labels: Tensor

    def of(self, classes: Sequence[int], a_class: int | None = None) -> Tensor:
        """Numbers of the images of these classes, in turn (any beginning is balanced), at most so many of each."""
        each = [(self.labels == c).nonzero().flatten() for c in classes]
        count = min(len(one) for one in each)
        if not count:
            raise ValueError(f"no image of one of the classes {list(classes)}")
        return torch.stack([one[: min(count, a_class or count)] for one in each], 1).flatten()

    def merge(self, other: Pool) -> Pool:
        """Both; the classes of the other are numbered after ours."""
        first = int(self.labels.max()) + 1
        return Pool(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels + first]))


@lru_cache
def pool(settings: Settings, name: str, split: str) -> Pool:
    """A data set on the device; digits get a black border and three equal channels."""
    found = open_images(name, split=split, max_rows=settings.limit)
    assert found.labels is not None
    images, labels = found.images, found.labels
    if images.shape[1] == 1:
        border = (32 - images.shape[-1]) // 2
        images = nn.functional.pad(images, [border] * 4).expand(-1, 3, -1, -1).contiguous()
    return Pool(images.to(settings.device), labels.to(settings.device))


def probes(settings: Settings, name: str = "cifar100") -> Tensor:
    """The first test images, as bytes: the packed sets hold their classes in turn, MNIST's own order is mixed."""
    if name == "tiny-imagenet":
        images = tiny_imagenet(settings)
    else:
        images = pool(settings, name, "test").images
    if len(images) < settings.probes.images:
        raise ValueError(f"{name} has {len(images)} images to probe with, {settings.probes.images} are wanted")
    return images[: settings.probes.images]


def tiny_imagenet(settings: Settings) -> Tensor:
    for folder in [*listed_folders("SOSIE_DATA"), NETS]:
        if (folder / TINY).is_file():
            with np.load(folder / TINY, allow_pickle=False) as found:
                return torch.from_numpy(found["images"]).permute(0, 3, 1, 2).contiguous().to(settings.device)
    raise FileNotFoundError(f"{TINY} is in no folder of SOSIE_DATA, nor in {NETS}: pack_tiny_imagenet.py makes it")


@dataclass(frozen=True, eq=False)
class Lessons:
    """What each of N networks learns: numbers of images (N, n) and its own labels of them, from 0 on."""

    index: Tensor
    labels: Tensor

    @staticmethod
    def of(images: Pool, tasks: Sequence[Sequence[int]], limit: int | None = None) -> Lessons:
        """One task, a list of classes, for each network; every one gets equally many images."""
        index = [images.of(classes) for classes in tasks]
        least = min(len(one) for one in index)
        count = min(least, limit or least)
        rows = torch.stack([one[:count] for one in index])
        return Lessons(rows, own_labels(images.labels[rows], tasks))

    def repeat(self, times: int) -> Lessons:
        return Lessons(self.index.repeat(times, 1), self.labels.repeat(times, 1))

    def __getitem__(self, which: slice | list[int]) -> Lessons:
        return Lessons(self.index[which], self.labels[which])


def own_labels(labels: Tensor, tasks: Sequence[Sequence[int]]) -> Tensor:
    """Classes (N, n) as numbers within each network's own list of classes."""
    own = torch.tensor([list(task) for task in tasks], device=labels.device)
    return (labels[:, :, None] == own[:, None, :]).int().argmax(2)


class Prepare:
    """Bytes to normalised floats, on their device; the constants are kept there, so that nothing waits for them."""

    def __init__(self, settings: Settings) -> None:
        device = settings.device
        self.mean = torch.tensor(MEAN, device=device).view(3, 1, 1) * 255
        self.scale = 1 / (torch.tensor(STD, device=device).view(3, 1, 1) * 255)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_floating_point():  # [0, 1], from loops that turn bytes into floats themselves
            return (x * 255 - self.mean) * self.scale
        return (x.float() - self.mean) * self.scale


def class_tasks(tasks: int, classes: int) -> list[list[int]]:
    """Classes in their order, so many a task."""
    return [list(range(k * classes, (k + 1) * classes)) for k in range(tasks)]


# Many networks trained at once, each on images of its own.


Penalty = Callable[[list[Tensor]], Tensor]  # activations of one network (n, c, h, w) at its sites → penalties (k,)


def train(
    settings: Settings,
    models: Sequence[nn.Module],
    images: Pool,
    lessons: Lessons,
    recipe: Recipe,
    *,
    seed: int,
    keep: Iterable[int] = (),
    penalty: Penalty | None = None,
    weights: Tensor | None = None,
) -> dict[int, State]:
    """The stacked networks after the epochs in `keep`, and after the last; 0 is before.

    Network k goes through its own images in its own order, which comes from `seed` and k alone. Only what requires
    gradients moves. `weights` (networks, k): how much of each penalty is added to each network's loss.
    """
    if len(models) != len(lessons.index):
        raise ValueError(f"{len(models)} networks, but lessons for {len(lessons.index)}")
    stack, prepare = (
        Stack(template(models[0], penalty), stacked_state(models)),
        Prepare(settings),
    )
    stepper = torch.optim.SGD(stack.trained.values(), recipe.rate, recipe.momentum, fused=True)
    kept, found = {*keep, recipe.epochs}, {}
    count = lessons.index.shape[1]
    steps = max(1, count // recipe.batch)  # what is left over of an epoch is not seen in it
    extra = 0 if weights is None else weights.shape[1]
    for epoch in range(recipe.epochs + 1):
        if epoch in kept:
            found[epoch] = {name: value.clone() for name, value in stack.state().items()}
        if epoch == recipe.epochs:
            break
        order = orders(len(models), count, seed, epoch).to(lessons.index.device)
        for chosen in order[:, : steps * recipe.batch].split(recipe.batch, 1):
            x, y = (side.gather(1, chosen) for side in (lessons.index, lessons.labels))
            answer = stack(prepare(images.images[x]))
            logits = answer[..., : answer.shape[-1] - extra].flatten(0, 1)
            loss = functional.cross_entropy(logits, y.flatten(), reduction="sum") / y.shape[1]
            if weights is not None:
                loss = loss + (answer[:, 0, -extra:] * weights).sum()
            stepper.zero_grad()
            loss.backward()
            if recipe.clip is not None:
                clip(stack.trained.values(), recipe.clip)
            stepper.step()
    check_finite(found[recipe.epochs], stack.trained)
    return found


def clip(stacked: Iterable[Tensor], length: float) -> None:
    """Shorten the gradient of every network to at most this length; each is one network's own."""
    grads = [x.grad for x in stacked if x.grad is not None]
    norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
    share = (length / norms).clamp(max=1)
    for grad in grads:
        grad.mul_(share.view(-1, *[1] * (grad.ndim - 1)))


def template(model: nn.Module, penalty: Penalty | None = None) -> nn.Module:
    """The code of a network; with a penalty, its penalties are further columns of the answer."""
    code = without_numbers(model)
    if penalty is not None:
        seen: list[Tensor] = []

        def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
            seen.append(output)

        def append(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
            found = penalty(seen)
            seen.clear()
            return torch.cat([logits.float(), found.expand(len(logits), -1)], 1)

        for site in sites_of(code).values():
            code.get_submodule(site).register_forward_hook(look)
        code.register_forward_hook(append)
    return code


def orders(networks: int, count: int, seed: int, epoch: int) -> Tensor:
    """A new order of the images for every network, (networks, count); the same on every device."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.rand(networks, count, generator=generator).argsort(1)


@torch.no_grad()
def accuracies(
    settings: Settings, model: nn.Module, state: State, images: Pool, lessons: Lessons, batch: int = 100
) -> Tensor:
    """Share of its own images that each network names rightly, (networks,)."""
    stack, prepare = Stack(template(model), state, trains=()), Prepare(settings)
    right = torch.zeros(len(lessons.index), device=lessons.index.device)
    for index, labels in zip(lessons.index.split(batch, 1), lessons.labels.split(batch, 1), strict=True):
        right += (stack(prepare(images.images[index])).argmax(2) == labels).sum(1)
    return (right / lessons.index.shape[1]).cpu()


def check_finite(state: State, names: Iterable[str]) -> None:
    for name in names:
        bad = ~torch.isfinite(state[name]).flatten(1).all(1)
        if bool(bad.any()):
            raise ValueError(f"{name} of network {int(bad.nonzero()[0])} is NaN or infinite: its rate was too high")


def wait(settings: Settings) -> None:
    """Until the device has done what it was told."""
    if settings.device.startswith("cuda"):
        torch.cuda.synchronize()


# How alike many networks are, all pairs at once: by atoms, by weights, and by what they represent.


STIMULUS = ("cca", "linear_cka", "debiased_cka", "rbf_cka")
RANK_TOLERANCE = 1e-6  # of eigenvalues, from float32 activations
BANDWIDTH = 0.5  # of the Gaussian kernels, times the median distance

Pairs = dict[str, Tensor]  # layer → (networks, networks)


@dataclass(eq=False)
class Site:
    """One layer of N networks: rows (N, r, channels) of positions for CCA, Gram matrices (N, n, n) for CKA."""

    rows: Tensor
    grams: Tensor

    def measured(self, name: str) -> Tensor:
        if name == "cca":
            return self.cca
        kernels = {"linear_cka": self._centred, "debiased_cka": self._u_centred, "rbf_cka": self._gaussian}[name]()
        flat = kernels.flatten(1)
        products = (flat @ flat.T).double()
        norms = products.diagonal().sqrt()
        norms = torch.where(norms > 0, norms, 1)  # a network that died answers all probes alike: 0 with every other
        return (products / norms[:, None] / norms[None, :]).cpu()

    @cached_property
    def cca(self) -> Tensor:
        """Root of the mean squared canonical correlation, over the smaller rank: equation 4, S_CCA = √cca_r2."""
        rows = centred(self.rows.double())
        values, vectors = torch.linalg.eigh(rows.mT @ rows)
        good = values > RANK_TOLERANCE * values[:, -1:]
        scale = torch.where(good, values, 1).rsqrt() * good
        white = rows @ (vectors * scale[:, None, :])  # (N, r, channels), 0 where there is no variance
        count, rank = len(rows), good.sum(1)
        others = white.transpose(0, 1).flatten(1)  # (r, N channels)
        squares = torch.stack([(one.mT @ others).square().sum(0).view(count, -1).sum(1) for one in white])
        return (squares / torch.minimum(rank[:, None], rank[None, :]).clamp_min(1)).sqrt().cpu()

    def _centred(self) -> Tensor:
        return torch.stack([double_centred(gram) for gram in self.grams])

    def _u_centred(self) -> Tensor:
        return torch.stack([u_centred(gram) for gram in self.grams])

    def _gaussian(self) -> Tensor:
        found = []
        for gram in self.grams:
            size = gram.diagonal()
            squares = size[:, None] + size[None, :] - 2 * gram
            squares = squares.fill_diagonal_(0).relu_()  # below 0 by rounding only
            inner = squares.flatten().sort().values
            middle = (inner[(len(inner) - 1) // 2] + inner[len(inner) // 2]) / 2
            found.append(double_centred((squares / (-2 * BANDWIDTH**2 * middle)).exp_()))
        return torch.stack(found)


@torch.no_grad()
def look(
    settings: Settings,
    model: nn.Module,
    state: State,
    images: Tensor,
    names: Sequence[str] = STIMULUS,
    *,
    seed: int = 0,
) -> dict[str, Site]:
    """What stacked networks represent after each layer of atoms (behind its ReLU), of the same images.

    `names` are the measures that it is for: rows are kept for CCA, Gram matrices for the others.
    Positions are drawn once for a layer, from the seed: the same for all networks. All of them where they are fewer.
    """
    template, prepare = copy.deepcopy(model).eval(), Prepare(settings)
    sites = sites_of(model)
    rows: dict[str, list[Tensor]] = {layer: [] for layer in sites}
    grams: dict[str, list[Tensor]] = {layer: [] for layer in sites}
    chosen: dict[str, Tensor] = {}
    x = prepare(images)
    for k in range(len(next(iter(state.values())))):
        template.load_state_dict({name: value[k] for name, value in state.items()})
        # Similarities near 1 differ in late digits.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), watch(template, list(sites.values())) as seen:
            template(x)
            found = {layer: seen[site] for layer, site in sites.items()}
        for layer, z in found.items():
            places = len(z) * z[0, 0].numel()
            if layer not in chosen:
                generator = torch.Generator().manual_seed(seed)
                order = torch.randperm(places, generator=generator)[: settings.probes.positions]
                chosen[layer] = order.sort().values.to(z.device)
            if "cca" in names:
                rows[layer].append(z.permute(0, 2, 3, 1).reshape(places, -1)[chosen[layer]])
            if set(names) - {"cca"}:
                flat = centred(z.flatten(1))  # all that follows is of centred kernels or of distances
                grams[layer].append(flat @ flat.T)
    return {layer: Site(*(stack_of(kept[layer]) for kept in (rows, grams))) for layer in sites}


def stack_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors) if tensors else torch.empty(0)


def by_stimulus(sites: Mapping[str, Site], names: tuple[str, ...] = STIMULUS) -> dict[str, Pairs]:
    return {name: {layer: site.measured(name) for layer, site in sites.items()} for name in names}


def by_atoms(state: State, base: State | None = None) -> Pairs:
    """Cosine of the atoms, layer by layer; with `base` (one network's atoms) of what was added to those."""
    atoms = atoms_of(state)
    if base is not None:
        atoms = {layer: x - base[layer].to(x) for layer, x in atoms.items()}
    table = AtomTable.stacked({layer: x.cpu() for layer, x in atoms.items()}, dtype=torch.float64)
    return {layer: cosines(table.at(layer).x.flatten(1)) for layer in table.layers}


def by_grassmann(state: State) -> Pairs:
    """Of layers with fewer atoms than a kernel has entries: it is 1 for any two models where they are as many."""
    table = AtomTable.stacked({layer: x.cpu() for layer, x in atoms_of(state).items()}, dtype=torch.float64)
    short = [layer for layer, (m, *kernel) in zip(table.layers, table.shapes, strict=True) if m < np.prod(kernel)]
    return {layer: atom_grassmann(table.at(layer)) for layer in short}


def by_weights(state: State) -> Pairs:
    """Cosine of the whole kernels α × D."""
    found = {}
    for layer, atoms in atoms_of(state).items():
        kernels = state[f"{layer}.coefficients"].flatten(1, 2).double() @ atoms.flatten(2).double()
        found[layer] = cosines(kernels.flatten(1).cpu())
    return found


def cosines(rows: Tensor) -> Tensor:
    unit = rows / rows.norm(dim=1, keepdim=True)
    return unit @ unit.T


def mean(pairs: Pairs) -> Tensor:
    """Over layers: the similarity of whole networks."""
    return torch.stack(list(pairs.values())).mean(0)


def correlation(x: Tensor, y: Tensor, draws: int) -> dict[str, Any]:
    """Pearson and Spearman over all pairs of networks, with intervals from a bootstrap over networks."""
    a, b = torch.triu_indices(len(x), len(x), 1).numpy()
    one, other = x.numpy()[a, b], y.numpy()[a, b]
    found: dict[str, Any] = {"pairs": len(a)}
    for name, coefficient in (("pearson", pearson), ("spearman", spearman)):
        try:
            value: float | None = coefficient(one, other).value
        except ValueError:  # one side does not vary: Grassmann of all kernels, say
            found[name] = {"value": None, "over_models": None}
            continue
        drawn = bootstrap(one, other, (a, b), ranks=name == "spearman", draws=draws)
        found[name] = {"value": value, "over_models": percentile_interval(drawn)}
    return found
