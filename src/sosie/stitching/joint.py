"""The layer between two networks: an affine map of channels, after a change of shape where theirs differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..linalg import Affine, JointMoments, lacks_room
from ..linalg.fits import check_fits
from ..measures import Measure, find, snap_to_bounds
from ..stats import Alignment, Covariances, Neurons, Scatter, UncentredAlignment

Resize = Literal["interpolate", "pool"]
RESIZES: tuple[Resize, ...] = ("interpolate", "pool")


@dataclass(frozen=True)
class Form:
    """What an activation of one input is: a vector, tokens with features, or a map of channels."""

    channels: int
    space: tuple[int, ...] = ()  # height and width of a map, the number of tokens; empty: a vector
    tokens: bool = False

    @classmethod
    def of(cls, shape: tuple[int, ...], channels_last: bool | None) -> Form:
        """From the shape of one input's activation, and whether features come last; None: it is not known."""
        if 0 in shape:
            raise ValueError(f"an activation of shape {shape} an input has nothing in it that could be stitched")
        if not shape:
            raise ValueError("an activation of one number an input cannot be stitched")
        if len(shape) == 1:
            return cls(shape[0])
        if channels_last is None:
            raise ValueError(
                f"an activation of shape {shape} an input cannot be stitched: nothing tells which dimension holds its "
                "features; choose another site"
            )
        if channels_last:
            return cls(shape[-1], shape[:-1], tokens=True)
        return cls(shape[0], shape[1:])

    def __str__(self) -> str:
        if not self.space:
            return f"a vector of {self.channels}"
        size = " × ".join(map(str, self.space))
        return f"{size} tokens of {self.channels}" if self.tokens else f"a map of {self.channels} channels, {size}"


class Joint(nn.Module):
    """Turns an activation of one network into one of another: shape first, then channels.

    Maps of another size are interpolated (bilinear) or pooled (adaptive mean), as `resize` says. Between maps and
    tokens a grid of tokens is read row by row; where one side has a token more than its grid, it is a class token:
    on the way to a map it is dropped, on the way to tokens it is made, as the mean of the others. A map or tokens
    become a vector by their mean.
    """

    def __init__(self, source: Form, target: Form, resize: Resize = "interpolate", *, bias: bool = True) -> None:
        super().__init__()
        if resize not in RESIZES:
            raise ValueError(f"no way to resize is called {resize!r}; there are {', '.join(RESIZES)}")
        _check(source, target)
        self.source, self.target, self.resize = source, target, resize
        self.weight = nn.Parameter(torch.zeros(target.channels, source.channels))
        self.bias = nn.Parameter(torch.zeros(target.channels)) if bias else None

    @property
    def reshapes(self) -> bool:
        """Whether the sites differ in more than their channels."""
        return self.source.space != self.target.space or self.source.tokens != self.target.tokens

    def forward(self, activation: Tensor) -> Tensor:
        shaped = self.shaped(activation)
        if not self.target.space or self.target.tokens:
            return F.linear(shaped, self.weight, self.bias)
        # Laid out as a network's own layer would: some go on with `x.view(…)`.
        mapped = torch.einsum("oc,nc...->no...", self.weight, shaped).contiguous()
        return mapped if self.bias is None else mapped + self.bias.view(1, -1, *[1] * len(self.target.space))

    def shaped(self, activation: Tensor) -> Tensor:
        """The activation in the target's shape, with the source's channels still."""
        source, target = self.source, self.target
        if not self.reshapes:
            return activation
        if not target.space:
            return activation.mean(
                tuple(range(1, activation.ndim - 1)) if source.tokens else (2, 3)[: activation.ndim - 2]
            )
        grid, extra = _grid(source)
        if source.tokens:
            activation = activation[:, extra:].transpose(1, 2).reshape(len(activation), -1, *grid)
        wanted, class_token = _grid(target)
        activation = self._resized(activation, wanted)
        if not target.tokens:
            return activation
        tokens = activation.flatten(2).transpose(1, 2)
        return torch.cat([tokens.mean(1, keepdim=True), tokens], dim=1) if class_token else tokens

    def _resized(self, maps: Tensor, size: tuple[int, ...]) -> Tensor:
        if tuple(maps.shape[2:]) == size:
            return maps
        if self.resize == "pool":
            return F.adaptive_avg_pool2d(maps, (size[0], size[1]))
        return F.interpolate(maps, size=size, mode="bilinear", align_corners=False)

    def extra_repr(self) -> str:
        return f"{self.source} → {self.target}, {self.resize}"


