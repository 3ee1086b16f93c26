"""Bad input gets a clear error, and nothing is left behind."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from nets import inputs, mlp
from rich.console import Console
from torch import Tensor, nn

import sosie
import sosie.stats
from sosie.capture import SilentSite, SiteError
from sosie.engine.comparing import FLOAT32_SQUARES, Inspector
from sosie.models import small_cnn
from sosie.report import print_comparison
from sosie.results import Comparison
from sosie.zoo import fingerprint


def test_unpaired_rows() -> None:
    with pytest.raises(ValueError, match=r"need paired rows, got 5 in .*6 in "):
        sosie.compare({"a": np.eye(5)}, {"a": np.eye(6)})
    with pytest.raises(ValueError, match="has 5 saved, but the data goes on"):
        sosie.compare({"a": np.eye(5)}, mlp(), inputs(20))


@pytest.mark.parametrize("n", [1, 3])
def test_too_few_rows(n: int) -> None:
    with pytest.raises(ValueError, match=f"at least 4.*got {n}|{n} rows, but Gram matrices need at least 4"):
        sosie.compare(mlp(), mlp(1), inputs(n))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("memory", [None, 1000])
def test_a_site_that_is_not_finite_is_named(bad: float, memory: int | None) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x.clone()
            out[-1, 2] = bad
            return out

    model = nn.Sequential(nn.Linear(8, 4), Broken(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"Sequential \(A\): activations are NaN or infinite .* at 1, 2\."):
        sosie.compare(model, mlp(), inputs(), memory=memory)


def test_empty_data() -> None:
    for data in ([], torch.zeros(0, 8), iter([])):
        with pytest.raises(ValueError, match="no inputs"):
            sosie.compare(mlp(), mlp(1), data)


def test_an_iterator_that_is_used_up() -> None:
    data = iter([inputs(20)])
    sosie.compare(mlp(), mlp(1), data)
    with pytest.raises(ValueError):
        sosie.compare(mlp(), mlp(1), data)


def test_a_model_that_raises_says_where() -> None:
    class Angry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:  # inputs that are tried first do not count
                raise RuntimeError("no more")
            return self.fc(x)

    model = Angry().train()
    with pytest.raises(RuntimeError, match="no more") as caught:
        sosie.compare(model, mlp(), inputs().split(50), measures="mean_cca")
    assert "while running Angry on inputs 50 to 99" in caught.value.__notes__
    assert model.training
    assert not model.fc._forward_hooks


def test_a_mistyped_site_offers_the_nearest() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x)

    with pytest.raises(SiteError, match="did you mean 'encoder'"):
        sosie.compare(Net(), mlp(), inputs(), sites_a=["encodr"])


def test_a_site_that_never_fires_is_named() -> None:
    model = mlp()
    model.spare = nn.Linear(3, 3)
    model.forward = lambda x: nn.Sequential(*list(model)[:5])(x)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="spare"):
        sosie.compare(model, mlp(), inputs(), sites_a=["spare"])


def test_constant_features_are_a_caveat_and_the_rest_goes_on() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].weight.zero_()  # site 2 is its bias for every input, and all after it
    for memory in (None, 1000):
        c = sosie.compare(model, mlp(1), inputs(), measures=["debiased_cka", "mean_cca", "rsa"], memory=memory)
        for name in c.measures:
            assert np.isnan(c.matrix(name)[2:]).all()
            assert np.isfinite(c.matrix(name)[:2]).all()
        row = next(r for r in c.rows() if r["site_a"] == "3" and r["site_b"] == "0")
        assert "do not vary" in row["caveats"][0]
        assert np.isnan(row["value"])
        assert c.best_match("debiased_cka")[3] == {
            "site_a": "3",
            "site_b": None,
            "value": pytest.approx(np.nan, nan_ok=True),
        }


def test_rank_one_features_are_no_obstacle() -> None:
    x = inputs()
    rank_one = {"s": (x[:, :1] @ torch.ones(1, 5)).numpy()}
    measures = [
        "linear_cka",
        "debiased_cka",
        "mean_cca",
        "svcca",
        "pwcca",
        "procrustes_angle",
        "regression_r2",
    ]
    c = sosie.compare(rank_one, {"s": x.numpy()}, measures=measures)
    assert all(np.isfinite(c.matrix(name)).all() for name in measures)
    assert c.matrix("mean_cca")[0, 0] == pytest.approx(1)


def test_more_neurons_than_rows_is_said() -> None:
    random = np.random.RandomState(0)
    a, b = {"s": random.randn(20, 30)}, {"t": random.randn(20, 30)}
    c = sosie.compare(a, b, measures=["mean_cca", "linear_cka", "regression_r2"])
    texts = {row["measure"]: row["caveats"] for row in c.rows()}
    assert "19 dimensions for n=20 rows: all correlations are 1" in texts["mean_cca"]
    assert "n=20 < width=30: biased up" in texts["linear_cka"]
    assert "19 dimensions for n=20 rows: the regression fits anything" in texts["regression_r2"]
    with pytest.warns(UserWarning, match="19 dimensions for n=20 rows: all correlations are 1"):
        sosie.measure("mean_cca", a["s"], b["t"])


def test_correlations_that_are_1_whatever_the_rows_are_counted_by_rank() -> None:
    random = np.random.RandomState(0)
    a, b = {"s": random.randn(20, 12)}, {"t": random.randn(20, 10)}
    c = sosie.compare(a, b, measures=["mean_cca", "svcca(keep=0.5)"])
    texts = {row["measure"]: row["caveats"] for row in c.rows()}
    assert texts["mean_cca"] == ["12 and 10 dimensions for n=20 rows: 3 of 10 correlations are 1 whatever the rows"]
    assert not texts["svcca(keep=0.5)"], "which keeps few directions"
    low_rank = {"s": random.randn(20, 2) @ random.randn(2, 50)}
    assert not sosie.compare(low_rank, {"t": b["t"][:, :3]}, measures="mean_cca").rows()[0]["caveats"]


def test_a_large_mean_is_no_constant_feature_in_float64() -> None:
    x = np.random.RandomState(0).randn(50, 4)
    y = x + 1e8
    with_offset = sosie.compare({"s": x}, {"s": y}, measures="linear_cka")
    assert with_offset.matrix()[0, 0] == pytest.approx(1, abs=1e-6)
    assert np.isnan(sosie.compare({"s": x}, {"s": 0 * x + 1e8}, measures="linear_cka").matrix()[0, 0])


def test_wrong_arguments() -> None:
    x = inputs()
    with pytest.raises(TypeError, match="need two models"):
        sosie.compare(mlp())
    with pytest.raises(TypeError, match="comparing models needs data"):
        sosie.compare(mlp(), mlp(1))
    with pytest.raises(TypeError, match="int is not a model"):
        sosie.compare(3, mlp(1), x)
    with pytest.raises(TypeError, match=r"Tensor is not a model.*compare\(model, model, data\)"):
        sosie.compare(mlp(), x, x)
    with pytest.raises(ValueError, match="no row rule 'middle'"):
        sosie.compare(mlp(), mlp(1), x, rows="middle")
    with pytest.raises(KeyError, match="did you mean debiased_cka"):
        sosie.compare(mlp(), mlp(1), x, measures=["debiased_ck"])
    with pytest.raises(ValueError, match="no measures"):
        sosie.compare(mlp(), mlp(1), x, measures=[])
    with pytest.raises(ValueError, match="'4GiB'"):
        sosie.compare(mlp(), mlp(1), x, memory="four")
    with pytest.raises(ValueError, match="at least two models"):
        sosie.compare([mlp()], x)
    with pytest.raises(TypeError, match="are one argument"):
        sosie.compare([mlp(), mlp(1)], x, x)
    assert isinstance(sosie.compare([mlp(), mlp(1)], data=x), Comparison)
    with pytest.raises(ValueError, match="at least 4"):
        sosie.compare(mlp(), mlp(1), x, block=2, memory=1000)


def test_interruption_leaves_the_model_as_found() -> None:
    model = mlp().train()

    def data():
        yield inputs(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sosie.compare(model, mlp(1), data())
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


def test_no_nan_without_a_reason() -> None:
    rows = {"s": np.eye(20)}  # every two rows are equally far apart: the U-centred Gram matrix is zero
    c = sosie.compare(rows, {"s": np.random.RandomState(0).randn(20, 3)})
    assert np.isnan(c.matrix()).all()
    assert "undefined" in c.rows()[0]["caveats"][0]
    for n in (8, 20, 200, 1000):  # what rounding leaves differs
        with pytest.raises(ValueError, match="debiased_cka is undefined"):
            sosie.measure("debiased_cka", np.eye(n), np.random.RandomState(0).randn(n, 3))


def test_sites_of_saved_activations_are_checked() -> None:
    a = {"x": np.random.RandomState(0).randn(20, 3), "y": np.random.RandomState(1).randn(20, 4)}
    assert sosie.compare(a, a, sites_a=["y"]).matrix().shape == (1, 2)
    with pytest.raises(ValueError, match="no site 'z'"):
        sosie.compare(a, a, sites_a=["z"])


def test_what_is_for_two_models_is_refused_for_three() -> None:
    with pytest.raises(ValueError, match="leave sites_b"):
        sosie.compare([mlp(), mlp(1), mlp(2)], inputs(), sites_b=["0"])


@pytest.mark.parametrize("scale", [1e200, 1e80, 1e-80, 1e-160, 1e-200])
def test_numbers_whose_products_float64_cannot_hold_are_refused(scale: float) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 40, 6))
    for given in ((x * scale, y), (y, x * scale)):
        with pytest.raises(ValueError, match=r"divide [xy] by that"):
            sosie.measure("raw_procrustes_distance", *given)


@pytest.mark.parametrize("name", ["linear_cka", "mean_cca", "mutual_knn", "debiased_cka"])
@pytest.mark.parametrize("scale", [1e65, 1e-65, 1e80, 1e-80, 1e200, 1e-200])
def test_a_scale_does_not_matter_to_what_is_invariant_to_it(name: str, scale: float) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 40, 6))
    assert sosie.measure(name, x * scale, y * scale) == pytest.approx(sosie.measure(name, x, y), rel=1e-9)


ODD_ARRAYS = {
    "masked": (np.ma.masked_greater(np.random.default_rng(0).normal(size=(40, 6)), 1.5), "masked array, .* leave"),
    "long double": (np.ones((40, 6), dtype=np.longdouble), "which torch lacks: round it with"),
    "objects": (np.array([[1.0, None]] * 40, dtype=object), r"Python objects \(NoneType, float\)"),
    "structured": (np.ones(40, dtype=[("u", float), ("v", float)]), "structured array with the fields u, v"),
    "dates": (np.ones((40, 6), dtype="M8[D]"), "must hold numbers, got an array of datetime64"),
    "text": (np.full((40, 6), "1"), "must hold numbers, got an array of <U1"),
    "complex": (np.ones((40, 6), dtype=complex), "complex"),
}


@pytest.mark.parametrize(("array", "says"), ODD_ARRAYS.values(), ids=ODD_ARRAYS)
@pytest.mark.parametrize("name", ["linear_cka", "output_rmse", "weight_cosine"])
def test_arrays_that_would_lose_their_meaning_are_refused(array: np.ndarray, says: str, name: str) -> None:
    plain = np.random.default_rng(1).normal(size=(40, 6))
    for given in ((array, plain), (plain, array)):
        with pytest.raises((TypeError, ValueError), match=says):
            sosie.measure(name, *given)


def test_missing_values_of_a_table_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    plain = np.random.default_rng(1).normal(size=(40, 6))
    table = pandas.DataFrame(plain)
    assert sosie.measure("linear_cka", table, plain) == pytest.approx(1)
    table.iloc[3, 2] = None
    with pytest.raises(ValueError, match="x has 1 values that are NaN"):
        sosie.measure("linear_cka", table, plain)
    with pytest.raises(TypeError, match="remove missing values"):
        sosie.measure("linear_cka", table.astype("Float64").astype(object), plain)


def test_masked_arrays_are_refused_wherever_they_enter() -> None:
    masked, _ = ODD_ARRAYS["masked"]
    with pytest.raises(ValueError, match="'a' is a masked array"):
        sosie.compare({"a": masked}, {"a": np.asarray(masked)})
    with pytest.raises(ValueError, match="an array of the data is a masked array"):
        sosie.compare(nn.Linear(6, 3).double(), nn.Linear(6, 3).double(), masked)
    whole = np.ma.masked_array(np.asarray(masked), mask=False)
    assert sosie.measure("linear_cka", whole, whole) == pytest.approx(1), "nothing is masked"


@pytest.mark.parametrize("scale", [2.0**66, 2.0**-83])
def test_activations_whose_squares_float32_cannot_hold(scale: float) -> None:
    random = torch.Generator().manual_seed(0)
    x, noise = torch.randn(300, 8, generator=random), torch.randn(300, 8, generator=random)
    y = x @ torch.randn(8, 8, generator=random) + noise
    names = ["linear_cka", "debiased_cka", "kernel_alignment", "mean_cca", "rbf_cka", "raw_procrustes_distance"]
    asked: list[dict[str, object]] = [
        {"measures": names},
        {"measures": names[:3], "memory": 1000, "null": "permutation", "draws": 20},
        {"measures": names[:3], "exact": True},
    ]
    for options in asked:
        plain = sosie.compare({"a": x}, {"b": y}, **options).rows()
        found = sosie.compare({"a": scale * x}, {"b": scale * y}, **options).rows()
        for one, other in zip(plain, found, strict=True):
            unit = scale if one["measure"] == "raw_procrustes_distance" else 1
            for key in ("value", "low", "high", "null", "p"):
                truth = one.get(key)
                assert (other.get(key) is None) == (truth is None)
                if truth is not None:
                    assert other[key] / unit == pytest.approx(truth, rel=1e-5, abs=1e-7), (one["measure"], key)
            assert one["caveats"] == other["caveats"]


def test_activations_whose_products_float64_cannot_hold_are_named() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 40, 6))
    for scale in (1e150, 1e-150):
        with pytest.raises(ValueError, match=r"the largest number in a of"):
            sosie.compare({"a": x * scale}, {"a": y})


@pytest.mark.parametrize("later", [slice(128, None), slice(5, None, 2)])
@pytest.mark.parametrize("memory", [None, 1000])
def test_rows_that_only_later_are_too_large_for_float32(later: slice, memory: int | None) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(512, 6, generator=random)
    y = x @ torch.randn(6, 5, generator=random) + torch.randn(512, 5, generator=random)
    x[later] *= 2.0**66  # the first row, and each 16th from there on, may be as before
    asked = {"measures": ["linear_cka", "debiased_cka"], "exact": memory is None, "memory": memory or 10**9}
    truth = sosie.compare({"a": x.double() / 2.0**66}, {"b": y.double()}, **asked)
    found = sosie.compare({"a": x}, {"b": y}, **asked)
    of_model = sosie.compare(nn.Sequential(nn.Identity()), {"b": y}, x, **asked)
    for name in asked["measures"]:
        assert found.matrix(name) == pytest.approx(truth.matrix(name), abs=1e-5)
        assert of_model.matrix(name)[0] == pytest.approx(truth.matrix(name)[0], abs=1e-5)
    with pytest.raises(ValueError, match=r"the largest number in a of"):
        sosie.compare({"a": x.double() * 1e60}, {"b": y.double()}, **asked)


def test_numbers_that_grow_on_a_gpu_are_noticed_later() -> None:
    inspector = Inspector()
    inspector.take("A", ["first", "second"], torch.tensor([[1.0, 1e30], [0.0, 0.0]]), [FLOAT32_SQUARES] * 2)
    with pytest.raises(ValueError, match=r"A: the numbers at second grew .* float32: use precision='float64'"):
        inspector.take("A", ["first", "second"], torch.tensor([[1.0, 1e36], [0.0, 0.0]]), [FLOAT32_SQUARES] * 2)


@pytest.mark.parametrize("name", ["weight_cosine", "weight_distance", "stable_rank_difference", "spectrum_distance"])
@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_weights_of_any_scale(name: str, scale: float) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 8, 6))
    assert sosie.measure(name, scale * x, scale * y) == pytest.approx(sosie.measure(name, x, y), rel=1e-12)


def with_one_large_direction(n: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(n, 6))
    y = x @ random.normal(size=(6, 5)) + random.normal(size=(n, 5))
    return x + 1e5 * random.normal(size=(n, 1)), y


def caveats_of(x: np.ndarray, y: np.ndarray, name: str = "mean_cca") -> list[str]:
    return sosie.compare({"a": x}, {"b": y}, measures=[name]).rows()[0]["caveats"]


@pytest.mark.parametrize(
    "name", ["mean_cca", "cca_r2", "pwcca", "regression_r2", "gaussian_information", "shape_angle"]
)
def test_directions_that_are_dropped_are_told(name: str) -> None:
    x, y = with_one_large_direction(2200)
    told = "5 of 6 directions dropped at condition "
    assert any(each.startswith(told) for each in caveats_of(x.astype(np.float32), y, name))
    sampled = "rests on a sample of 2048 of 2200 rows: sums of products do not carry all directions at condition "
    assert any(each.startswith(sampled) for each in caveats_of(x, y, name))
    few = caveats_of(x[:300], y[:300], name)
    assert not any("condition" in each for each in few), "all rows are at hand, and carry them"
    with pytest.warns(UserWarning, match=told):
        sosie.measure(name, x.astype(np.float32), y)


@pytest.mark.parametrize("large", [1e15, 1e18, 1e22])
@pytest.mark.parametrize("n", [60, 3000])  # of the latter a sample is kept
def test_directions_that_one_row_hides_are_told(large: float, n: int) -> None:
    x, y = np.random.default_rng(0).normal(size=(2, n, 3))
    assert not any("dropped" in text for text in caveats_of(x, y))
    x[0] *= large
    told = [text for text in caveats_of(x, y) if "dropped" in text]
    assert [re.match(r"2 of 3 directions dropped at condition \de\+\d\d", text) is not None for text in told] == [True]
    x[:, 2] = x[:, 0]  # then one is no direction that the data have
    assert [text[:17] for text in caveats_of(x, y) if "dropped" in text] == ["1 of 2 directions"]


def test_sampled_rows_stand_in_for_sums_that_lose_directions() -> None:
    x, y = with_one_large_direction(2200)
    for name in ("mean_cca", "regression_r2", "pwcca", "shape_angle"):
        found = sosie.compare({"a": x}, {"b": y}, measures=[name]).matrix(name)[0, 0]
        assert found == pytest.approx(sosie.measure(name, x, y), abs=0.02)


def test_without_rows_the_sums_say_what_they_lose() -> None:
    x, y = with_one_large_direction(300)
    moments = sosie.stats.Moments.of(torch.from_numpy(x), torch.from_numpy(y))
    loss = moments.scatters[0][0].loss(1e-6)
    assert (loss.count, loss.of) == (5, 6)
    assert 1e5 < loss.condition < 1e6


@pytest.mark.parametrize("n", [40, 300, 2200])
@pytest.mark.parametrize("digits", ["float32", "float64"])
def test_directions_that_the_data_do_not_have_are_no_loss(n: int, digits: str) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(n, 8)).astype(digits)
    y = (x[:, :5] + random.normal(size=(n, 5))).astype(digits)
    made = [x[:, :2], np.full((n, 2), 3.0), x @ random.normal(size=(8, 6)).astype(digits) + 5, 100 * x[:, :1] + 50]
    more = np.concatenate([x, *made], axis=1).astype(digits)
    found = sosie.compare({"a": more, "b": x}, {"b": y}, measures=["mean_cca", "regression_r2"])
    assert not any("condition" in caveat or "sample" in caveat for row in found.rows() for caveat in row["caveats"])
    for name in ("mean_cca", "regression_r2"):
        assert found.matrix(name)[0] == pytest.approx(found.matrix(name)[1], abs=1e-4)


# Sites that give no rows


class Odd(nn.Module):
    """Between two layers, modules whose outputs cannot become rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions, self.numbers, self.sparse = nn.Linear(8, 6), _Says(), _Says(), _Says()
        self.words, self.nothing, self.head = _Says(), nn.Linear(6, 0), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        self.positions(torch.arange(4.0)[None])  # as rotary embeddings: one for all inputs
        self.numbers(x.argmax(1))
        self.sparse(x.to_sparse())
        self.words("nothing")
        self.nothing(x)
        return self.head(x)


