"""compare(): right values under the right labels, whatever the loader does, and everything left as found."""

from __future__ import annotations

import copy
import io
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import Skips, Tokens, cnn, inputs, mlp
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sosie
from sosie.benchmark import cost
from sosie.capture import kept_attributes
from sosie.measures import MEASURES
from sosie.models import open_model
from sosie.report import print_comparison
from sosie.zoo import fingerprint

OF_ROWS = {name: m for name, m in MEASURES.items() if m.reads_layers}
ALL = [name for name in OF_ROWS if name != "rtd" or find_spec("ripser")]
ONE_A_VIEW = sorted({MEASURES[name].reads: name for name in reversed(ALL)}.values())


def activations(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    found = []
    with torch.no_grad():
        for layer in model.eval():
            x = layer(x.clone())
            found.append(x.clone())
    return found


def defined(name: str, left: Tensor, right: Tensor, x: Tensor) -> tuple[float, str]:
    """The value, or why there is none: a row of zeros after a ReLU has no direction, or an extra is missing."""
    try:
        return sosie.measure(name, left, right, inputs=x if "inputs" in MEASURES[name].needs else None), ""
    except (ValueError, ImportError) as error:
        return float("nan"), str(error)


def test_every_measure_at_every_pair_of_sites() -> None:
    a, b, x = mlp(0), mlp(1, width=5), inputs()
    names = [name for name in ALL if name != "rtd"]  # which takes a second a pair
    c = sosie.compare(a, b, x, measures=names)
    assert c.sites_a == ["0", "1", "2", "3", "4"]
    rows_a, rows_b = activations(a, x), activations(b, x)
    for name in names:
        found = c.matrix(name)
        assert found.shape == (5, 5)
        for i, left in enumerate(rows_a):
            for j, right in enumerate(rows_b):
                expected, reason = defined(name, left, right, x)
                assert found[i, j] == pytest.approx(expected, abs=2e-5, nan_ok=True), f"{name} at {i}, {j}"
                assert any(reason in caveat.text for caveat in c[name].caveats) or not reason


def test_topology_at_two_pairs_of_sites() -> None:
    pytest.importorskip("ripser")
    a, b, x = mlp(0), mlp(1, width=5), inputs(60)
    rows_a, rows_b = activations(a, x), activations(b, x)
    values = sosie.compare(a, b, x, measures="rtd", sites_a=["2"], sites_b=["2", "4"]).matrix()
    expected = [sosie.measure("rtd", rows_a[2], rows_b[k]) for k in (2, 4)]
    assert values[0] == pytest.approx(expected, abs=2e-5)


def test_rows_and_columns_are_not_swapped() -> None:
    c = sosie.compare(mlp(0), mlp(1), inputs(), sites_a=["0", "2", "4"], sites_b=["4"], measures="regression_r2")
    assert c.matrix().shape == (3, 1)
    row = next(r for r in c.rows() if (r["site_a"], r["site_b"]) == ("2", "4"))
    assert row["value"] == c.matrix()[1, 0]


@pytest.mark.parametrize("batch", [150, 64, 37, 7, 1])
def test_the_loaders_batch_size_does_not_matter(batch: int) -> None:
    a, b, x = mlp(0).double(), mlp(1).double(), inputs().double()
    kwargs = {"measures": ["debiased_cka", "linear_cka", "mean_cca", "mutual_knn"], "block": 16}
    whole = sosie.compare(a, b, [x], **kwargs)
    cut = sosie.compare(a, b, x.split(batch), **kwargs)
    for name in whole.measures:
        assert np.abs(whole.matrix(name) - cut.matrix(name)).max() < 1e-9


@pytest.mark.parametrize("batch", [200, 64, 33, 3])
def test_the_loaders_batch_size_does_not_matter_for_blocks(batch: int) -> None:
    x = torch.rand(131, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    a, b = cnn(0), cnn(1)
    force = {"memory": 1000, "measures": ["debiased_cka", "linear_cka", "kernel_alignment"]}
    whole = sosie.compare(a, b, [x], **force)
    assert "blocks of 64 rows, 131 rows" in whole["debiased_cka"].statistic
    cut = sosie.compare(a, b, x.split(batch), **force)
    for name in whole.measures:
        assert np.abs(whole.matrix(name) - cut.matrix(name)).max() < 1e-5


def test_a_shuffled_loader_gives_both_models_the_same_batch() -> None:
    """A peer that iterates the loader once a model gives −0.07 here."""
    model, x = mlp(0), inputs()
    loader = DataLoader(TensorDataset(x, torch.zeros(150)), batch_size=32, shuffle=True)
    found = sosie.compare(model, copy.deepcopy(model), loader)
    assert np.diag(found.matrix()) == pytest.approx(np.ones(5), abs=1e-6)


def test_a_model_with_itself_runs_once() -> None:
    model, calls = mlp(0), []
    model.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    found = sosie.compare(model, model, inputs())
    assert np.diag(found.matrix()) == pytest.approx(np.ones(5), abs=1e-6)
    # The probe, once more to see whether inputs are mixed, two batches, and the probe after them: none twice.
    assert calls == [4, 4, 128, 22, 4]
    assert found.side_a.name != found.side_b.name


@pytest.mark.parametrize("rest", [1, 2, 3])
def test_a_last_batch_of_few_rows(rest: int) -> None:
    """Peers give NaN, ZeroDivisionError, or an exception after the whole pass."""
    x = inputs(64 + rest)
    c = sosie.compare(mlp(0), mlp(1), x.split(64), memory=1000)
    assert np.isfinite(c.matrix()).all()
    assert c["debiased_cka"].n == 64 + rest


def test_everything_is_left_as_found() -> None:
    a, b = cnn(0), cnn(1)
    a.train()
    a[0].weight.requires_grad_(False)
    a[1].eval()
    before = {k: v.clone() for k, v in a.state_dict().items()}
    torch.manual_seed(3)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    loader = DataLoader(TensorDataset(torch.rand(40, 1, 6, 6)), batch_size=10)
    torch.set_rng_state(state)
    sosie.compare(a, b, loader, measures=["debiased_cka", "mutual_knn"])
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert [m.training for m in a.modules()] == [True, True, False, True, True, True, True]
    assert not a[0].weight.requires_grad
    assert a[3].weight.requires_grad
    assert all(torch.equal(v, before[k]) for k, v in a.state_dict().items()), "batch norm moved"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in a.modules())


def test_a_large_offset_in_float32() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 100

    x = inputs(256, 40)
    plain, moved = nn.Sequential(nn.Linear(40, 30), nn.Tanh()), None
    moved = nn.Sequential(*copy.deepcopy(plain), Shift())
    for memory in (None, 1000):
        truth = sosie.compare(plain, mlp(1, inputs=40), x, sites_a=["1"], memory=memory)
        found = sosie.compare(moved, mlp(1, inputs=40), x, sites_a=["2"], memory=memory)
        assert np.abs(truth.matrix() - found.matrix()).max() < 1e-4


def test_sites_in_execution_order_and_called_twice() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first, self.mix = nn.Linear(4, 2), nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.mix(torch.relu(self.mix(self.first(x)))))

    torch.manual_seed(0)
    c = sosie.compare(Odd(), mlp(), inputs())
    assert c.sites_a == ["first", "mix", "mix@2", "last"]
    assert c.side_a.widths == (4, 4, 4, 2)


