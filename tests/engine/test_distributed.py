"""Several processes over one comparison: as one process has it, and no process is left waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nets import Tokens, mlp
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import sosie
from sosie.capture import Share
from sosie.data import DataPart
from sosie.engine.comparing import Pass
from sosie.engine.distributed import RankFailed, SingleProcess, single_process
from sosie.engine.partial import Partial
from sosie.results import ARRAYS, Comparison, Comparisons, Side


def _needs_the_store() -> None:
    if not hasattr(torch.distributed.ProcessGroup, "get_group_store"):
        pytest.skip("comparisons are not shared with a torch this old")


Answers = dict[str, list[Any]]  # of each process, by what it did
DOUBTS: dict[str, Any] = {"precision": "float64", "null": "permutation", "draws": 25, "interval": True}


def rows(n: int, seed: int = 1) -> Tensor:
    """Far from zero, so that it matters where sums are centred."""
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 3


class OneByOne(Dataset[Tensor]):
    """Inputs by index, which notes what it was asked for."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.asked = x, set[int]()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        self.asked.add(index)
        return self.x[index]


def stream(x: Tensor) -> Iterator[Tensor]:
    """Batches of different sizes, of unknown number, that can be read once."""
    start = 0
    for size in [10, 40, 7, 30, 30, 1, 60, 25] * 3:
        if start < len(x):
            yield x[start : start + size]
        start += size


def nets() -> tuple[nn.Module, nn.Module]:
    return mlp(0).double(), mlp(1).double()


CASES: dict[str, Any] = {
    "grams": lambda: sosie.compare(
        *nets(), DataLoader(TensorDataset(rows(203)), 24), block=8, memory=1000, sites_a=["0", "2"],
        measures=["debiased_cka", "linear_cka", "kernel_alignment"], **DOUBTS,
    ),
    "moments": lambda: sosie.compare(
        *nets(), DataLoader(TensorDataset(rows(203)), 24), measures=["debiased_cka", "mean_cca", "procrustes_angle"],
        **DOUBTS,
    ),
    "folds": lambda: sosie.compare(
        *nets(), DataLoader(TensorDataset(rows(203)), 24), measures="predictivity", sites="2",
    ),
    "float32": lambda: sosie.compare(mlp(0), mlp(1), DataLoader(rows(203).float(), 24), measures="debiased_cka"),
    "float32, some chunks far off": lambda: sosie.compare(mlp(0), mlp(1), stream(rows(150).float())),
    "rows": lambda: sosie.compare(
        *nets(), OneByOne(rows(150)), measures=["mutual_knn(k=3)", "deconfounded_cka"], sites_a="2", sites_b="2",
        **DOUBTS | {"draws": 20},
    ),
    "sampled rows": lambda: sosie.compare(*nets(), stream(rows(203).repeat(12, 1)), measures="cknna", sites_a="2"),
    "exact": lambda: sosie.compare(*nets(), rows(203), measures="debiased_cka", exact=True),
    "three models": lambda: sosie.compare([*nets(), mlp(2).double()], rows(300), block=8, memory=1000),
    "fewer inputs than asked for": lambda: sosie.compare(*nets(), [rows(20)], max_rows=30),
    "a part of larger data": lambda: sosie.compare(*nets(), DataPart(rows(300), 8), max_rows=290, block=8, memory=1000),
    "saved": lambda: sosie.compare({"a": rows(3000)}, {"b": rows(3000, 2)}, block=8, measures=["linear_cka", "cknna"]),
    "outputs": lambda: sosie.compare_outputs(*nets(), [(rows(n), torch.arange(n) % 3) for n in (20, 30, 11, 40, 2)]),
    "numbers": lambda: sosie.compare_outputs(*nets(), DataLoader(rows(203), 24), kind="regression"),
    "saved outputs": lambda: sosie.compare_outputs(rows(9000), rows(9000, 2), labels=torch.arange(9000) % 8),
}  # fmt: skip


def all_cases() -> dict[str, Comparison | Comparisons]:
    return {name: case() for name, case in CASES.items()}


@pytest.fixture(scope="module")
def one() -> dict[str, Comparison | Comparisons]:
    return all_cases()


