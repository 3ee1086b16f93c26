"""`--help` of every verb: a sentence, two examples that run as written, options in groups, at most 80 columns."""

from __future__ import annotations

import gc
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import sosie
from sosie.capture import RULES
from sosie.cli.help import split_help, term
from sosie.cli.main import app
from sosie.cli.options import GROUPS, OUTPUT, ROWS
from sosie.data import specification
from sosie.files import write_weights
from sosie.linalg import FITS
from sosie.models import open_model
from sosie.zoo import fingerprints

IMAGES = 64  # of the demo, instead of 1,000
NOT_RUN = {
    "sosie demo": "as the other, with more epochs",
    "sosie serve nets --open": "runs until Ctrl-C (test_cli_serve.py)",
    "sosie serve nets --port 0": "runs until Ctrl-C (test_cli_serve.py)",
    "sosie papers frankenstein --small": "takes minutes",
    "sosie zoo index nets": "an index is for 1,000 layers and more",
    "sosie zoo index nets --kind weights": "an index is for 1,000 layers and more",
}


def walk(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield f"{above}{name}", command
        if hasattr(command, "commands"):
            yield from walk(command, f"{name} ")


VERBS = dict(walk(get_command(app)))
EXAMPLES = [example for verb in VERBS.values() for example in split_help(verb.help)[1]]


def invoke(command: str) -> str:
    done = CliRunner().invoke(app, shlex.split(command)[1:], terminal_width=80)
    assert done.exit_code == 0, f"{command}: {done.output} {done.exception!r}"
    return str(done.output)


@pytest.mark.parametrize("name", VERBS)
def test_help_has_a_sentence_two_examples_and_options_in_groups(name: str) -> None:
    text = invoke(f"sosie {name} --help")
    assert max(map(len, text.splitlines())) <= 80, text
    assert not re.search(r"<\w+>", text), f"a type in place of a meaning: {text}"
    verb = VERBS[name]
    sentence, examples, _ = split_help(verb.help)
    assert re.fullmatch(r"[A-Z][^.?!]*[.?]", sentence), f"not one sentence: {sentence!r}"
    assert len(sentence) <= 67, f"does not fit on a line of the list of verbs: {sentence!r}"
    assert f"\n{sentence}\n\nExamples:\n" in text
    assert len(examples) >= 2
    assert all(example.startswith(f"sosie {name}") for example in examples), examples
    groups = re.findall(r"^(\w.+):$", text, flags=re.M)
    if hasattr(verb, "commands"):
        return
    for parameter in (each for each in verb.params if each.name != "help" and not getattr(each, "hidden", False)):
        assert parameter.rich_help_panel in GROUPS, parameter.name
        assert parameter.rich_help_panel in groups, (parameter.name, groups)
        assert parameter.help, parameter.name
        if getattr(parameter, "is_flag", False):
            assert re.search(rf"^  {', '.join(parameter.opts)}  +[A-Z]", text, flags=re.M), parameter.name
        else:
            assert re.fullmatch("[A-Z_]+", parameter.metavar or ""), f"what does {parameter.name} expect?"
            assert f"\n  {term(parameter)} " in text, parameter.name
    assert groups[1:] == [group for group in GROUPS if group in groups]  # always in the same order


def test_the_verbs_fit_on_one_screen_by_question() -> None:
    text = invoke("sosie --help")
    assert len(text.splitlines()) <= 34
    assert max(map(len, text.splitlines())) <= 80
    assert re.findall(r"^(\w.+):$", text, flags=re.M) == ["Compare", "Make and search", "Look", "Put to the test"]
    for name, verb in VERBS.items():
        if " " not in name:
            assert re.search(rf"^  {name} +{re.escape(split_help(verb.help)[0])}$", text, flags=re.M), name


@pytest.mark.parametrize("words", [[], ["zoo"]])
def test_without_a_verb_the_help_is_printed_once(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.output.count("Usage:") == 1
    assert done.output.strip() == CliRunner().invoke(app, [*words, "--help"]).output.strip()


def test_defaults_are_shown_but_not_those_of_flags() -> None:
    text = " ".join(invoke("sosie compare --help").split())
    assert "--block N Rows per block of Gram matrices (default: 64). --null" in text
    assert "models without weights (default: 0)." in text
    assert "(default: debiased_cka; for sketches linear_cka)." in text
    assert "False" not in text
    assert "None" not in text


def test_printed_examples_can_be_pasted() -> None:
    """An example over several lines is still the same command."""
    text = invoke("sosie compare --help")
    shown = text.partition("Examples:\n")[2].partition("\n\n")[0].replace("\\\n", "")
    assert list(map(shlex.split, shown.splitlines())) == list(map(shlex.split, split_help(VERBS["compare"].help)[1]))


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the examples name, where the demo data are few."""
    folder = tmp_path_factory.mktemp("examples")
    everything = specification.open_images

    def few(spec: str, *, split: str = "test", max_rows: int | None = None) -> Any:
        return everything(spec, split=split, max_rows=min(max_rows or IMAGES, IMAGES))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for room in (specification, sosie.data):
            patch.setattr(room, "open_images", few)
        networks = [open_model(f"small_cnn(seed={seed})") for seed in (0, 1)]
        for letter, network in zip("ab", networks, strict=True):
            write_weights(folder / f"demo-{letter}.safetensors", network.model.state_dict())
        sosie.compare(*networks, "demo", sites=["conv*"]).save("demo.json")
        np.savez("images.npz", images=np.random.default_rng(0).integers(0, 256, (16, 28, 28), dtype=np.uint8))
        Path("mine.py").write_text("def measure(x, y):\n    return float((x.mean() - y.mean()) ** 2 + 1)\n")
        invoke("sosie zoo init nets --data demo")
        invoke("sosie zoo add nets a=small_cnn@demo-a.safetensors b=small_cnn@demo-b.safetensors --tag demo")
        invoke("sosie zoo export nets nets.sosiezoo")
        gc.collect()  # closes the zoo, whose log would otherwise go away while it is copied
        yield folder


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run_as_written(example: str, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if example in NOT_RUN:
        pytest.skip(NOT_RUN[example])
    shutil.copytree(ready, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    if "zoo init nets" in example:
        shutil.rmtree("nets")
    if "zoo export" in example:
        Path("nets.sosiezoo").unlink()
    invoke(example)
    for name in re.findall(r"--(?:out|html|plot) ([\w.]+)", example):
        assert list(Path().glob(f"{Path(name).stem}*")), f"no {name}"


def test_examples_that_are_not_run_exist() -> None:
    assert set(NOT_RUN) <= set(EXAMPLES)


def test_the_help_of_rows_names_every_rule() -> None:
    assert set(re.findall(r"[\w()]+", ROWS.partition(":")[2])) - {"or"} == {*RULES, "grid(4)"}
    [of_zoo] = [each.help for each in VERBS["zoo init"].params if each.name == "rows"]
    assert set(re.findall(r"\w+", of_zoo.partition(":")[2].partition(".")[0])) - {"or"} == set(fingerprints.ROWS)


def test_the_help_of_fit_names_every_fit() -> None:
    [of_fit] = [each.help for each in VERBS["stitch"].params if each.name == "fit"]
    for text in (of_fit, sosie.stitch.__doc__):
        assert set(FITS) <= set(re.findall(r"\w+", text))


def test_files_that_a_verb_cannot_write_are_refused_before_it_runs() -> None:
    """Of every verb; an option that writes JSON or a page may have no ending."""
    written = {
        (name, each.opts[0]): each
        for name, verb in VERBS.items()
        for each in verb.params
        if each.metavar == "FILE" and each.rich_help_panel == OUTPUT
    }
    assert len(written) > 20
    for (name, option), each in written.items():
        for file in ("x.csv", "x.txt", "x.npz"):
            with pytest.raises(ValueError, match=rf"{file}: this is written as \.") as caught:
                each.callback(None, each, Path(file))
            assert caught.value.exit_status == 2, (name, option)  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"--out a\.html: this is written as \.json; files that end in \.html are writ"
    ):
        CliRunner().invoke(app, ["diff", "a", "b", "--out", "a.html"], catch_exceptions=False)
    with pytest.raises(ValueError, match=r"the file a\.zip: this is written as \.sosiezoo"):
        CliRunner().invoke(app, ["zoo", "export", "nets", "a.zip"], catch_exceptions=False)
