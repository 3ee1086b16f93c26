"""Many models: fingerprints of them, kept and searched."""

from ..results import Clusters, Duplicates, Family, Map, Neighbours, Recommendation
from .fingerprints import Fingerprint, NotComparable, Probe, fingerprint
from .store import DiskFull, NameTaken, ZooBusy
from .tables import Added, Listing, Report
from .zoo import Entry, Zoo

__all__ = [
    "Added",
    "Clusters",
    "DiskFull",
    "Duplicates",
    "Entry",
    "Family",
    "Fingerprint",
    "Listing",
    "Map",
    "NameTaken",
    "Neighbours",
    "NotComparable",
    "Probe",
    "Recommendation",
    "Report",
    "Zoo",
    "ZooBusy",
    "fingerprint",
]
