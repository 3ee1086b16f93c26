"""A model as something whose weights are compared: its name, its sites, the shape of its input."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..capture import (
    Linearised,
    NotLinear,
    Site,
    SiteError,
    as_found,
    check_linear,
    linearised,
    restored_after_errors,
    select,
    weighted_layers,
)
from ..capture.arguments import shapes_for
from ..engine.provenance import describe_model
from ..linalg import VANISHED, Invariants, centred, chain_products, double_centred, unit
from ..models import open_model, weights_of, with_name
from ..progress import Progress
from ..results import Side


@dataclass
class WeightSource:
    """A model under comparison; `look` learns its sites and the shape of its input."""

    model: nn.Module
    name: str
    prepare: Any = None
    sites: Any = None
    device: str | torch.device | None = None
    shape: tuple[int, ...] = ()
    guessed: bool = False  # whether nothing said the shape of the input
    side: Side | None = None
    notes: tuple[str, ...] = field(default=())
    weights: str = ""  # where they are from, if that is known

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    @property
    def known(self) -> Side:
        assert self.side is not None
        return self.side

    def describe(self) -> str:
        return describe_model(self.model, self.name, self.weights)

    def shaped(self, rows: Tensor) -> Tensor:
        """Rows of entries as inputs, where the model is."""
        first = next((t for t in (*self.model.parameters(), *self.model.buffers())), None)
        return rows.reshape(len(rows), *self.shape).to(None if first is None else first.device)

    @contextmanager
    def opened(self, sink: Any) -> Iterator[Linearised]:
        chosen = weighted_layers(self.model) if self.sites is None else self.sites
        with (
            restored_after_errors(self.model),
            as_found(self.model, self.device),
            linearised(self.model, chosen, sink, prepare=self.prepare) as run,
        ):
            yield run

    def look(self, input_shape: Sequence[int] | None) -> None:
        """Find an input that the model takes, learn its sites, and check that they are linear in it."""
        shapes, self.guessed = candidates(self.model, self.name, input_shape)
        failed = []
        for shape in shapes:
            self.shape = shape
            try:
                self._look()
                return
            except NotLinear as error:
                raise NotLinear(f"{self.name}: {error}") from error
            except SiteError as error:  # no other shape would help
                raise type(error)(f"{self.name}: {error}") from error
            except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
                failed.append(f"{_by(shape)}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        raise ValueError(
            f"{self.name} does not take an input of {' or '.join(map(_by, shapes))}; give input_shape=\n  "
            + "\n  ".join(failed)
        )

    def _look(self) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2, self.entries, generator=generator, dtype=torch.float64)
        rows = torch.cat([rows, rows[:1] + 2 * rows[1:]])

        def check(site: Site, found: Tensor, exponent: int) -> int:
            check_linear(site.label, found)
            return found.shape[1]

        with self.opened(check) as run:
            widths = run.run(self.shaped(rows))
            self.notes = tuple(sorted(run.notes))
            self.side = Side(
                self.name, tuple(s.label for s in run.sites), tuple(widths), tuple(s.shape for s in run.sites)
            )


def open_weights(thing: Any, name: str | None, sites: Any, device: Any) -> WeightSource:
    """A module, a named model or a specification."""
    if isinstance(thing, str):
        thing = open_model(thing)
    model, own, prepare = with_name(thing)
    name = own if name is None else name
    if not isinstance(model, nn.Module):
        hint = ""
        if isinstance(model, dict) and model and all(isinstance(value, Tensor) for value in model.values()):
            hint = " (a state dict does not say how its tensors are joined: load it into a model)"
        raise TypeError(
            f"cannot compare the weights of {name}: give a torch.nn.Module or a specification like "
            f"'tiny10@weights.safetensors', got {type(model).__name__}{hint}"
        )
    return WeightSource(model, name, prepare, sites, device, weights=weights_of(thing))


def check_weights(source: WeightSource) -> None:
    """Refuse weights that are no numbers, by name."""
    name = source.name
    for key, value in (*source.model.named_parameters(), *source.model.named_buffers()):
        if is_lazy(value):
            raise ValueError(f"{name}: {key} has no shape yet; run the model once before its weights are compared")
        if isinstance(value, nn.Parameter) and not value.numel():
            raise ValueError(f"{name}: {key} has shape {tuple(value.shape)}: a layer without neurons has no weights")
        if value.is_meta:
            raise ValueError(f"{name}: {key} is on the meta device, which holds no numbers")
        if value.is_complex():
            raise ValueError(f"{name}: {key} is complex ({value.dtype}), which is not supported")
        # A sum is finite only if all its terms are, and takes a fraction of the time.
        if not value.is_floating_point() or bool(torch.isfinite(value.detach().sum())):
            continue
        if bad := int((~torch.isfinite(value)).sum()):
            raise ValueError(f"{name}: {key} has {bad} of {value.numel()} values that are NaN or infinite")


def candidates(model: nn.Module, name: str, given: Sequence[int] | None) -> tuple[list[tuple[int, ...]], bool]:
    """Shapes of one input to try, in order; and whether they are guesses."""
    if given is not None:
        shape = tuple(int(size) for size in given)
        if not shape or min(shape) < 1:
            raise ValueError(f"input_shape is the shape of one input, as (3, 32, 32); got {tuple(given)}")
        return list(dict.fromkeys([shape, (math.prod(shape),)])), False
    first = next((m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))), None)
    if isinstance(first, nn.Linear):
        return [(first.in_features,)], False
    if first is not None and first.weight.ndim == 4 and not first.transposed:
        return shapes_for(first), True
    why = "no linear layer or convolution says" if first is None else f"{type(first).__name__} does not say"
    raise ValueError(f"{name}: {why} how large an input is; give input_shape=, as (3, 32, 32)")


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


# W Wᵀ of every site of a model, W (d, p) its linear map from the d entries of the input; of norm 1 each
#
# A chain of layers starts with one matrix, so that all its maps live in the span of that matrix's columns: the kernels
# are kept in a basis of it, and two models of the same or of other sizes meet in the product of their bases.

BLOCK_BYTES = 2**23  # that a block of pairs of models takes


@dataclass(frozen=True)
class Kernels:
    """Of N models with equally many sites: basis · core · basisᵀ, NaN where a map vanishes."""

    basis: Tensor | None  # (N, d, r) with orthonormal columns; None: the entries of the input themselves, r = d
    cores: Tensor  # (N, S, r, r)

    def member(self, k: int) -> Kernels:
        """One model alone."""
        return Kernels(None if self.basis is None else self.basis[k : k + 1], self.cores[k : k + 1])

    def invariants(self, k: int) -> Invariants:
        """What the chance level of a member's sites (S,) depends on."""
        trace = self.cores[k].diagonal(dim1=-2, dim2=-1).sum(-1)
        if self.basis is None:
            along = self.cores[k].diagonal(dim1=-2, dim2=-1)
        else:
            along = (self.basis[k] @ self.cores[k] * self.basis[k]).sum(-1)  # (S, d)
        return Invariants(trace, torch.ones_like(trace), along.square().sum(-1))

    def dense(self) -> Kernels:
        """In the entries of the input."""
        if self.basis is None:
            return self
        q = self.basis[:, None]
        return Kernels(None, q @ self.cores @ q.mT)


