"""The pytest plugin of sosie: the fixture `sosie_golden` holds a model against a golden record.

It imports neither torch nor sosie before it is used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER = "golden"  # of the records, beside the test's file
PAGES = ".sosie"  # of the pages of failed tests, in the root folder
WRITTEN = pytest.StashKey[set[Path]]()  # the records that this run has written


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sosie", "golden records of neural networks")
    group.addoption("--sosie-update", action="store_true", help="write the records of sosie_golden anew")


@dataclass
class Golden:
    """`sosie_golden(model, data)` fails with the table unless the model gives what its record says.

    `pytest --sosie-update` writes the record: golden/<name>.safetensors beside the test's file, by default named after
    the test. A second call with the same name is held against it. Further options are those of
    `sosie.diffing.record`: sites, prepare, inputs, max_rows, floor, device.
    """

    folder: Path
    default: str
    pages: Path
    update: bool
    written: set[Path]

    def __call__(self, model: Any, data: Any = None, *, name: str | None = None, **options: Any) -> None:
        __tracebackhide__ = True
        from sosie.diffing import diff, record

        path = self.folder / f"{_file_name(name or self.default)}.safetensors"
        if self.update and path not in self.written:
            if data is None:
                pytest.fail("--sosie-update needs the data: sosie_golden(model, data)", pytrace=False)
            record(model, data, path, **options)
            self.written.add(path)
            return
        if not path.is_file():
            pytest.fail(f"no golden record {path}: write it with pytest --sosie-update, and commit it", pytrace=False)
        options = {key: value for key, value in options.items() if key not in ("replay", "max_rows")}
        if "sites" in options:
            options["sites_b"] = options.pop("sites")
        if options.get("inputs") is False:
            del options["inputs"]
        shared = f"{path} was written for another call: name= gives each a record of its own\n" * (path in self.written)
        try:
            found = diff(path, model, data, **options)
        except ValueError as error:
            failure = pytest.fail.Exception(f"{shared}{error}", pytrace=False)
            raise failure from None
        if not found.same:
            from sosie import write_report

            page = write_report(found, self.pages / f"{path.stem}.html")
            pytest.fail(f"{shared}{found.as_text()}\nsee {page}", pytrace=False)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "model"


@pytest.fixture
def sosie_golden(request: pytest.FixtureRequest) -> Golden:
    """Hold a model against its golden record: sosie_golden(model, data)."""
    update = bool(request.config.getoption("--sosie-update"))
    written = request.config.stash.setdefault(WRITTEN, set())
    return Golden(request.path.parent / FOLDER, request.node.name, request.config.rootpath / PAGES, update, written)
