"""Small factorisations on one core each, many of them side by side."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

import sosie
from sosie.linalg import eigen, eigenvalues, once, side_by_side, singular, singular_values, triangular_inverse
from sosie.linalg.products import SMALL, _blas, lock_of, one_thread
from sosie.measures import MEASURES, define
from sosie.process_state import products, threads_of_torch, torch_on_one_core
from sosie.stats import Covariances


def blas_threads() -> list[int]:
    return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]


def test_one_thread_and_as_before_afterwards() -> None:
    _blas()  # loads all libraries there are
    before = blas_threads()
    assert before, "NumPy has no BLAS that can be told how many threads to use"
    with one_thread:
        assert set(blas_threads()) == {1}
    assert blas_threads() == before


@pytest.fixture
def two_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_side_by_side_keeps_the_order_and_leaves_threads_as_found() -> None:
    before, names = blas_threads(), set()

    def square(x: int) -> int:
        names.add(threading.current_thread().name)
        assert torch.get_num_threads() == 1
        return x * x

    assert list(side_by_side(square, range(50))) == [x * x for x in range(50)]
    assert all(name.startswith("sosie") for name in names)
    assert torch.get_num_threads() == 2
    assert blas_threads() == before


@pytest.mark.usefixtures("two_threads")
def test_an_error_comes_through_and_threads_are_as_found() -> None:
    before = blas_threads()

    def fail(x: int) -> int:
        raise KeyError(x)

    with pytest.raises(KeyError):
        list(side_by_side(fail, range(5)))
    assert torch.get_num_threads() == 2
    assert blas_threads() == before


@pytest.mark.usefixtures("two_threads")
def test_torch_leaves_the_cores_to_numpy_and_gets_them_back() -> None:
    names = set()
    with products(one_core=True), torch_on_one_core():
        assert torch.get_num_threads() == 1
        list(side_by_side(lambda _: names.add(threading.current_thread().name), range(50)))
        assert torch.get_num_threads() == 1
    assert all(name.startswith("sosie") for name in names), "in as many workers as outside"
    with pytest.raises(KeyError), torch_on_one_core():
        raise KeyError
    assert torch.get_num_threads() == threads_of_torch() == 2


@pytest.mark.usefixtures("two_threads")
def test_measures_run_with_torch_on_one_core() -> None:
    threads = []

    @define(reads=Covariances, bounds=(0, 1), closer="up", invariant=set())
    def threads_seen(c: Covariances) -> torch.Tensor:
        """How many threads torch has."""
        threads.append(torch.get_num_threads())
        return c.x.matrix.new_ones(())

    x, y = np.random.default_rng(0).normal(size=(2, 60, 4))
    sosie.measure(threads_seen, x, y)
    sosie.compare({"l": x}, {"l": y}, measures=threads_seen)
    MEASURES.pop("threads_seen")
    assert len(threads) > 1
    assert set(threads) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("grad", [True, False])
def test_workers_record_gradients_as_the_caller_does(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        assert list(side_by_side(lambda _: torch.is_grad_enabled(), range(4))) == [grad] * 4


class Slow:
    """Its value waits until another instance's is being made too."""

    made = 0

    def __init__(self, meet: threading.Barrier) -> None:
        self.meet = meet

    @once
    def value(self) -> int:
        """What it is."""
        type(self).made += 1
        self.meet.wait(timeout=5)
        return 7


def test_once_is_made_once_and_lets_other_instances_go_on() -> None:
    Slow.made = 0
    meet = threading.Barrier(2)  # breaks if one instance's value keeps the other's from being made
    both = [Slow(meet), Slow(meet)]
    found: list[int] = []
    workers = [threading.Thread(target=lambda each=each: found.append(each.value)) for each in (*both, *both)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [7] * 4
    assert Slow.made == 2
    assert Slow.value.__doc__ == "What it is."


@pytest.mark.parametrize("size", [30, SMALL + 1])
def test_eigenvalues_and_vectors_are_those_of_the_matrix(size: int) -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(size, size)))
    matrix = x + x.T
    values, vectors = eigen(matrix)
    torch.testing.assert_close(matrix @ vectors, vectors * values, atol=1e-9, rtol=0)
    torch.testing.assert_close(eigenvalues(matrix), values, atol=1e-9, rtol=0)
    assert bool((values.diff() >= 0).all())


@pytest.mark.parametrize("shape", [(40, 25), (25, 40)])
def test_singular_values_and_vectors(shape: tuple[int, int]) -> None:
    matrix = torch.from_numpy(np.random.default_rng(1).normal(size=shape))
    u, sizes, vt = singular(matrix)
    torch.testing.assert_close((u * sizes) @ vt, matrix)
    torch.testing.assert_close(singular_values(matrix), sizes)
    torch.testing.assert_close(u.T @ u, torch.eye(25, dtype=torch.float64))
    differentiable = matrix.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(singular_values(differentiable).sum(), differentiable)
    torch.testing.assert_close(gradient, u @ vt)


def test_the_inverse_of_a_triangle() -> None:
    lower = torch.from_numpy(np.random.default_rng(2).normal(size=(20, 20))).tril() + 5 * torch.eye(20)
    identity = torch.eye(20, dtype=torch.float64)
    for factor in (lower, lower.clone().requires_grad_()):
        torch.testing.assert_close(triangular_inverse(factor) @ lower, identity)
    torch.testing.assert_close(triangular_inverse(lower.float()) @ lower.float(), identity.float(), atol=1e-5, rtol=0)


def test_the_last_to_leave_puts_the_threads_back() -> None:
    before = blas_threads()
    first = second = one_thread
    with _blas().limit(limits=2, user_api="blas"):  # so that there is something to put back on one core, too
        wanted = blas_threads()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert set(blas_threads()) == {1}, "the second still wants one core"
        second.__exit__(None, None, None)
        assert blas_threads() == wanted
    assert blas_threads() == before


def test_what_was_made_once_can_be_copied() -> None:
    class Squares:
        def __init__(self, number: int) -> None:
            self.number = number

        @once
        def square(self) -> int:
            return self.number**2

    found = Squares(3)
    assert found.square == 9
    copied = copy.deepcopy(found)
    assert copied.square == 9
    assert lock_of(copied) is not lock_of(found)
    assert type(pickle.loads(pickle.dumps(lock_of(found)))) is type(lock_of(found))


@pytest.mark.usefixtures("two_threads")
def test_two_comparisons_at_once_are_what_one_is() -> None:
    torch_threads, blas = torch.get_num_threads(), blas_threads()
    generator = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(40, 6, generator=generator, dtype=torch.float64) for name in "xyz"}
    measures = ["mean_cca", "procrustes_distance", "mutual_knn"]

    def values() -> list[np.ndarray]:
        # Warnings are the interpreter's, not a thread's: they are seen to elsewhere.
        found = sosie.compare(rows, rows, measures=measures)
        return [found.values[name].value for name in measures]

    expected = values()
    found: list[list[np.ndarray]] = []
    workers = [threading.Thread(target=lambda: found.append(values())) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 3
    for each in found:
        for one, other in zip(each, expected, strict=True):
            assert np.array_equal(one, other, equal_nan=True)
    assert (torch.get_num_threads(), blas_threads()) == (torch_threads, blas)


def test_the_inverse_of_nothing_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert triangular_inverse(torch.empty(0, 0, dtype=torch.float64)).shape == (0, 0)
    assert capfd.readouterr() == ("", "")
