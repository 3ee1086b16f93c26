"""Stitching at many sites gives, in one pass, the same values as stitching at each site, and as `compare`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from nets import cnn
from torch import Tensor, nn

import sosie
from sosie.report import write_report
from sosie.results import Comparison
from sosie.stitching import TaskLoss
from sosie.stitching.cuts import LeakingCut
from sosie.stitching.joint import Tally

SITES = ["0", "1", "3", "5"]
NUMBERS = ("relative_accuracy", "accuracy", "agreement_b", "agreement_a", "cross_entropy")


def images(n: int = 90, size: int = 6, seed: int = 0) -> Tensor:
    return torch.rand(n, 1, size, size, generator=torch.Generator().manual_seed(seed))


def labelled(n: int = 90, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    x = images(n, seed=seed)
    with torch.no_grad():
        y = cnn(1).eval()(x + 0.4 * torch.rand(x.shape, generator=torch.Generator().manual_seed(5))).argmax(1)
    return list(zip(x.split(40), y.split(40), strict=True))


def rows_of(activation: Tensor) -> Tensor:
    last = activation.movedim(1, -1) if activation.ndim == 4 else activation
    return last.reshape(-1, last.shape[-1]).double()


@pytest.mark.parametrize("batch", [13, 90])
def test_float64_is_least_squares_on_the_whole_matrix(batch: int) -> None:
    """Against LAPACK on all rows at once, with a column of ones."""
    a, b, x = cnn(0).double(), cnn(1).double(), images().double()
    joint = sosie.stitch(a, "1", b, "3", list(x.split(batch)), precision="float64").model.joint
    with torch.no_grad():
        left, right = rows_of(a.eval()[:2](x)), rows_of(b.eval()[:4](x))
    ones = torch.cat([left, torch.ones(len(left), 1)], dim=1)
    expected = torch.linalg.lstsq(ones, right).solution
    found = torch.cat([joint.weight.T, joint.bias[None]])
    assert ((found - expected).norm() / expected.norm()).item() < 1e-8


@pytest.mark.parametrize("batch", [13, 90])
def test_both_precisions_on_rows_that_are_hard_to_invert(batch: int) -> None:
    """One direction of A has a hundredth of the others' deviation, and the mean is 30 deviations off."""
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 7] = x[:, 6] + 0.01 * x[:, 7]
    x = (x + 30).float()
    one, other = nn.Sequential(nn.Identity(), nn.Linear(8, 3)), nn.Sequential(nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        target = torch.tanh(x - 30)
    ones = torch.cat([x.double(), torch.ones(len(x), 1)], dim=1)
    fitted = ones @ torch.linalg.lstsq(ones, target.double()).solution

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.site, self.head = nn.Tanh(), other[1]

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.site(x - 30))

    for precision, most in (("float64", 1e-8), ("float32", 2e-4)):
        found = sosie.stitch(one, "0", Shifted(), "site", list(x.split(batch)), precision=precision)
        weight, bias = _in_float64(one, Shifted(), x, batch, precision)
        error = (x.double() @ weight.T + bias - fitted).norm() / fitted.norm()
        assert float(error) < most, precision
        assert found.report["rank"] == 8


def _in_float64(a: nn.Module, b: nn.Module, x: Tensor, batch: int, precision: str) -> tuple[Tensor, Tensor]:
    """The fit before rounding to the precision of the network."""
    from sosie.linalg import fit
    from sosie.stitching.cuts import CutModel
    from sosie.stitching.joint import Form, Joint, sums_of_pairs

    models = CutModel.of(a).cut_at("0", x), CutModel.of(b).cut_at("site", x)
    sites = [models[0].cut.site], [models[1].cut.site]
    sums = sums_of_pairs(models, sites, {(0, 0): Joint(Form(8), Form(8))}, list(x.split(batch)), precision, None)  # type: ignore[arg-type]
    found = fit("least_squares", sums[0, 0].joint(0, 0))
    return found.weight, found.bias


