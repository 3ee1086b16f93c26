"""A zoo from the outside: what goes in comes out, and what must not go in does not."""

from __future__ import annotations

import pickle
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from made_prints import INPUTS, PROBE, SIZE, N, made, new_zoo, same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sosie
from sosie.files import DamagedFile
from sosie.zoo import Added, NameTaken, Probe, Zoo, fingerprint


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    assert len(zoo) == 0
    entry = zoo.add(made(1), "a", tags=("x", "y"), task="digits", source="tiny10@w.safetensors", parent="base")
    assert (entry.name, entry.tags, entry.task, entry.parent) == ("a", ("x", "y"), "digits", "base")
    assert (entry.architecture, entry.parameters, entry.digest) == ("Net1", 10, f"{1:016x}")
    again = sosie.Zoo(tmp_path / "zoo")
    assert again.settings == zoo.settings
    assert same(again["a"].fingerprint, made(1))
    assert "a" in again
    assert "b" not in again
    assert 3 not in again
    assert list(again) == ["a"]
    assert torch.equal(again.probe.batch, INPUTS)
    assert [p.name for p in sorted((tmp_path / "zoo" / "vectors").iterdir())] == ["cka-16.f32", "weights-16.f32"]


def test_models_are_fingerprinted_on_the_probe_set_of_the_zoo(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
    zoo = new_zoo(tmp_path)
    zoo.add(model, "net")
    wanted = fingerprint(model, INPUTS, size=SIZE)
    assert same(zoo["net"].fingerprint, wanted)
    np.testing.assert_allclose(zoo["net"].fingerprint.cosine(wanted).diagonal(), 1, atol=1e-6)


@pytest.mark.parametrize(
    "data",
    [
        INPUTS,
        [(INPUTS[:5], torch.arange(5)), (INPUTS[5:], torch.arange(3))],
        [{"x": INPUTS, "scale": 2.0, "labels": torch.arange(N)}],
        ["a text", "another", "a third", "<b>"],
    ],
    ids=["tensor", "pairs", "dicts", "texts"],
)
def test_the_probe_set_is_kept(data: object, tmp_path: Path) -> None:
    Zoo(tmp_path / "z", data, rows="mean")
    kept = Zoo(tmp_path / "z", data).probe  # given again, it is the same
    assert kept.digest == Probe.of(data).digest
    assert kept.n == Probe.of(data).n


def test_data_that_can_be_read_once_or_come_in_another_order_make_a_zoo(tmp_path: Path) -> None:
    x = torch.randn(40, 3)
    loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
    for name, data in (("once", iter(x.split(8))), ("shuffled", loader)):
        assert Zoo(tmp_path / name, data=data, max_rows=40).settings.n == 40
        assert Zoo(tmp_path / name).probe.n == 40
    with pytest.raises(ValueError, match=r"another probe set.*a loader that shuffles"):
        Zoo(tmp_path / "shuffled", data=loader)


def test_as_many_inputs_are_taken_as_at_first(tmp_path: Path) -> None:
    more = torch.arange(60.0).reshape(20, 3)
    assert Zoo(tmp_path / "z", more, max_rows=8).probe.n == 8
    assert Zoo(tmp_path / "z", more).probe.n == 8
    with pytest.raises(ValueError, match=r"8 inputs of hash .* 12 of hash"):
        Zoo(tmp_path / "z", more, max_rows=12)


def test_another_probe_set_is_refused_naming_both(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    with pytest.raises(ValueError, match=r"another probe set.*or make another zoo") as told:
        Zoo(tmp_path / "zoo", INPUTS + 1)
    assert PROBE.digest in str(told.value)
    assert Probe.of(INPUTS + 1).digest in str(told.value)
    with pytest.raises(
        ValueError, match=f"on another probe set, {Probe.of(INPUTS + 1).digest}.*{PROBE.digest}: make it with zoo.finge"
    ):
        zoo.add(made(0, probe=Probe.of(INPUTS + 1)), "a")
    with pytest.raises(ValueError, match="size=32; the zoo has size=16"):
        zoo.add(made(0, size=32), "a")
    with pytest.raises(ValueError, match="was made with size=16, not 64"):
        Zoo(tmp_path / "zoo", size=64)
    with pytest.raises(ValueError, match=r"kinds=\('cka', 'weights', 'atoms'\), not \('cka',\)"):
        Zoo(tmp_path / "zoo", kinds="cka")
    assert len(zoo) == 0


def test_no_zoo_is_made_by_accident(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="data="):
        Zoo(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("all of it")
    with pytest.raises(FileExistsError, match="is not a zoo"):
        Zoo(tmp_path / "full", INPUTS)
    with pytest.raises(TypeError, match="named rules"):
        Zoo(tmp_path / "none", INPUTS, rows=lambda x: x)
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    zoo.add(made(0), "a", tags="x")
    before = (tmp_path / "zoo" / "exact.f32").stat().st_size
    entry = zoo.add(made(0), "a", tags="y", task="digits")  # the same: not added twice, facts taken over
    assert (entry.tags, entry.task, len(zoo)) == (("x", "y"), "digits", 1)
    assert (tmp_path / "zoo" / "exact.f32").stat().st_size == before
    with pytest.raises(NameTaken, match=r"replace=True"):
        zoo.add(made(1), "a")
    assert same(zoo["a"].fingerprint, made(0))
    old = zoo["a"]
    zoo.add(made(1), "a", replace=True)
    assert same(zoo["a"].fingerprint, made(1))
    assert same(old.fingerprint, made(0))  # whoever held it keeps it until the zoo is compacted
    assert zoo["a"].tags == ()
    assert len(zoo) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../a", "separators"), ("a/b", "separators"), ("a\\b", "separators"), ("..", "folder"), (".", "folder"),
        ("", "got ''"), ("a\0b", "x00"), ("a\nb", "printable"), ("\x1b[31m", "x1b"), ("\u202eabc", "u202e"),
        ("\ud800", "ud800"), ("a" * 201, "1 to 200 letters"), (" a", "padded"), (7, "text"),
    ],
)  # fmt: skip
def test_names_that_are_refused(name: str, said: str, tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    with pytest.raises((ValueError, TypeError), match=said):
        zoo.add(made(0), name)
    with pytest.raises((ValueError, TypeError), match=said):
        zoo.add({name: made(0)})
    zoo.add(made(0), "ok")
    with pytest.raises((ValueError, TypeError), match=said):
        zoo.tag("ok", add=[name])
    assert list(zoo) == ["ok"]
    assert name not in zoo


def test_other_names_are_kept_as_they_are_and_escaped_where_shown(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path)
    names = ["<img src=x onerror=alert(1)>", "a' OR 1=1; --", "réseau 網", "%s%n", "a" * 200, "tiny10@w.safetensors"]
    for k, name in enumerate(names):
        zoo.add(made(k), name, tags="<b>", task="<i>")
    assert list(zoo) == names
    assert f"{len(zoo)} models" in zoo._repr_html_()
    assert "<th>source</th>" not in zoo._repr_html_()
    shown = zoo.list()._repr_html_()
    assert "<img" not in shown
    assert "&lt;img src=x onerror=alert(1)&gt;" in shown
    assert "<b>" not in shown
    zoo.remove("a' OR 1=1; --")
    assert len(zoo) == 5


def test_list_filters(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 6)
    for k in range(6):
        zoo.tag(f"m{k}", add=["all"] + ["even"] * (k % 2 == 0))
    zoo.add(made(9), "last", task="digits")
    assert [row["name"] for row in zoo.list(tag="even")] == ["m0", "m2", "m4"]
    assert [row["name"] for row in zoo.list(tag=["all", "even"], architecture="Net1")] == ["m4"]
    assert [row["name"] for row in zoo.list(architecture=["Net1", "Net2"])] == ["m1", "m2", "m4", "m5"]
    assert [row["name"] for row in zoo.list(task="digits")] == ["last"]
    assert [row["name"] for row in zoo.list(limit=2, offset=1)] == ["m1", "m2"]
    zoo.tag("m0", add="new", drop=["even", "never there"])
    assert zoo["m0"].tags == ("all", "new")
    found = zoo.list()
    assert (len(found), found[0]["sites"], found[1]["kinds"]) == (7, 3, ["cka", "weights"])
    with pytest.raises(KeyError, match="did you mean 'm0'"):
        zoo.tag("m00", add="x")
    with pytest.raises(TypeError, match="tag="):
        zoo.list(tag=[3])  # type: ignore[list-item]
    table = pytest.importorskip("pandas") and found.to_pandas()
    assert list(table["name"]) == [f"m{k}" for k in range(6)] + ["last"]


def test_removed_models_are_gone_and_their_room_comes_back(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 6)
    mapped = zoo.store.vectors("cka")
    kept = np.array(mapped.rows)
    held = zoo["m3"]
    zoo.remove("m0", "m3")
    with pytest.raises(KeyError, match="m0"):
        zoo["m0"]
    with pytest.raises(KeyError, match="nothere"):
        zoo.remove("m1", "nothere")
    assert "m1" in zoo  # all or none
    zoo.add(made(0), "m0")  # the name is free again
    given_back = zoo.compact()
    assert given_back == 2 * 3 * (28 + 16) * 4 + 2 * 16 * 4  # m0: exact and cka; m3: these, and weights
    assert zoo.compact() == 0
    assert zoo.check().problems == ()
    for name in ("m0", "m1", "m2", "m4", "m5"):
        assert same(zoo[name].fingerprint, made(int(name[1:])))
    assert np.array_equal(mapped.rows, kept)  # a reader keeps what it has mapped
    with pytest.raises(KeyError, match="meanwhile"):
        held.fingerprint  # noqa: B018


def test_rows_and_their_owners(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 5)
    zoo.remove("m1")
    mapped = zoo.store.vectors("cka")
    assert list(mapped.row_numbers()) == [0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert mapped.rows.shape == (15, SIZE)
    (place,) = mapped.owners(np.array([7]))
    assert mapped.models[place] == zoo["m2"].id
    assert np.array_equal(mapped.rows[7], made(2).vectors["cka"][7 - mapped.first[place]])
    assert mapped.has_rows(np.array([-1, 0, 4, 7, 14, 15])).tolist() == [False, True, False, True, True, False]
    assert len(zoo.store.vectors("cka", architecture=["Net0"]).models) == 2
    with pytest.raises(KeyError, match="there are cka, exact, weights"):
        zoo.store.vectors("atoms")


def test_a_zoo_travels_as_its_folder(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 2)
    assert list(pickle.loads(pickle.dumps(zoo))) == ["m0", "m1"]
    assert "2 models" in repr(zoo)


def test_a_newer_or_foreign_database_is_refused(tmp_path: Path) -> None:
    new_zoo(tmp_path)
    path = tmp_path / "zoo" / "zoo.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE about SET value = '99' WHERE key = 'version'")
    with pytest.raises(DamagedFile, match="newer sosie"):
        Zoo(tmp_path / "zoo")
    connection.close()
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    sqlite3.connect(path).execute("CREATE TABLE cats (name TEXT)").connection.close()
    with pytest.raises(DamagedFile, match="not that of a zoo"):
        Zoo(tmp_path / "zoo")
    path.write_bytes(b"this is no database at all, whatever its name says" * 100)
    with pytest.raises(DamagedFile, match="damaged"):
        Zoo(tmp_path / "zoo")


def test_several_at_once_and_what_became_of_each(tmp_path: Path) -> None:
    zoo = new_zoo(tmp_path, 1)
    facts = {"b": {"parent": "m0", "tags": "y"}}
    found = zoo.add({"m0": made(0), "b": made(2), "c": made(1)}.items(), tags="x", facts=facts)
    assert found == Added(("b", "c"), ("m0",), {})
    assert (zoo["b"].tags, zoo["b"].parent, zoo["c"].tags, zoo["m0"].tags) == (("x", "y"), "m0", ("x",), ("x",))
    other = zoo.add({"m0": made(5), "d": made(3)})
    assert isinstance(other, Added)
    assert other.added == ("d",)
    assert "replace=True" in other.failed["m0"]
    assert same(zoo["m0"].fingerprint, made(0))
    with pytest.raises(ValueError, match="more than once"):
        zoo.add([("e", made(0)), ("e", made(1))])
    with pytest.raises(ValueError, match="leave name= out"):
        zoo.add({"e": made(0)}, "f")
    with pytest.raises(ValueError, match="no option 'colour'"):
        zoo.add({"e": made(0)}, colour="red")
    with pytest.raises(ValueError, match="give name="):
        zoo.add(made(0))


def test_a_zoo_of_texts_needs_rows_that_padding_allows(tmp_path: Path) -> None:
    masked = {"input_ids": torch.ones(8, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 0]] * 8)}
    for data in (["a", "b b", "c"] * 4, masked):
        with pytest.raises(ValueError, match=r"cannot be flattened: make the zoo with rows='mean', for tokens"):
            Zoo(tmp_path / "texts", data=data)
    assert not (tmp_path / "texts").exists()
    Zoo(tmp_path / "flat", data={**masked, "attention_mask": torch.ones(8, 3)})
    assert Zoo(tmp_path / "texts", data=masked, rows="mean").settings.rows == "mean"