class _Says(nn.Module):
    def forward(self, x: object) -> object:
        return x


ODD = {
    "positions": "has shape (1, 4) for 4 inputs: its first dimension does not count them",
    "numbers": "returned a tensor of int64, not of floating-point numbers",
    "sparse": "returned a sparse_coo tensor, not a dense one",
    "words": "returned str, which holds no tensor",
    "nothing": "has shape (4, 0), which is empty",
}


@pytest.mark.parametrize("sites", ["leaves", ["*"], [nn.Module]])
def test_sites_of_a_pattern_that_give_no_rows_are_left_out_and_told(sites: object, tmp_path: Path) -> None:
    model = Odd()
    c = sosie.compare(model, mlp(), inputs(), sites_a=sites)
    assert isinstance(c, Comparison)
    assert dict(c.side_a.left_out) == ODD
    assert c.side_b.left_out == ()
    assert {"embed", "head"} <= set(c.sites_a)
    assert all(
        any(text.startswith("left out of Odd: positions has shape") for text in row["caveats"]) for row in c.rows()
    )
    again = sosie.load(c.save(tmp_path / "c.json"))
    assert isinstance(again, Comparison)
    assert again.side_a == c.side_a
    console = Console(file=io.StringIO(), width=100)
    print_comparison(c, console)
    assert "left out of Odd: positions" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "left out of Odd: positions" in sosie.write_report(c, tmp_path / "c.html").read_text()


