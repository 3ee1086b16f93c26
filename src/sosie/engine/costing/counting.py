"""Operations and memory, counted as torch runs them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ...linalg import all_by_torch

Shape = Sequence[int]

aten = torch.ops.aten

# Functions that ask for no vectors; while operations are watched torch computes them all the same.
_WITHOUT_VECTORS = (torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.matrix_norm, torch.linalg.matrix_rank)
_VALUES_ONLY: ContextVar[bool] = ContextVar("sosie_values_only", default=False)


def _sides(matrix: Shape) -> tuple[int, int, int]:
    """How many matrices, and the longer and shorter side of each."""
    *many, rows, columns = matrix
    return math.prod(many), max(rows, columns), min(rows, columns)


def _svd(a: Shape, full_matrices: bool = False, compute_uv: bool = True, **_: Any) -> int:
    count, m, n = _sides(a)
    with_vectors = compute_uv and not _VALUES_ONLY.get()
    return count * (6 * m * n**2 + 20 * n**3 if with_vectors else 2 * m * n**2 + 2 * n**3)


def _eigh(a: Shape, triangle: str = "L", compute_v: bool = True, **_: Any) -> int:
    count, n, _short = _sides(a)
    return count * (9 * n**3 if compute_v and not _VALUES_ONLY.get() else 4 * n**3 // 3)


def _qr(a: Shape, mode: str = "reduced", **_: Any) -> int:
    count, m, n = _sides(a)
    triangle = 2 * m * n**2 - 2 * n**3 // 3
    return count * (triangle if mode == "r" else 2 * triangle)


def _cube(share: float) -> Callable[..., int]:
    """share × n³ of square matrices."""

    def formula(a: Shape, *_: Any, **__: Any) -> int:
        count, n, _short = _sides(a)
        return int(count * share * n**3)

    return formula


def _solve(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    count, n, _short = _sides(a)
    return int(count * 2 * n**3 / 3) + 2 * n * math.prod(b)


def _triangular(a: Shape, b: Shape, **_: Any) -> int:
    return a[-1] * math.prod(b)


def _twice_triangular(b: Shape, a: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[-1] * math.prod(b)


def _squares(a: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a)


def _vectors(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a)


def _added_vectors(c: Shape, a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a)


def _distances(x: Shape, y: Shape, *_: Any, **__: Any) -> int:
    return 3 * math.prod(x) * y[-2]


# What torch's counter does not know, a multiplication and an addition being two. Factorisations by the leading terms of
# Golub and Van Loan, Matrix Computations (4th edition): singular values 2mn² + 2n³, with vectors 6mn² + 20n³ (8.6.3);
# eigenvalues of symmetric matrices 4n³/3, with vectors 9n³ (8.3); Householder's R 2mn² − 2n³/3, as much again for Q
# (5.2); Cholesky n³/3 (4.2); elimination 2n³/3, an inverse 2n³ (3.2); each triangle of a solution n² a column (3.1).
FORMULAS: dict[Any, Callable[..., int]] = {
    aten._linalg_svd: _svd,
    aten._linalg_eigh: _eigh,
    aten.linalg_qr: _qr,
    aten.linalg_cholesky_ex: _cube(1 / 3),
    aten.linalg_inv_ex: _cube(2),
    aten.linalg_lu_factor_ex: _cube(2 / 3),
    aten._linalg_det: _cube(2 / 3),
    aten._linalg_slogdet: _cube(2 / 3),
    aten._linalg_solve_ex: _solve,
    aten.linalg_solve_triangular: _triangular,
    aten.cholesky_solve: _twice_triangular,
    aten.linalg_vector_norm: _squares,
    aten.mv: _vectors,
    aten.dot: _vectors,
    aten.vdot: _vectors,
    aten.addmv: _added_vectors,
    aten._cdist_forward: _distances,
}


@dataclass
class Count:
    """What a run took: operations by part, the most bytes of tensors alive at a time, and what had no formula."""

    flops: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    unknown: set[str] = field(default_factory=set)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside belongs to this part."""
        counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        with counter:
            yield
        self.flops[name] = self.flops.get(name, 0) + counter.get_total_flops()


@contextmanager
def counted() -> Iterator[Count]:
    """Count what runs inside, `count.part("…")` by part; everything is done by torch, so that it is seen.

    Elementwise operations, sums and comparisons are not counted, as in torch's own counter.
    """
    count = Count()
    alive = _Alive(count)
    with all_by_torch(), _Asked(), alive:
        yield count


class _Asked(TorchFunctionMode):
    """Notices what was asked for, before torch takes it apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WITHOUT_VECTORS:
            return func(*args, **(kwargs or {}))
        token = _VALUES_ONLY.set(True)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _VALUES_ONLY.reset(token)


class _Alive(TorchDispatchMode):
    """Follows the memory of tensors made inside the block until it is given back."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count
        self._known: set[int] = set()
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, 0)
        found = func(*args, **kwargs)
        for tensor in _tensors(found):
            self._meet(tensor, tensor.untyped_storage().nbytes())
        self._count.peak_bytes = max(self._count.peak_bytes, self._bytes)
        packet = getattr(func, "_overloadpacket", func)
        known = packet in FORMULAS or packet in flop_registry or packet is aten._linalg_check_errors
        if "linalg" in str(packet) and not known:
            self._count.unknown.add(str(packet).removeprefix("aten."))
        return found

    def _meet(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self._bytes += size
            weakref.finalize(storage, self._lose, key, size)

    def _lose(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
