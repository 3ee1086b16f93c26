"""Networks as linear maps of their input, compared without data.

Without its activation functions a network is a linear map, and so is the part up to any site. The kernels W Wᵀ of the
sites are compared, where W (d, p) maps the d entries of the input to the p features of a site: exactly, from each entry
of the input, or estimated from Gaussian inputs if there are too many entries.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..capture.batches import shapes_for
from ..capture.linear import LinearRun, NotLinear, check_linear, linearised, weighted_layers
from ..capture.restore import as_found, kept_attributes
from ..capture.sites import Site, SiteError, select
from ..checks import listed
from ..engine import caveats
from ..engine.network import Network
from ..engine.uncertainty import FEWEST_GROUPS, around, by_jackknife, judged
from ..linalg import VANISHED, Invariants, centred, chain_products, double_centred, permuted_moments, unit
from ..measures import Measure, as_array, snap_to_bounds
from ..progress import Progress, track
from ..results import Array, Caveat, Chance, Comparison, Estimate, Side
from ..stats import UncentredLinearMaps

CHUNK = 128  # inputs of one forward pass
FEWEST_ENTRIES = 4  # of an input, for the formula of the chance level
OF_ARCHITECTURE = (
    "the value of unrelated networks depends on their architecture: convolutions alone make them similar. "
    "null='weights' measures it"
)


def compare_maps(
    networks: Sequence[Network],
    measures: Sequence[Measure],
    about: dict[str, Any],
    *,
    input_shape: Sequence[int] | None,
    probes: int | None,
    draws: int,
    seed: int,
    memory: int,
    matched: bool,
) -> tuple[Callable[[int, int], Comparison], Callable[[int, int, str], Array]]:
    """Return two functions: the comparison of a pair of networks, and its values alone, cheaper for many pairs.

    The work on each network alone is done now.
    """
    maps = []
    for network in networks:
        chain = _chain(network)
        if chain is not None and input_shape is not None and math.prod(input_shape) != chain.entries:
            raise ValueError(f"{network.name} takes {chain.entries} numbers, not input_shape {_by(input_shape)}")
        maps.append(chain or look(network, input_shape))
    if len({linear.entries for linear in maps}) > 1:
        sizes = listed((f"{linear.side.name} takes {_by(linear.shape)}" for linear in maps), 6)
        raise ValueError(f"models must take inputs of one size, but {sizes}; input_shape= sets the size of images")
    kinds = list(dict.fromkeys(map(_is_centred, measures)))
    exact = probes is None and _bytes(maps, len(kinds)) <= memory
    source = ExactValues(maps, kinds) if exact else EstimatedValues(maps, probes or PROBES, seed)

    def compare(i: int, j: int) -> Comparison:
        a, b = maps[i], maps[j]
        drawn: dict[str, list[Array]] = {measure.name: [] for measure in measures}
        for draw in track(range(draws), f"chance for {a.side.name} and {b.side.name}", draws, "shuffled copies"):
            copied = replace(b.network, model=shuffled(b.network.model, seed, draw))
            other = _chain(copied) or replace(b, network=copied)
            for name, value in source.with_other(i, other, measures).items():
                drawn[name].append(value)
        has_layout = max(len(a.shape), len(b.shape)) > 1
        values = {}
        for measure in measures:
            value, low, high = source.pair(i, j, measure)
            chance: Chance | None = None
            if draws:
                chance = judged(measure, value, np.stack(drawn[measure.name]))
            elif isinstance(source, ExactValues) and not has_layout:  # shuffled pixels make no image
                chance = source.chance(i, j, measure)
            known = [*_of_undefined(value, a.side, b.side), *_of_networks(measure, a, b, matched)]
            if not exact:
                more = f"probes={PROBES} gives an interval" if low is None else "more probes= narrow the interval"
                known.append(Caveat(f"estimated from {source.statistic}; {more}, more memory= makes it exact"))
            known += caveats.of_draws(draws)
            known += [Caveat(OF_ARCHITECTURE)] if chance is None and has_layout else []
            known += caveats.of_bounds(measure, value)
            values[measure.name] = Estimate.of(
                measure,
                value,
                n=source.n,
                statistic=source.statistic,
                interval=(low, high),
                chance=chance,
                caveats=known,
            )
        with_input = {**about, "input": list(maps[0].shape)}
        return Comparison(a.side, b.side, values, "entries of the input", with_input, kind="weights")

    by_name = {measure.name: measure for measure in measures}
    return compare, lambda i, j, name: source.pair(i, j, by_name[name])[0]


def _of_undefined(value: Array, side_a: Side, side_b: Side) -> Iterator[Caveat]:
    text = "undefined: the product of the weights up to here is zero, or the same for each entry of the input"
    undefined = np.isnan(value)
    yield from (Caveat(text, site_a=side_a.sites[i], undefined=True) for i in np.flatnonzero(undefined.all(1)))
    yield from (Caveat(text, site_b=side_b.sites[j], undefined=True) for j in np.flatnonzero(undefined.all(0)))


def _of_networks(measure: Measure, a: LinearNetwork, b: LinearNetwork, matched: bool) -> Iterator[Caveat]:
    if matched:
        yield Caveat(f"{measure.name} does not depend on the order of neurons: they were not matched")
    for linear in (a, b):
        if linear.guessed:
            shape = " × ".join(map(str, linear.shape))
            yield Caveat(f"{linear.side.name}: inputs of {shape} were assumed; input_shape= sets the shape")
        yield from (Caveat(f"{linear.side.name}: {text}") for text in linear.notes)


def _is_centred(measure: Measure) -> bool:
    return not issubclass(measure.reads, UncentredLinearMaps)


# A network without its activation functions: its input and its sites


@dataclass(frozen=True)
class LinearNetwork:
    """A network with the shape of its input and its sites."""

    network: Network
    shape: tuple[int, ...]  # of one input
    side: Side
    layers: tuple[nn.Linear, ...] = ()  # of a chain, which is made of dense layers and activations alone
    depths: tuple[int, ...] = ()  # of a chain: the number of layers up to each site
    guessed: bool = False  # whether the shape of the input is a guess
    notes: tuple[str, ...] = ()  # operations that are not linear, and their replacement

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


def _inputs(network: Network, shape: Sequence[int], rows: Tensor) -> Tensor:
    """Rows (n, entries) as inputs of the network, on its device."""
    first = next(itertools.chain(network.model.parameters(), network.model.buffers()), None)
    return rows.reshape(len(rows), *shape).to(None if first is None else first.device)


@contextmanager
def _linear(network: Network, sink: Any) -> Iterator[LinearRun]:
    sites = weighted_layers(network.model) if network.sites is None else network.sites
    prepare = None if getattr(network.prepare, "text_only", False) else network.prepare  # inputs here are numbers
    with (
        kept_attributes(network.model),
        as_found(network.model, network.device),
        linearised(network.model, sites, sink, prepare=prepare) as run,
    ):
        yield run


def check_weights(network: Network) -> None:
    """Raise if a parameter or buffer holds no numbers, NaN or infinity; the error names it."""
    name = network.name
    for key, value in (*network.model.named_parameters(), *network.model.named_buffers()):
        if is_lazy(value):
            raise ValueError(f"{name}: {key} has no shape yet; run the model once before its weights are compared")
        if isinstance(value, nn.Parameter) and not value.numel():
            raise ValueError(f"{name}: {key} has shape {tuple(value.shape)}: a layer without neurons has no weights")
        if value.is_meta:
            raise ValueError(f"{name}: {key} is on the meta device, so it holds no numbers")
        if value.is_complex():
            raise ValueError(f"{name}: {key} is complex ({value.dtype}), which is not supported")
        check_finite({key: value}, name)


def check_finite(tensors: Mapping[str, Tensor], label: str) -> None:
    """Raise if a tensor holds NaN or infinity; the error names it."""
    for name, tensor in tensors.items():
        # A sum is finite only if all its terms are, and takes a fraction of the time.
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach().sum())):
            continue
        if bad := int((~torch.isfinite(tensor)).sum()):
            raise ValueError(f"{name} of {label} has {bad} of {tensor.numel()} values that are NaN or infinite")


def look(network: Network, input_shape: Sequence[int] | None) -> LinearNetwork:
    """Find a shape of input that the network takes, and its sites; raise unless they are linear in the input."""
    shapes, guessed = candidates(network.model, network.name, input_shape)
    generator = torch.Generator().manual_seed(0)

    def check(site: Site, rows: Tensor, exponent: int) -> int:
        check_linear(site.label, rows)
        return rows.shape[1]

    failed = []
    for shape in shapes:
        rows = torch.randn(2, math.prod(shape), generator=generator, dtype=torch.float64)
        rows = torch.cat([rows, rows[:1] + 2 * rows[1:]])
        try:
            with _linear(network, check) as run:
                widths = run.run(_inputs(network, shape, rows))
                sites, notes = run.sites, tuple(sorted(run.notes))
        except (NotLinear, SiteError) as error:  # no other shape would help
            raise type(error)(f"{network.name}: {error}") from error
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
            failed.append(f"{_by(shape)}: {(str(error) or type(error).__name__).splitlines()[0]}")
            continue
        side = Side(network.name, tuple(s.label for s in sites), tuple(widths), tuple(s.shape for s in sites))
        return LinearNetwork(network, shape, side, guessed=guessed, notes=notes)
    raise ValueError(
        f"{network.name} does not take an input of {' or '.join(map(_by, shapes))}; give input_shape=\n  "
        + "\n  ".join(failed)
    )


def candidates(model: nn.Module, name: str, input_shape: Sequence[int] | None) -> tuple[list[tuple[int, ...]], bool]:
    """Shapes of one input to try, in order; and whether they are guesses."""
    if input_shape is not None:
        shape = tuple(map(int, input_shape))
        if not shape or min(shape) < 1:
            raise ValueError(f"input_shape is the shape of one input, such as (3, 32, 32); got {tuple(input_shape)}")
        return list(dict.fromkeys([shape, (math.prod(shape),)])), False
    first = next((m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))), None)
    if isinstance(first, nn.Linear):
        return [(first.in_features,)], False
    if first is not None and first.weight.ndim == 4 and not first.transposed:
        return shapes_for(first), True
    why = "no linear layer or convolution says" if first is None else f"{type(first).__name__} does not say"
    raise ValueError(f"{name}: {why} how large an input is; give input_shape=, such as (3, 32, 32)")


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def shuffled(model: nn.Module, seed: int, draw: int) -> nn.Module:
    """A copy with the entries of each tensor of weights in random order; biases and norms stay as they are."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                order = torch.randperm(weights.numel(), generator=generator).to(weights.device)
                weights.copy_(weights.flatten()[order].view_as(weights))
    return model