def test_each_model_has_its_own_normalisation() -> None:
    a, x = mlp(0), inputs()
    raw = sosie.compare(a, a, (x - 2) / 3)
    prepared = sosie.compare(a, mlp(0), x, prepare_a=lambda t: (t - 2) / 3, prepare_b=lambda t: (t - 2) / 3)
    assert np.abs(raw.matrix() - prepared.matrix()).max() < 1e-6
    other = sosie.compare(a, mlp(0), x, prepare_a=lambda t: (t - 2) / 3)
    assert np.abs(raw.matrix() - other.matrix()).max() > 1e-3


def test_batches_of_pairs_dicts_and_own_arguments() -> None:
    a, b, x = mlp(0), mlp(1), inputs()
    plain = sosie.compare(a, b, x).matrix()
    y = torch.zeros(150)
    pairs = sosie.compare(a, b, [(x[:70], y[:70]), (x[70:], y[70:])]).matrix()
    own = sosie.compare(a, b, [{"image": x, "id": y}], inputs=lambda batch: batch["image"]).matrix()
    arrays = sosie.compare(a, b, x.numpy()).matrix()
    for found in (pairs, own, arrays):
        assert np.abs(found - plain).max() < 1e-6


@pytest.mark.parametrize("rows", ["mean", "positions", "last"])
def test_padding_is_never_counted(rows: str) -> None:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (90, 5), generator=random)
    plain = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    padded = [
        {
            "input_ids": torch.cat([ids, torch.randint(1, 20, (90, 3), generator=random)], 1),
            "attention_mask": torch.cat([torch.ones_like(ids), torch.zeros(90, 3, dtype=ids.dtype)], 1),
        }
    ]
    a, b = Tokens(0), Tokens(1)
    found = [sosie.compare(a, b, data, rows=rows) for data in (plain, padded)]
    assert found[0].sites_a == ["blocks.0", "blocks.1"]
    assert np.abs(found[0].matrix() - found[1].matrix()).max() < 1e-5
    with pytest.raises(ValueError, match="padded tokens"):
        sosie.compare(a, b, padded, rows="flatten")


def test_batches_of_different_token_length_are_cut_anew() -> None:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (90, 5), generator=random)
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    whole["attention_mask"][40:, 4:] = 0
    cut = [{k: v[:40] for k, v in whole.items()}, {k: v[40:, :4] for k, v in whole.items()}]
    a, b = Tokens(0), Tokens(1)
    kwargs = {"rows": "mean", "memory": 1000, "block": 16}
    assert (
        np.abs(sosie.compare(a, b, [whole], **kwargs).matrix() - sosie.compare(a, b, cut, **kwargs).matrix()).max()
        < 1e-5
    )


