"""Dense linear algebra: products, sums of squares, factorisations; by NumPy on a CPU, and on one core if small."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from ..process_state import SharedContext, threads_of_torch, torch_on_one_core

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController


FLOAT32_PRODUCTS = 2.0**-40, 2.0**50  # range of the largest number for which float32 holds sums of products of two
FLOAT64_PRODUCTS = 1e-36, 1e36  # and float64 those of eight, which the spread of chance levels needs

HALVED = 128  # columns from which a product of halves takes less time than one of the whole with itself

_BY_TORCH: ContextVar[bool] = ContextVar("sosie_all_by_torch", default=False)


def product(x: Tensor, y: Tensor) -> Tensor:
    """XY, in the finer of the two precisions; by NumPy on a CPU.

    NumPy computes XᵀX at half the cost, unlike torch, and is far less disturbed by a busy machine; consecutive products
    are left to one library, since the threads of two would compete for the cores.
    """
    dtype = torch.promote_types(x.dtype, y.dtype)
    left, right = x.to(dtype), y.to(dtype)
    if not for_numpy(left) or not for_numpy(right):
        return left @ right
    with np.errstate(all="ignore"):  # numbers that are not finite are reported elsewhere
        return torch.from_numpy(left.numpy() @ right.numpy())


def cross_product(x: Tensor, y: Tensor) -> Tensor:
    """XᵀY."""
    return product(x.T, y)


def self_product(rows: Tensor) -> Tensor:
    """XᵀX; at half the cost on a CPU."""
    return cross_product(rows, rows)


def self_product_squares(rows: Tensor) -> Tensor:
    """‖XᵀX‖² in float64, by halves of the columns, recursively, since their product with each other counts twice."""
    half = rows.shape[1] // 2
    if half < HALVED:
        return total_squares(self_product(rows))
    left, right = rows[:, :half], rows[:, half:]
    return self_product_squares(left) + self_product_squares(right) + 2 * total_squares(cross_product(left, right))


def take_columns(rows: Tensor, which: Tensor) -> Tensor:
    """These columns; NumPy takes a fifth of the time of torch."""
    if not for_numpy(rows):
        return rows[:, which]
    return torch.from_numpy(rows.numpy().take(which.numpy(), 1))


def for_numpy(matrix: Tensor) -> bool:
    """Return whether NumPy and SciPy may compute with it: on a CPU, without a gradient."""
    plain = matrix.device.type == "cpu" and not matrix.requires_grad
    return plain and matrix.dtype in (torch.float32, torch.float64) and not _BY_TORCH.get()


@contextmanager
def all_by_torch() -> Iterator[None]:
    """Compute with torch alone inside the block, so that all operations can be counted."""
    token = _BY_TORCH.set(True)
    try:
        yield
    finally:
        _BY_TORCH.reset(token)


def with_room(rows: Tensor, label: str) -> Tensor:
    """The rows, in float64 if their products would overflow or vanish in float32."""
    return rows.double() if lacks_room(rows, label) else rows


def lacks_room(rows: Tensor, label: str, largest: float | None = None) -> bool:
    """Return whether products of such rows leave float32; raise if they leave float64. NaN is noticed elsewhere.

    `largest` is the largest number in the rows and those before them, if it is known.
    """
    largest = largest_number(rows) if largest is None else largest
    low, high = FLOAT64_PRODUCTS
    if math.isfinite(largest) and largest and not low <= largest <= high:
        raise ValueError(
            f"the largest number in {label} is {largest:.0e}: its products leave the range of float64; multiply "
            f"{label} by a power of 2 that brings it near 1"
        )
    low, high = FLOAT32_PRODUCTS
    return rows.dtype != torch.float64 and bool(largest) and not low <= largest <= high


def near_one(rows: Tensor) -> Tensor:
    """The rows times the power of 2 that brings the largest number near 1; unchanged if their products fit."""
    largest = largest_number(rows)
    low, high = FLOAT64_PRODUCTS if rows.dtype == torch.float64 else FLOAT32_PRODUCTS
    if low <= largest <= high or not largest or not math.isfinite(largest):
        return rows
    most = 1000 if rows.dtype == torch.float64 else 126  # largest exponent of this precision
    return rows * 2.0 ** max(-most, min(most, -math.frexp(largest)[1]))


def largest_number(rows: Tensor) -> float:
    """The largest absolute number, or a bound on it below `high` if float32 holds all products.

    On a CPU √Σx² takes a thirtieth of the time of the maximum, and mostly shows that no number is too large.
    """
    rows = rows.detach()
    if not rows.numel():
        return 0.0
    if for_numpy(rows):
        low, high = FLOAT32_PRODUCTS
        with np.errstate(all="ignore"):
            size = float(np.linalg.norm(rows.numpy().ravel(order="K")))
        if low * rows.numel() ** 0.5 <= size <= high:
            return size
    return max(abs(float(end)) for end in torch.aminmax(rows))


def column_squares(rows: Tensor) -> Tensor:
    """Σ x² of each column."""
    return _squares(rows, "ij,ij->j") if for_numpy(rows) else rows.square().sum(0)


def row_squares(rows: Tensor) -> Tensor:
    """Σ x² of each row."""
    return _squares(rows, "ij,ij->i") if for_numpy(rows) else rows.square().sum(1)


def total_squares(rows: Tensor) -> Tensor:
    """Σ x² of all entries, in float64; not finite where an entry is not, or its square overflows."""
    if not for_numpy(rows) or rows.dtype != torch.float64:
        return rows.double().square().sum()
    flat = rows.numpy().ravel(order="K")  # in the order of memory, so that a transpose is not copied
    with np.errstate(all="ignore"):
        return torch.tensor(flat @ flat, dtype=torch.float64)


def _squares(rows: Tensor, which: str) -> Tensor:
    """One pass that writes nothing to memory, without torch threads, which would wait for those of a product."""
    array = rows.numpy()
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.einsum(which, array, array, dtype=np.float64)).to(rows.dtype)


# Many small pieces of linear algebra at once, each on one core
#
# A factorisation of a few hundred columns gains nothing from several threads, which wait for each other while other
# work keeps the cores busy: up to a hundred times as long. So small ones get one thread each, and run side by side.

S = TypeVar("S")
T = TypeVar("T")

MOST_WORKERS = 8  # each holds what it works on


@cache
def _blas() -> ThreadpoolController:
    import scipy.linalg  # noqa: F401 (its own BLAS is limited only if it is loaded before)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def _one_each() -> Iterator[None]:
    limited = _blas().limit(limits=1, user_api="blas")  # not by `with`, which only the same thread can leave
    try:
        yield
    finally:
        limited.restore_original_limits()


one_thread = SharedContext(_one_each)  # NumPy's and SciPy's linear algebra on one core inside the context


def side_by_side(function: Callable[[S], T], items: Iterable[S]) -> Generator[T, None, None]:
    """`map(function, items)` in order, in as many workers as torch may use threads, each on one core."""
    workers = min(threads_of_torch(), MOST_WORKERS, os.cpu_count() or 1)
    if workers == 1:
        yield from map(function, items)
        return
    if torch.cuda.is_initialized():
        _load_for_gpus()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="sosie")
    try:
        with torch_on_one_core(), one_thread:
            yield from pool.map(_in_worker(function), items)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@cache
def _load_for_gpus() -> None:
    """torch loads its linear algebra for GPUs at the first call, which must not come from two threads at once."""
    torch.linalg.cholesky(torch.ones(1, 1, device="cuda"))


def _in_worker(function: Callable[[S], T]) -> Callable[[S], T]:
    """The function with the gradient mode of this thread, which workers do not inherit."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def call(item: S) -> T:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return function(item)

    return call


