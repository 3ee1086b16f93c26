"""Capture: from a model and data to activations, and from activations to rows."""

from .arguments import labels_of, model_arguments, without_labels
from .batches import ALL, Batches, Chunk, NoData, Share, recut
from .linear import Linearised, NotLinear, check_linear, linearised, weighted_layers
from .mixing import TRIED, by_input, mixing_note
from .restore import as_found, borrowed, kept_attributes, restored_after_errors
from .rows import RULES, Masks, Rule, check_rule, mask_of, needs_axes, rows_per_input, to_rows
from .saved import ActivationFile, BadActivations, open_activations, read_npz, read_safetensors
from .sites import NoRows, SilentSite, Site, SiteError, UnknownSite, nearest, select, unwrap
from .structure import BadBatch, answer_in, count_inputs, cut, fresh_leaf, input_rows, number_array, unshared
from .watch import Keep, Sink, Watch, watch

__all__ = [
    "ALL",
    "RULES",
    "TRIED",
    "ActivationFile",
    "BadActivations",
    "BadBatch",
    "Batches",
    "Chunk",
    "Keep",
    "Linearised",
    "Masks",
    "NoData",
    "NoRows",
    "NotLinear",
    "Rule",
    "Share",
    "SilentSite",
    "Sink",
    "Site",
    "SiteError",
    "UnknownSite",
    "Watch",
    "answer_in",
    "as_found",
    "borrowed",
    "by_input",
    "check_linear",
    "check_rule",
    "count_inputs",
    "cut",
    "fresh_leaf",
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
