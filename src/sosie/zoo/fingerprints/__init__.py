"""A model as a few short vectors, whose cosines estimate how alike models are."""

from .making import KINDS, MOST_SITES, fingerprint
from .probe import MOST_PROBES, PROBES, Probe
from .projection import SIZE, project, standard_deviation
from .record import Fingerprint, NotComparable, kind_of

__all__ = [
    "KINDS",
    "MOST_PROBES",
    "MOST_SITES",
    "PROBES",
    "SIZE",
    "Fingerprint",
    "NotComparable",
    "Probe",
    "fingerprint",
    "kind_of",
    "project",
    "standard_deviation",
]
