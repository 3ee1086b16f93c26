"""Joint sums: what closed-form stitching reads of paired rows, and no more."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..linalg import JointMoments, lacks_room

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
