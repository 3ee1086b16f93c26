"""Stitching: halves → fit or training of the joint → evaluation; single joints, maps of all sites, files."""

from .evaluating import Stitch
from .fitting import stitch
from .halves import Half, Stitched
from .sites import stitch_sites

__all__ = ["Half", "Stitch", "Stitched", "stitch", "stitch_sites"]