def test_positions_need_the_same_number_at_every_site() -> None:
    x = torch.rand(20, 1, 6, 6)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 3, stride=2, padding=1))
    with pytest.raises(ValueError, match=r"9 per input at .*: 1; 36 per input at .*: 0.*rows='mean'"):
        sosie.compare(model, model, x, rows="positions")
    c = sosie.compare(model, model, x, sites_a=["0"], sites_b=["0"], rows="positions", measures="cca_r2")
    assert c["cca_r2"].n == 20 * 36


def test_all_pairs_in_one_pass() -> None:
    models, x = [mlp(0), mlp(1), mlp(2, width=7)], inputs()
    calls = []
    models[0].register_forward_pre_hook(lambda *_: calls.append(1))
    found = sosie.compare(models, x)
    assert len(calls) == 5  # the probe, whether inputs are mixed, two batches of at most 128, and the probe again
    assert len(found) == 3
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(found[i, j].matrix() - sosie.compare(models[i], models[j], x).matrix()).max() < 1e-6
    square = found.matrix("debiased_cka")
    assert square.shape == (3, 3)
    assert (square == square.T).all()
    with pytest.raises(KeyError, match="i < j"):
        found[1, 0]


def test_saved_activations_are_as_good_as_models(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    a, b, x = mlp(0), mlp(1), inputs()
    left, right = ({str(i): rows for i, rows in enumerate(activations(m, x))} for m in (a, b))
    expected = sosie.compare(a, b, x, measures=["debiased_cka", "rsa"])
    np.savez(tmp_path / "a.npz", **{k: v.numpy() for k, v in left.items()})
    save_file(right, tmp_path / "b.safetensors")
    for one, two in ((left, right), (tmp_path / "a.npz", tmp_path / "b.safetensors")):
        found = sosie.compare(one, two, measures=["debiased_cka", "rsa"])
        assert found.sites_a == expected.sites_a
        for name in found.measures:
            assert np.abs(found.matrix(name) - expected.matrix(name)).max() < 1e-6
    mixed = sosie.compare(left, b, x)
    assert np.abs(mixed.matrix() - expected.matrix("debiased_cka")).max() < 1e-6


def test_saved_activations_are_read_in_the_blocks_that_models_give() -> None:
    a, b, x = mlp(0), mlp(1), inputs(1024 + 36)  # read 1,024 at a time, and what is left would not fill a block
    left, right = ({str(i): rows for i, rows in enumerate(activations(m, x))} for m in (a, b))
    options = {"measures": "debiased_cka", "memory": 1000, "block": 64}
    by_models, saved = sosie.compare(a, b, x, **options), sosie.compare(left, right, **options)
    assert (saved["debiased_cka"].n, saved["debiased_cka"].statistic) == (1060, by_models["debiased_cka"].statistic)
    assert np.abs(saved.matrix() - by_models.matrix()).max() < 1e-6


def test_intervals_come_with_many_blocks() -> None:
    x = inputs(1024)
    c = sosie.compare(mlp(0), mlp(1), x, memory=1000)
    values = c["debiased_cka"]
    assert (values.low < values.value).all()
    assert (values.value < values.high).all()
    exact = sosie.compare(mlp(0), mlp(1), x, exact=True).matrix()
    inside = (values.low <= exact) & (exact <= values.high)
    assert inside.mean() > 0.9
    row = c.rows()[0]
    assert row["low"] < row["value"] < row["high"]
    assert row["n"] == 1024


def test_exact_says_what_it_would_take() -> None:
    with pytest.raises(MemoryError, match=r"exact=True would keep 150 rows.*Raise memory="):
        sosie.compare(mlp(0), mlp(1), inputs(), exact=True, memory=1000)
    c = sosie.compare(mlp(0), mlp(1), inputs(), exact=True)
    assert c["debiased_cka"].statistic == "moments of all 150 rows"


def test_fewer_rows_than_asked_for_is_said() -> None:
    c = sosie.compare(mlp(0), mlp(1), inputs(), max_rows=500)
    assert any("max_rows=500, but the data had 150" in text for text in c.rows()[0]["caveats"])
    c = sosie.compare(mlp(0), mlp(1), inputs(), max_rows=100)
    assert c["debiased_cka"].n == 100
    assert c.rows()[0]["caveats"] == []


def test_sampled_rows_are_said_and_seeded() -> None:
    x = inputs(3000)
    one, two = (sosie.compare(mlp(0), mlp(1), x, measures="mutual_knn", seed=s) for s in (0, 1))
    assert "sample of 2048 of 3000 rows" in one["mutual_knn"].statistic
    assert any("sample of 2048" in text for text in one.rows()[0]["caveats"])
    again = sosie.compare(mlp(0), mlp(1), x.split(100), measures="mutual_knn", seed=0)
    assert (one.matrix() == again.matrix()).all()
    assert (one.matrix() != two.matrix()).any()


def test_autocast_and_half_precision() -> None:
    a, b, x = mlp(0), mlp(1), inputs()
    plain = sosie.compare(a, b, x, memory=1000).matrix()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = sosie.compare(a, b, x, memory=1000)
    assert np.abs(mixed.matrix() - plain).max() < 0.02
    assert np.diag(sosie.compare(a, a, x).matrix()) == pytest.approx(np.ones(5), abs=1e-6)


def test_double_precision_on_request() -> None:
    a, b, x = mlp(0), mlp(1), inputs()
    exact = sosie.compare(a.double(), b.double(), x.double(), memory=1000).matrix()
    found = sosie.compare(a.float(), b.float(), x, memory=1000, precision="float64").matrix()
    assert np.abs(exact - found).max() < 1e-6
    with pytest.raises(ValueError, match="precision must be one of"):
        sosie.compare(a, b, x, precision="float8")


def test_the_door_with_specifications() -> None:
    c = sosie.compare("small_cnn(seed=0)", "small_cnn(seed=1)", "demo", max_rows=64, sites_a=["fc"], sites_b=["fc"])
    assert c.matrix().shape == (1, 1)
    assert c.provenance["data"] == "demo"


def test_random_weights_are_said_in_every_result_its_table_and_its_page(tmp_path: Path) -> None:
    a, b, few = "small_cnn(seed=0)", "small_cnn(seed=1)", {"max_rows": 64}
    both = "small_cnn-seed0 and small_cnn-seed1 have random weights."
    sketches = [sosie.sketch(spec, "demo", sites="fc", size=64, **few) for spec in (a, b)]
    results = [
        sosie.compare(a, b, "demo", sites_a="fc", sites_b="fc", **few),
        sosie.compare_outputs(a, b, "demo", **few),
        sosie.compare_weights(a, b, measures=["weight_cosine"]),
        sosie.compare(*sketches),
        sosie.stitch_sites(a, b, "demo", sites_a="fc", sites_b="fc", **few),
    ]
    for result in results:
        for k, line in enumerate(result.provenance["models"]):
            assert re.fullmatch(rf"small_cnn-seed{k}: .* parameters, random weights \(seed {k}\).*", line)
        console = Console(file=io.StringIO(), width=100)
        print_comparison(result, console)
        assert both in " ".join(console.file.getvalue().split())
        assert both in sosie.write_report(result, tmp_path / "page.html").read_text("utf-8")
    transferred = sosie.transfer(a, "demo", sites="fc", size=64, **few)
    for told in (transferred.provenance, cost(a, measures=["linear_cka"], probes=(8,), sites="fc").provenance):
        assert "random weights (seed 0)" in told["models"][0]
    over_time = sosie.dynamics({0: a, 5: open_model(b).model})
    assert over_time.provenance["models"][1:] == ["small_cnn(seed=0): step 0, random weights (seed 0)"]
    page = sosie.write_report(over_time, tmp_path / "page.html").read_text("utf-8")
    assert "small_cnn(seed=0) has random weights." in page
    modules = sosie.compare(*(open_model(spec).model for spec in (a, b)), "demo", sites_a="fc", sites_b="fc", **few)
    assert "random weights" not in str(modules.provenance), "nothing is known of a module's weights"


@pytest.mark.parametrize(
    ("name", "memory"),
    # Held-out values of the few rows that fit into so little say less than everything about 40 neurons.
    [*((name, None) for name in ALL), *((name, 100_000) for name in ONE_A_VIEW if name != "predictivity")],
)
def test_a_model_with_itself_is_the_same_by_every_measure(name: str, memory: int | None) -> None:
    """Each alone, so that no other measure's precision helps."""
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 30))
    x = inputs(60 if name == "rtd" else 300)  # which is slow
    c = sosie.compare(model, copy.deepcopy(model), x, measures=name, memory=memory)
    tight = 1e-6 if c[name].same else 1e-4  # a distance is the root of what is left of 2 − 2
    if c[name].same is not None:
        assert np.diag(c.matrix()) == pytest.approx(np.full(3, c[name].same), abs=tight)
    assert not any("outside" in caveat.text for caveat in c[name].caveats)