# Plain chains of dense layers: their maps are products of matrices, and need no forward pass

# Layers of a chain that do not change its product.
PASSED = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.CELU, nn.SELU, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Mish, nn.PReLU, nn.RReLU, nn.Identity, nn.Dropout, nn.Flatten,
    nn.AlphaDropout,
)  # fmt: skip


def _chain(network: Network) -> LinearNetwork | None:
    """The network as a chain, an nn.Sequential of dense layers and elementwise activations; None if it is not one."""
    model, sites = network.model, network.sites
    if network.prepare is not None:
        return None
    layers: dict[str, nn.Linear] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooked = module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations")
        partial = type(module) is nn.Flatten and (module.start_dim, module.end_dim) != (1, -1)
        if hooked or partial or type(module) not in (nn.Sequential, nn.Linear, *PASSED):
            return None
        if type(module) is nn.Linear:
            layers[name] = module
    if (
        not layers
        or len(set(layers.values())) < len(layers)  # a layer that is used twice has sites for both calls
        or any(a.out_features != b.in_features for a, b in itertools.pairwise(layers.values()))
    ):
        return None
    depth = {name: k for k, name in enumerate(layers, 1)} | {"": len(layers)}
    chosen = {} if sites is None else select(model, sites)
    names = dict.fromkeys([*layers, ""]) if sites is None else chosen
    if any(name not in depth for name in names) or any(site.calls not in (None, {1}) for site in chosen.values()):
        return None
    # In execution order, with the model's own output last.
    ordered = sorted(names, key=lambda name: (depth[name], name == ""))
    label = "." if "output" in dict(model.named_modules()) else "output"
    linear, depths = tuple(layers.values()), tuple(depth[name] for name in ordered)
    widths = tuple(linear[k - 1].out_features for k in depths)
    side = Side(network.name, tuple(name or label for name in ordered), widths, tuple((width,) for width in widths))
    return LinearNetwork(network, (linear[0].in_features,), side, linear, depths)