@pytest.fixture(scope="module")
def several() -> list[dict[str, Comparison | Comparisons]]:
    _needs_the_store()
    found: list[dict[str, Comparison | Comparisons]] = run_ranks(3, all_cases)
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_process_has_what_one_alone_has(case: str, one: dict[str, Any], several: list[dict[str, Any]]) -> None:
    for found in several:
        # In float32 rounding hangs on the centre, and each process moves its own where a chunk is far off.
        assert_same(one[case], found[case], 1e-6 if "far off" in case else 1e-12)
        first = found[case].pairs[0, 1] if isinstance(found[case], Comparisons) else found[case]
        assert first.provenance["processes"] == len(several)


def assert_same(one: Any, other: Any, within: float = 1e-12) -> None:
    if isinstance(one, Comparisons):
        for pair, found in one.pairs.items():
            assert_same(found, other.pairs[pair])
        return
    assert (one.side_a, one.side_b, list(one.values)) == (other.side_a, other.side_b, list(other.values))
    for name, values in one.values.items():
        theirs = other.values[name]
        assert (values.n, values.statistic, values.caveats) == (theirs.n, theirs.statistic, theirs.caveats)
        for kind in ARRAYS:
            a, b = getattr(values, kind), getattr(theirs, kind)
            assert (a is None) == (b is None), f"{name}: {kind}"
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=0, atol=within, err_msg=f"{name}: {kind}")


def test_the_cases_take_all_kinds_of_statistics_and_doubts(one: dict[str, Any]) -> None:
    text = " ".join(
        values.statistic for name in CASES if name != "three models" for values in one[name].values.values()
    )
    assert all(part in text for part in ("blocks of 8", "moments of all", "a seeded sample of 2048 of", "counts over"))
    for name in ("grams", "moments", "rows"):
        for values in one[name].values.values():
            assert all(getattr(values, kind) is not None for kind in ("low", "null", "p", "p_search"))


def what_is_read() -> list[int]:
    data = OneByOne(rows(300))
    sosie.compare(*nets(), DataLoader(data, 16), block=8, memory=1000)
    return sorted(data.asked)


def test_inputs_that_can_be_had_by_index_are_read_once(of_two: Answers) -> None:
    first, *others = of_two["what_is_read"]
    again = set(range(16))  # the first batch shows every process what there is
    assert sorted([*first, *(index for other in others for index in other if index not in again)]) == list(range(300))


def with_files() -> Any:
    path = Path("part.safetensors")
    sosie.compare(*nets(), rows(300), max_rows=160, resume=path, block=8, memory=1000)
    return sosie.compare(*nets(), rows(300), resume=path, block=8, memory=1000)


def from_the_file() -> Any:
    with single_process():
        return sosie.compare("part.safetensors")


def test_statistics_are_gone_on_from(of_two: Answers, tmp_path: Path) -> None:
    whole = sosie.compare(*nets(), rows(300), block=8, memory=1000, resume=tmp_path / "other.safetensors")
    for found in (*of_two["with_files"], *of_two["from_the_file"]):
        assert_same(whole, found)


def alone() -> Any:
    if torch.distributed.get_rank() == 0:
        with single_process():
            return sosie.compare(*nets(), rows(100))
    return None


def test_one_of_them_may_compare_alone(of_two: Answers) -> None:
    first, second = of_two["alone"]
    assert second is None
    assert "processes" not in first.provenance
    assert_same(sosie.compare(*nets(), rows(100)), first)


def rank() -> int:
    return torch.distributed.get_rank()


def other_data() -> Any:
    return sosie.compare(*nets(), rows(100, seed=rank()))


def own_samples() -> Any:
    data = TensorDataset(rows(100))
    return sosie.compare(*nets(), DataLoader(data, 10, sampler=DistributedSampler(data, shuffle=False)))


def other_weights() -> Any:
    return sosie.compare_outputs(nets()[0], mlp(rank()).double(), rows(100))


def ends_early() -> Any:
    return sosie.compare(*nets(), stream(rows(150 - 20 * rank())))


def fails_on_the_way() -> Any:
    def batches() -> Iterator[Tensor]:
        for number in range(40):
            if number == 9 and rank() == 1:
                raise OSError("the disk is gone")
            time.sleep(0.1 * rank())
            yield rows(20)

    return sosie.compare(*nets(), batches())


def fails_before() -> Any:
    return sosie.compare("missing.npz" if rank() else {"a": rows(50)}, {"b": rows(50)})


