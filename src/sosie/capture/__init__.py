"""Capture: from a model and data to activations, and from activations to rows."""

from .archives import read_npz, read_safetensors
from .arguments import labels_of, model_arguments, without_labels
from .batches import Batches, Chunk, NoData, recut
from .cuts import Cut
from .fingerprint import input_numbers
from .keep import Keep
from .leaks import LeakingCut
from .linear import Linearised, NotLinear, check_linear, linearised, weighted_layers
from .masks import Masks, mask_of
from .mixing import TRIED, ends, mixing_note
from .names import unwrap
from .outputs import answer_in, fresh_leaf, unshared
from .predictive import BETA, Loss, NoGradient, Predictive, predictive_of
from .quiet import as_found, borrowed, kept_attributes, restored_after_errors
from .rows import RULES, Rule, check_rule, needs_axes, rows_per_input, to_rows
from .saved import BadActivations, SavedActivations, open_activations
from .shares import ALL, Share
from .sites import NoRows, SilentSite, Site, SiteError, UnknownSite, nearest, select
from .squared_gradients import SquaredGradients
from .structure import BadBatch, count_inputs, cut, input_rows, number_array
from .watch import Seen, Sink, watch

__all__ = [
    "ALL",
    "BETA",
    "RULES",
    "TRIED",
    "BadActivations",
    "BadBatch",
    "Batches",
    "Chunk",
    "Cut",
    "Keep",
    "LeakingCut",
    "Linearised",
    "Loss",
    "Masks",
    "NoData",
    "NoGradient",
    "NoRows",
    "NotLinear",
    "Predictive",
    "Rule",
    "SavedActivations",
    "Seen",
    "Share",
    "SilentSite",
    "Sink",
    "Site",
    "SiteError",
    "SquaredGradients",
    "UnknownSite",
    "answer_in",
    "as_found",
    "borrowed",
    "check_linear",
    "check_rule",
    "count_inputs",
    "cut",
    "ends",
    "fresh_leaf",
    "input_numbers",
    "input_rows",
    "kept_attributes",
    "labels_of",
    "linearised",
    "mask_of",
    "mixing_note",
    "model_arguments",
    "nearest",
    "needs_axes",
    "number_array",
    "open_activations",
    "predictive_of",
    "read_npz",
    "read_safetensors",
    "recut",
    "restored_after_errors",
    "rows_per_input",
    "select",
    "to_rows",
    "unshared",
    "unwrap",
    "watch",
    "weighted_layers",
    "without_labels",
]
