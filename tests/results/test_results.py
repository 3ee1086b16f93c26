"""Results round-trip exactly, are refused in words when damaged, and never half-written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sosie
from sosie import files
from sosie.files import DamagedFile, write_atomically
from sosie.report import write_report
from sosie.results import (
    Caveat,
    Comparison,
    Comparisons,
    Diff,
    Estimate,
    Place,
    Side,
    SiteDiff,
    by_chance,
    doubts,
    same_depth,
    stars,
    summarise,
    written_p,
)


def values(value: np.ndarray, **changes) -> Estimate:
    plain = {"n": 100, "statistic": "all rows", "closer": "up", "bounds": (0.0, 1.0), "same": 1.0}
    return Estimate(value=value, **{**plain, **changes})


def comparison(**changes) -> Comparison:
    a = Side("a", ("x", "y", "z"), (3, 4, 5), ((3,), (4,), (5, 1, 1)))
    b = Side("b", ("u", "v"), (3, 4), ((3,), (4,)))
    matrix = np.array([[0.1, 1 / 3], [np.nan, 0.9], [0.30000000000000004, 2e-17]])
    found = {
        "linear_cka": values(matrix, low=matrix - 0.1, caveats=(Caveat("odd", "y", "u"), Caveat("all"))),
        "procrustes_angle": values(matrix, closer="down", same=0.0, bounds=(0.0, None)),
    }
    return replace(Comparison(a, b, found, provenance={"sosie": "0", "models": ["é", "<b>"]}), **changes)


def test_plain_data_are_read_by_the_types_of_their_fields(tmp_path: Path) -> None:
    site = SiteDiff("x", "y", "by name", (3, 4), "float32", "float32", error=np.nan, at=Place(2, (0, 1)))
    diff = Diff("a", "b", same=False, verdict="Different.", sites=(site,), factor=8.0)
    path = diff.save(tmp_path / "d.json")
    back = sosie.load(path)
    assert isinstance(back, Diff)
    assert (back.sites[0].at, back.sites[0].shape, back.factor, back.first) == (site.at, (3, 4), 8.0, None)
    assert np.isnan(back.sites[0].error)

    def edited(**changes: Any) -> Any:
        content = json.loads(path.read_text())
        content["sites"][0] |= changes
        del content["floor"], content["sites"][0]["notes"]  # fields with a default
        (tmp_path / "edited.json").write_text(json.dumps({**content, "hash": None}))
        return sosie.load(tmp_path / "edited.json")

    assert edited(error=0.5).sites[0].error == 0.5
    for changes, message in (
        ({"error": "much"}, r"sites\[0\]\.error must be a number"),
        ({"shape": [3, -4]}, r"sites\[0\]\.shape\[1\] must be at least 0"),
        ({"at": {"input": 2}}, r"sites\[0\]\.at has no 'index'"),
    ):
        with pytest.raises(DamagedFile, match=message):
            edited(**changes)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    c = comparison()
    back = sosie.load(c.save(tmp_path / "c.json"))
    assert isinstance(back, Comparison)
    assert back.side_a == c.side_a
    assert back.provenance == c.provenance
    for name in c.measures:
        np.testing.assert_array_equal(back.matrix(name), c.matrix(name))
        assert replace(back[name], value=0, low=0) == replace(c[name], value=0, low=0)
    np.testing.assert_array_equal(back["linear_cka"].low, c["linear_cka"].low)
    assert back.save(tmp_path / "again.json").read_bytes() == (tmp_path / "c.json").read_bytes()


@given(number=st.floats(allow_nan=False, allow_infinity=False))
@settings(deadline=None)
def test_every_float_comes_back(number: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    side = Side("s", ("x",), (1,), ((1,),))
    c = Comparison(side, side, {"m": values(np.array([[number]]))})
    path = tmp_path_factory.mktemp("r") / "c.json"
    assert sosie.load(c.save(path)).matrix("m")[0, 0] == number


def test_many_models_round_trip(tmp_path: Path) -> None:
    c = comparison()
    found = Comparisons(("a", "b", "c"), {(0, 1): c, (0, 2): c, (1, 2): c})
    back = sosie.load(found.save(tmp_path / "all.json"))
    assert isinstance(back, Comparisons)
    assert len(back) == 3
    np.testing.assert_array_equal(back["a", "c"].matrix("linear_cka"), c.matrix("linear_cka"))
    with pytest.raises(KeyError, match="no model named 'd'"):
        back["a", "d"]


def edited(tmp_path: Path, **changes) -> Path:
    path = comparison().save(tmp_path / "c.json")
    found = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**found, "hash": None, **changes}), "utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 3}, "written by a newer sosie .*upgrade"),
        ({"version": "new"}, "no valid version"),
        ({"format": "other"}, "not a saved result"),
        ({"values": {"m": {}}}, "damaged"),
        ({"values": [1]}, "damaged"),
        ({"side_a": {"name": "a", "sites": ["x"], "widths": [1], "shapes": [[1]]}}, "damaged"),
        (
            {"side_a": {"name": "a", "sites": [1, 2, 3], "widths": [1, 1, 1], "shapes": [[1]] * 3}},
            r"sites\[0\] must be text",
        ),
        ({"provenance": None}, "damaged"),
    ],
)
def test_damaged_files_are_refused_in_words(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(DamagedFile, match=message):
        sosie.load(edited(tmp_path, **changes))


@pytest.mark.parametrize(
    ("kind", "rule", "names"),
    [
        ("representations", "flatten", ["linear_cka"]),
        ("outputs", "outputs", ["agreement"]),
        ("shifts", "outputs", ["agreement"]),
        ("weights", "tensors", ["weight_cosine"]),
        ("weights", "entries of the input", ["wcka"]),
        ("sketches", "flatten, hadamard kernel", ["linear_cka"]),
        ("stitching", "positions", ["agreement_b", "cross_entropy"]),
        ("transfer", "flatten", ["mean_embedding", "kernel_norm"]),
    ],
)
def test_files_without_a_kind_are_told_by_what_they_hold(
    tmp_path: Path, kind: Any, rule: str, names: list[str]
) -> None:
    sites = ("x", "y") if kind == "shifts" else ("x",)
    side = Side("s", sites, (1,) * len(sites), ((1,),) * len(sites))
    found = {name: values(np.zeros((len(sites), len(sites)))) for name in names}
    path = Comparison(side, side, found, rule, kind=kind).save(tmp_path / "c.json")
    assert sosie.load(path).kind == kind
    content = json.loads(path.read_text("utf-8"))
    del content["kind"]
    path.write_text(json.dumps({**content, "hash": None}), "utf-8")
    assert sosie.load(path).kind == kind


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    path = comparison().save(tmp_path / "c.json")
    whole = path.read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], "not whole JSON"),
        (b"", "not whole JSON"),
        (b"\x80\x04\x95", "not text"),
        (b"[1, 2]", "not a saved result"),
        (b"[" * 100_000, "nested too deeply|not whole JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(DamagedFile, match=message):
            sosie.load(path)
    with pytest.raises(FileNotFoundError):
        sosie.load(tmp_path / "none.json")


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "f.txt"
    write_atomically(path, "old")

    def interrupted(temporary: Path) -> None:
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupted)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_atomically(tmp_path, "x")


def test_rows_carry_value_doubt_and_caveats() -> None:
    rows = comparison().rows()
    assert len(rows) == 12
    row = rows[2]
    assert (row["measure"], row["site_a"], row["site_b"], row["n"]) == ("linear_cka", "y", "u", 100)
    assert row["caveats"] == ["odd", "all"]
    assert rows[3]["caveats"] == ["all"]
    assert rows[0]["low"] == 0.0
    assert rows[0]["high"] is None


def test_best_match_follows_the_direction() -> None:
    c = comparison()
    assert [m["site_b"] for m in c.best_match("linear_cka")] == ["v", "v", "u"]
    assert [m["site_b"] for m in c.best_match("procrustes_angle")] == ["u", "v", "v"]


def test_names_are_checked() -> None:
    c = comparison()
    with pytest.raises(KeyError, match="did you mean 'linear_cka'"):
        c.matrix("linear_ckaa")
    with pytest.raises(ValueError, match="name the measure"):
        c.matrix()
    with pytest.raises(ValueError, match=r"shape \(1, 1\), the sites make it \(3, 2\)"):
        comparison(values={"m": values(np.ones((1, 1)))})
    c.matrix("linear_cka")[:] = 0
    assert c.matrix("linear_cka")[1, 1] == 0.9, "a caller changed the result"


def test_same_depth_is_relative() -> None:
    assert same_depth(3, 3) == (0, 1, 2)
    assert same_depth(3, 5) == (0, 2, 4)
    assert same_depth(1, 4) == (3,)
    assert same_depth(4, 1) == (0, 0, 0, 0)


def test_the_sentence_says_what_was_found() -> None:
    found = summarise(comparison(), "linear_cka")
    assert "most alike at y (0.90) and least alike at z (0.00)" in found.sentence
    assert found.diagonal.tolist() == [0.1, 0.9, 2e-17]
    assert found.best_partner == (1, 1, 0)
    side = Side("s", ("x", "y"), (1, 1), ((1,), (1,)))
    same = Comparison(side, side, {"m": values(np.eye(2))})
    assert "are the same at every depth" in summarise(same, "m").sentence
    level = Comparison(side, side, {"m": values(np.full((2, 2), 0.5))})
    assert "are equally alike at every depth (0.50)." in summarise(level, "m").sentence
    huge = Comparison(side, side, {"m": values(np.full((2, 2), 1e300) * np.eye(2) * [1, 2])})
    assert "most alike at y (2e+300) and least alike at x (1e+300)" in summarise(huge, "m").sentence
    lost = Comparison(side, side, {"m": values(np.full((2, 2), np.nan))})
    assert "undefined" in summarise(lost, "m").sentence


def doubted(**changes) -> Comparison:
    """Best matches: v by 0.03, v by 0.2, u by 0.05 of chance."""
    p = np.array([[0.5, 0.03], [0.9, 0.2], [0.05, 1.0]])
    found = replace(comparison()["linear_cka"], **{"p": p / 2, "p_search": p, **changes})
    return comparison(values={"linear_cka": found})


def test_the_sentence_counts_best_matches_that_chance_would_hardly_give() -> None:
    def told(**changes) -> str:
        return summarise(doubted(**changes), "linear_cka").sentence

    ending = " best matches are distinguishable from chance (p ≤ 0.05, corrected for the search)."
    assert told().endswith("at the same depth. 2 of 3" + ending)
    assert told(p=None).endswith("2 of 3" + ending)
    assert told(p_search=None).endswith("2 of 3" + ending.replace("corrected", "not corrected"))
    assert told(p_search=np.ones((3, 2))).endswith("None of 3" + ending)
    unknown = np.full((3, 2), np.nan)
    unknown[0, 1] = 0.01
    assert told(p=None, p_search=unknown).endswith("1 of 1" + ending.replace("are", "is"))
    assert "chance" not in told(p=None, p_search=np.full((3, 2), np.nan))
    assert "chance" not in told(p=None, p_search=None)


def test_a_p_value_at_its_floor_is_a_bound(tmp_path: Path) -> None:
    """Of 200 draws none was as close: p is at most 1 / 201."""
    assert written_p(1 / 201, 1 / 201) == "≤ 0.005"
    assert written_p(2 / 201, 1 / 201) == "0.010"
    assert written_p(1 / 5001, 1 / 5001) == "<0.001"
    x = np.random.default_rng(0).normal(size=(256, 6))
    found = sosie.compare({"a": x}, {"a": x}, null="permutation", draws=200)
    found = sosie.load(found.save(tmp_path / "c.json"))
    assert found["debiased_cka"].p_floor == pytest.approx(1 / 201)
    assert doubts(found["debiased_cka"], 0, 0)["p"].startswith("≤ 0.005")
    page = write_report(found, tmp_path / "c.html").read_text()
    assert '"pFloor":0.0049' in page.replace(" ", "")


def test_p_values_are_written_so_that_the_level_can_be_told() -> None:
    assert [written_p(p) for p in (1e-9, 0.001, 0.0123, 0.0499, 0.0501, 0.5, 1.0)] == [
        "<0.001",
        "0.001",
        "0.012",
        "0.0499",
        "0.0501",
        "0.500",
        "1.000",
    ]
    assert [stars(p) for p in (0.001, 0.01, 0.05, 0.0501, np.nan)] == ["***", "**", "*", "n.s.", ""]


def test_undefined_values_are_neither_chance_nor_clear() -> None:
    c = doubted(p_search=np.full((3, 2), 0.5))
    assert by_chance(c["linear_cka"]).tolist() == [[True, True], [False, True], [True, True]]
    assert by_chance(doubted()["linear_cka"]).tolist() == [[True, False], [False, True], [False, True]]  # 0.05 is clear
    assert by_chance(comparison()["linear_cka"]) is None


def test_the_notebook_and_the_log_have_chance() -> None:
    null = np.full((3, 2), 0.02)
    c = doubted(null=null, null_spread=null / 2, high=comparison()["linear_cka"].value)
    html = c._repr_html_()
    assert "<td>[0.233, 0.333]</td><td>0.020±0.010</td><td>0.030 *" in html
    assert html.count('<tr style="opacity:0.6"><td>y') == 1
    assert html.count("n.s.") == 1
    assert "<th>p</th>" not in comparison()._repr_html_()

    class Run:
        def log(self, scalars) -> None:
            self.found = scalars

    run = Run()
    c.log(run)
    assert run.found["sosie/linear_cka/distinguishable"] == 2 / 5  # one of the six is undefined
    comparison().log(run)
    assert "sosie/linear_cka/distinguishable" not in run.found


def test_pandas_notebook_and_writers() -> None:
    c = comparison()
    assert len(c.to_pandas()) == 12
    assert "&lt;" in replace(c, side_a=replace(c.side_a, sites=("<i>", "y", "z")))._repr_html_()

    class TensorBoard:
        def __init__(self) -> None:
            self.found = {}

        def add_scalar(self, key, value, step) -> None:
            self.found[key] = (value, step)

    class WandB:
        def log(self, scalars, step=None) -> None:
            self.found = (scalars, step)

    board, run = TensorBoard(), WandB()
    c.log(board, step=7)
    c.log(run)
    assert board.found["sosie/linear_cka/best_match"][1] == 7
    assert run.found[0]["sosie/linear_cka/best_match"] == board.found["sosie/linear_cka/best_match"][0]
    with pytest.raises(TypeError, match="add_scalar"):
        c.log(3)


class Stand:
    """What writers have been given, whichever method took it."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.step: int | None = -1

    def take(self, metrics, step=None):
        assert not self.found
        self.found, self.step = metrics, step


