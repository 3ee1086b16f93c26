"""Golden records: what is written, that a model is held against it, and what is refused."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosie
from sosie.diffing import Record, diff, is_record, record
from sosie.files import DamagedFile
from sosie.results import Diff

X = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.norm(self.conv(x))) + x


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block(), nn.Flatten(), nn.Linear(144, 5)).eval()


def scaled(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].conv.weight.mul_(1.05)  # type: ignore[index, union-attr]
    return other


def test_a_model_is_the_same_as_its_record_and_another_is_not(model: nn.Module, tmp_path: Path) -> None:
    path = record(model, X, tmp_path / "golden.safetensors")
    assert is_record(path)
    same = diff(path, model)
    assert same.same
    assert "bit for bit" in same.verdict
    found = diff(path, scaled(model))
    assert not found.same
    assert found.first == "2"
    assert [site.site_a for site in found.sites if site.beyond] == ["2", "4", "output"]
    whole = diff(model, scaled(model), X[:16], sites=["0", "1", "2", "4"])
    for ours, theirs in zip(found.sites, [s for s in whole.sites if not s.inside], strict=True):
        assert ours.error == pytest.approx(theirs.error, rel=1e-6)
        if theirs.made is not None:
            assert ours.made == pytest.approx(theirs.made, rel=1e-6)


def test_inner_sites_name_the_inner_module(model: nn.Module, tmp_path: Path) -> None:
    path = record(model, X, tmp_path / "golden.safetensors", sites="leaves", max_rows=4)
    found = diff(path, scaled(model))
    assert found.first == "2.conv"
    assert found.sites[0].inputs == 4
    made = {site.site_a: site.made for site in found.sites}
    assert made["2.conv"] == pytest.approx(0.05, rel=0.2)
    assert made["2.norm"] == 0  # it inherits its error
    some = diff(path, model, sites="2.norm")
    assert [site.site_a for site in some.sites] == ["2.norm", "output"]
    assert not some.unpaired_a  # nobody asked for the others


def test_the_floor_is_that_of_the_day_of_the_record(model: nn.Module, tmp_path: Path) -> None:
    path = record(model, X, tmp_path / "golden.safetensors")
    levels = Record.load(path).levels
    for site in diff(path, model).sites:
        assert site.floor == pytest.approx(max(levels[site.site_a].error, torch.finfo(torch.float32).eps))
    half = copy.deepcopy(model).bfloat16()
    found = diff(path, half)
    assert found.same, found.verdict
    assert any("bfloat16" in caveat for caveat in found.caveats)
    assert not diff(path, half, floor=1e-6).same
    with pytest.raises(ValueError, match=r"holds the floor 'batch'.*floor='bfloat16'"):
        diff(path, half, floor="bfloat16")


def test_inputs_can_be_left_out(model: nn.Module, tmp_path: Path) -> None:
    path = record(model, X, tmp_path / "golden.safetensors", inputs=False)
    with pytest.raises(TypeError, match="holds no inputs: give the data"):
        diff(path, model)
    assert diff(path, model, X).same
    assert diff(path, model, [X[:20], X[20:]]).same
    with pytest.raises(ValueError, match="record of other inputs: the first 16 inputs"):
        diff(path, model, X + 1)


def test_a_record_of_a_part_of_larger_data(model: nn.Module, tmp_path: Path) -> None:
    part = sosie.data.DataPart(X, 100)
    golden = record(model, part, tmp_path / "golden.safetensors")
    for data in (None, part):
        assert sosie.diff(golden, model, data).verdict.startswith("The same, bit for bit")


def test_a_tensor_that_two_layers_share_is_kept_once(tmp_path: Path) -> None:
    plain = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8))).eval()
    rows = torch.randn(64, 32)
    shared = record(plain, rows, tmp_path / "a.safetensors", max_rows=64).stat().st_size
    alone = record(plain, rows, tmp_path / "b.safetensors", max_rows=64, replay=False).stat().st_size
    assert shared < 1.2 * alone


def test_without_replay_nobody_is_guilty(model: nn.Module, tmp_path: Path) -> None:
    path = record(model, X, tmp_path / "golden.safetensors", replay=False)
    found = diff(path, scaled(model), replay=False)
    assert not found.same
    assert found.first is None


def test_dicts_with_masks(tmp_path: Path) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.words(input_ids) * attention_mask[..., None])}

    torch.manual_seed(0)
    tagger = Tagger().eval()
    batch = {"input_ids": torch.randint(11, (6, 5)), "attention_mask": torch.ones(6, 5, dtype=torch.long)}
    batch["attention_mask"][:, 3:] = 0
    path = record(tagger, [batch], tmp_path / "golden.safetensors")
    assert diff(path, tagger).same
    other = copy.deepcopy(tagger)
    with torch.no_grad():
        other.head.bias.add_(0.1)  # type: ignore[union-attr]
    assert diff(path, other).first == "head"


def test_assert_same(model: nn.Module, tmp_path: Path) -> None:
    path = record(model, X, tmp_path / "golden.safetensors")
    sosie.assert_same(model, path)
    sosie.assert_same(model, copy.deepcopy(model), X)
    with pytest.raises(AssertionError, match=r"Different from 2 on.*\nsite +error +makes itself +floor\n2 ") as caught:
        sosie.assert_same(scaled(model), path)
    assert "output" in str(caught.value)


def test_what_lies_outside_the_blocks_is_recorded_too(model: nn.Module, tmp_path: Path) -> None:
    path = record(model, X, tmp_path / "golden.safetensors")
    for name in ("0", "4"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_submodule(name).bias.add_(0.05)  # type: ignore[operator, union-attr]
        assert diff(path, other).first == name


def test_what_was_not_recorded_is_not_blamed_on_the_forward(model: nn.Module, tmp_path: Path) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].bias.add_(0.05)  # type: ignore[index, union-attr]
    found = diff(record(model, X, tmp_path / "blocks.safetensors", sites="blocks"), other)
    assert found.verdict.startswith("Different from 1 on: something makes an error of ")
    assert found.verdict.endswith(
        'before 1, where nothing was recorded; a record with sites="leaves" tells what it is.'
    )
    later = diff(record(model, X, tmp_path / "last.safetensors", sites=["2.norm"]), other)
    assert later.verdict.endswith("before 2.norm, where nothing was recorded.")


class Rounds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (8 * x).round().to(torch.int8)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().to_sparse()


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x.to(self.weight.dtype) if x.layout == torch.strided else x, self.weight)


@pytest.mark.parametrize("kind", [Rounds, Sparse])
def test_integers_and_sparse_numbers_between_layers(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(6, 4), kind(), Product(), nn.Linear(3, 2)).eval()
    x = torch.randn(30, 6)
    path = record(a, x, tmp_path / "r.safetensors")
    d = diff(path, copy.deepcopy(a))
    assert d.same, d.verdict
    assert [site.site_a for site in d.sites] == ["0", "2", "3", "output"]
    assert any("1 returned" in caveat and "left out" in caveat for caveat in d.caveats)
    assert not any("half as many" in caveat for caveat in d.caveats)
    b = copy.deepcopy(a)
    b[2].weight.data.mul_(1.05)  # type: ignore[operator, union-attr]
    assert diff(path, b).first == "2"
    b = copy.deepcopy(a)
    b[1].forward = lambda x, rounds=b[1].forward: rounds(x + 0.2)  # type: ignore[method-assign]
    assert diff(a, b, x).first == "1"


@pytest.mark.parametrize("place", [0.3, 0.6, 0.95])
def test_damage_is_noticed(model: nn.Module, tmp_path: Path, place: float) -> None:
    path = record(model, X, tmp_path / "golden.safetensors")
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match="golden"):
        Record.load(path)


def test_what_is_refused(model: nn.Module, tmp_path: Path) -> None:
    path = record(model, X, tmp_path / "golden.safetensors")
    with pytest.raises(TypeError, match="a record is the reference, so it comes first"):
        diff(model, path, X)
    with pytest.raises(ValueError, match="no site of A has a counterpart"):
        diff(path, nn.Sequential(OrderedDict(flat=nn.Flatten(), linear=nn.Linear(192, 5))).eval())
    with pytest.raises(ValueError, match="max_rows"):
        record(model, X, path, max_rows=0)
    with pytest.raises(IsADirectoryError):
        record(model, X, tmp_path)
    with pytest.raises(ValueError, match=r"a record is written as \.safetensors, got out=.*golden\.npz"):
        record(model, X, tmp_path / "golden.npz")
    assert not [each for each in tmp_path.iterdir() if each.name != "golden.safetensors"]


def test_inputs_are_prepared_by_one_option_where_there_is_one_model(model: nn.Module, tmp_path: Path) -> None:
    def half(x: Tensor) -> Tensor:
        return x / 2

    path = record(model, X, tmp_path / "golden.safetensors", prepare=half)
    sosie.assert_same(model, path, prepare=half)
    assert diff(path, model).first == "input"
    assert diff(model, model, X, prepare=half).same
    assert not diff(model, model, X, prepare=half, prepare_b=lambda x: x).same


def test_a_record_of_a_model_whose_layers_give_no_numbers_holds_its_output(tmp_path: Path) -> None:
    """As a diff of such models does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.cfloat)).eval()
    x = torch.randn(6, 4, dtype=torch.cfloat)
    path = record(model, x, tmp_path / "golden.safetensors")
    found = diff(path, model)
    assert found.same
    assert [site.site_a for site in found.sites] == ["output"]
    assert any("Only its output is recorded" in caveat for caveat in found.caveats)
    wrong = copy.deepcopy(model)
    wrong[0].weight.data.mul_(1.01j)
    assert not diff(path, wrong).same


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: (x.to_sparse(), torch.complex(x, x), 3, None, ["a"] * len(x)),
    ],
)
def test_answers_of_many_kinds_are_the_same_in_a_record(answer: Any, tmp_path: Path) -> None:
    class Answering(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 3), scale

        def forward(self, x: Tensor) -> Any:
            return answer(self.scale * self.layer(x))

    torch.manual_seed(0)
    model, other = Answering(1).eval(), Answering(1.5).eval()
    other.layer.load_state_dict(model.layer.state_dict())
    path = record(model, torch.rand(8, 4), tmp_path / "golden.safetensors")
    assert diff(path, copy.deepcopy(model)).same
    found = diff(path, other)
    assert (found.same, found.first) == (False, "output")


def test_a_record_that_is_missing_is_said_to_be(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*nope\.safetensors: a golden record would hold its inputs"):
        sosie.assert_same(model, tmp_path / "nope.safetensors")


def test_a_diff_of_a_record_saves_and_loads(model: nn.Module, tmp_path: Path) -> None:
    found: Any = diff(record(model, X, tmp_path / "golden.safetensors"), scaled(model))
    again = sosie.load(found.save(tmp_path / "d.json"))
    assert isinstance(again, Diff)
    assert again.rows() == found.rows()
    assert "record of 16 inputs" in again.provenance["models"][0]