# Kernels W Wᵀ of norm 1, from each entry of the input
#
# A chain of layers starts with one matrix, so that all its maps are in the span of that matrix's columns: the kernels
# are kept in a basis of it, and two models, also of different sizes, meet in the product of their bases.

BLOCK_BYTES = 2**23  # for a block of pairs of models


# Kernels of N models with equally many sites, as basis · core · basisᵀ: a basis (N, d, r) with orthonormal columns, or
# None for the entries of the input themselves (r = d), and the cores (N, S, r, r), NaN if a map vanishes.
Kernels = tuple[Tensor | None, Tensor]


def _kernels(maps: Sequence[LinearNetwork], kinds: Iterable[bool]) -> dict[bool, Kernels]:
    """Kernels of chains of one shape, or of one network of any kind: centred (True), as they are (False), or both."""
    if not maps[0].layers:
        weights = _maps(maps[0])
        return {kind: (None, _normed(torch.stack([_kernel(w, kind) for w in weights]))[None]) for kind in kinds}
    device = maps[0].network.device
    first, *factors = [
        torch.stack([layer.weight.detach().to(device).mT for layer in stack]).double()  # (N, p, q)
        for stack in zip(*(linear.layers for linear in maps), strict=True)
    ]
    first, kernels = unit(first), {}
    for kind in kinds:
        basis, r = torch.linalg.qr(centred(first) if kind else first)
        products = chain_products([r, *factors])
        cores = torch.stack([products[depth - 1] @ products[depth - 1].mT for depth in maps[0].depths], dim=1)
        cores[~(r.square().sum((-2, -1)) > VANISHED * first.square().sum((-2, -1)))] = torch.nan
        kernels[kind] = basis, _normed(cores)
    return kernels