class Mlflow(Stand):
    """The module mlflow: names of metrics hold few characters, log_dict writes an artifact."""

    def log_metrics(self, metrics, step=None, synchronous=None, run_id=None, timestamp=None):
        assert all(re.fullmatch(r"[\w\-. :/]+", name, re.ASCII) for name in metrics)
        self.take(metrics, step)

    def log_metric(self, key, value, step=None, synchronous=None):
        raise AssertionError("one call for all")

    def log_dict(self, dictionary, artifact_file, run_id=None):
        raise AssertionError("not an artifact")


class Trackio(Stand):
    def log(self, metrics, step=None):
        self.take(metrics, step)


class LightningModule(Stand):
    def log(self, name, value, prog_bar=False, logger=None):
        raise AssertionError("one call for all")

    def log_dict(self, dictionary, prog_bar=False, logger=None, on_step=None):
        self.take(dictionary)


class LightningLogger(Stand):
    def log_metrics(self, metrics, step=None):
        self.take(metrics, step)


@pytest.mark.parametrize("kind", [Mlflow, Trackio, LightningModule, LightningLogger])
def test_every_writer_gets_the_scalars(kind: type[Stand]) -> None:
    c = comparison()
    c = replace(c, values={**c.values, "mutual_knn(k=5)": c["linear_cka"]})
    writer = kind()
    c.log(writer, step=3)
    assert len(writer.found) == len(c.scalars())
    assert sorted(writer.found.values()) == sorted(c.scalars().values())
    assert writer.step == (None if kind is LightningModule else 3)