class once(Generic[T]):
    """`functools.cached_property` with a lock for each instance, not one for the class as in Python 3.11."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> once[T] | T:
        if instance is None:
            return self
        with lock_of(instance):
            if self.name not in instance.__dict__:
                instance.__dict__[self.name] = self.make(instance)
        return instance.__dict__[self.name]


class OwnLock:
    """A reentrant lock that is made anew in a copy or a pickle of its owner."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[OwnLock], tuple[()]]:
        return OwnLock, ()


def lock_of(instance: object) -> OwnLock:
    lock: OwnLock = instance.__dict__.setdefault("_lock", OwnLock())
    return lock


def memo(instance: object, key: object, make: Callable[[], T]) -> T:
    """`make()`, called once for each key of an instance."""
    with lock_of(instance):
        made: dict[object, T] = instance.__dict__.setdefault("_made", {})
        if key not in made:
            made[key] = make()
        return made[key]


# Factorisations of dense matrices: by NumPy on a CPU without gradients, on one core if small

SMALL = 1024  # columns up to which more cores are not faster


def eigenvalues(matrix: Tensor) -> Tensor:
    """Eigenvalues of a symmetric matrix, ascending."""
    return _factorise(matrix, np.linalg.eigvalsh, torch.linalg.eigvalsh)


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of a symmetric matrix."""
    return _factorise(matrix, np.linalg.eigh, torch.linalg.eigh)


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values, descending."""
    return _factorise(matrix, partial(np.linalg.svd, compute_uv=False), torch.linalg.svdvals)


