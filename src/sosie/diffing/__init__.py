"""Is it still the same model, and if not, which layer is it?"""

from .comparing import diff
from .record import Record, assert_same, is_record, record
from .weights import diff_weights
