"""Many models: fingerprints of them, kept and searched."""

from .fingerprints import Fingerprint, NotComparable, fingerprint
from .kinds import Probe
from .store import DiskFull, NameTaken, ZooBusy
from .zoo import Added, Entry, Listing, Report, Zoo

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
