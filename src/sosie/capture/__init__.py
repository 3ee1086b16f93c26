"""Capture: from a model and data to activations, and from activations to rows."""

from .archives import read_npz, read_safetensors
from .arguments import labels_of, model_arguments
from .batches import Batches, Chunk, NoData, recut
from .cuts import Cut
from .leaks import LeakingCut
from .masks import Masks, mask_of
from .names import unwrap
from .outputs import answer_in
from .quiet import as_found
from .rows import RULES, Rule, check_rule, rows_per_input, to_rows
from .saved import BadActivations, SavedActivations, open_activations
from .sites import SilentSite, Site, SiteError, UnknownSite, nearest, select
from .squared_gradients import SquaredGradients
from .structure import BadBatch, count_inputs, cut, input_rows
from .watch import Seen, Sink, watch

__all__ = [
    "RULES",
    "BadActivations",
    "BadBatch",
    "Batches",
    "Chunk",
    "Cut",
    "LeakingCut",
    "Masks",
    "NoData",
    "Rule",
    "SavedActivations",
    "Seen",
    "SilentSite",
    "Sink",
    "Site",
    "SiteError",
    "SquaredGradients",
    "UnknownSite",
    "answer_in",
    "as_found",
    "check_rule",
    "count_inputs",
    "cut",
    "input_rows",
    "labels_of",
    "mask_of",
    "model_arguments",
    "nearest",
    "open_activations",
    "read_npz",
    "read_safetensors",
    "recut",
    "rows_per_input",
    "select",
    "to_rows",
    "unwrap",
    "watch",
]
