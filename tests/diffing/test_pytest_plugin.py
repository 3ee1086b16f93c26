"""The pytest plugin: records are written when asked for, and held against otherwise."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch._dynamo  # noqa: F401 (cannot be imported twice, and pytester forgets what is imported inside its tests)

pytest_plugins = ["pytester"]

TEST = """
    import torch
    from torch import nn

    def made(scale=1.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        with torch.no_grad():
            model[0].weight.mul_(scale)
        return model

    def test_port(sosie_golden):
        sosie_golden(made({scale}), torch.linspace(0, 1, 40).reshape(10, 4))
"""


def test_records_are_written_and_held_against(pytester: pytest.Pytester) -> None:
    installed = any(entry.name == "sosie" for entry in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "pytest_sosie"]  # pytest refuses it twice

    def run(scale: float, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=TEST.replace("{scale}", str(scale)))
        return pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider", *options)

    run(1.0).stdout.fnmatch_lines(["*no golden record *test_port.safetensors: write it with pytest --sosie-update*"])
    run(1.0, "--sosie-update").assert_outcomes(passed=1)
    assert (pytester.path / "golden" / "test_port.safetensors").is_file()
    run(1.0).assert_outcomes(passed=1)
    found = run(1.1)
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*Different from 0 on: 0 makes an error of *", "site *error*", "see *test_port.html"])
    assert (pytester.path / ".sosie" / "test_port.html").is_file()


def test_a_record_is_written_once_in_a_run(pytester: pytest.Pytester) -> None:
    installed = any(entry.name == "sosie" for entry in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "pytest_sosie"]
    twice = """
    def test_port_again(sosie_golden):
        for scale in ({scales}):
            sosie_golden(made(scale), torch.linspace(0, 1, 40).reshape(10, 4))
"""
    pytester.makepyfile(test_it=TEST.replace("{scale}", "1.0") + twice.replace("{scales}", "1.0, 1.0"))
    pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider", "--sosie-update").assert_outcomes(passed=2)
    pytester.makepyfile(test_it=TEST.replace("{scale}", "1.0") + twice.replace("{scales}", "1.0, 1.1"))
    found = pytester.runpytest_inprocess(*plugin, "-p", "no:cacheprovider", "--sosie-update")
    found.assert_outcomes(passed=1, failed=1)
    found.stdout.fnmatch_lines(["*test_port_again.safetensors was written for another call: name= gives each*"])


def test_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, pytest_sosie; print([m for m in ('torch', 'sosie', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