def singular(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (p, k), σ (k,) descending and Vᵀ (k, q) with k = min(p, q)."""
    by_numpy, by_torch = (partial(svd, full_matrices=False) for svd in (np.linalg.svd, torch.linalg.svd))
    return _factorise(matrix, by_numpy, by_torch)


def orthonormal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors (n, k) and singular values (k,), descending, with k = min(n, p); from a QR."""
    if len(matrix) <= matrix.shape[1]:
        _, r = _factorise(matrix.T, np.linalg.qr, torch.linalg.qr)
        return singular(r.T)[:2]
    q, r = _factorise(matrix, np.linalg.qr, torch.linalg.qr)
    u, sizes, _ = singular(r)
    return q @ u, sizes


def orthonormal_square(columns: Tensor) -> Tensor:
    """(n, n): an orthogonal matrix whose first k columns span these k."""
    return _factorise(columns, partial(np.linalg.qr, mode="complete"), partial(torch.linalg.qr, mode="complete"))[0]


def cholesky(matrix: Tensor) -> Tensor:
    """The Cholesky factor L of a positive definite matrix L Lᵀ; differentiable."""
    return _factorise(matrix, np.linalg.cholesky, torch.linalg.cholesky)


def _factorise(matrix: Tensor, by_numpy: Callable[..., Any], by_torch: Callable[..., Any]) -> Any:
    if not for_numpy(matrix):
        factors = by_torch(matrix)
        return factors if isinstance(factors, Tensor) else tuple(factors)
    with threads_for(matrix):
        factors = by_numpy(matrix.numpy())
    return torch.from_numpy(factors) if isinstance(factors, np.ndarray) else tuple(map(torch.from_numpy, factors))


def gram_factor(matrix: Tensor) -> Tensor:
    """F (p, rank) with F Fᵀ a positive semidefinite float64 matrix on a CPU, to its last digits; not differentiable.

    The Cholesky factor takes a tenth of the time of eigenvectors. For a singular matrix the largest directions come
    first, until only rounding is left: below p times that of the largest entry.
    """
    from scipy.linalg.lapack import dpotrf, dpstrf

    with threads_for(matrix):
        # LAPACK takes a third of the time of NumPy; the transpose of the symmetric matrix saves a copy.
        lower, failed = dpotrf(matrix.numpy().T, lower=1)
        if not failed:
            return torch.from_numpy(lower)
        lower, order, rank, _ = dpstrf(matrix.numpy().T, lower=1)
    factor = np.empty((rank, len(lower)))
    factor[:, order - 1] = np.triu(lower.T)[:rank]
    return torch.from_numpy(factor).T


def triangular_inverse(factor: Tensor) -> Tensor:
    """L⁻¹ of a lower triangle with no zero on its diagonal; differentiable."""
    if not len(factor) or not for_numpy(factor) or factor.dtype != torch.float64:
        return torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
    from scipy.linalg.lapack import dtrtri  # unlike a solver, it skips the half of the result that is zero

    with threads_for(factor):
        return torch.from_numpy(dtrtri(factor.numpy(), lower=1)[0])


def threads_for(matrix: Tensor) -> AbstractContextManager[None]:
    """One core for small matrices: more gain nothing, and libraries would wait for each other's threads."""
    return one_thread if min(matrix.shape[-2:]) <= SMALL else nullcontext()


# Products of many matrices, with a scale of their own

VANISHED = 1e-24  # share of Σ W² that rounding leaves when a map with equal entries for all inputs is centred


def unit(matrix: Tensor) -> Tensor:
    """The matrix (…, d, p) over its largest entry; a matrix of zeros stays as it is.

    The factor is a constant for gradients, which are right if the result is divided by its size later.
    """
    largest = matrix.detach().abs().amax((-2, -1), keepdim=True)
    return matrix / largest.where(largest > 0, largest.new_ones(()))


def chain_products(factors: Sequence[Tensor]) -> list[Tensor]:
    """W₁, W₁W₂, W₁W₂W₃, … (…, d, p), each times a positive number, so that deep chains neither overflow nor vanish."""
    for k, (left, right) in enumerate(itertools.pairwise(factors)):
        if left.shape[-1] != right.shape[-2]:
            shapes = f"{tuple(left.shape[-2:])} and {tuple(right.shape[-2:])}"
            raise ValueError(f"factors {k + 1} and {k + 2} do not fit together: {shapes}; each is (inputs, outputs)")
    return list(
        itertools.accumulate(factors[1:], lambda left, right: unit(left @ unit(right)), initial=unit(factors[0]))
    )


def vanishes(size: float, whole: float) -> bool:
    """Return whether a kernel of this norm, of a map with this Σ W², is rounding."""
    return not size > VANISHED * whole


# The best one-to-one match of rows with columns


def best_assignment(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the min(p, q) entries of scores (p, q) with the largest sum, one per row and column."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(scores.detach().cpu().numpy(), maximize=True)
    return torch.from_numpy(rows).to(scores.device), torch.from_numpy(columns).to(scores.device)