@pytest.mark.parametrize("site", ODD)
def test_a_named_site_that_gives_no_rows_is_an_error(site: str) -> None:
    with pytest.raises(SiteError, match=rf"site '{site}'.*{re.escape(ODD[site][:20])}"):
        sosie.compare(Odd(), mlp(), inputs(), sites_a=[site])


def test_sites_that_give_no_rows_are_left_out_of_sketches_fingerprints_and_dynamics() -> None:
    made = sosie.sketch(Odd(), inputs(), sites="leaves", size=8)
    assert dict(made.side.left_out) == ODD
    assert any("left out of" in row["caveats"][-1] for row in sosie.compare(made, made).rows())
    about = fingerprint(Odd(), inputs(), sites="leaves", kinds="cka").about
    assert about["left_out"]["cka"].keys() == ODD.keys()
    found = sosie.dynamics([Odd(), Odd()], data=inputs(), sites="*")
    assert any("left out of checkpoints: positions has shape" in c.text for c in found["debiased_cka"].caveats)


def test_none_that_gives_rows_is_an_error() -> None:
    with pytest.raises(SilentSite, match="no site gave an activation: 'positions' has shape"):
        sosie.compare(Odd(), mlp(), inputs(), sites_a=["p*", "n?m*"])


# Models that torch cannot run or watch


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, inputs())])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_cannot_be_watched_but_its_answers_compare(make: Callable[[nn.Module], nn.Module]) -> None:
    model = make(mlp())
    for call in (
        lambda: sosie.compare(model, mlp(), inputs()),
        lambda: sosie.sketch(model, inputs(), size=8),
        lambda: sosie.stitch(model, "0", mlp(), "0", inputs()),
    ):
        with pytest.raises(TypeError, match="TorchScript module, whose layers cannot be watched: give the model"):
            call()
    assert sosie.compare_outputs(model, mlp(), inputs(), measures="agreement").matrix().item() == 1
    mixed = nn.Sequential(nn.Linear(8, 8), make(mlp()))
    c = sosie.compare(mixed, mixed, inputs(), sites_a="leaves", sites_b=["0"])
    assert c.sites_a == ["0"]
    with pytest.raises(SiteError, match="site '1' is a TorchScript module"):
        sosie.compare(mixed, mixed, inputs(), sites_a=["1"])


