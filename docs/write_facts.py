"""The facts of all measures as JSON, for `sosie measures`."""

from __future__ import annotations

import json

import sosie
from sosie.cli.measures import FACTS as PATH


def page() -> str:
    return json.dumps(sosie.list_measures(), indent=1, ensure_ascii=False) + "\n"


__all__ = ["PATH", "page"]