def of_chains(weights: Sequence[Tensor], depths: Sequence[int], *, centre: bool) -> Kernels:
    """Of N chains with factors (N, d, p₁), (N, p₁, p₂), …, at these depths: how many factors are multiplied."""
    first = unit(weights[0])
    whole = first.square().sum((-2, -1))
    q, r = torch.linalg.qr(centred(first) if centre else first)
    maps = chain_products([r, *weights[1:]])
    kernels = torch.stack([maps[depth - 1] @ maps[depth - 1].mT for depth in depths], dim=1)
    lost = ~(r.square().sum((-2, -1)) > VANISHED * whole)
    kernels[lost] = torch.nan
    return Kernels(q, _normed(kernels))


def of_maps(maps: Sequence[Tensor], *, centre: bool) -> Kernels:
    """Of one model, from its maps (d, p) one by one."""
    kernels = []
    for each in maps:
        kernel = each @ each.mT
        whole = kernel.diagonal().sum()
        kernel = double_centred(kernel) if centre else kernel
        kernels.append(
            kernel if bool(kernel.diagonal().sum() > VANISHED * whole) else torch.full_like(kernel, torch.nan)
        )
    return Kernels(None, _normed(torch.stack(kernels)[None]))


def _normed(kernels: Tensor) -> Tensor:
    """Of norm 1; a kernel of zeros becomes NaN."""
    return kernels / torch.linalg.vector_norm(kernels, dim=(-2, -1), keepdim=True)