def test_weights_on_the_meta_device_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3, device="meta"))
    for call in (
        lambda: sosie.compare(model, mlp(), inputs()),
        lambda: sosie.compare_outputs(model, mlp(), inputs()),
        lambda: sosie.sketch(model, inputs(), size=8),
        lambda: sosie.stitch(model, "0", mlp(), "0", inputs()),
    ):
        with pytest.raises(ValueError, match=r"1\.weight is on the meta device, which holds no numbers: load"):
            call()


def test_layers_without_neurons_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 3))
    with pytest.raises(ValueError, match=r"0\.weight has shape \(0, 8\): a layer without neurons"):
        sosie.compare_weights(model, model)
    with pytest.raises(ValueError, match=r"shape \(0,\) per input cannot be stitched"):
        sosie.stitch(model, "0", model, "0", inputs())


class Answer:
    """No dict and no dataclass."""

    __slots__ = ("hidden", "last_hidden_state", "logits")


class Answering(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.net = name, mlp()

    def forward(self, x: Tensor) -> Answer:
        found = Answer()
        setattr(found, self.name, self.net(x))
        return found


def test_an_object_with_logits_or_hidden_states_is_read_by_its_attribute() -> None:
    for name in ("last_hidden_state", "logits"):
        c = sosie.compare(Answering(name), mlp(), inputs(), sites_a=".", sites_b=".")
        np.testing.assert_allclose(c.matrix(), 1, atol=1e-6)
    assert sosie.compare_outputs(Answering("logits"), mlp(), inputs(), measures="agreement").matrix().item() == 1
    sosie.stitch(Answering("logits"), "net.0", Answering("logits"), "net.0", inputs())
    with pytest.raises(SiteError, match=r"'output' .*returned Answer, which holds no tensor"):
        sosie.compare(Answering("hidden"), mlp(), inputs(), sites_a=".", sites_b=".")


@pytest.mark.parametrize("door", [sosie.compare, sosie.compare_outputs, lambda a, b, x: sosie.sketch(a, x)])
def test_a_lazy_model_is_refused_and_still_lazy_afterwards(door) -> None:
    model, x = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(affine=False), nn.LazyLinear(3)), inputs()
    before = str(model)
    with pytest.raises(ValueError, match=r"LazyLinear .* no weights yet: run one batch through the model first"):
        door(model, model, x)
    assert str(model) == before
    model(x)
    door(model, model, x)
    assert str(model[1]).startswith("BatchNorm1d(6,")