def _grid(form: Form) -> tuple[tuple[int, ...], int]:
    """Height and width, and how many tokens come before the grid."""
    if not form.tokens:
        return form.space, 0
    count = form.space[0]
    for extra in (0, 1):
        side = math.isqrt(count - extra)
        if side * side == count - extra:
            return (side, side), extra
    raise ValueError(f"{form}: {count} tokens are no square grid, with or without a class token")


def _check(source: Form, target: Form) -> None:
    if source.space == target.space and source.tokens == target.tokens:
        return
    if not source.space:
        raise ValueError(f"{source} cannot become {target}: there is no telling where in it what belongs")
    for form in (source, target):
        if form.space and len(form.space) != (1 if form.tokens else 2) and target.space:
            raise ValueError(f"{source} cannot become {target}: only maps of two dimensions and tokens are resized")
    if target.space:
        _grid(source)
        _grid(target)


# How alike B and a map of A are, at the joint of a stitched network: from moments, for any affine map

AT_THE_JOINT = ("linear_cka", "mean_cca", "svcca", "regression_r2")


def mapped(moments: JointMoments, affine: Affine) -> JointMoments:
    """The moments of S(A) and B."""
    check_fits(moments, affine)
    weight, bias = affine.weight.to(moments.cov_aa), affine.bias.to(moments.cov_aa)
    cov = weight @ moments.cov_aa @ weight.T
    if not bool((cov.diagonal() > 0).any()):
        raise ValueError("the map sends all of A to one point, so there is nothing to compare with B")
    return JointMoments(
        n=moments.n,
        mean_a=weight @ moments.mean_a + bias,
        mean_b=moments.mean_b,
        cov_aa=(cov + cov.T) / 2,
        cov_bb=moments.cov_bb,
        cov_ab=weight @ moments.cov_ab,
        products=moments.products,
    )


def similarity_at_joint(
    moments: JointMoments,
    affine: Affine,
    measures: Iterable[str | Measure] = AT_THE_JOINT,
    *,
    of_b: Scatter | None = None,
) -> dict[str, float]:
    """The measures' values for S(A) and B; those that read covariances, neurons, or the alignment, centred or not.

    Measures that ignore what S does say nothing of it: CKA ignores rotations, mean_cca and regression_r2 any
    invertible map, so regression_r2 of a least squares map is that of A itself; `explained` does depend on the map.
    `of_b`: B's covariance with its factorisations, where many maps are compared with one B.
    """
    return similarities(mapped(moments, affine), map(find, measures), of_b)


def similarities(m: JointMoments, measures: Iterable[Measure], of_b: Scatter | None = None) -> dict[str, float]:
    """The measures' values for A and B as they are."""
    of_a, of_b = scatter(m, "a"), of_b or scatter(m, "b")
    both = Covariances(of_a, of_b, m.cov_ab)
    return {measure.name: float(snap_to_bounds(_value(m, both, measure), measure, m.products)) for measure in measures}


def scatter(m: JointMoments, side: Literal["a", "b"]) -> Scatter:
    """One side's covariance, cut where its products have no more digits."""
    return Scatter(m.cov_aa if side == "a" else m.cov_bb, m.n, tolerance=m.tolerance)