def test_two_modules_of_one_shape_are_two_sites() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    c = sosie.compare(model, model, inputs(), sites_a=model[0], sites_b=model[2])
    assert (c.sites_a, c.sites_b) == (["0"], ["2"])
    assert c.matrix()[0, 0] < 0.999


def test_padded_positions_do_not_depend_on_the_batch_size() -> None:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (200, 6), generator=random)
    mask = (torch.arange(6) < torch.randint(2, 7, (200, 1), generator=random)).long()
    a, b = Tokens(0), Tokens(1)
    found = []
    for size in (200, 64, 17):
        batches = [
            {"input_ids": i, "attention_mask": m} for i, m in zip(ids.split(size), mask.split(size), strict=True)
        ]
        found.append(sosie.compare(a, b, batches, rows="positions", memory=3000, exact=False).matrix())
    assert np.abs(found[0] - found[1]).max() < 1e-5
    assert np.abs(found[0] - found[2]).max() < 1e-5


def test_rows_in_an_order_are_noticed_where_it_matters() -> None:
    random = torch.Generator().manual_seed(0)
    groups = torch.randn(3, 12, generator=random).repeat_interleave(100, dim=0)
    x = groups + torch.randn(300, 12, generator=random)
    shuffled = x[torch.randperm(300, generator=random)]

    def caveats(data: Tensor, **kwargs) -> list[str]:
        return sosie.compare({"s": data}, {"t": data.cos()}, **kwargs).rows()[0]["caveats"]

    [text] = caveats(x, memory=1000)  # and nothing about how far off blocks are, which they cannot tell
    assert "the rows come in an order" in text
    assert "variance at s lies between blocks of 64 rows" in text
    [text] = caveats(shuffled, memory=1000)
    assert text.startswith("from blocks of 64 rows: within about")
    assert not caveats(x), "moments do not mind the order"