def fails_at_the_end() -> Any:
    from sosie.engine import partial

    before = partial.evaluate
    try:
        if rank() == 0:
            partial.evaluate = None  # type: ignore[assignment]
        return sosie.compare({"a": rows(50)}, {"b": rows(50)})
    finally:
        partial.evaluate = before


def of_different_lengths() -> Any:
    tokens = torch.arange(60).reshape(6, 10) % 20
    mask = (torch.arange(10) < torch.tensor([10, 3, 5, 10, 10, 4])[:, None]).long()
    batches = [{"input_ids": tokens[k : k + 2], "attention_mask": mask[k : k + 2]} for k in (0, 2, 4)]
    return sosie.compare(Tokens(0), Tokens(1), batches, rows="positions")


def in_turn() -> dict[str, Any]:
    """One after the other in the same processes: what went wrong with one must not harm the next."""
    found: dict[str, Any] = {}
    for one in (
        *(other_data, own_samples, other_weights, ends_early, fails_on_the_way, fails_before, fails_at_the_end),
        *(what_is_read, with_files, from_the_file, alone, of_different_lengths),
    ):
        try:
            found[one.__name__] = one()
        except Exception as error:
            found[one.__name__] = error
    return found


@pytest.fixture(scope="module")
def of_two() -> Answers:
    _needs_the_store()
    both = run_ranks(2, in_turn)
    return {name: [found[name] for found in both] for name in both[0]}


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (other_data, "data is .* in rank 0 and .* in rank 1"),
        (own_samples, "no DistributedSampler"),
        (other_weights, "models is .* in rank 0 and .* in rank 1"),
        (ends_early, "the number of inputs is 150 in rank 0 and 130 in rank 1"),
    ],
)
def test_processes_that_do_not_compare_the_same_all_say_so(mistake: Any, words: str, of_two: Answers) -> None:
    for error in of_two[mistake.__name__]:
        with pytest.raises((ValueError, RankFailed), match=words):  # the later process reports what the first one said
            raise error


@pytest.mark.parametrize(
    ("mistake", "by", "words"),
    [
        (fails_on_the_way, 1, "OSError: the disk is gone"),
        (fails_before, 1, "FileNotFoundError: .*missing"),
        (fails_at_the_end, 0, "TypeError"),
    ],
)
def test_where_one_fails_the_others_end_and_say_why(mistake: Any, by: int, words: str, of_two: Answers) -> None:
    found = of_two[mistake.__name__]
    assert not isinstance(found[by], RankFailed)
    with pytest.raises(RankFailed, match=f"rank {by} failed: {words}"):
        raise found[1 - by]


def test_texts_of_different_lengths_by_position_are_refused(of_two: Answers) -> None:
    assert of_different_lengths().values
    assert any("cannot be numbered" in str(error) for error in of_two["of_different_lengths"])


def only_the_first() -> Any:
    if rank():
        return None
    torch.distributed.group.WORLD.get_group_store().set_timeout(timedelta(seconds=1))
    return sosie.compare(*nets(), rows(50))


def test_a_process_that_does_not_come_is_not_waited_for_forever() -> None:
    _needs_the_store()
    found = run_ranks(2, only_the_first)
    with pytest.raises(RankFailed, match=r"rank 1 did not join within 1 s.*single_process"):
        raise found[0]


def test_how_far_off_means_were_is_told_of_all() -> None:
    def sums(**counts: int) -> Partial:
        side = Side("a", (), (), ())
        return Partial(side, side, {}, "flatten", **counts)

    class First(SingleProcess):
        share = Share(0, 2)

        def collect(self, mine: Any, absorb: Any) -> None:
            absorb(({(0, 1): sums(inputs=3, rows=13)}, {}, {("a", "x"): 5.0, ("a", "y"): 1.0}))

    totals = {(0, 1): sums(inputs=4, rows=14)}
    plan = SimpleNamespace(statistics=["grams"])
    inspector = SimpleNamespace(offsets={("a", "y"): 2.0})
    rest = {"partials": totals, "first_row": 10, "_order": {}, "settle": lambda: None}
    run: Any = SimpleNamespace(plan=plan, _inspector=inspector, **rest)
    Pass.gather(run, First())
    assert inspector.offsets == {("a", "x"): 5.0, ("a", "y"): 2.0}
    assert (totals[0, 1].inputs, totals[0, 1].rows) == (7, 17)
