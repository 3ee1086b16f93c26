"""For specifications of models and data: functions in a user's `file.py:factory`, and files found by name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from .checks import nearest, parse_call

_FACTORY = re.compile(r"(?P<path>.+?\.py):(?P<call>.*)", re.DOTALL)


def is_factory(spec: str) -> bool:
    """Whether the text names a function in a Python file."""
    return _FACTORY.fullmatch(spec) is not None or spec.endswith(".py")


def listed_folders(variable: str) -> list[Path]:
    """The folders in an environment variable, separated as in PATH."""
    return [Path(part).expanduser() for part in os.environ.get(variable, "").split(os.pathsep) if part.strip()]


def find_file(name: str, variable: str) -> Path:
    """The file or folder of that name: as it is, or else inside a folder of the environment variable.

    A name that is absolute or contains `..` is not looked for in those folders, since it could lead out of them.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    folders = [] if path.is_absolute() or ".." in path.parts else listed_folders(variable)
    for folder in folders:
        if (folder / path).exists():
            return folder / path
    looked = ", ".join(str(folder) for folder in [Path.cwd(), *folders] if not path.is_absolute()) or str(path.parent)
    siblings = {item.name for folder in [path.parent, *folders] if folder.is_dir() for item in folder.iterdir()}
    near = get_close_matches(path.name, sorted(siblings), n=3)
    offer = f"; near it: {', '.join(near)}" if near else ""
    advice = "" if folders or path.is_absolute() else f"; set {variable} to the folders to search"
    raise FileNotFoundError(f"no file {name} (looked in {looked}){offer}{advice}")


def load_factory(spec: str) -> Callable[[], Any]:
    """The function named by `path/to/file.py:factory` or `path/to/file.py:factory(width=2)`, ready to call.

    Imports from the file's folder work only while the file is read and while the factory runs: `sys.path` and
    `sys.modules` are restored, so that two files may each have a `layers.py` beside them.
    """
    path, name, options = _parts(spec)

    def call() -> Any:
        with _importing_from(path.resolve()) as module:
            return _find(module, name, path)(**options)

    call.__name__ = name or "factory"
    return call


def load_function(spec: str) -> Callable[..., Any]:
    """The function named by `path/to/file.py:function`, to be called many times; `function(k=2)` fixes options.

    The file is run once, so it must import modules from its own folder at its top.
    """
    path, name, options = _parts(spec)
    with _importing_from(path.resolve()) as module:
        function = _find(module, name, path)
    return functools.partial(function, **options) if options else function


def _parts(spec: str) -> tuple[Path, str, dict[str, Any]]:
    """The file, the function and the options that a specification names."""
    match = _FACTORY.fullmatch(spec)
    if match is None or not match["call"].strip():
        raise ValueError(f"{spec!r} names no function: write path/to/file.py:factory")
    path = Path(match["path"]).expanduser()
    name, options = parse_call(match["call"])
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name the Python file inside it, as in file.py:{name}")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} (looked in {Path.cwd()}), wanted for {spec!r}")
    return path, name, options


def _find(module: ModuleType, name: str, path: Path) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    if hasattr(module, name):
        raise TypeError(f"{name} in {path} is {type(function).__name__}, not a function to call")
    known = [key for key, value in vars(module).items() if inspect.isroutine(value) or inspect.isclass(value)]
    known = [key for key in known if not key.startswith("_")]
    raise AttributeError(f"no function {name!r} in {path}{nearest(name, known)}")


@contextmanager
def _importing_from(path: Path) -> Iterator[ModuleType]:
    """The file as a module, with its folder first on the path; modules of the folder are forgotten afterwards."""
    folder = str(path.parent)
    name = f"_sosie_factory_{path.stem}"
    before, wrote_bytecode = dict(sys.modules), sys.dont_write_bytecode
    location = importlib.util.spec_from_file_location(name, path)
    if location is None or location.loader is None:
        raise ImportError(f"cannot import {path}: is it a Python file?")
    module = importlib.util.module_from_spec(location)
    sys.path.insert(0, folder)
    sys.modules[name] = module  # dataclasses look themselves up here while the file is read
    sys.dont_write_bytecode = True  # a file edited twice within a second would be read from a stale cache
    importlib.invalidate_caches()
    try:
        location.loader.exec_module(module)
        yield module
    except SystemExit as error:
        raise RuntimeError(f"{path} ends the program when it is imported: guard it by `__name__`") from error
    except Exception as error:
        error.add_note(f"while running {path}")
        raise
    finally:
        sys.dont_write_bytecode = wrote_bytecode
        if folder in sys.path:
            sys.path.remove(folder)
        new = [key for key in sys.modules if key not in before]
        for key in [key for key in new if key == name or _stems_from(key, path.parent)]:
            del sys.modules[key]


def _stems_from(key: str, folder: Path) -> bool:
    """Whether a module was found through the folder on the path, not in an installation deeper inside."""
    top = key.partition(".")[0]
    module = sys.modules.get(top) or sys.modules.get(key)
    places = [getattr(module, "__file__", None), *list(getattr(module, "__path__", []))]
    homes = {folder / top, folder / f"{top}.py", folder / top / "__init__.py"}
    return any(Path(place).resolve() in homes for place in places if isinstance(place, str))


def import_library(name: str, wanted_by: str, *, extra: str = "") -> Any:
    """Import an optional module, or raise an error that says how to install it: by name, or as an extra of sosie's."""
    library = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        wanted = f"'sosie[{extra}]'" if extra else library
        raise ModuleNotFoundError(
            f"{wanted_by} needs {library}, which is not installed: pip install {wanted}", name=library
        ) from error
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise ImportError(
            f"{wanted_by} needs {library}, which is installed but cannot be imported with this torch ({error}): pip "
            f"install --upgrade {library}"
        ) from error
