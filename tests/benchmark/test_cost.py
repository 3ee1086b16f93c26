"""Costs against counts by hand; values are the same whether counted or not."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sosie
from sosie.benchmark import cost, counted
from sosie.benchmark.cost import FORWARD, MEASURE, from_activations
from sosie.capture import Chunk
from sosie.engine.network import Network
from sosie.files import DamagedFile
from sosie.measures import find
from sosie.models import open_model, small_cnn
from sosie.results import Cost, Costs

SPEC = "small_cnn(atoms=6, width=4, size=16)"
SHAPE = (1, 16, 16)
LAYERS = [(256, 4), (64, 8), (16, 8), (4, 16)]  # positions and channels of conv1 … conv4


@pytest.fixture(scope="module")
def found() -> Costs:
    return cost(SPEC, None, ["atom_cosine", "linear_cka", "cca_r2"], input_shape=SHAPE, probes=[8, 32], batch=64)


def test_atoms_cost_what_is_counted_by_hand(found: Costs) -> None:
    row = found.of("atom_cosine")
    # For each layer one product and two norms of m k² entries, two operations per entry; the first has 4 kernels.
    assert (row.flops, row.forward_flops, row.sites) == (3 * 2 * (4 + 6 + 6 + 6) * 9, 0, 4)
    assert row.probes is None
    wide = cost("alexnet(atoms=9)", measures="atom_cosine").of("atom_cosine")
    assert wide.flops == 6 * (9 * 25 + 9 * 25 + 3 * 9 * 9)
    assert wide.seconds > 0


def test_a_forward_costs_what_torch_counts_on_the_bare_model(found: Costs) -> None:
    model = open_model(SPEC).model
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(32, *SHAPE))
    assert found.of("linear_cka", 32).forward_flops == 2 * counter.get_total_flops()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        nn.Sequential(*list(model)[-1:])(torch.zeros(8, 64))
    assert counter.get_total_flops() == 2 * 8 * 64 * 10  # the last layer too, though no site comes after it


def test_linear_cka_costs_what_its_formula_says(found: Costs) -> None:
    for probes in (8, 32):
        expected = 0
        for positions, p in LAYERS:
            n = probes * positions
            # XᵀX, YᵀY and XᵀY; Σ‖x‖²x and Σ‖y‖²x with their twins; Σ‖x‖²‖y‖².
            expected += 2 * n * 3 * p * p + 2 * n * 4 * p + 2 * n
        assert found.of("linear_cka", probes).measure_flops == expected


def test_canonical_correlations_add_factorisations_by_formula(found: Costs) -> None:
    extra = [found.of("cca_r2", n).measure_flops - found.of("linear_cka", n).measure_flops for n in (8, 32)]
    assert min(extra) > sum(p**3 for _, p in LAYERS)  # two inverses and their products, for any number of inputs


def test_the_ratio_grows_with_the_inputs(found: Costs) -> None:
    ratios = found.ratios("linear_cka", "atom_cosine")
    assert list(ratios) == [8, 32]
    assert 3.9 < ratios[32] / ratios[8] < 4  # kernels are computed once per forward, whatever the inputs
    assert ratios[8] == found.of("linear_cka", 8).flops / found.of("atom_cosine").flops
    with pytest.raises(KeyError, match="2 rows of 'linear_cka'"):
        found.of("linear_cka")


@pytest.mark.parametrize("name", ["linear_cka", "cca_r2", "debiased_cka", "mutual_knn", "procrustes_angle"])
def test_what_is_counted_is_the_measure_itself(name: str) -> None:
    """The values equal those of the rows, with and without counting, in one chunk or in several."""
    torch.manual_seed(0)
    models = small_cnn(width=4, size=16), small_cnn(width=4, size=16)
    x = torch.rand(60, *SHAPE, generator=torch.Generator().manual_seed(0))
    networks = [Network(model, "small", ["conv3", "fc"], "mean") for model in models]
    chunks = [Chunk(x[:40], 0, 40), Chunk(x[40:], 40, 20)]
    with torch.no_grad():
        whole = [(model[:7](x).mean((2, 3)), model(x)) for model in models]
    expected = [float(find(name).of(a.double(), b.double())) for a, b in zip(*whole, strict=True)]
    for each in ([Chunk(x, 0, 60)], chunks):
        values, _ = from_activations(find(name), *networks, each, 2**30, nullcontext)
        assert values.tolist() == pytest.approx(expected, rel=1e-4)
        with counted() as count:
            values, _ = from_activations(find(name), *networks, each, 2**30, count.part)
        assert values.tolist() == pytest.approx(expected, rel=1e-4)
        assert count.flops[FORWARD] > 0
        assert MEASURE in count.flops
        assert not count.unknown
    assert not any(module._forward_hooks for model in models for module in model.modules())


def test_factorisations_have_formulas() -> None:
    tall, square = torch.randn(2, 12, 5, dtype=torch.float64), torch.eye(6) * 2
    for expected, run in (
        (2 * (2 * 12 * 25 + 2 * 125), lambda: torch.linalg.svdvals(tall)),
        (2 * (6 * 12 * 25 + 20 * 125), lambda: torch.linalg.svd(tall.mT, full_matrices=False)),
        (2 * 2 * (2 * 12 * 25 - 2 * 125 // 3), lambda: torch.linalg.qr(tall)),
        (9 * 216, lambda: torch.linalg.eigh(square)),
        (4 * 216 // 3, lambda: torch.linalg.eigvalsh(square)),
        (216 // 3, lambda: torch.linalg.cholesky(square)),
        (6 * 6 * 4, lambda: torch.linalg.solve_triangular(square, torch.ones(6, 4), upper=True)),
        (2 * 216 // 3 + 2 * 6 * 6 * 4, lambda: torch.linalg.solve(square, torch.ones(6, 4))),
        (2 * 216, lambda: torch.linalg.inv(square)),
        (2 * 36, lambda: square.norm()),
        (2 * 36, lambda: square @ torch.ones(6)),
        (2 * 6, lambda: square[0] @ square[1]),
        (3 * 6 * 6 * 6, lambda: torch.cdist(square, square, compute_mode="donot_use_mm_for_euclid_dist")),
        (2 * 6 * 6 * 6, lambda: square @ square),
    ):
        with counted() as count, count.part("x"):
            run()
        assert count.flops == {"x": expected}
        assert not count.unknown
    with counted() as count, count.part("x"):
        torch.linalg.eig(square)
    assert count.unknown == {"linalg_eig"}


def test_products_by_numpy_are_counted_too() -> None:
    from sosie.linalg import self_product

    rows = torch.randn(50, 7)
    with FlopCounterMode(display=False) as counter:
        self_product(rows)
    assert counter.get_total_flops() == 0  # done by NumPy, so not counted
    with counted() as count, count.part("x"):
        self_product(rows)
    assert count.flops["x"] == 2 * 50 * 49


def test_memory_is_that_of_tensors_alive_at_a_time() -> None:
    given = torch.zeros(1000)
    with counted() as count:
        first = given + 1  # 4000 bytes
        second = first.view(10, 100)[2:].T  # a view takes no memory
        del first
        third = second.double()  # 6400 bytes
        assert count.peak_bytes == 4000 + 6400
        del second  # the last reference to the first
        fourth = third + 1
        assert count.peak_bytes == 2 * 6400
        fourth.add_(1)
        given.view(10, 100).add_(0)  # memory from before does not count
        del third, fourth
        torch.zeros(1500)
    assert count.peak_bytes == 2 * 6400


def test_other_weights_and_other_sites() -> None:
    other = cost(SPEC, "small_cnn(atoms=6, width=4, size=16, seed=1)", ["wcka", "atom_grassmann"], input_shape=SHAPE)
    assert [row.measure for row in other] == ["wcka", "atom_grassmann"]
    assert other.of("wcka").forward_flops == 0 < other.of("wcka").measure_flops
    assert other.of("atom_grassmann").flops > 0
    one = cost("small_cnn(width=4)", None, "rsa", "demo", sites="fc", probes=[16], rows="flatten")
    assert (one.of("rsa").sites, one.rows_rule) == (1, "flatten")
    assert one.provenance["data"] == "demo"


def test_models_are_left_as_found() -> None:
    model = small_cnn(width=4, size=16, atoms=3).train()
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    cost(model, None, ["linear_cka", "wcka"], input_shape=SHAPE, probes=[8])
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_saved_and_loaded(found: Costs, tmp_path: Path) -> None:
    path = found.save(tmp_path / "c.json")
    assert sosie.load(path) == found == Costs.load(path)
    assert found.rows()[1]["flops"] == found.of("linear_cka", 8).flops
    broken = json.loads(path.read_text("utf-8"))
    del broken["costs"][0]["seconds"]
    path.write_text(json.dumps({**broken, "hash": None}), "utf-8")
    with pytest.raises(DamagedFile, match="seconds"):
        sosie.load(path)
    wrong = Costs(("a", "b"), (Cost("x", 1, 1, -5, 0, 0.0, 0, ""),), "cpu", "", "").save(tmp_path / "n.json")
    with pytest.raises(DamagedFile, match="forward_flops must be at least 0"):
        sosie.load(wrong)


def test_bad_input_is_told_in_words() -> None:
    with pytest.raises(ValueError, match="the same layers of atoms"):
        cost("small_cnn(width=4)", measures="atom_cosine")
    with pytest.raises(ValueError, match=r"\(6, 3, 3\) and \(5, 3, 3\)"):
        cost(SPEC, "small_cnn(atoms=5, width=4, size=16)", "atom_cosine")
    with pytest.raises(ValueError, match="probes must be a whole number of at least 4"):
        cost(SPEC, probes=[1])
    with pytest.raises(ValueError, match="reads answers"):
        cost(SPEC, measures="agreement")
    with pytest.raises(ValueError, match="have 40 inputs, but 50"):
        cost(SPEC, None, "linear_cka", torch.rand(40, *SHAPE), probes=[50])
    with pytest.raises(ValueError, match="sites in pairs"):
        cost(SPEC, nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), "linear_cka", torch.rand(8, *SHAPE), probes=[8])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seconds", "long"), ("seconds", float("nan")), ("peak_bytes", float("inf")),
        ("forward_flops", -1), ("measure_flops", 1.5), ("measure", 3), ("probes", "many"), ("probes", -1),
        ("unknown", "svd"), ("unknown", [1]), ("statistic", None),
    ],
)  # fmt: skip
def test_a_hostile_row_is_refused(found: Costs, tmp_path: Path, key: str, value: object) -> None:
    content = json.loads(found.save(tmp_path / "c.json").read_text())
    content["costs"] = [dict(content["costs"][0]) | {key: value}]
    (tmp_path / "c.json").write_text(json.dumps({**content, "hash": None}))
    with pytest.raises(DamagedFile, match="damaged"):
        sosie.load(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("key", "value"), [("device", 3), ("memory", None), ("rows_rule", 1), ("provenance", [1]), ("models", "ab")]
)
def test_a_hostile_table_is_refused(found: Costs, tmp_path: Path, key: str, value: object) -> None:
    path = found.save(tmp_path / "c.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hash": None, key: value}))
    with pytest.raises(DamagedFile, match="damaged"):
        sosie.load(tmp_path / "c.json")