def _kernel(mapped: Tensor, centre: bool) -> Tensor:
    """W Wᵀ of a map W (d, p); NaN if it vanishes."""
    whole = mapped @ mapped.mT
    kernel = double_centred(whole) if centre else whole
    return kernel if bool(kernel.trace() > VANISHED * whole.trace()) else torch.full_like(kernel, torch.nan)


def _normed(kernels: Tensor) -> Tensor:
    """Kernels of norm 1; a kernel of zeros becomes NaN."""
    return kernels / torch.linalg.vector_norm(kernels, dim=(-2, -1), keepdim=True)


def _maps(linear: LinearNetwork) -> list[Tensor]:
    """W (d, p) of each site, up to a scale."""
    d = linear.entries
    maps = [torch.empty(d, width, dtype=torch.float64) for width in linear.side.widths]
    exponents = torch.zeros(d, len(maps), dtype=torch.long)

    def keep(site: Site, rows: Tensor, exponent: int) -> tuple[Tensor, int]:
        return rows, exponent

    with (
        _linear(linear.network, keep) as run,
        Progress(f"weights of {linear.side.name}", d, "entries of the input") as bar,
    ):
        for start in range(0, d, CHUNK):
            entries = torch.arange(start, min(start + CHUNK, d))
            rows = nn.functional.one_hot(entries, d).double()
            for k, (mapped, exponent) in enumerate(run.run(_inputs(linear.network, linear.shape, rows))):
                maps[k][entries] = mapped.cpu()
                exponents[entries, k] = exponent
            bar.advance(len(entries))
    scale = _common_scale(exponents)
    return [weights * scale[:, k, None] for k, weights in enumerate(maps)]


def _common_scale(exponents: Tensor) -> Tensor:
    """Powers of two that bring rows of different exponents, along the first axis, to the largest one's scale."""
    shift = (exponents - exponents.amax(0)).clamp(min=-1022)  # the smallest exponent of float64
    return torch.pow(2.0, shift.double())