def test_all_pairs_are_what_single_stitches_are() -> None:
    a, b, data, test = cnn(0), cnn(1), labelled(), labelled(60, seed=3)
    c = sosie.stitch_sites(a, b, data, test=test, sites_a=SITES, sites_b=SITES, pairs="all", precision="float64")
    assert c.sites_a == c.sites_b == SITES
    for i, site_a in enumerate(SITES):
        for j, site_b in enumerate(SITES):
            if site_a == "5" and site_b != "5":
                assert math.isnan(c["accuracy"].value[i, j]), "a vector cannot become a map"
                continue
            s = sosie.stitch(a, site_a, b, site_b, data, precision="float64")
            found = s.evaluate(test)
            for name in NUMBERS:
                assert c[name].value[i, j] == pytest.approx(found[name], abs=1e-6), (site_a, site_b, name)
            if site_a != "5":
                assert c["regression_r2"].value[i, j] == pytest.approx(s.report["r2"], abs=1e-9)
    caveats = [caveat for caveat in c["accuracy"].caveats if "cannot become" in caveat.text]
    assert [(caveat.site_a, caveat.site_b) for caveat in caveats] == [("5", "0"), ("5", "1"), ("5", "3")]
    assert c.provenance["inputs"] == 60
    assert c.provenance["settings"]["pairs"] == "all"


def test_trained_pairs_are_what_single_stitches_are() -> None:
    a, b, test = cnn(0), cnn(1), labelled(60, seed=3)
    way = TaskLoss(epochs=2, batch=30, rate=0.02, start="identity", validation=test)
    sites = ["0", "3"]
    # Batches that can be read only once.
    c = sosie.stitch_sites(a, b, iter(labelled()), test=test, sites_a=sites, sites_b=sites, fit=way)
    untrained = sosie.stitch_sites(a, b, labelled(), test=test, sites_a=sites, sites_b=sites, fit="identity")
    for i, site in enumerate(sites):
        alone = sosie.stitch(a, site, b, site, labelled(), fit=way).evaluate(test)
        assert c["cross_entropy"].value[i, i] == pytest.approx(alone["cross_entropy"], abs=1e-6)
        assert c["cross_entropy"].value[i, i] < untrained["cross_entropy"].value[i, i]
    assert c.provenance["settings"]["fit"].startswith("task_loss(")
    assert not any(
        module.training != other.training for module, other in zip(a.modules(), cnn(0).modules(), strict=True)
    )


def test_indices_are_those_of_compare_over_positions() -> None:
    a, b, x = cnn(0), cnn(1), images()
    names = ["linear_cka", "regression_r2", "kernel_alignment", "mean_cca"]
    c = sosie.stitch_sites(a, b, x, sites_a=["0", "1", "3"], sites_b=["0", "1", "3"], measures=names)
    same = sosie.compare(a, b, x, sites_a=["0", "1", "3"], sites_b=["0", "1", "3"], measures=names, rows="positions")
    for name in names:
        assert np.diag(c.matrix(name)) == pytest.approx(np.diag(same.matrix(name)), abs=1e-5), name
        assert np.isnan(c.matrix(name)).sum() == 6, "nothing off the diagonal"
    assert sum("off the diagonal" in caveat.text for caveat in c["linear_cka"].caveats) == 1
    assert any("not on held-out data" in caveat.text for caveat in c["agreement_b"].caveats)
    assert any("no labels" in caveat.text for caveat in c["agreement_b"].caveats)
    assert "accuracy" not in c.measures


def test_a_network_stitched_to_itself_and_batches_do_not_matter() -> None:
    model, x = cnn(0), labelled()
    c = sosie.stitch_sites(model, model, x, sites=SITES)
    assert np.diag(c.matrix("agreement_b")) == pytest.approx(1)
    assert np.diag(c.matrix("linear_cka")) == pytest.approx(1)
    other = sosie.stitch_sites(cnn(0), cnn(1), x, sites_a=SITES, sites_b=SITES)
    whole = [(torch.cat([b[0] for b in x]), torch.cat([b[1] for b in x]))]
    again = sosie.stitch_sites(cnn(0), cnn(1), whole, sites_a=SITES, sites_b=SITES)
    for name in other.measures:
        assert np.diag(other.matrix(name)) == pytest.approx(np.diag(again.matrix(name)), abs=1e-5), name
    assert c.side_a.name != c.side_b.name


class Residual(nn.Module):
    def __init__(self, seed: int, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two, self.mix = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x + self.two(self.one(x).relu())).relu())


