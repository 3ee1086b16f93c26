"""Many models: their fingerprints, stored and searched.

`zoo.py` is the door. `fingerprints.py` turns a model into a few short vectors; `tasks.py` does so for many models, here
or in other processes. `store.py` keeps their facts in SQLite, `vectors.py` their vectors in flat files. `search.py`
(with `index.py` for large zoos), `questions.py` and `recommend.py` answer questions. `upkeep.py` checks and exports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fingerprints import Fingerprint, NotComparable, Probe, fingerprint
    from .listing import Listing
    from .store import DiskFull, NameTaken, ZooBusy
    from .upkeep import Report
    from .zoo import Added, Entry, Zoo

# Names are fetched when first used, so that `sosie zoo list` does not wait for torch.
_HOMES = {
    "fingerprints": ("Fingerprint", "NotComparable", "Probe", "fingerprint"),
    "listing": ("Listing",),
    "store": ("DiskFull", "NameTaken", "ZooBusy"),
    "upkeep": ("Report",),
    "zoo": ("Added", "Entry", "Zoo"),
}

__all__ = [
    "Added",
    "DiskFull",
    "Entry",
    "Fingerprint",
    "Listing",
    "NameTaken",
    "NotComparable",
    "Probe",
    "Report",
    "Zoo",
    "ZooBusy",
    "fingerprint",
]


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'sosie.zoo' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".{home}", __name__), name)
    return value