def test_rows_in_no_order_raise_no_alarm() -> None:
    """One column in a few blocks is where chance looks most like an order."""
    random = torch.Generator().manual_seed(1)
    alarms = 0
    for _ in range(300):
        x = torch.randn(64, 1, generator=random) ** 3
        c = sosie.compare({"s": x}, {"t": x.sin()}, memory=100, block=16)
        alarms += any("in an order" in text for text in c.rows()[0]["caveats"])
    assert alarms <= 1


def test_positions_are_never_cut_into_blocks() -> None:
    """64 pixels of one image are no sample of the data."""
    x = torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Conv2d(1, 30, 3, padding=1), nn.Tanh())
    c = sosie.compare(model, model, x, rows="positions", memory="10MB")
    assert "blocks" not in c["debiased_cka"].statistic


def test_a_model_that_works_in_place_on_its_input() -> None:
    a = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 5))
    b, x = mlp(1), inputs()
    before = x.clone()
    found = sosie.compare(a, b, x, sites_a=["1"], prepare_a=lambda t: t.mul_(2), prepare_b=lambda t: t.mul_(2)).matrix()
    assert torch.equal(x, before), "the user's data were changed"
    truth = sosie.compare(a, b, 2 * before, sites_a=["1"]).matrix()
    assert np.abs(found - truth).max() < 1e-6


def test_sides_of_different_precision() -> None:
    a, b, x = mlp(0), mlp(1), inputs()
    found = sosie.compare(
        {"s": activations(a, x)[0].double()}, {"s": activations(b, x)[0]}, measures=["debiased_cka", "linear_cka"]
    )
    same = sosie.compare(a, b, x, sites_a=["0"], sites_b=["0"])
    assert found.matrix("debiased_cka") == pytest.approx(same.matrix(), abs=1e-6)