def _value(m: JointMoments, both: Covariances, measure: Measure) -> Tensor:
    if measure.reads in (Alignment, UncentredAlignment):
        # ⟨K, L⟩ = ‖Σ x yᵀ‖²; n² cancels in what measures make of it, and is kept for what the view says it holds.
        seconds = m.about("mean" if measure.reads is Alignment else "zero")
        xx, yy, xy = ((m.n * second).square().sum() for second in seconds)
        return measure(measure.reads(xx, yy, xy))
    if measure.reads is Covariances:
        return measure(both)
    if measure.reads is Neurons:
        p, q = m.widths
        if measure.same_width and p != q:
            raise ValueError(f"{measure.name} compares neuron by neuron, so needs equal widths, got {p} and {q}")
        return measure(Neurons(m.cov_aa.diagonal(), m.cov_bb.diagonal(), m.cov_ab))
    raise ValueError(
        f"{measure.name} reads {measure.reads.__name__}, which means and covariances do not give: apply the map to the "
        "rows and compare them"
    )


# Joint sums: what closed-form stitching reads of paired rows, and no more

Blocks = Mapping[int, Tensor]  # by site: (parts, features, rows of a part), the same parts at every site
Pair = tuple[int, int]

FAR = 1.0  # standard deviations between the provisional centre and a chunk's mean before the chunk is centred anew
LONGEST = 4096  # rows that are added up in the precision of the products; longer sums would lose digits of float32


@dataclass(frozen=True)
class SiteSums:
    """One site's sums over its rows, about a centre, in float64."""

    centre: Tensor  # (p,)
    total: Tensor  # (p,)    Σ x
    square: Tensor  # (p, p) Σ x xᵀ

    def moved(self, centre: Tensor, n: int) -> SiteSums:
        """The same about another centre."""
        d = centre - self.centre
        square = self.square - torch.outer(d, self.total) - torch.outer(self.total, d) + n * torch.outer(d, d)
        return SiteSums(centre, self.total - n * d, square)

    def plus(self, other: SiteSums) -> SiteSums:
        return replace(self, total=self.total + other.total, square=self.square + other.square)

    def far_off(self, n: int) -> bool:
        """Whether the centre is so far from some neuron's mean that products about it lose digits."""
        offset = (self.total / n).square()
        spread = self.square.diagonal() / n - offset
        return bool(((offset > FAR**2 * spread) & (spread > 0)).any())


@dataclass(frozen=True)
class JointSums:
    """Sums over n paired rows of some sites of two sides, and over the pairs of sites asked for."""

    n: int
    products: torch.dtype  # the precision in which rows were multiplied; the sums are float64
    a: dict[int, SiteSums]
    b: dict[int, SiteSums]
    cross: dict[Pair, Tensor]  # (p, q) Σ x yᵀ

    def merge(self, other: JointSums) -> JointSums:
        """Of both lots of rows, about the first one's centres."""
        if self.cross.keys() != other.cross.keys() or self.products != other.products:
            raise ValueError(
                f"these sums are of other sites or precisions: {sorted(self.cross)} in {self.products} and "
                f"{sorted(other.cross)} in {other.products}"
            )
        other = other.about({i: s.centre for i, s in self.a.items()}, {j: s.centre for j, s in self.b.items()})
        return JointSums(
            self.n + other.n,
            self.products,
            {i: sums.plus(other.a[i]) for i, sums in self.a.items()},
            {j: sums.plus(other.b[j]) for j, sums in self.b.items()},
            {pair: product + other.cross[pair] for pair, product in self.cross.items()},
        )

    def about(self, centres_a: Mapping[int, Tensor], centres_b: Mapping[int, Tensor]) -> JointSums:
        """The same sums about other centres, in closed form."""
        a = {i: sums.moved(centres_a[i], self.n) for i, sums in self.a.items()}
        b = {j: sums.moved(centres_b[j], self.n) for j, sums in self.b.items()}
        cross = {}
        for (i, j), product in self.cross.items():
            d, e = a[i].centre - self.a[i].centre, b[j].centre - self.b[j].centre
            cross[i, j] = product - torch.outer(d, self.b[j].total) - torch.outer(a[i].total, e)
        return replace(self, a=a, b=b, cross=cross)

    def joint(self, i: int, j: int) -> JointMoments:
        """Means and covariances of a pair of sites, on the CPU: what a fit of A to B reads, and factorises."""
        a, b = self.a[i], self.b[j]
        mean_a, mean_b = a.total / self.n, b.total / self.n
        return JointMoments(
            self.n,
            (a.centre + mean_a).cpu(),
            (b.centre + mean_b).cpu(),
            (a.square / self.n - torch.outer(mean_a, mean_a)).cpu(),
            (b.square / self.n - torch.outer(mean_b, mean_b)).cpu(),
            (self.cross[i, j] / self.n - torch.outer(mean_a, mean_b)).cpu(),
            products=self.products,
        )


