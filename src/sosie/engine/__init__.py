"""From models and data to results, in one pass."""

from ..measures import Transform
from .comparing import compare
from .distributed import single_process
from .extracting import extract
from .network import open_source
from .one_shot import align, list_measures, measure
from .outputs import compare_outputs
from .running import Running
from .stream import look_at
