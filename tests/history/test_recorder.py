"""A record of training: what it keeps, what it leaves as found, and what a kill, damage or a stranger does to it."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import python
from safetensors.torch import load as load_safetensors
from torch import nn
from torch.nn.utils import prune, weight_norm
from torch.nn.utils.parametrizations import spectral_norm

import sosie
from sosie.capture import watch
from sosie.files import DamagedFile, write_json
from sosie.history import Recorder, open_run
from sosie.history import run_folder as frames
from sosie.models import AtomConv2d, small_cnn

IMAGES = torch.rand(12, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return small_cnn(atoms=6)


def tiny(value: float = 0.0) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.constant_(made[0].weight, value)
    return made


def tiny_run(folder: Path, count: int = 3) -> Path:
    made = tiny()
    with Recorder(folder, made, "weights") as recorder:
        for step in range(count):
            made[0].weight.data.fill_(float(step))
            recorder.record(step)
    return folder / "records"


def test_atoms_weights_and_activations_are_kept_as_they_were(model: nn.Module, tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {"atoms": {}, "weights": {}, "activations": {"probe": IMAGES}}
    recorders = {what: Recorder(tmp_path / what, model, what, **options) for what, options in kinds.items()}
    seen = []
    for step in (0, 7):
        nn.init.normal_(model.conv1.atoms, generator=torch.Generator().manual_seed(step))
        for recorder in recorders.values():
            recorder.record(step)
        with torch.no_grad(), watch(model.eval(), "relu2") as found:
            found.run(IMAGES)
            seen.append((model.conv1.atoms.clone(), model.conv1.weight.clone(), found["relu2"].flatten(1)))
    for recorder in recorders.values():
        recorder.close()
    runs = {what: open_run(tmp_path / what) for what in kinds}
    assert all(run.steps == [0, 7] for run in runs.values())
    for k, (atoms, weight, rows) in enumerate(seen):
        assert torch.equal(runs["atoms"].tensor(k, "conv1"), atoms)
        assert torch.equal(runs["weights"].tensor(k, "conv1"), weight)
        torch.testing.assert_close(runs["activations"].tensor(k, "relu2"), rows, rtol=1e-5, atol=1e-6)
    assert runs["weights"].sites == ("conv1", "conv2", "conv3", "conv4", "fc")


def test_a_record_is_safetensors(model: nn.Module, tmp_path: Path) -> None:
    with Recorder(tmp_path / "r", model, dtype=torch.bfloat16) as recorder:
        recorder.record(0)
    run = open_run(tmp_path / "r")
    frame = run.frames[0]
    found = load_safetensors((tmp_path / "r" / "records").read_bytes()[frame.start : frame.ends])
    assert set(found) == {*run.sites, ".coefficients"}
    assert torch.equal(found["conv3"], model.conv3.atoms.detach().bfloat16())
    assert torch.equal(run.tensor(0, "conv3"), found["conv3"])


def test_the_model_and_chance_are_left_as_found(model: nn.Module, tmp_path: Path) -> None:
    model.append(nn.Dropout(0.5)).append(nn.BatchNorm1d(10))
    model.train()
    model.conv2.eval()
    model.conv1.atoms.requires_grad_(False)
    model(IMAGES).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = [module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]
    dice = torch.get_rng_state(), np.random.get_state()[1].copy()
    with Recorder(tmp_path / "r", model, "activations", data=IMAGES) as recorder:
        recorder.record(0)
    assert before == ([module.training for module in model.modules()], [p.requires_grad for p in model.parameters()])
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(dict(model.named_parameters())[name].grad, g) for name, g in gradients.items())
    assert torch.equal(dice[0], torch.get_rng_state())
    assert (dice[1] == np.random.get_state()[1]).all()
    assert not model._forward_hooks
    assert not model.conv1._forward_hooks


def test_steps_go_up_and_every_thins_them_out(tmp_path: Path) -> None:
    with Recorder(tmp_path / "r", tiny(), "weights", every=5) as recorder:
        for step in range(12):
            recorder.record(step)
        assert recorder.steps == [0, 5, 10]
        with pytest.raises(ValueError, match=r"step 10 is not after step 10.*resume"):
            recorder.record(10)
        for wrong in (-1, True, 1.0):
            with pytest.raises(ValueError, match="whole number"):
                recorder.record(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="closed"):
        recorder.record(15)


def test_a_run_goes_on_and_goes_back(tmp_path: Path) -> None:
    tiny_run(tmp_path / "r", 4)
    made = tiny(9.0)
    with Recorder(tmp_path / "r", made, "weights") as recorder:
        assert recorder.steps == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="step 2 is not after step 3"):
            recorder.record(2)
        with pytest.raises(ValueError, match="starts at step 0: name another folder"):
            recorder.resume(0)
        assert recorder.resume(1) == [2, 3]
        recorder.record(2)
    run = open_run(tmp_path / "r")
    assert run.steps == [0, 1, 2]
    assert [float(run.tensor(k, "0")[0, 0]) for k in range(3)] == [0.0, 1.0, 9.0]


def test_the_same_cell_run_twice(tmp_path: Path) -> None:
    tiny_run(tmp_path / "r", 3)
    with (
        Recorder(tmp_path / "r", tiny(5.0), "weights") as recorder,
        pytest.raises(ValueError, match=r"step 0 is not after step 2.*overwrite=True"),
    ):
        recorder.record(0)
    assert open_run(tmp_path / "r").steps == [0, 1, 2]  # nothing is lost
    with pytest.raises(ValueError, match="overwrite=True"):
        Recorder(tmp_path / "r", nn.Sequential(nn.Linear(7, 7)), "weights")
    outputs = [Recorder(tmp_path / "r", tiny(), "weights")]  # a notebook holds what its cells returned
    with pytest.raises(BlockingIOError, match="an earlier cell"):
        Recorder(tmp_path / "r", tiny(), "weights")
    assert open_run(tmp_path / "r").steps == [0, 1, 2]
    for _ in range(2):
        outputs.append(Recorder(tmp_path / "r", tiny(), "weights", overwrite=True))
        outputs[-1].record(0)
    with pytest.raises(ValueError, match="closed"):
        outputs[0].record(3)
    for _ in range(2):
        with Recorder(tmp_path / "r", tiny(5.0), "weights", overwrite=True) as recorder:
            recorder.record(0)
            recorder.record(1)
    run = open_run(tmp_path / "r")
    assert (run.steps, float(run.tensor(0, "0")[0, 0])) == ([0, 1], 5.0)


def test_overwriting_takes_a_run_only(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="other files"):
        Recorder(tmp_path / "full", tiny(), "weights", overwrite=True)
    Recorder(tmp_path / "new", tiny(), "weights", overwrite=True).close()


def test_another_model_sites_probe_or_kind_is_refused_by_name(model: nn.Module, tmp_path: Path) -> None:
    Recorder(tmp_path / "a", model, sites=["conv1", "conv2"]).close()
    with pytest.raises(ValueError, match=r"site conv3 is missing there and \(6, 3, 3\) here"):
        Recorder(tmp_path / "a", model)
    with pytest.raises(ValueError, match=r"site conv1 is \(6, 3, 3\) there and \(4, 3, 3\) here"):
        Recorder(tmp_path / "a", small_cnn(atoms=4), sites=["conv1", "conv2"])
    other = small_cnn(atoms=6)
    other.fc = nn.Linear(576, 7)
    with pytest.raises(ValueError, match=r"parameter fc.weight is \(10, 576\) there and \(7, 576\) here"):
        Recorder(tmp_path / "a", other, sites=["conv1", "conv2"])
    with pytest.raises(ValueError, match="it holds atoms there and weights here"):
        Recorder(tmp_path / "a", model, "weights", sites=["conv1", "conv2"])
    with pytest.raises(ValueError, match="stored as F32 there and F64 here"):
        Recorder(tmp_path / "a", model, sites=["conv1", "conv2"], dtype=torch.float64)
    Recorder(tmp_path / "p", model, "activations", data=IMAGES, sites="fc").close()
    with pytest.raises(ValueError, match="probed with 12 inputs"):
        Recorder(tmp_path / "p", model, "activations", data=IMAGES + 1, sites="fc")
    Recorder(tmp_path / "p", model, "activations", data=[IMAGES[:5], IMAGES[5:]], sites="fc").close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="other files"):
        Recorder(tmp_path / "full", model)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"what": "gradients"}, "one of .atoms., .weights., .activations."),
        ({"what": "activations"}, "give data="),
        ({"data": IMAGES}, "data= is for activations"),
        ({"what": "activations", "data": IMAGES.double()}, "inputs of float64 for a model of float32"),
        ({"every": 0}, "at least 1"),
        ({"dtype": torch.int8}, "dtype"),
        ({"sites": "cnov1"}, "did you mean 'conv1'"),
    ],
)
def test_nonsense_is_refused(model: nn.Module, tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Recorder(tmp_path / "r", model, **options)
    assert not (tmp_path / "r").exists()
    with pytest.raises(ValueError, match="no layer of atoms"):
        Recorder(tmp_path / "r", small_cnn())


def test_two_recorders_do_not_write_into_one_folder(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="no locks on this system")
    first = Recorder(tmp_path / "r", tiny(), "weights")
    with pytest.raises(BlockingIOError, match="another recorder"):
        Recorder(tmp_path / "r", tiny(), "weights")
    del first
    Recorder(tmp_path / "r", tiny(), "weights").close()


def test_cut_anywhere_all_whole_records_are_kept(tmp_path: Path) -> None:
    records = tiny_run(tmp_path / "r")
    whole = records.read_bytes()
    ends = [frame.ends for frame in open_run(tmp_path / "r").frames]
    for cut in range(len(whole)):
        records.write_bytes(whole[:cut])
        expected = sum(end <= cut for end in ends)
        run = open_run(tmp_path / "r")
        assert run.steps == list(range(expected))
        assert (run.note is None) == (cut in (0, *ends))
        assert [float(run.tensor(k, "0")[1, 1]) for k in range(expected)] == list(range(expected))
        if cut % 7 == 0:  # going on cuts the rest off
            noted = pytest.warns(UserWarning, match="unfinished record") if run.note else contextlib.nullcontext()
            with noted, Recorder(tmp_path / "r", tiny(8.0), "weights") as recorder:
                assert recorder.note == run.note
                recorder.record(100)
            again = open_run(tmp_path / "r")
            assert (again.steps, again.note) == ([*range(expected), 100], None)
            assert float(again.tensor(expected, "0")[0, 0]) == 8.0


def test_a_changed_byte_is_never_read_as_a_number(tmp_path: Path) -> None:
    records = tiny_run(tmp_path / "r")
    whole = bytearray(records.read_bytes())
    first = open_run(tmp_path / "r").frames[0]
    for place in range(first.ends):
        changed = whole.copy()
        changed[place] ^= 0x10
        records.write_bytes(changed)
        with pytest.raises(DamagedFile):
            open_run(tmp_path / "r").tensor(0, "0")
        if place < first.start:  # a head: nothing after it may be cut off
            with pytest.raises(DamagedFile, match="not merely interrupted"):
                Recorder(tmp_path / "r", tiny(), "weights")
            assert records.read_bytes() == changed


@pytest.mark.parametrize("size", ["huge", "one more than is left", "to the end", "into a later frame"])
def test_a_wrong_length_costs_no_later_record(tmp_path: Path, size: str) -> None:
    """A head that is whole in itself: its checksum fits."""
    records = tiny_run(tmp_path / "r", 4)
    whole, found = records.read_bytes(), open_run(tmp_path / "r").frames
    second, left = found[1], len(whole) - found[1].start
    length = {"huge": 2**62, "one more than is left": left + 1, "to the end": left, "into a later frame": left - 3}[
        size
    ]
    head = frames._HEAD.pack(frames.MAGIC, second.step, length, second.checksum)
    head += frames._CHECK.pack(zlib.crc32(head))
    changed = whole[: second.begins] + head + whole[second.start :]
    records.write_bytes(changed)
    for opening in (lambda: open_run(tmp_path / "r"), lambda: Recorder(tmp_path / "r", tiny(), "weights")):
        with pytest.raises(DamagedFile, match=r"damaged at byte \d+: .*step [23] after it is whole"):
            opening()
    assert records.read_bytes() == changed
    # The same head with nothing whole behind it is what a kill leaves.
    records.write_bytes(changed[: second.start + 20])
    if length > 20:
        assert open_run(tmp_path / "r").steps == [0]


def test_killed_at_any_moment_a_run_reopens(tmp_path: Path) -> None:
    if not hasattr(__import__("os"), "fork"):
        pytest.skip("no fork on this system")
    script = Path(__file__).with_name("killed_runs.py")
    found = python(script, tmp_path / "r")
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert told["kills"] >= 10
    assert told["kept"] > 0
    assert open_run(tmp_path / "r").steps


def forged(folder: Path, **changes: Any) -> None:
    """A run.json that says something else, with a hash that fits."""
    found = {**json.loads((folder / "run.json").read_text()), **changes}
    del found["hash"]
    write_json(folder / "run.json", found)


@pytest.mark.parametrize(
    "changes",
    [
        {"shapes": [[2**40, 2**20]]},
        {"shapes": [[-2, 2]]},
        {"shapes": [[True, 2]]},
        {"shapes": [[2, 2], [2, 2]]},
        {"sites": [3]},
        {"sites": [], "shapes": []},
        {"dtype": "object"},
        {"what": "pickles"},
        {"parameters": []},
        {"probe": {"inputs": "many"}},
        {"by_depth": "yes"},
        {"version": 3},
        {"format": "sosie-comparison"},
    ],
)
def test_a_hostile_description_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    tiny_run(tmp_path / "r")
    forged(tmp_path / "r", **changes)
    with pytest.raises(DamagedFile):
        open_run(tmp_path / "r").tensor(0, "0")


def test_a_hostile_frame_takes_no_memory(tmp_path: Path) -> None:
    records = tiny_run(tmp_path / "r", 1)
    head = frames._HEAD.pack(frames.MAGIC, 5, 2**62, 0)
    records.write_bytes(records.read_bytes() + head + frames._CHECK.pack(zlib.crc32(head)) + b"x" * 10)
    run = open_run(tmp_path / "r")
    assert run.steps == [0]
    assert run.note is not None
    records.write_bytes(frames.framed(0, b"\xff" * 8 + b"[" * 100) + frames.framed(0, b""))
    with pytest.raises(DamagedFile, match="step 0 comes after step 0"):
        open_run(tmp_path / "r")
    records.write_bytes(frames.framed(0, b"\xff" * 8 + b"[" * 100))
    with pytest.raises(DamagedFile, match=r"has 108 bytes where run\.json makes it"):
        open_run(tmp_path / "r").tensor(0, "0")
    (tmp_path / "r" / "run.json").write_text('{"format": "sosie-run"')
    with pytest.raises(DamagedFile, match="not whole JSON"):
        open_run(tmp_path / "r")
    (tmp_path / "r" / "run.json").unlink()
    with pytest.raises(DamagedFile, match=r"no run\.json"):
        open_run(tmp_path / "r")


def test_whether_coefficients_moved_is_known(model: nn.Module, tmp_path: Path) -> None:
    with Recorder(tmp_path / "r", model) as recorder:
        recorder.record(0)
        model.conv1.atoms.data += 1
        recorder.record(1)
        assert open_run(tmp_path / "r").coefficients_moved() == []
        model.conv2.coefficients.data *= 1.01
        recorder.record(2)
    assert open_run(tmp_path / "r").coefficients_moved() == ["conv2"]


def test_a_last_record_that_was_changed_is_refused_and_one_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tiny_run(tmp_path / "r")
    whole = path.read_bytes()
    last = whole.rindex(frames.MAGIC)
    for place in (last + 3, last + 10, last + frames.HEAD + 1, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        for read in (lambda: open_run(tmp_path / "r"), lambda: Recorder(tmp_path / "r", tiny(), "weights")):
            with pytest.raises(DamagedFile, match=f"records is damaged at byte {last}.*truncate -s {last}"):
                read()
    for end in (last + 3, last + frames.HEAD, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert open_run(tmp_path / "r").steps == [0, 1]
        assert f"{end - last} bytes of an unfinished record after step 1" in str(open_run(tmp_path / "r").note)


def test_records_of_another_run_are_refused(tmp_path: Path) -> None:
    records, other = tiny_run(tmp_path / "a"), tiny_run(tmp_path / "b")
    with Recorder(tmp_path / "a", tiny(), "weights") as recorder:  # goes on with the run that is there
        recorder.record(3)
    assert open_run(tmp_path / "a").tensor(3, "0").tolist() == [[0, 0], [0, 0]]
    records.write_bytes(other.read_bytes())
    with pytest.raises(DamagedFile, match=r"the record of step 0 .* of another run"):
        open_run(tmp_path / "a").tensor(0, "0")


def pruned(state: dict[str, Any] | None = None) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), weight_norm(nn.Linear(3, 3)))
        prune.random_unstructured(model[0], "weight", 0.3)
    if state is not None:
        model.load_state_dict(state)
    return model


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the weight norm of before parametrisations
def test_weights_that_a_layer_computes_are_recorded_as_they_are_now(tmp_path: Path) -> None:
    first, last = pruned(), pruned()
    with torch.no_grad():
        for parameter in last.parameters():
            parameter.neg_()
    weights = [model[0].weight_orig * model[0].weight_mask for model in (first, last)]
    weights += [torch.linalg.vector_norm(last[3].weight_v, dim=1, keepdim=True)]
    # `last` was not run since its parameters changed, so that its `weight` is not up to date.
    with Recorder(tmp_path / "r", last, "weights") as recorder:
        recorder.record(0)
    run = open_run(tmp_path / "r")
    assert run.sites == ("0", "2", "3")
    assert torch.equal(run.tensor(0, "0"), weights[1])
    torch.testing.assert_close(run.tensor(0, "3"), last[3].weight_g * last[3].weight_v / weights[2])
    loaded = sosie.dynamics([pruned(first.state_dict()), pruned(last.state_dict())])
    np.testing.assert_allclose(loaded.matrix("weight_cosine")[:2, 0, 1], -1)
    assert loaded.matrix("weight_cosine")[2, 0, 1] == pytest.approx(1)  # minus times minus


def test_atoms_that_a_layer_computes_are_recorded_as_they_are_now(tmp_path: Path) -> None:
    model = nn.Sequential(AtomConv2d(1, 2, 3, 4))
    prune.random_unstructured(model[0], "atoms", 0.3)
    with torch.no_grad():
        model[0].atoms_orig.fill_(1.0)
    for what in ("atoms", "weights"):
        with Recorder(tmp_path / what, model, what) as recorder:
            recorder.record(0)
    model(IMAGES)  # prunes
    assert torch.equal(open_run(tmp_path / "atoms").tensor(0, "0"), model[0].atoms)
    torch.testing.assert_close(open_run(tmp_path / "weights").tensor(0, "0"), model[0].weight)


def test_a_layer_that_shares_its_weight_is_recorded_under_its_own_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    with Recorder(tmp_path / "r", model, "weights") as recorder:
        recorder.record(0)
    run = open_run(tmp_path / "r")
    assert torch.equal(run.tensor(0, "0"), run.tensor(0, "1"))


def test_recording_weights_leaves_the_power_iteration_of_spectral_norm_alone(tmp_path: Path) -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(60, 80)), nn.ReLU(), nn.Linear(80, 3)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Recorder(tmp_path / "r", model, "weights") as recorder:
        recorder.record(0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(open_run(tmp_path / "r").tensor(0, "0"), model.eval()[0].weight)


def test_a_probe_is_a_copy(tmp_path: Path) -> None:
    model, probe = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), torch.randn(64, 6)
    with Recorder(tmp_path / "r", model, "activations", data=probe, sites=["1"]) as recorder:
        recorder.record(0)
        probe.normal_()
        recorder.record(1)
    run = open_run(tmp_path / "r")
    assert torch.equal(run.tensor(0, "1"), run.tensor(1, "1"))


def test_a_probe_from_one_buffer_that_is_filled_again_and_again(tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).normal(size=(4, 32, 6)).astype(np.float32)
    buffer = np.empty((32, 6), np.float32)

    def batches() -> Iterator[np.ndarray[Any, Any]]:
        for batch in inputs:
            buffer[:] = batch
            yield buffer

    model = nn.Sequential(nn.Linear(6, 8))
    with Recorder(tmp_path / "r", model, "activations", data=batches(), sites=["0"]) as recorder:
        recorder.record(0)
    expected = model(torch.from_numpy(inputs).flatten(0, 1))
    torch.testing.assert_close(open_run(tmp_path / "r").tensor(0, "0"), expected)
