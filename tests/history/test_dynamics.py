"""Every time against every other: values known by hand, or pair by pair from `sosie.measure`."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sosie
from sosie.history import Recorder, open_run
from sosie.models import AtomConv2d, small_cnn

IMAGES = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(0))
ANGLES = [0.0, 0.3, 0.9, 1.4]


def turning(folder: Path, start: float = 0.0) -> Path:
    """Atoms of one layer turn in a plane, those of the other stay: the cosine of two times is that of the angle."""
    model = nn.Sequential(AtomConv2d(1, 2, 3, 4), AtomConv2d(2, 2, 3, 4))
    one, other = torch.linalg.qr(torch.randn(36, 2, generator=torch.Generator().manual_seed(0)).double()).Q.T
    for layer in model:
        nn.init.constant_(layer.coefficients, 0.5)
    with Recorder(folder, model.double(), dtype=torch.float64) as recorder:
        for step, angle in enumerate(ANGLES):
            model[0].atoms.data = (1 + step) * (math.cos(start + angle) * one + math.sin(start + angle) * other).view(
                4, 3, 3
            )
            model[1].atoms.data = one.view(4, 3, 3).clone()
            recorder.record(10 * step)
    return folder


def trained(count: int = 4, make: Any = small_cnn) -> dict[int, nn.Module]:
    """Networks that move away from the first by more and more."""
    found = {}
    for step in range(count):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = make()
            torch.manual_seed(step + 1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.02 * step * torch.randn_like(parameter)
        found[5 * step] = model
    return found


def test_the_cosine_of_turning_atoms_is_that_of_the_angle(tmp_path: Path) -> None:
    found = sosie.dynamics(turning(tmp_path / "r"))
    assert (found.what, found.steps, found.sites, found.measures) == (
        "atoms",
        [0, 10, 20, 30],
        ("0", "1"),
        ["atom_cosine"],
    )
    apart = np.subtract.outer(ANGLES, ANGLES)
    np.testing.assert_allclose(found.matrix("atom_cosine")[0], np.cos(apart), atol=1e-12)
    np.testing.assert_allclose(found.matrix()[1], 1, atol=1e-12)
    assert found.settled(math.cos(0.6)) == {"0": 20, "1": 0}
    assert found["atom_cosine"].caveats == ()


def test_two_runs_are_time_against_time(tmp_path: Path) -> None:
    found = sosie.dynamics(turning(tmp_path / "a"), turning(tmp_path / "b", start=0.5))
    apart = np.subtract.outer(ANGLES, np.add(ANGLES, 0.5))
    np.testing.assert_allclose(found.matrix()[0], np.cos(apart), atol=1e-12)
    assert (found.name_a, found.name_b, found.two_runs) == ("a", "b", True)
    only = sosie.dynamics(tmp_path / "a", tmp_path / "b", "atom_grassmann", sites="1")
    np.testing.assert_allclose(only.matrix(), 1, atol=1e-12)


def test_weights_pair_by_pair_are_what_measure_says() -> None:
    models = trained()
    found = sosie.dynamics(models, measures=["weight_cosine", "weight_distance", "spectrum_distance"])
    assert (found.steps, found.sites) == ([0, 5, 10, 15], ("conv1", "conv2", "conv3", "conv4", "fc"))
    listed = list(models.values())
    for name in found.measures:
        for s, site in enumerate(found.sites):
            for i in range(4):
                for j in range(4):
                    pair = (listed[k].get_submodule(site).weight for k in (i, j))
                    assert found.matrix(name)[s, i, j] == pytest.approx(sosie.measure(name, *pair), abs=1e-10)
    assert found.settled(measure="weight_distance")["fc"] is None  # near its last state only at the last step


@pytest.mark.parametrize("memory", [None, 60_000])
def test_activations_pair_by_pair_are_what_measure_says(memory: int | None) -> None:
    models = trained()
    names = ["debiased_cka", "linear_cka", "kernel_alignment", "procrustes_angle", "regression_r2", "mutual_knn(k=3)"]
    found = sosie.dynamics(models, measures=names, data=IMAGES, sites=["pool3", "fc"], memory=memory)
    rows = {}
    with torch.no_grad():
        for k, model in enumerate(models.values()):
            rows[k, 0] = model[:9](IMAGES).flatten(1)
            rows[k, 1] = model(IMAGES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            for s in range(2):
                for i in range(4):
                    for j in range(4):
                        expected = sosie.measure(name, rows[i, s], rows[j, s])
                        assert found.matrix(name)[s, i, j] == pytest.approx(expected, abs=1e-5), name
    assert any("biased up" in c.text for c in found["linear_cka"].caveats)
    assert found["debiased_cka"].n == 20


def test_a_recorded_run_gives_the_same_to_ten_digits(tmp_path: Path) -> None:
    models = trained()
    for step, model in models.items():
        with Recorder(tmp_path / "r", model, "activations", data=IMAGES, sites=["relu2", "fc"]) as recorder:
            recorder.record(step)
    found, run = sosie.dynamics(tmp_path / "r"), open_run(tmp_path / "r")
    for s, site in enumerate(found.sites):
        for i in range(4):
            for j in range(4):
                expected = sosie.measure("debiased_cka", run.tensor(i, site), run.tensor(j, site))
                assert found.matrix()[s, i, j] == pytest.approx(expected, abs=1e-10)
    again = sosie.dynamics(models, data=IMAGES, sites=["relu2", "fc"])
    np.testing.assert_array_equal(again.matrix(), found.matrix())
    with pytest.raises(ValueError, match=r"data= was decided"):
        sosie.dynamics(tmp_path / "r", data=IMAGES)


def test_files_of_weights_and_state_dicts_are_checkpoints(tmp_path: Path) -> None:
    models = list(trained(3).values())
    paths = [tmp_path / f"{k}.safetensors" for k in range(3)]
    for path, model in zip(paths, models, strict=True):
        save_file(model.state_dict(), path)
    expected = sosie.dynamics(models).matrix()
    np.testing.assert_array_equal(sosie.dynamics(paths).matrix(), expected)
    np.testing.assert_array_equal(sosie.dynamics([m.state_dict() for m in models]).matrix(), expected)
    np.testing.assert_array_equal(sosie.dynamics([f"small_cnn@{path}" for path in paths]).matrix(), expected)
    atoms = trained(3, lambda: small_cnn(atoms=6))
    one = sosie.dynamics(atoms, measures="atom_cosine")
    other = sosie.dynamics({k: m.state_dict() for k, m in atoms.items()}, measures="atom_cosine")
    np.testing.assert_array_equal(one.matrix(), other.matrix())
    with pytest.raises(TypeError, match="cannot be run on data"):
        sosie.dynamics([m.state_dict() for m in models], data=IMAGES)


def test_states_without_a_value_are_left_out_and_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with Recorder(tmp_path / "r", model, "weights") as recorder:
        for step in range(4):
            recorder.record(step)
            model[0].weight.data.fill_(float("nan") if step == 0 else float(step))
            model[1].weight.data.fill_(0.0 if step == 1 else 1.0)
    found = sosie.dynamics(tmp_path / "r")
    assert np.isnan(found.matrix()[0, 1]).all()
    assert np.isnan(found.matrix()[0, :, 1]).all()
    assert np.isfinite(np.delete(np.delete(found.matrix()[0], 1, 0), 1, 1)).all()
    texts = {(c.text, c.site_a) for c in found["weight_cosine"].caveats}
    assert ("r, step 1: 6 of 6 numbers are NaN or infinite", "0") in texts
    assert ("r, step 2: all weights are 0: they have no direction", "1") in texts


def test_a_killed_run_and_moving_coefficients_are_told(tmp_path: Path) -> None:
    model = small_cnn(atoms=6)
    with Recorder(tmp_path / "r", model) as recorder:
        for step in range(3):
            recorder.record(step)
            model.conv2.coefficients.data += 0.1
    with (tmp_path / "r" / "records").open("ab") as file:
        file.write(b"sosieFRM half a rec")
    found = sosie.dynamics(tmp_path / "r")
    assert found.steps == [0, 1, 2]
    texts = {(c.text.split(":")[1][:25], c.site_a) for c in found["atom_cosine"].caveats}
    assert texts == {(" records", None), (" the coefficients were tr", "conv2")}
    other = small_cnn(atoms=6)
    with Recorder(tmp_path / "s", other) as recorder:
        recorder.record(0)
    both = sosie.dynamics(tmp_path / "r", tmp_path / "s")
    assert both.matrix().shape == (4, 3, 1)
    assert sum("different coefficients" in c.text for c in both["atom_cosine"].caveats) == 4


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    models = trained(2)
    run = turning(tmp_path / "r")
    for wrong, match in [
        ("linear_cka", "linear_cka compares activations, but r is a record of atoms"),
        ("wcka", "use compare_weights"),
        ("agreement", "use compare_outputs"),
        ([], "no measures"),
    ]:
        with pytest.raises(ValueError, match=match):
            sosie.dynamics(run, measures=wrong)
    with pytest.raises(ValueError, match="give data="):
        sosie.dynamics(models, measures="linear_cka")
    with pytest.raises(ValueError, match="leave data out"):
        sosie.dynamics(models, measures="weight_cosine", data=IMAGES)
    with pytest.raises(ValueError, match="separate calls"):
        sosie.dynamics(models, measures=["weight_cosine", "atom_cosine"])
    with pytest.raises(ValueError, match="at least two checkpoints"):
        sosie.dynamics([models[0]])
    with pytest.raises(TypeError, match=r"with a run\.json"):
        sosie.dynamics(tmp_path)
    with pytest.raises(TypeError, match="got Sequential"):
        sosie.dynamics(models[0])
    with pytest.raises(ValueError, match=r"no site recorded in .* is called 'conv'"):
        sosie.dynamics(run, sites="conv")
    with pytest.raises(ValueError, match=r"parameter fc.weight is \(10, 576\)"):
        sosie.dynamics([models[0], small_cnn(classes=7)])
    with pytest.raises(ValueError, match="9 atoms of 9 entries"):
        sosie.dynamics(trained(2, lambda: small_cnn(atoms=9)), measures="atom_grassmann")
    Recorder(tmp_path / "empty", models[0], "weights").close()
    with pytest.raises(ValueError, match="no record yet"):
        sosie.dynamics(tmp_path / "empty")
    with pytest.raises(ValueError, match="record of atoms, empty of weights"):
        sosie.dynamics(run, tmp_path / "empty")


def test_two_runs_of_other_probes_or_shapes_are_refused(tmp_path: Path) -> None:
    model = small_cnn()
    for name, probe in (("a", IMAGES), ("b", IMAGES.flip(0))):
        with Recorder(tmp_path / name, model, "activations", data=probe, sites="fc") as recorder:
            recorder.record(0)
    with pytest.raises(ValueError, match="rows of other inputs cannot be paired"):
        sosie.dynamics(tmp_path / "a", tmp_path / "b")
    for name, width in (("c", 2), ("d", 3)):
        with Recorder(tmp_path / name, nn.Sequential(nn.Linear(2, width)), "weights") as recorder:
            recorder.record(0)
    with pytest.raises(ValueError, match=r"site 0 is \(2, 2\) in c and \(3, 2\) in d"):
        sosie.dynamics(tmp_path / "c", tmp_path / "d")


def test_checkpoints_are_kept_where_asked(tmp_path: Path) -> None:
    found = sosie.dynamics(trained(3), folder=tmp_path / "kept")
    np.testing.assert_array_equal(sosie.dynamics(tmp_path / "kept").matrix(), found.matrix())


def test_other_coefficients_are_told_whatever_sites_the_runs_have_beside(tmp_path: Path) -> None:
    model = nn.Sequential(AtomConv2d(1, 2, 3, 4), AtomConv2d(2, 2, 3, 4))
    with Recorder(tmp_path / "whole", model) as recorder:
        recorder.record(0)
    nn.init.constant_(model[1].coefficients, 0.5)
    with Recorder(tmp_path / "part", model, sites="1") as recorder:
        recorder.record(0)
    found = sosie.dynamics(tmp_path / "whole", tmp_path / "part", sites="1")
    assert [c.site_a for c in found["atom_cosine"].caveats if "different coefficients" in c.text] == ["1"]


def test_no_sites_and_data_for_a_recorded_run(tmp_path: Path) -> None:
    turning(tmp_path / "r")
    with pytest.raises(ValueError, match="an empty list of sites"):
        sosie.dynamics(tmp_path / "r", sites=[])
    with pytest.raises(ValueError, match="data= was decided"):
        sosie.dynamics(tmp_path / "r", data=np.zeros((4, 1, 28, 28), dtype=np.float32))


def test_a_damaged_record_is_no_undefined_value(tmp_path: Path) -> None:
    with Recorder(tmp_path / "r", small_cnn(), "weights") as recorder:
        for step in range(3):
            recorder.record(step)
    content = bytearray((tmp_path / "r" / "records").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "r" / "records").write_bytes(content)
    with pytest.raises(sosie.files.DamagedFile, match="step 1 is damaged"):
        sosie.dynamics(tmp_path / "r")


def test_depth_is_known_only_where_something_tells_it(tmp_path: Path) -> None:
    def make() -> nn.Module:
        layers = {"z": AtomConv2d(1, 3, 3, 4), "m": nn.Conv2d(3, 3, 3), "a": AtomConv2d(3, 2, 3, 4)}
        return nn.Sequential(OrderedDict(layers))

    torch.manual_seed(0)
    models = [make() for _ in range(3)]
    models.append(deepcopy(models[2]))
    models[1].get_submodule("z").load_state_dict(models[2].get_submodule("z").state_dict())
    whole = sosie.dynamics(models)
    assert whole.sites == ("z", "m", "a")
    assert whole.settled(0.99) == {"z": 1, "m": 2, "a": 2}
    assert whole.order().correlation == pytest.approx(np.sqrt(3) / 2)
    states = sosie.dynamics([model.state_dict() for model in models])
    assert states.sites == whole.sites
    assert states.order().correlation == whole.order().correlation
    paths = [tmp_path / f"{k}.safetensors" for k in range(len(models))]
    for path, model in zip(paths, models, strict=True):
        save_file(model.state_dict(), path)
    files = sosie.dynamics(paths, folder=tmp_path / "kept")
    assert files.sites == ("a", "m", "z")  # sorted by name
    assert files.order().correlation is None
    assert "not in order of depth" in files["weight_cosine"].caveats[0].text
    again = sosie.load(files.save(tmp_path / "d.json"))
    assert not again.by_depth
    kept = sosie.dynamics(tmp_path / "kept")  # the folder knows what it did not know
    assert not kept.by_depth
    assert kept.order().correlation is None
    assert kept["weight_cosine"].caveats == files["weight_cosine"].caveats
    with Recorder(tmp_path / "model", models[0], "weights") as recorder:
        recorder.record(0)
    assert not sosie.dynamics(tmp_path / "model", tmp_path / "kept").by_depth
    assert sosie.dynamics(tmp_path / "model").by_depth
