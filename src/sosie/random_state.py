"""The random states of torch, NumPy and Python are one for all threads."""

from __future__ import annotations

import threading

SEEDING = threading.RLock()  # whoever sets the random state, or puts it back, holds this