def test_an_mlflow_client_says_what_to_log_to() -> None:
    class MlflowClient:
        def log_metric(self, run_id, key, value, timestamp=None, step=None): ...

        def log_batch(self, run_id, metrics=(), params=(), tags=()): ...

    with pytest.raises(TypeError, match=r"mlflow\.start_run"):
        comparison().log(MlflowClient())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="a device or a pipe"):
        write_atomically(pipe, "text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_file_without_its_checksum_is_refused_unless_it_is_older(tmp_path: Path) -> None:
    path = comparison().save(tmp_path / "c.json")
    found = json.loads(path.read_text("utf-8"))
    said = found.pop("hash")
    path.write_text(json.dumps(found), "utf-8")
    with pytest.raises(DamagedFile, match="checksum"):
        sosie.load(path)
    path.write_text(json.dumps({**found, "version": 1}), "utf-8")
    assert isinstance(sosie.load(path), Comparison)
    path.write_text(json.dumps({**found, "hash": said}, indent=4), "utf-8")  # laid out otherwise, the same content
    assert isinstance(sosie.load(path), Comparison)


def test_a_file_edited_by_hand_is_read_where_that_is_meant(tmp_path: Path) -> None:
    path = comparison().save(tmp_path / "c.json")
    found = json.loads(path.read_text("utf-8"))
    found["rows_rule"] = "mean"
    path.write_text(json.dumps(found), "utf-8")
    with pytest.raises(DamagedFile, match=r'c\.json is damaged.*edited it by hand, set its "hash" to null'):
        sosie.load(path)
    path.write_text(json.dumps({**found, "hash": None}), "utf-8")
    assert sosie.load(path).rows_rule == "mean"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused_anywhere(tmp_path: Path, number: str) -> None:
    path = edited(tmp_path, provenance={"seconds": "here"})
    path.write_text(path.read_text("utf-8").replace('"here"', number), "utf-8")
    with pytest.raises(DamagedFile, match=r"c\.json is damaged: it has a number that is NaN or infinite"):
        sosie.load(path)


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "c.json"
    link.symlink_to(Path("far") / "kept.json")  # which is not there yet
    for _ in range(2):
        assert comparison().save(link) == link
        assert link.is_symlink()
        assert isinstance(sosie.load(tmp_path / "far" / "kept.json"), Comparison)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["c.json", "far", "kept.json"]


def test_what_a_kill_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from sosie.files import write_atomically
def write(path):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
write_atomically(sys.argv[1], write)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.json")], check=False)
    assert len(list(tmp_path.glob(".*.part"))) == 1
    other = tmp_path / ".b.json.0123abcd-1-x.part"  # of another machine, being written
    own = tmp_path / f".b.json.{files._process_space()}-{os.getpid()}-x.part"  # of another thread
    old = tmp_path / ".b.json.0123abcd-2-x.part.cka"
    for path in (other, own, old, tmp_path / ".mine.part"):
        path.touch()
    os.utime(old, (0, 0))
    comparison().save(tmp_path / "c.json")
    assert {path.name for path in tmp_path.iterdir()} == {"c.json", ".mine.part", other.name, own.name}


@pytest.mark.parametrize("bounds", [[0, 1e308], [-1e308, None], [1, 0], [0], [0, "1"]])
def test_bounds_that_are_none_are_refused(tmp_path: Path, bounds: list[object]) -> None:
    values = json.loads(comparison().save(tmp_path / "c.json").read_text("utf-8"))["values"]
    name = next(iter(values))
    with pytest.raises(DamagedFile, match=r"c\.json is damaged"):
        sosie.load(edited(tmp_path, values={name: {**values[name], "bounds": bounds}}))
