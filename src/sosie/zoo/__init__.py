"""Many models: their fingerprints, stored and searched.

`zoo.py` is the door. `fingerprints.py` turns a model into a few short vectors; `tasks.py` does so for many models, here
or in other processes. `store.py` keeps their facts in SQLite, `vectors.py` their vectors in flat files. `search.py`
(with `index.py` for large zoos), `questions.py` and `recommend.py` answer questions. `upkeep.py` checks and exports.
"""

from .fingerprints import Fingerprint, NotComparable, Probe, fingerprint
from .store import DiskFull, NameTaken, ZooBusy
from .upkeep import Report
from .zoo import Added, Entry, Listing, Zoo

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
