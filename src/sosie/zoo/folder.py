"""The folder of a zoo: its probe set, the settings that all its models share, and how it is made."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..capture import without_labels
from ..checks import one_of
from ..engine.provenance import digest_of
from ..files import DamagedFile, read_nested, write_nested
from ..stats import check_seed
from .fingerprints import KINDS, Fingerprint, kind_of
from .kinds import MOST_PROBES, SIZE, Probe, check_size
from .store import Facts, Record, Store
from .vectors import EXACT, sync_folder

# The probe set of a zoo as one file: tensors as they are, their structure as JSON

KIND, VERSION = "probe", 2


def save_probe(probe: Probe, path: Path) -> Path:
    try:
        return write_nested(path, KIND, VERSION, {"n": probe.n, "hash": probe.digest}, probe.batch)
    except TypeError as error:
        raise TypeError(f"this probe set cannot be kept: {error}") from error


def load_probe(path: Path, digest: str | None = None) -> Probe:
    """The inputs, whose hash is computed anew: the file must hold what it says, and what was asked for."""
    if not path.is_file():
        raise probe_gone(path)
    about, batch = read_nested(path, KIND, VERSION)
    try:
        n, found = int(about["n"]), digest_of(without_labels(batch))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise DamagedFile(f"{path} is damaged: {type(error).__name__}: {error}") from error
    wanted = about.get("hash") if digest is None else digest
    if found != wanted or not 0 < n <= MOST_PROBES:
        raise DamagedFile(f"{path} holds {n} inputs of hash {found}, the zoo was made with those of hash {wanted}")
    return Probe(batch, n, found)


def probe_gone(path: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"the probe set is gone: no file {path}; Zoo(folder, data=…).check(repair=True) with the data it was "
        "made of, or `sosie zoo check FOLDER --repair --data …`, puts it back"
    )


# What all models of a zoo have in common: the probe set and how fingerprints are made

ROWS = ("flatten", "mean", "cls", "last")
_HASH = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True)
class Settings:
    """Pinned when the zoo is made."""

    probe: str  # hash
    n: int
    size: int
    seed: int
    kinds: tuple[str, ...]
    rows: str

    @classmethod
    def of(cls, probe: Probe, given: dict[str, Any]) -> Settings:
        """Those given, the rest as `fingerprint` has them."""
        chosen: dict[str, Any] = {"size": SIZE, "seed": 0, "kinds": KINDS, "rows": "flatten"} | given
        kinds: str | Sequence[str] = chosen["kinds"]
        chosen["kinds"] = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if not isinstance(chosen["rows"], str):
            raise TypeError("a zoo has one of the named rules as rows=, which other processes know too, not a function")
        return cls(probe.digest, probe.n, **chosen).checked()

    @classmethod
    def from_json(cls, about: dict[str, Any]) -> Settings:
        try:
            values = {name: about[name] for name in cls.__dataclass_fields__}
            return cls(**{**values, "kinds": tuple(values["kinds"])}).checked()
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(f"the settings of the zoo are damaged: {type(error).__name__}: {error}") from error

    def checked(self) -> Settings:
        check_size(self.size)
        check_seed(self.seed)
        one_of(self.rows, "rows (a fingerprint has one row per input)", ROWS)
        if not self.kinds or len(set(self.kinds)) < len(self.kinds) or not set(self.kinds) <= set(KINDS):
            given = ", ".join(map(str, self.kinds)) or "none"
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, each once, got {given}")
        if not isinstance(self.probe, str) or not _HASH.fullmatch(self.probe) or not isinstance(self.n, int):
            raise ValueError(f"no hash of a probe set: {str(self.probe)[:40]!r}")
        return self

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "kinds": list(self.kinds)}

    def check_same(self, given: dict[str, Any], folder: Any) -> None:
        """Raise if a zoo that is there was opened with other settings."""
        for name, value in given.items():
            mine = getattr(self, name)
            value = ((value,) if isinstance(value, str) else tuple(value)) if name == "kinds" else value
            if value != mine:
                raise ValueError(f"{folder} was made with {name}={mine!r}, not {value!r}; all its models share that")

    def check_probe(self, probe: Probe, folder: Any) -> None:
        if probe.digest != self.probe:
            raise ValueError(
                f"another probe set: {folder} was made with {self.n} inputs of hash {self.probe}, the data given are "
                f"{probe.n} of hash {probe.digest}. Leave data out to use that of the zoo, or make another zoo"
            )

    def check_alike(self, name: str, found: Fingerprint) -> None:
        """Raise unless a fingerprint was made as all others here."""
        if found.probe != self.probe:
            raise ValueError(
                f"{name!r}: a fingerprint on another probe set, {found.probe}; that of the zoo is {self.probe}: make "
                "it with zoo.fingerprint(model), or `sosie zoo fingerprint FOLDER MODEL --out FILE`"
            )
        for setting in ("n", "size", "seed", "rows"):
            mine, theirs = getattr(self, setting), getattr(found, setting)
            if mine != theirs:
                raise ValueError(f"{name!r}: a fingerprint with {setting}={theirs!r}; the zoo has {setting}={mine!r}")

    def record(self, name: str, found: Fingerprint, facts: Facts, added: str = "") -> Record:
        """What the store keeps of a fingerprint; refused unless it was made as all others here."""
        self.check_alike(name, found)
        keys = [key for key in found.vectors if kind_of(key) in self.kinds]
        if not keys:
            kinds = ", ".join(self.kinds)
            raise ValueError(f"{name!r}: a fingerprint of {', '.join(found.kinds)}; the zoo has {kinds}")
        blocks = {key: (found.vectors[key], tuple(found.labels[key])) for key in keys}
        if found.exact is not None and "cka" in blocks:
            blocks[EXACT] = found.exact, tuple(found.labels["cka"])
        about = {"absent": dict(found.absent), "about": dict(found.about)}
        digest, architecture = (str(found.about.get(key) or "unknown") for key in ("model", "architecture"))
        return Record(name, digest, architecture, found.about.get("parameters", 0), blocks, facts, about, added=added)

    def fingerprint(self, stored: Record) -> Fingerprint:
        """The way back."""
        vectors = {key: block[0] for key, block in stored.blocks.items()}
        labels = {key: block[1] for key, block in stored.blocks.items() if key != EXACT}
        exact = vectors.pop(EXACT, None)
        about = dict(stored.about["absent"]), dict(stored.about["about"])
        return Fingerprint(self.probe, self.n, self.size, self.seed, self.rows, vectors, labels, exact, *about)


def make_folder(folder: Path, probe: Probe, settings: Settings, wait: float) -> None:
    """An empty zoo; if somebody else has made one there meanwhile, that one."""
    with new_folder(folder) as temporary:
        save_probe(probe, temporary / "probe.safetensors")
        Store.create(temporary, settings.as_json(), wait)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when it is full."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there, and is no zoo: name a new folder, or an empty one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}."))
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # mkdtemp makes folders that only their owner can read
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / "zoo.sqlite").is_file():
                raise
        with contextlib.suppress(OSError):
            sync_folder(folder.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