def test_inputs_of_another_type_than_the_weights_are_named() -> None:
    for call in (sosie.compare, sosie.compare_outputs):
        with pytest.raises(ValueError, match=r"inputs of float32 for a model of float16.*inputs\.to\(torch\.float16\)"):
            call(mlp().half(), mlp(1), inputs())
    with pytest.raises(ValueError, match="inputs of int64 for a model of float32"):
        sosie.compare(mlp(), mlp(1), torch.ones(40, 8, dtype=torch.long))


def test_ids_are_not_blamed_for_types_inside_a_model() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3).half()

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.words(ids))

    with pytest.raises(RuntimeError, match="dtype"):
        sosie.compare(Mixed(), Mixed(), torch.zeros(40, 5, dtype=torch.long))


class Ensemble(nn.Module):
    """Its members are run by torch.vmap through one stateless copy."""

    def __init__(self) -> None:
        super().__init__()
        self.members, self.one = nn.ModuleList([nn.Linear(8, 3) for _ in range(3)]), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.func.stack_module_state(list(self.members))
        out: torch.Tensor = torch.vmap(lambda p, b: torch.func.functional_call(self.one, (p, b), (x,)))(*state).mean(0)
        return out


def test_modules_inside_vmap_are_left_out_or_named() -> None:
    x = inputs()
    with pytest.raises(SiteError, match=r"'one' is called inside torch\.vmap.*Choose a site outside"):
        sosie.compare(Ensemble(), mlp(0), x, sites_a="one")
    assert sosie.compare(Ensemble(), mlp(0), x, sites_a=".").sites_a == ["output"]