class JointMaker:
    """Makes the sums of one chunk: keeps each site's provisional centre, and moves it when it is far off.

    Rows are multiplied in `products` or in their own precision, whichever is finer.
    """

    def __init__(self, products: torch.dtype = torch.float32) -> None:
        self.products = products
        self._centres: dict[tuple[str, int], Tensor] = {}

    def part(self, a: Blocks, b: Blocks, pairs: Collection[Pair]) -> JointSums:
        """From blocks of all the sites that the pairs name."""
        counts = {block.shape[0] * block.shape[2] for block in (*a.values(), *b.values())}
        if len(counts) != 1:
            raise ValueError(f"need paired rows, got {' and '.join(map(str, sorted(counts)))}")
        if not self._centres:
            for k, block in (*a.items(), *b.items()):
                if lacks_room(block, f"site {k}"):
                    self.products = torch.float64
        dtype = self.products
        for block in (*a.values(), *b.values()):
            dtype = torch.promote_types(dtype, block.dtype)
        (n,) = counts
        rows_a, sums_a = self._side("a", a, n, dtype)
        rows_b, sums_b = self._side("b", b, n, dtype)
        cross = {(i, j): block_product(rows_a[i], rows_b[j]) for i, j in pairs}
        return JointSums(n, dtype, sums_a, sums_b, cross)

    def _side(
        self, side: str, blocks: Blocks, n: int, dtype: torch.dtype
    ) -> tuple[dict[int, Tensor], dict[int, SiteSums]]:
        rows, sums = {}, {}
        for k, block in blocks.items():
            block = block.to(dtype)
            if (side, k) not in self._centres:
                self._centres[side, k] = _mean(block)
            rows[k], sums[k] = _about(block, self._centres[side, k])
            if sums[k].far_off(n):
                self._centres[side, k] = _mean(block)
                rows[k], sums[k] = _about(block, self._centres[side, k])
        return rows, sums


def block_product(x: Tensor, y: Tensor) -> Tensor:
    """Σ x yᵀ over all rows: one product a part, and the parts added up in float64."""
    pieces = zip(x.split(LONGEST, 2), y.split(LONGEST, 2), strict=True)
    products = [torch.bmm(u, v.transpose(1, 2)).sum(0, dtype=torch.float64) for u, v in pieces]
    return products[0] if len(products) == 1 else torch.stack(products).sum(0)


def _about(block: Tensor, centre: Tensor) -> tuple[Tensor, SiteSums]:
    rows = block - centre.to(block.dtype)[:, None]
    return rows, SiteSums(centre, _total(rows), block_product(rows, rows))


def _total(rows: Tensor) -> Tensor:
    pieces = [part.sum(2).sum(0, dtype=torch.float64) for part in rows.split(LONGEST, 2)]
    return torch.stack(pieces).sum(0)


def _mean(block: Tensor) -> Tensor:
    """In float64, but a number that the block's own precision holds, so that it is subtracted exactly."""
    return block.mean((0, 2), dtype=torch.float64).to(block.dtype).double()
