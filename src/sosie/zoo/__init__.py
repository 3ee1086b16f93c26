"""Many models: fingerprints of them, kept and searched."""

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