def test_modules_of_torch_export_are_compared_by_their_outputs() -> None:
    any_number = ({0: torch.export.Dim("inputs")},)
    exported = torch.export.export(mlp(0), (inputs(),), dynamic_shapes=any_number)
    assert sosie.compare_outputs(exported.module(), mlp(0), inputs()).matrix("agreement").item() == 1
    with pytest.raises(SiteError, match="give the ExportedProgram itself, whose layers have names"):
        sosie.compare(exported.module(), mlp(0), inputs())
    if torch.__version__ < (2, 5):
        pytest.skip("torch 2.4 does not unflatten a Sequential")
    assert sosie.compare(exported, mlp(0), inputs()).sites_a == sosie.compare(mlp(0), mlp(0), inputs()).sites_a


@pytest.mark.parametrize("of", [sosie.compare, sosie.compare_outputs])
def test_images_that_are_no_batch_of_floats_say_what_to_write(of: Callable[..., object]) -> None:
    model, images = small_cnn(), torch.rand(8, 1, 28, 28)
    for data in (images[0], list(images), tuple(images)):
        with pytest.raises(ValueError, match=r"shape \(1, 28, 28\).* image\[None\] .* torch.stack\(images\)"):
            of(model, model, data)
    for whole in ((images * 255).to(torch.uint8), (images * 255).to(torch.uint8).numpy()):
        with pytest.raises(ValueError, match=r"images of uint8.* images.float\(\) / 255"):
            of(model, model, whole)


class _Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.body(self.embed(input_ids))


def test_inputs_that_are_all_padding_give_no_rows() -> None:
    ids, mask = torch.arange(80).view(20, 4) % 9, torch.ones(20, 4, dtype=torch.long)
    mask[-8:] = 0  # the few inputs that show the sites before the pass are the last ones
    given = {"measures": "linear_cka", "sites": "body", "rows": "positions"}
    c = sosie.compare(_Reads(), _Reads(), [{"input_ids": ids, "attention_mask": mask}], **given)
    assert c.rows()[0]["n"] == 48
    with pytest.raises(ValueError, match="the data gave no rows: the attention_mask marks every token as padding"):
        sosie.compare(_Reads(), _Reads(), [{"input_ids": ids, "attention_mask": 0 * mask}], **given)