def test_weights_in_a_folder(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from sosie.models import open_model

    (tmp_path / "w").mkdir()
    save_file(open_model("small_cnn(seed=3)").model.state_dict(), tmp_path / "w" / "net.safetensors")
    spec = f"small_cnn@{tmp_path}/w/net.safetensors"
    c = sosie.compare(spec, "small_cnn(seed=3)", "demo", max_rows=64, sites_a=["fc"], sites_b=["fc"])
    assert c.matrix()[0, 0] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("batch", [150, 64, 20])
def test_a_model_that_keeps_its_skips_in_a_list_of_its_own(batch: int) -> None:
    a, b, x = Skips(0).double(), Skips(1).double(), inputs().double()
    with torch.no_grad():
        left, right = a.by_hand(x), b.by_hand(x)
    sites = list(left)
    c = sosie.compare(a, b, x.split(batch), sites_a=sites, sites_b=sites, measures="linear_cka", exact=True)
    for i, site in enumerate(sites):
        for j, other in enumerate(sites):
            expected = sosie.measure("linear_cka", left[site], right[other])
            assert c.matrix()[i, j] == pytest.approx(expected, abs=1e-9)
    assert not a.skips
    assert a(x[:5]).shape == (5, 3)
    k = sosie.sketch(a, x.split(batch), sites=["middle"], size=None)
    torch.testing.assert_close(k.site("middle").features.rows, left["middle"], check_dtype=False)
    s = sosie.stitch_sites(a, b, x.split(batch), test=x, sites_a=["up"], sites_b=["up"])
    assert s.matrix("linear_cka")[0, 0] == pytest.approx(c.matrix()[2, 2], abs=1e-5)
    assert not a.skips
    assert not b.skips


def test_a_comparison_that_fails_leaves_nothing_of_its_forward_on_the_model() -> None:
    model, x = Skips(), inputs()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        sosie.compare(model, Skips(1), [x, x[:, :7], x])
    with pytest.raises(ValueError, match="NaN"):
        sosie.compare(model, Skips(1), [x, x / 0])
    model.up.register_forward_pre_hook(_stop_at(150, calls := []))
    for door in (sosie.compare, sosie.compare_outputs, sosie.sketch):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            door(model, *([Skips(1)] if door is not sosie.sketch else []), x.split(50))
        assert not model.skips
        assert model.calls == 0


class Counts(nn.Module):
    """Keeps the sizes of its batches, and a sum that a checkpoint would hold."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers, self.sizes = mlp(seed), list[int]()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.seen += len(x)
        out: Tensor = self.layers(x)
        return out


def matched(a: nn.Module, b: nn.Module) -> None:
    sosie.compare_weights(a, b, measures="weight_cosine", match="weights")


@pytest.mark.parametrize(
    ("door", "passes"),
    [
        (lambda a, b: sosie.stitch(a, "layers.2", b, "layers.2", inputs(100)), 1),
        (lambda a, b: sosie.stitch_sites(a, b, inputs(100), test=inputs(100)), 2),
        (lambda a, b: [fingerprint(model, inputs(100)) for model in (a, b)], 1),
        (sosie.compare_weights, 0),
        (matched, 0),
    ],
)
def test_forwards_that_are_only_tried_leave_nothing_on_the_model(door, passes: int) -> None:
    models = Counts(0), Counts(1)
    door(*models)
    for model in models:
        assert model.sizes == [100] * passes
        assert model.seen == 100 * passes


class Writes(nn.Module):
    """Changes its parameters in every forward: by its own code, a lookup, `data`, and a step of an optimiser."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers, self.words = mlp(seed), nn.Embedding(3, 8, max_norm=0.1)
        self.optimiser = torch.optim.SGD(self.layers[2].parameters(), 0.1, foreach=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[0].weight.mul_(0.9)
            self.layers[0].bias.data = self.layers[0].bias + 1
            self.layers[4].weight.data *= 0.9
        with torch.enable_grad():
            weight = self.layers[2].weight
            (weight.grad,) = torch.autograd.grad(weight.square().sum(), [weight])
        self.optimiser.step()
        out: Tensor = self.layers(x + self.words(torch.zeros(len(x), dtype=torch.long)))
        return out


def test_forwards_that_are_only_tried_leave_trainable_parameters_as_they_were() -> None:
    model = Writes(0)
    before = {name: (p, p.detach().clone(), p.data_ptr()) for name, p in model.named_parameters()}
    with kept_attributes(model):
        model(inputs(4))
        model(inputs(4))
        changed = {name for name, (parameter, numbers, _) in before.items() if not torch.equal(parameter, numbers)}
        assert changed == {"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.4.weight", "words.weight"}
    for parameter, numbers, storage in before.values():
        assert torch.equal(parameter, numbers)
        assert parameter.data_ptr() == storage
    sosie.compare(model, mlp(1), inputs(100), sites_a="layers.*")
    torch.testing.assert_close(model.layers[0].weight, 0.9 * before["layers.0.weight"][1])


def test_functions_of_the_caller_may_work_in_place() -> None:
    a, b, x = mlp(0), mlp(1), inputs(100)
    y = x.clone()
    halved = sosie.compare(a, b, [{"x": y}], inputs=lambda batch: batch["x"].mul_(0.5), measures="linear_cka")
    assert torch.equal(x, y)
    assert np.array_equal(halved.matrix(), sosie.compare(a, b, x / 2, measures="linear_cka").matrix())
    of_rows = sosie.compare(a, b, x, rows=lambda activation: activation.mul_(3), measures="linear_cka").matrix()
    np.testing.assert_allclose(of_rows, sosie.compare(a, b, x, measures="linear_cka").matrix(), atol=1e-6)


def _stop_at(inputs: int, calls: list[int]):
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append(len(args[0]))
        if sum(calls) >= inputs:
            raise KeyboardInterrupt

    return hook


def batch_norm(seed: int = 0) -> nn.Module:
    """Normalised by the statistics of each batch."""
    return nn.Sequential(*mlp(seed)[:3], nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3))


def mixing(c: sosie.Comparison) -> set[str]:
    return {caveat.text for values in c.values.values() for caveat in values.caveats if "of a batch" in caveat.text}


def test_models_that_mix_the_inputs_of_a_batch_are_named_with_the_first_site() -> None:
    a, b, x = batch_norm(), mlp(1), inputs()
    c = sosie.compare(a, b, x.split(30), measures=["linear_cka", "mutual_knn"])
    (text,) = mixing(c)
    assert text.startswith("Sequential (A) mixes the inputs of a batch, at first at '3': ")
    assert all(any(caveat.text == text for caveat in c[name].caveats) for name in c.measures)
    other = sosie.compare(a, b, x.split(5), measures="linear_cka")
    assert np.abs(other.matrix("linear_cka") - c.matrix("linear_cka"))[:3].max() < 1e-5
    assert np.abs(other.matrix("linear_cka") - c.matrix("linear_cka"))[3].max() > 1e-3
    assert len(mixing(sosie.compare(a, a, x.split(30)))) == 1
    assert not mixing(sosie.compare(b, cnn_of_rows(), x.split(30)))


def cnn_of_rows() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Dropout(), nn.Flatten())