def inner_products(a: Kernels, b: Kernels, *, upper: bool = False) -> Tensor:
    """⟨K, L⟩ for all members and sites: (N, M, S, T). `upper`: a is b, and only members i < j are filled."""
    (basis_a, cores_a), (basis_b, cores_b) = a, b
    if basis_a is None or basis_b is None:
        x, y = (cores if basis is None else basis[:, None] @ cores @ basis[:, None].mT for basis, cores in (a, b))
        return torch.einsum("nsde,mtde->nmst", x, y)
    (n, s, r, _), (m, t, q, _) = cores_a.shape, cores_b.shape
    products = cores_a.new_full((n, m, s, t), torch.nan)
    step = max(1, BLOCK_BYTES // (8 * r * q * (s + t + 1)))
    for i in range(n):
        for j in range(i if upper else 0, m, step):
            columns = slice(j, j + step)
            # ⟨K, C L Cᵀ⟩ = ⟨K C, C L⟩ with C the product of two bases.
            met = torch.einsum("dr,mdq->mrq", basis_a[i], basis_b[columns])
            left = torch.einsum("srp,mpq->msrq", cores_a[i], met)
            right = torch.einsum("mrp,mtpq->mtrq", met, cores_b[columns])
            products[i, columns] = torch.einsum("msrq,mtrq->mst", left, right)
    return products


def _bytes(maps: Sequence[LinearNetwork], kinds: int) -> int:
    """Bytes for exact values: all kernels, and the maps of one model while they are made."""
    kernels = largest = 0
    for linear in maps:
        d, sites = linear.entries, len(linear.side.sites)
        if linear.layers:
            rank = min(d, linear.layers[0].out_features)
            kernels += 8 * kinds * (sites * rank + d) * rank
        else:
            kernels += 8 * kinds * sites * d * d
            largest = max(largest, 8 * d * sum(linear.side.widths))
    return kernels + largest


class ExactValues:
    """Values from each entry of the input; all pairs of chains of one shape are computed at once."""

    def __init__(self, maps: Sequence[LinearNetwork], kinds: Sequence[bool]) -> None:
        self.n, self.statistic = maps[0].entries, f"each of {maps[0].entries} entries of the input"
        groups: dict[Any, list[int]] = {}
        for k, linear in enumerate(maps):
            sizes = tuple(layer.weight.shape for layer in linear.layers)
            groups.setdefault((sizes, linear.depths) if sizes else k, []).append(k)
        self._place = {k: (g, m) for g, members in enumerate(groups.values()) for m, k in enumerate(members)}
        self._kernels = [_kernels([maps[k] for k in members], kinds) for members in groups.values()]
        self._tables: dict[tuple[int, int, str], Array] = {}  # values of all pairs of two groups (N, M, S, T)

    def pair(self, i: int, j: int, measure: Measure) -> tuple[Array, None, None]:
        """The values of a pair; there is no interval, since nothing is estimated."""
        if swapped := self._place[i][0] > self._place[j][0]:
            i, j = j, i
        (g, m), (h, n) = self._place[i], self._place[j]
        key = g, h, measure.name
        if key not in self._tables:
            a, b = (self._kernels[group][_is_centred(measure)] for group in (g, h))
            self._tables[key] = _cosines(measure, inner_products(a, b, upper=g == h))
        table = self._tables[key][m, n]
        return table.T if swapped else table, None, None

    def with_other(self, i: int, other: LinearNetwork, measures: Sequence[Measure]) -> dict[str, Array]:
        """The values of a network of these with another one."""
        g, m = self._place[i]
        kernels = _kernels([other], self._kernels[g])
        values = {}
        for measure in measures:
            kind = _is_centred(measure)
            basis, cores = self._kernels[g][kind]
            member = None if basis is None else basis[m : m + 1], cores[m : m + 1]
            values[measure.name] = _cosines(measure, inner_products(member, kernels[kind])[0, 0])
        return values

    def chance(self, i: int, j: int, measure: Measure) -> Chance | None:
        """Mean and spread over all orders of the entries of the input."""
        if self.n < FEWEST_ENTRIES or "shift" not in measure.invariant:
            return None
        x, y = (self._invariants(k, _is_centred(measure)) for k in (i, j))
        mean, variance = permuted_moments(
            Invariants(x.trace[:, None], x.norm[:, None], x.diagonal[:, None]),
            Invariants(y.trace[None], y.norm[None], y.diagonal[None]),
            self.n,
        )
        # Below 0 by rounding only, if a kernel is a multiple of the centring matrix: all shuffles give the same value.
        return Chance(as_array(mean), as_array(variance.clamp(min=0).sqrt()))

    def _invariants(self, k: int, kind: bool) -> Invariants:
        """The invariants of the kernels of a network's sites (S,), which set the value at chance."""
        group, member = self._place[k]
        bases, cores = self._kernels[group][kind]
        diagonal = cores[member].diagonal(dim1=-2, dim2=-1)  # (S, r)
        trace = diagonal.sum(-1)
        if bases is not None:
            diagonal = (bases[member] @ cores[member] * bases[member]).sum(-1)  # (S, d)
        return Invariants(trace, torch.ones_like(trace), diagonal.square().sum(-1))


def _cosines(measure: Measure, products: Tensor) -> Array:
    """The values of a measure for kernels of norm 1."""
    one = products.new_ones(())
    return as_array(snap_to_bounds(measure(measure.reads(one, one, products)), measure))


# Kernels from random inputs, if the input has too many entries to try each: unbiased, and with an interval
#
# For independent Gaussian g and h the mean of (gᵀK h)(gᵀL h) is ⟨K, L⟩; products of pairs of different inputs within
# blocks estimate it without bias, for all pairs of sites at once. Centring subtracts the mean of each input: the
# constant input runs too, so that one pass gives centred and uncentred kernels.

BLOCK = 128  # inputs that are paired with each other in a block
PROBES = 8 * BLOCK
FEWEST = 2 * BLOCK

Grams = dict[bool, Tensor]  # centred (True) and as they are (False)


def random_grams(linear: LinearNetwork, probes: int, seed: int) -> Grams:
    """Gram matrices (blocks, S, b, b) of each site's response to Gaussian inputs, with a diagonal of 0.

    The inputs depend on `seed` alone, so that they are the same for each network.
    """
    grams: list[Tensor] = []
    exponents: list[Tensor] = []
    means: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)

    def gram(site: Site, rows: Tensor, exponent: int) -> tuple[Tensor, int]:
        return (rows @ rows.T).cpu(), 2 * exponent

    with _linear(linear.network, gram) as run, Progress(f"probing {linear.side.name}", probes, "inputs") as bar:
        for _ in range(probes // BLOCK):
            rows = torch.randn(BLOCK, linear.entries, generator=generator, dtype=torch.float64)
            means.append(rows.mean(1))
            rows = torch.cat([rows, rows.new_ones(1, linear.entries)])
            of_sites, of_exponents = zip(*run.run(_inputs(linear.network, linear.shape, rows)), strict=True)
            grams.append(torch.stack(of_sites))
            exponents.append(torch.tensor(of_exponents))
            bar.advance(BLOCK)
    whole = torch.stack(grams) * _common_scale(torch.stack(exponents))[..., None, None]
    # The last row and column are those of the constant input.
    plain, constant, both = whole[..., :-1, :-1], whole[..., :-1, -1], whole[..., -1:, -1:]
    share = torch.stack(means)[:, None, :, None]  # (blocks, 1, b, 1)
    shared = share * constant[..., None, :]
    of_centred = plain - shared - shared.mT + share * share.mT * both
    largest = whole.abs().amax((0, 2, 3))[None, :, None, None]
    norm = largest.where(largest > 0, largest.new_ones(()))
    kinds = {True: of_centred / norm, False: plain / norm}
    for kernels in kinds.values():
        kernels.diagonal(dim1=-2, dim2=-1).zero_()
    return kinds


class EstimatedValues:
    """Values from Gaussian inputs."""

    def __init__(self, maps: Sequence[LinearNetwork], probes: int, seed: int) -> None:
        self.n, self.seed, self.statistic = probes, seed, f"{probes} Gaussian inputs, seed {seed}"
        self._grams = [random_grams(linear, probes, seed) for linear in maps]

    def pair(self, i: int, j: int, measure: Measure) -> tuple[Array, Array | None, Array | None]:
        """The values of a pair and their interval, from leaving out one block at a time."""
        value, without = _from_grams(measure, self._grams[i], self._grams[j])
        if len(without) < FEWEST_GROUPS:
            return value, None, None
        return value, *around(measure, value, by_jackknife(without))

    def with_other(self, i: int, other: LinearNetwork, measures: Sequence[Measure]) -> dict[str, Array]:
        grams = random_grams(other, self.n, self.seed)
        return {measure.name: _from_grams(measure, self._grams[i], grams)[0] for measure in measures}


def _from_grams(measure: Measure, of_a: Grams, of_b: Grams) -> tuple[Array, Array]:
    """The values (S, T) of all blocks, and with each block left out (blocks, S, T)."""
    a, b = of_a[_is_centred(measure)], of_b[_is_centred(measure)]
    sums = (
        a.square().sum((-2, -1))[..., :, None],
        b.square().sum((-2, -1))[..., None, :],
        a.flatten(2) @ b.flatten(2).mT,
    )
    whole = measure(measure.reads(*(blocks.sum(0) for blocks in sums)))
    without = measure(measure.reads(*(blocks.sum(0) - blocks for blocks in sums)))
    return as_array(snap_to_bounds(whole, measure)), as_array(without)
