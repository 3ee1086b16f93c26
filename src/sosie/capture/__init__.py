"""Capture: from a model and data to activations, and from activations to rows."""

from ..checks import nearest
from .arguments import labels_of, model_arguments, without_labels
from .batches import ALL, Batches, Chunk, NoData, Share, recut
from .linear import Linearised, NotLinear, check_linear, linearised, weighted_layers
from .mixing import TRIED, by_input, differ, mixing_note, of_input, tried_of
from .restore import as_found, borrowed, kept_attributes, restored_after_errors
from .rows import RULES, Masks, Rule, check_rule, gives_several_rows, mask_of, needs_axes, rows_per_input, to_rows
from .saved import ActivationFile, BadActivations, open_activations, read_npz, read_safetensors
from .sites import NoRows, SilentSite, Site, SiteError, UnknownSite, select, unwrap
from .structure import BadBatch, answer_in, count_inputs, cut, fresh_leaf, input_rows, number_array, unshared
from .watch import Keep, Sink, Watch, watch