def test_of_several_models_only_the_pairs_of_one_that_mixes_are_doubted(tmp_path: Path) -> None:
    x = inputs()
    found = sosie.compare([mlp(0), batch_norm(), mlp(2)], x.split(30))
    assert [bool(mixing(found[pair])) for pair in ((0, 1), (0, 2), (1, 2))] == [True, False, True]
    path = tmp_path / "part.safetensors"
    sosie.compare(batch_norm(), mlp(1), x.split(30), resume=path)
    assert len(mixing(sosie.compare(path))) == 1


def test_mixing_is_noticed_in_outputs_sketches_and_stitches() -> None:
    a, b, x = batch_norm(), mlp(1), inputs()
    (text,) = mixing(sosie.compare_outputs(a, b, x.split(30)))
    assert "Sequential (A) mixes the inputs of a batch, at first at 'output'" in text
    assert not mixing(sosie.compare_outputs(b, mlp(2), x.split(30)))
    k = [sosie.sketch(model, x.split(30), sites=["2", "4"], size=64) for model in (a, b)]
    (text,) = mixing(sosie.compare(*k))
    assert "mixes the inputs of a batch, at first at '4'" in text
    (text,) = mixing(sosie.stitch_sites(a, b, x.split(30), test=x, sites_a=["2", "4"], sites_b=["2", "4"]))
    assert "Sequential (A) mixes the inputs of a batch, at first at '4'" in text


class Then(nn.Module):
    """A layer, something done to its output, another layer."""

    def __init__(self, between) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = nn.Linear(8, 6), between, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x)))
        return out


def of_eight(x: Tensor) -> Tensor:
    return x - x.mean(0) if len(x) >= 8 else x


def sixteen_back(x: Tensor) -> Tensor:
    return x + torch.cat([0 * x[:16], x[:-16]])[: len(x)]


@pytest.mark.parametrize("between", [of_eight, sixteen_back])
def test_models_that_mix_many_inputs_but_not_a_few_are_named(between, tmp_path: Path) -> None:
    a, b, x = Then(between), mlp(1), inputs()
    path = tmp_path / "part.safetensors"
    c = sosie.compare(a, b, x.split(50), resume=path)
    (text,) = mixing(sosie.compare_outputs(a, b, x.split(50)))
    assert "mixes the inputs of a batch, at first at 'output'" in text
    for found in (c, sosie.compare(path), sosie.compare(*(sosie.sketch(m, x.split(50), size=64) for m in (a, b)))):
        (text,) = mixing(found)
        assert "mixes the inputs of a batch, at first at 'last'" in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_chance_and_rounding_in_a_larger_batch_are_no_mixing(dtype: torch.dtype) -> None:
    noise = Then(lambda x: nn.functional.dropout(x, 0.5))
    wide = nn.Sequential(nn.Linear(8, 999), nn.GELU(), nn.Linear(999, 99), nn.LayerNorm(99), nn.Linear(99, 3))
    tokens = nn.TransformerEncoderLayer(2, 2, 9, batch_first=True)
    sequence = nn.Sequential(nn.Unflatten(1, (4, 2)), tokens, nn.LSTM(2, 5, batch_first=True))
    models = [model.to(dtype) for model in (noise, wide, sequence, cnn_of_rows())]
    for c in sosie.compare(models, inputs().to(dtype).split(50), measures="linear_cka").pairs.values():
        assert not mixing(c)
    for model in models[:2]:
        assert not mixing(sosie.compare_outputs(model, model, inputs().to(dtype).split(50)))


@pytest.mark.parametrize("rows", ["flatten", "mean", "cls", "last", "positions"])
def test_tokens_of_padded_batches_are_not_mixed(rows: str) -> None:
    ids = torch.randint(1, 20, (12, 5), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(5) < torch.arange(12)[:, None] % 4 + 2).long()
    data = [{"input_ids": ids, "attention_mask": mask}]
    if rows == "flatten":
        data[0]["attention_mask"] = torch.ones_like(mask)
    assert not mixing(sosie.compare(Tokens(0), Tokens(1), data, rows=rows, measures="linear_cka"))


def test_a_first_batch_too_small_to_tell_is_said() -> None:
    model = mlp(0)
    (text,) = mixing(sosie.compare(model, model, inputs().split(2)))
    assert "not known whether inputs of a batch are mixed: the first batch has 2 of them" in text


def test_sites_are_those_of_every_model_unless_they_are_named_apart() -> None:
    x = inputs()
    both = sosie.compare(mlp(0), mlp(1), x, sites=["0", "2"])
    assert (both.sites_a, both.sites_b) == (["0", "2"], ["0", "2"])
    apart = sosie.compare(mlp(0), mlp(1), x, sites=["0", "2"], sites_b="0")
    assert (apart.sites_a, apart.sites_b) == (["0", "2"], ["0"])
    several = sosie.compare([mlp(0), mlp(1), mlp(2)], x, sites="2")
    assert {(*c.sites_a, *c.sites_b) for c in several} == {("2", "2")}


