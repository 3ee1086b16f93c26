"""The probe set of a zoo as one file: tensors as they are, their structure as JSON."""

from __future__ import annotations

from pathlib import Path

from ..capture import without_labels
from ..engine.digest import digest_of
from ..results import DamagedFile, read_nested, write_nested
from .fingerprints import MOST_PROBES, Probe

KIND, VERSION = "probe", 2


def save_probe(probe: Probe, path: Path) -> Path:
    try:
        return write_nested(path, KIND, VERSION, {"n": probe.n, "hash": probe.digest}, probe.batch)
    except TypeError as error:
        raise TypeError(f"this probe set cannot be kept: {error}") from error


def load_probe(path: Path, digest: str | None = None) -> Probe:
    """The inputs, whose hash is computed anew: the file must hold what it says, and what was asked for."""
    if not path.is_file():
        raise gone(path)
    about, batch = read_nested(path, KIND, VERSION)
    try:
        n, found = int(about["n"]), digest_of(without_labels(batch))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error
    wanted = about.get("hash") if digest is None else digest
    if found != wanted or not 0 < n <= MOST_PROBES:
        raise DamagedFile(f"{path} holds {n} inputs of hash {found}, the zoo was made with those of hash {wanted}")
    return Probe(batch, n, found)


def gone(path: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"the probe set is gone: no file {path}; Zoo(folder, data=…).check(repair=True) with the data it was "
        "made of, or `sosie zoo check FOLDER --repair --data …`, puts it back"
    )