class WithPlaces(nn.Module):
    """One of the layers returns a table of positions, without one row per input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.places, self.head = nn.Linear(6, 6), nn.Embedding(1, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.one(x) + self.places(torch.zeros(1, dtype=torch.long)))


def test_sites_that_give_no_rows_are_named_in_a_caveat() -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    model = WithPlaces()
    c = sosie.stitch_sites(model, model, x, test=x, sites_a="*", sites_b=["one", "head"])
    assert c.sites_a == ["one", "head"]
    assert [site for site, _ in c.side_a.left_out] == ["places"]
    for estimate in c.values.values():
        assert any(caveat.text.startswith(f"left out of {c.side_a.name}: places") for caveat in estimate.caveats)


def test_leaks_are_left_out_by_default_and_refused_when_named() -> None:
    a, b, x = Residual(0), Residual(1), torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    c = sosie.stitch_sites(a, b, x)
    assert c.sites_a == c.sites_b == ["mix", "head"]
    assert any("one, two" in caveat.text for caveat in c["agreement_b"].caveats)
    with pytest.raises(LeakingCut, match="two"):
        sosie.stitch_sites(a, b, x, sites_b=["two", "mix"], sites_a=["two", "mix"])
    every = sosie.stitch_sites(a, b, x, pairs="all")
    assert every.sites_a == ["one", "two", "mix", "head"], "A may be cut anywhere"
    assert every.sites_b == ["mix", "head"]


def test_what_does_not_fit_is_told() -> None:
    a, b, x = cnn(0), cnn(1), images(20)
    with pytest.raises(ValueError, match=r"3 of A \(0, 1, 3\) and 2 of B \(0, 1\).*pairs='all'"):
        sosie.stitch_sites(a, b, x, sites_a=["0", "1", "3"], sites_b=["0", "1"])
    with pytest.raises(ValueError, match="debiased_cka needs more"):
        sosie.stitch_sites(a, b, x, measures="debiased_cka")
    with pytest.raises(ValueError, match=r"float32.*float64"):
        sosie.stitch_sites(a, b, x, precision="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pairs must be.*diagonal.*all"):
        sosie.stitch_sites(a, b, x, pairs="some")  # type: ignore[arg-type]
    c = sosie.stitch_sites(a, b, x, sites_a=["0", "3"], sites_b=["3", "0"], fit="identity", pairs="all")
    assert np.isfinite(c["agreement_b"].value).sum() == 2, "identity joins equal widths only"


def test_everything_is_left_as_found(tmp_path: Path) -> None:
    a, b = cnn(0).train(), cnn(1).train()
    state = torch.get_rng_state()
    c = sosie.stitch_sites(a, b, labelled(), sites_a=SITES, sites_b=SITES)
    assert a.training
    assert b.training
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for m in (a, b) for module in m.modules())
    back = sosie.load(c.save(tmp_path / "c.json"))
    assert isinstance(back, Comparison)
    np.testing.assert_array_equal(back.matrix("accuracy"), c.matrix("accuracy"))
    assert write_report(back, tmp_path / "c.html").stat().st_size > 10_000


def test_the_ratio_has_the_interval_of_a_jackknife_over_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    n, classes = 300, 4
    labels = torch.randint(classes, (n,), generator=generator)
    b = 2 * nn.functional.one_hot(labels, classes) + torch.randn(n, classes, generator=generator)
    stitched = b + 1.5 * torch.randn(n, classes, generator=generator)
    tally = Tally()
    for part in torch.arange(n).split(70):
        tally.add(stitched[part], b[part], b[part], labels[part])
    s, r = ((x.argmax(1) == labels).double().numpy() for x in (stitched, b))
    ratio = s.sum() / r.sum()
    left = np.array([(s.sum() - u) / (r.sum() - v) for u, v in zip(s, r, strict=True)])
    error = math.sqrt((n - 1) / n * np.square(left - left.mean()).sum())
    low, high = tally.interval("relative_accuracy") or (0, 0)
    assert tally.numbers()["relative_accuracy"] == pytest.approx(ratio)
    assert (high - low) / 2 == pytest.approx(1.968 * error, rel=0.01)
    lost = nn.functional.cross_entropy(stitched.double(), b.double().softmax(1), reduction="none").numpy()
    low, high = tally.interval("cross_entropy") or (0, 0)
    assert (high - low) / 2 == pytest.approx(1.968 * lost.std(ddof=1) / math.sqrt(n), rel=1e-3)


def test_the_interval_of_a_proportion_is_wilsons() -> None:
    """Newcombe 1998, table I, method 3."""
    for count, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert Tally(n, {"accuracy": count}).interval("accuracy") == pytest.approx((low, high), abs=1e-4)
