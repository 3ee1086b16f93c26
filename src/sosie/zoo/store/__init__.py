"""The folder of a zoo: vectors in files that only grow, and a database that says which of their rows exist."""

from .checking import Problem, find_problems, mend
from .compacting import compact
from .errors import DiskFull, ZooBusy
from .names import check_kind, check_name, check_tags, check_text
from .record import Block, Facts, Mapped, Record, Stored
from .store import NameTaken, Store
from .vectors import EXACT, no_room, sync_folder

__all__ = [
    "EXACT",
    "Block",
    "DiskFull",
    "Facts",
    "Mapped",
    "NameTaken",
    "Problem",
    "Record",
    "Store",
    "Stored",
    "ZooBusy",
    "check_kind",
    "check_name",
    "check_tags",
    "check_text",
    "compact",
    "find_problems",
    "mend",
    "no_room",
    "sync_folder",
]