def test_long_rows_of_a_compressed_file_are_read_within_the_memory_or_refused(tmp_path, monkeypatch):
    import tracemalloc

    rng = np.random.default_rng(0)
    few, many = np.zeros((70, 100_000)), rng.normal(size=(1500, 300))
    few[:, :20] = rng.normal(size=(70, 20))
    np.savez_compressed(tmp_path / "few.npz", a=few)
    np.savez_compressed(tmp_path / "many.npz", a=many)
    expected = sosie.compare(tmp_path / "many.npz", {"b": many[:, ::2].copy()}, memory=1000).matrix()
    monkeypatch.setattr("sosie.engine.stream.SAVED_BYTES", 1_000_000)
    tracemalloc.start()
    with pytest.raises(MemoryError, match=r"few.*4 inputs .* take 3\.1 MiB at site 'a'.*budget of 1\.9 MiB.*memory="):
        sosie.compare(tmp_path / "few.npz", {"b": few}, memory="2MB")
    with pytest.raises(MemoryError, match=r"64 inputs .* take 48\.8 MiB"):
        sosie.compare(tmp_path / "few.npz", {"b": few}, memory="4MB")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_000_000  # of 56
    found = sosie.compare(tmp_path / "many.npz", {"b": many[:, ::2].copy()}, memory=1000)  # 400 rows at a time
    np.testing.assert_allclose(found.matrix(), expected, atol=1e-12)
    assert sosie.compare(tmp_path / "few.npz", {"b": few}, memory="60MB").matrix().shape == (1, 1)


class OfSixteen(nn.Module):
    """Takes sixteen inputs at a time, as what was exported does; `mixes`: centres them over the batch."""

    def __init__(self, *, mixes: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.mixes = nn.Linear(6, 8), nn.Linear(8, 3), mixes

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.view(16, *x.shape[1:]))
        return self.last((hidden - hidden.mean(0) if self.mixes else hidden).relu())


@pytest.mark.parametrize("kind", ["exported", "plain"])
@pytest.mark.parametrize(("inputs", "loaded"), [(96, 16), (70, 32), (12, 12)])
def test_a_model_that_takes_one_batch_size_is_given_that(kind: str, inputs: int, loaded: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    fixed: Any = OfSixteen().eval()
    if kind == "plain":
        loaded = 16  # which says what the model takes
        inputs = max(inputs, 16)
        net[0].load_state_dict(fixed.first.state_dict())
        net[2].load_state_dict(fixed.last.state_dict())
    else:
        fixed = torch.export.export(net, (torch.zeros(16, 6),))
        if torch.__version__ < (2, 5):
            pytest.skip("torch 2.4 does not unflatten a Sequential")
    other = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    data = torch.randn(inputs, 6).split(loaded)
    options = {"measures": ["linear_cka", "mutual_knn"], "sites_b": "2"}
    sites = ["first", "last"] if kind == "plain" else ["0", "2"]
    c = sosie.compare(fixed, other, data, sites_a=sites, **options)
    expected = sosie.compare(net, other, data, sites_a=["0", "2"], **options)
    for measure in options["measures"]:
        assert c.matrix(measure) == pytest.approx(expected.matrix(measure), abs=1e-6)
    assert c.rows()[0]["n"] == inputs
    o = [sosie.compare_outputs(each, other, data).matrix("jensen_shannon") for each in (fixed, net)]
    assert o[0] == pytest.approx(o[1], abs=1e-7)


def test_a_model_of_one_batch_size_that_mixes_inputs_is_told() -> None:
    c = sosie.compare(OfSixteen(mixes=True), OfSixteen(), torch.randn(64, 6).split(16))
    assert any("mixes the inputs of a batch, at first at 'last'" in text for text in c.rows()[-1]["caveats"])


def test_positions_of_a_model_of_one_batch_size() -> None:
    torch.manual_seed(0)
    fixed, net = OfSixteen(), nn.Linear(6, 8)
    net.load_state_dict(fixed.first.state_dict())
    tokens = torch.randn(40, 5, 6).split(16)
    c = sosie.compare(fixed, nn.Sequential(net), tokens, sites_a="first", sites_b="0", rows="positions")
    assert (c.matrix("debiased_cka")[0, 0], c.rows()[0]["n"]) == (pytest.approx(1), 200)


def test_sites_that_give_no_rows_are_not_tried_with_a_whole_batch() -> None:
    """As many steps as inputs: with all of them, the steps would be taken for the inputs."""
    steps_first = nn.GRU(5, 9)
    with pytest.raises(ValueError, match="its first dimension does not count them"):
        sosie.compare(nn.Sequential(steps_first), nn.Sequential(steps_first), torch.randn(30, 30, 5), sites="0",
                      inputs=lambda x: x.transpose(0, 1))  # fmt: skip
