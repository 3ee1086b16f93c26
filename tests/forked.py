"""Python as a command, in a process forked from one that has imported torch and sosie: its start takes no seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PATIENCE = 300  # seconds after which a process that hangs is ended
CONTEXT = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "scipy.stats", "sosie.cli.main", "sosie.engine", "sosie.train", "sosie.zoo"]
)


def python(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`: of a script, `-c CODE` or `-m MODULE`."""
    words, variables = [*map(str, arguments)], dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "out"), Path(folder, "err")
        process = CONTEXT.Process(target=_python, args=(words, cwd or Path.cwd(), variables, files))  # type: ignore[attr-defined]
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, PATIENCE, *(file.read_bytes() for file in files))
        return subprocess.CompletedProcess(words, process.exitcode, *(file.read_text("utf-8") for file in files))


def _python(words: list[str], cwd: Path, variables: Mapping[str, str], files: tuple[Path, Path]) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    kind, *sys.argv = words if words[0] in ("-c", "-m") else ("script", *words)
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[0], code = "-c", sys.argv[0]
        exec(code, {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