def inner_products(a: Kernels, b: Kernels, *, upper: bool = False) -> Tensor:
    """⟨K, L⟩ for all members and sites: (N, M, S, T). `upper`: a is b, and only members i < j are filled."""
    if (a.basis is None) != (b.basis is None):
        a, b = a.dense(), b.dense()
    (n, s, r, _), (m, t, q, _) = a.cores.shape, b.cores.shape
    found = a.cores.new_full((n, m, s, t), torch.nan)
    if a.basis is None or b.basis is None:
        flat_a, flat_b = a.cores.reshape(n * s, -1), b.cores.reshape(m * t, -1)
        return (flat_a @ flat_b.T).reshape(n, s, m, t).permute(0, 2, 1, 3)
    each = 8 * r * q * (s + t + 1)
    step_j = max(1, min(m, BLOCK_BYTES // each))
    step_i = max(1, min(n, BLOCK_BYTES // (each * step_j)))
    for i in range(0, n, step_i):
        for j in range(i if upper else 0, m, step_j):
            rows, columns = slice(i, i + step_i), slice(j, j + step_j)
            found[rows, columns] = _met(a.basis[rows], a.cores[rows], b.basis[columns], b.cores[columns])
    return found


def _met(basis_a: Tensor, cores_a: Tensor, basis_b: Tensor, cores_b: Tensor) -> Tensor:
    """⟨P, C L Cᵀ⟩ = ⟨P C, C L⟩ with C the product of two bases, for a block of models."""
    (n, s, r, _), (m, t, q, _) = cores_a.shape, cores_b.shape
    d = basis_a.shape[1]
    # By torch as what follows: threads of two libraries would fight over the cores.
    met = basis_a.mT.reshape(n * r, d) @ basis_b.permute(1, 0, 2).reshape(d, m * q)  # (n r, m q)
    left = cores_a.reshape(n, s * r, r) @ met.reshape(n, r, m * q)  # (n, s r, m q)
    left = left.reshape(n, s, r, m, q).permute(0, 3, 1, 2, 4).reshape(n * m, s, r * q)
    of_b = met.reshape(n * r, m, q).permute(1, 0, 2)  # (m, n r, q)
    right = of_b @ cores_b.permute(0, 2, 1, 3).reshape(m, q, t * q)  # (m, n r, t q)
    right = right.reshape(m, n, r, t, q).permute(1, 0, 2, 4, 3).reshape(n * m, r * q, t)
    return (left @ right).reshape(n, m, s, t)


# Plain chains of dense layers: their maps are products of matrices, and need no forward pass

# Layers of a chain that leave its product as it is.
PASSED = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.CELU, nn.SELU, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Mish, nn.PReLU, nn.RReLU, nn.Identity, nn.Dropout, nn.Flatten,
    nn.AlphaDropout,
)  # fmt: skip


@dataclass(frozen=True)
class Chain:
    """Dense layers one after the other, and at which of them (counted from 1) there is a site."""

    names: tuple[str, ...]
    layers: tuple[nn.Linear, ...]
    sites: tuple[tuple[str, int], ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for chains that can be stacked."""
        return tuple(tuple(layer.weight.shape) for layer in self.layers), tuple(depth for _, depth in self.sites)

    @property
    def depths(self) -> list[int]:
        """At which there are sites, each once: the whole network and its last layer are one."""
        return sorted({depth for _, depth in self.sites})

    @property
    def index(self) -> list[int]:
        """Which of the depths each site is at."""
        return [self.depths.index(depth) for _, depth in self.sites]

    def side(self, name: str) -> Side:
        widths = tuple(self.layers[depth - 1].out_features for _, depth in self.sites)
        return Side(name, tuple(label for label, _ in self.sites), widths, tuple((width,) for width in widths))


def chain_of(model: nn.Module, sites: Any, prepare: Any) -> Chain | None:
    """The chain that a model is, if it is one: an nn.Sequential of dense layers and elementwise activations."""
    if prepare is not None:
        return None
    found = list(_walk("", model))
    layers = [(name, module) for name, module in found if type(module) is nn.Linear]
    if not layers or any(module is None for _, module in found):
        return None
    if len({id(layer) for _, layer in layers}) < len(layers):
        return None  # a layer that is used twice has sites for both calls
    if any(a.out_features != b.in_features for (_, a), (_, b) in itertools.pairwise(layers)):
        return None
    names = tuple(name for name, _ in layers)
    depth = {name: k for k, name in enumerate(names, 1)} | {"": len(names)}
    chosen = None if sites is None else select(model, sites)
    wanted = list(dict.fromkeys([*names, ""]) if chosen is None else chosen)
    if any(name not in depth for name in wanted) or any(w.calls not in (None, {1}) for w in (chosen or {}).values()):
        return None
    # In the order in which they fire, as anywhere else: the model's own output comes last.
    ordered = sorted(wanted, key=lambda name: (depth[name], name == ""))
    label = "." if "output" in dict(model.named_modules()) else "output"
    return Chain(names, tuple(m for _, m in layers), tuple((name or label, depth[name]) for name in ordered))


def _walk(name: str, module: nn.Module) -> list[tuple[str, nn.Module | None]]:
    """The layers in order; None stands for anything that is not known to be one of a chain."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    if type(module) is nn.Sequential and not hooks:
        # Not named_children, which leaves out a layer's second use.
        children = ((f"{name}.{key}" if name else key, child) for key, child in module._modules.items())
        return [each for key, child in children if child is not None for each in _walk(key, child)]
    if hooks or hasattr(module, "parametrizations"):
        return [(name, None)]
    if type(module) is nn.Flatten:
        return [(name, module if (module.start_dim, module.end_dim) == (1, -1) else None)]
    return [(name, module if type(module) in (nn.Linear, *PASSED) else None)]


def stacked(chains: Sequence[Chain], device: Any) -> list[Tensor]:
    """The factors (N, inputs, outputs) of chains with equal shapes, in float64."""
    count = len(chains[0].layers)
    return [
        torch.stack([chain.layers[k].weight.detach().to(device).mT for chain in chains]).double() for k in range(count)
    ]


# Kernels from random inputs, where there are too many entries to try each: unbiased, and with an interval
#
# For independent Gaussian g and h the mean of (gᵀK h)(gᵀL h) is ⟨K, L⟩; products of pairs of different inputs within
# blocks estimate it without bias, for all pairs of sites at once. Centring takes from each input its mean: what the
# network makes of the constant input is known, so that both kinds come from one pass.

BLOCK = 128  # inputs whose pairs are looked at
PROBES = 8 * BLOCK
FEWEST = 2 * BLOCK


@dataclass(frozen=True)
class Probed:
    """Gram matrices of what each site makes of the probes, off their diagonal, block by block."""

    plain: Tensor  # (blocks, S, b, b)
    centred: Tensor

    def met(self, other: Probed, *, centre: bool) -> Tensor:
        """⟨K, L⟩ of each block (blocks, S, T), but for a factor."""
        return self._grams(centre).flatten(2) @ other._grams(centre).flatten(2).mT

    def size(self, *, centre: bool) -> Tensor:
        """⟨K, K⟩ of each block (blocks, S), but for the same factor."""
        return self._grams(centre).square().sum((-2, -1))

    def _grams(self, centre: bool) -> Tensor:
        return self.centred if centre else self.plain


def probe(source: WeightSource, probes: int, seed: int) -> Probed:
    """Run a model on the probes that `seed` gives, the same for each model."""
    grams: list[Tensor] = []
    sizes: list[Tensor] = []
    means: list[Tensor] = []

    def gram(site: Site, rows: Tensor, exponent: int) -> tuple[Tensor, int]:
        return (rows @ rows.T).cpu(), 2 * exponent

    with source.opened(gram) as run, Progress(f"probing {source.name}", probes, "inputs") as bar:
        for drawn in _drawn(source.entries, probes, seed):
            means.append(drawn.mean(1))
            with_constant = torch.cat([drawn, drawn.new_ones(1, source.entries)])
            found = run.run(source.shaped(with_constant))
            grams.append(torch.stack([each for each, _ in found]))
            sizes.append(torch.tensor([exponent for _, exponent in found]))
            bar.advance(len(drawn))
    whole = torch.stack(grams) * common_scale(torch.stack(sizes))[..., None, None]
    return _off_diagonal(whole, torch.stack(means))


def common_scale(exponents: Tensor) -> Tensor:
    """Powers of two that bring what was scaled apart, along the first axis, to the scale of the largest."""
    shift = (exponents - exponents.amax(0)).clamp(min=-1022)  # below it float64 has nothing left
    return torch.pow(2.0, shift.double())


def _drawn(entries: int, probes: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(probes // BLOCK):
        yield torch.randn(BLOCK, entries, generator=generator, dtype=torch.float64)


def _off_diagonal(whole: Tensor, means: Tensor) -> Probed:
    """The last row and column are those of the constant input."""
    plain, constant, both = whole[..., :-1, :-1], whole[..., :-1, -1], whole[..., -1:, -1:]
    share = means[:, None, :, None]  # (blocks, 1, b, 1)
    shared = share * constant[..., None, :]
    centred = plain - shared - shared.mT + share * share.mT * both
    largest = whole.abs().amax((0, 2, 3))[None, :, None, None]
    norm = largest.where(largest > 0, largest.new_ones(()))
    return Probed(*(_without_diagonal(grams / norm) for grams in (plain, centred)))


def _without_diagonal(grams: Tensor) -> Tensor:
    grams = grams.clone()
    grams.diagonal(dim1=-2, dim2=-1).zero_()
    return grams


# Copies of a model whose weights are in no order: what the architecture alone makes alike


def shuffled(source: WeightSource, seed: int, draw: int) -> WeightSource:
    """A copy whose tensors of weights have the same numbers in another order; biases and norms as they are."""
    model = copy.deepcopy(source.model)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                order = torch.randperm(weights.numel(), generator=generator).to(weights.device)
                weights.copy_(weights.flatten()[order].view_as(weights))
    return replace(source, model=model)
