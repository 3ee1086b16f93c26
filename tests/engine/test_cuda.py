"""The same comparison on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from forked import python
from nets import cnn, inputs, mlp
from torch import Tensor, nn

import sosie
from sosie.engine.evaluate import by_pair
from sosie.engine.provenance import begin_digest, digest_of
from sosie.linalg import gram_cuda
from sosie.measures import find
from sosie.stats import Sample
from sosie.zoo import Probe, fingerprint
from sosie.zoo import fingerprints as making

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MEASURES = ["debiased_cka", "linear_cka", "kernel_alignment", "mean_cca", "mutual_knn", "rsa", "procrustes_angle"]


@pytest.mark.parametrize("memory", [None, 1000])
@pytest.mark.parametrize("precision", [None, "float32", "float64"])
def test_same_values_as_on_a_cpu(memory: int | None, precision: str | None) -> None:
    x = torch.rand(131, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    a, b = cnn(0), cnn(1)
    measures = MEASURES if memory is None else MEASURES[:3]
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # the forward passes are to be the same
    here = sosie.compare(a, b, x, measures=measures, memory=memory)
    there = sosie.compare(a, b, x, measures=measures, memory=memory, device="cuda", precision=precision)
    torch.backends.cudnn.allow_tf32 = before
    for name in here.measures:
        np.testing.assert_allclose(there.matrix(name), here.matrix(name), atol=1e-3, equal_nan=True, err_msg=name)
    assert next(a.parameters()).device.type == "cpu"


@pytest.mark.parametrize(
    "name", [*MEASURES[3:], "svcca", "pwcca", "cca_r2", "regression_r2", "rbf_cka", "jaccard", "cknna"]
)
def test_all_pairs_of_sites_as_on_a_cpu(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    sides = [[torch.randn(200, width, generator=random) for width in (30, 120, 300)] for _ in "ab"]
    found = []
    for device in ("cpu", "cuda"):
        sample = Sample.of(*([rows.to(device) for rows in side] for side in sides))
        everywhere = np.ones(3, dtype=bool)
        pairs = by_pair([find(name)], sample, sample.widths, everywhere, everywhere)[name]
        found.append(pairs.matrix((3, 3)).cpu().numpy())
    np.testing.assert_allclose(found[1], found[0], atol=1e-10)


def test_models_on_different_devices() -> None:
    a, b, x = mlp(0), mlp(1).cuda(), inputs()
    found = sosie.compare(a, b, x).matrix()
    assert np.abs(found - sosie.compare(a, mlp(1), x).matrix()).max() < 1e-3
    assert next(b.parameters()).is_cuda


def test_a_site_that_is_not_finite_is_named_though_looked_at_later() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x.clone()
            out[-1, 2] = torch.nan
            return out

    model = nn.Sequential(nn.Linear(8, 4), Broken(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"activations are NaN or infinite .* at 1, 2\."):
        sosie.compare(model, mlp(), inputs(300).split(64), device="cuda", memory=1000)


@pytest.mark.parametrize("memory", [None, 1000])
def test_a_model_with_itself(memory: int | None) -> None:
    measures = (
        ["debiased_cka", "linear_cka", "normalized_bures", "procrustes_angle"]
        if memory is None
        else ["debiased_cka", "linear_cka"]
    )
    c = sosie.compare(mlp(0), mlp(0), inputs(), measures=measures, device="cuda", memory=memory)
    for name in measures:
        assert np.diag(c.matrix(name)) == pytest.approx(np.full(5, c[name].same), abs=1e-6)


def test_the_setting_of_the_products_is_put_back() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    sosie.compare(mlp(0), mlp(1), inputs(), device="cuda", memory=1000)
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize("small", [0, 10**9], ids=["blocks", "moments"])
def test_an_interrupted_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr("sosie.engine.partial.EVERY", 0.0)
    monkeypatch.setattr("sosie.engine.plan.SMALL_WORK", small)
    x, path = inputs(400), tmp_path / "part.safetensors"
    kwargs = {"measures": ["debiased_cka", "mutual_knn", "mean_cca"], "block": 16, "device": "cuda"}
    whole = sosie.compare(mlp(0), mlp(1), x.split(64), **kwargs)

    def stopping():
        yield from x.split(64)[:4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sosie.compare(mlp(0), mlp(1), stopping(), resume=path, **kwargs)
    found = sosie.compare(mlp(0), mlp(1), x.split(64), resume=path, **kwargs)
    for name in whole.measures:
        np.testing.assert_allclose(found.matrix(name), whole.matrix(name), atol=1e-6)


@pytest.mark.parametrize("tf32", [True, False])
def test_stitching_is_as_on_a_cpu(tf32: bool) -> None:
    """Cuts are compared with the whole network without TF32, whatever is allowed."""
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.rand(96, 1, 6, 6, generator=generator), torch.randint(3, (96,), generator=generator)
    trained = ["task_loss(epochs=2, batch=32)", "task_loss(start='random', epochs=2, batch=32, cka=0.5)"]
    trained += ["task_loss(start='permutation', epochs=2, batch=32, rank=2, patience=1)"]
    closed = ["least_squares", "ridge(strength=0.1)", "procrustes", "reduced_rank(k=2)", "permutation", "identity"]
    ways = [*closed, "lasso(alpha=0.01)", *trained]
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        found = {}
        for device in ("cpu", "cuda"):
            a, b = cnn(0).to(device), cnn(1).to(device)
            site = next(name for name, module in a.named_modules() if isinstance(module, nn.Conv2d))
            found[device] = sosie.stitch(a, site, b, site, [(x, labels)], fit=ways)
        assert torch.backends.cudnn.allow_tf32 == tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        weights = here.model.joint.weight, there.model.joint.weight.cpu()
        torch.testing.assert_close(*weights, atol=2e-2 if tf32 else 2e-3, rtol=0)
        one, other = (s.evaluate([(x, labels)])["cross_entropy"] for s in (here, there))
        assert one == pytest.approx(other, abs=2e-2 if tf32 else 1e-3)


def test_stitching_at_all_sites_and_a_stitch_in_a_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.rand(64, 1, 6, 6, generator=generator), torch.randint(3, (64,), generator=generator))]
    there = sosie.stitch_sites(cnn(0).cuda(), cnn(1).cuda(), data, test=data)
    here = sosie.stitch_sites(cnn(0), cnn(1), data, test=data)
    for name in here.measures:
        np.testing.assert_allclose(there.matrix(name), here.matrix(name), atol=0.05, equal_nan=True, err_msg=name)
    site = here.sites_a[0]
    found = sosie.stitch(cnn(0).cuda(), site, cnn(1).cuda(), site, data)
    found.save(tmp_path / "s.safetensors")
    again = sosie.Stitch.load(tmp_path / "s.safetensors", cnn(0).cuda(), cnn(1).cuda())
    torch.testing.assert_close(again.model(data[0][0].cuda()), found.model(data[0][0].cuda()))


def test_a_digest_does_not_depend_on_where_the_weights_are() -> None:
    here = {**cnn(0).state_dict(), "half": torch.arange(6).half().view(2, 3), "one": torch.tensor(2), "prepare": "x"}
    there = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in here.items()}
    there["half"] = there["half"].t().contiguous().t()  # not as it lies in memory
    there["apart"], here["apart"] = [torch.arange(5.0)] * 2  # on the CPU, behind others of its type
    assert digest_of(there) == digest_of(here)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_a_digest_of_many_pieces_is_the_same_on_a_gpu(dtype: torch.dtype) -> None:
    """More than are taken at once, a tensor that is longer than that, and a rest that is no word."""
    drawn = [torch.randint(2, (count,), generator=torch.Generator().manual_seed(count)) for count in (3, 2**20 + 5)]
    here = [each.to(dtype) for each in (*drawn, torch.randn(5 * 2**22).to(dtype), torch.randn(77, 13).to(dtype).T)]
    there = [each.cuda() for each in here]
    assert digest_of(there) == digest_of(here)
    there[2].view(torch.uint8)[-1] ^= 1
    assert digest_of(there) != digest_of(here)


def test_a_digest_is_begun_without_waiting_for_the_device() -> None:
    weights = [torch.randn(2**k + 1, device="cuda") for k in range(20)]
    wanted = digest_of(weights)  # the numbers that words are multiplied by are there from now on
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        finish = begin_digest(weights)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert finish() == wanted


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_a_fingerprint_is_that_of_a_cpu(offset: float, triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not triton:
        monkeypatch.setattr(gram_cuda, "suits", lambda stack, about="mean": False)
    model, x = cnn(0), torch.rand(131, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        next(module for module in model.modules() if isinstance(module, nn.Conv2d)).bias += offset
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # the forward passes are to be the same
    here, there = (fingerprint(model, x, kinds="cka", device=device) for device in ("cpu", "cuda"))
    torch.backends.cudnn.allow_tf32 = before
    assert here.sites == there.sites
    assert here.about["model"] == there.about["model"]
    np.testing.assert_allclose(there.cosine(here, exact=True), here.cosine(here, exact=True), atol=2e-3)


def test_a_fingerprint_is_float32_whatever_the_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        found = fingerprint(mlp(0).float(), torch.randn(140, 8, dtype=torch.float32), kinds="cka", device="cuda")
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.exact is not None
    assert found.exact.dtype == found.vectors["cka"].dtype == np.float32


def test_a_fingerprint_waits_for_the_device_only_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all is queued, from the pass to the short vectors, nothing is asked of the device."""
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20)).cuda()
    probe = Probe.of(torch.randn(140, 40, device="cuda"))
    fingerprint(model, probe, kinds="cka")  # kernels are compiled and tables made
    sketched = making.project

    def waiting(vectors: Tensor, size: int, seed: int) -> Tensor:
        found = sketched(vectors, size, seed)
        torch.cuda.set_sync_debug_mode(before)
        return found

    monkeypatch.setattr(making, "project", waiting)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fingerprint(model, probe, kinds="cka")
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_threads_that_ask_for_the_first_factorisation_of_a_process_get_it() -> None:
    script = (
        "import sosie, torch; torch.set_num_threads(8);"
        "x, y = ({str(k): torch.randn(64, 32, device='cuda') for k in range(8)} for _ in range(2));"
        "found = sosie.compare(x, y, measures=['procrustes_angle', 'mean_cca'], exact=True);"
        "assert found.matrix('procrustes_angle').shape == (8, 8)"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
