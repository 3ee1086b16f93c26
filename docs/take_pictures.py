"""Take the pictures in docs/pictures: run the examples of gallery.md and shapes.md, and photograph their pages.

`python docs/take_pictures.py`, with chromium and the extra `dev` installed. A picture is the top of a page, or a figure
that the examples save.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
SIZE = {"width": 1120, "height": 760}
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.S | re.M)


def write_pages(folder: Path) -> list[Path]:
    """Run the examples in a folder; the pages that they write there."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for page in ("gallery.md", "shapes.md"):
            namespace: dict[str, object] = {"__name__": "__main__"}
            for code in BLOCK.findall((DOCS / page).read_text("utf-8")):
                exec(code, namespace)
    return sorted(folder.glob("*.html"))


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    keep = Path(sys.argv[1]) if len(sys.argv) > 1 else None  # a folder for the whole pages, to look at
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        pages = write_pages(Path(folder))
        for figure in Path(folder).glob("*.png"):
            Image.open(figure).convert("RGB").quantize(128).save(PICTURES / figure.name, optimize=True)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM)
        for path in pages:
            page = browser.new_page(viewport=SIZE)
            page.goto(path.as_uri())
            page.wait_for_timeout(300)
            picture = PICTURES / f"{path.stem}.png"
            page.screenshot(path=picture)
            Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)  # a third of the size
            if keep is not None:
                page.screenshot(path=keep / f"{path.stem}.png", full_page=True)
                shutil.copy(path, keep)
            page.close()
        browser.close()
    print(f"{len(pages)} pictures in {PICTURES}")


if __name__ == "__main__":
    main()
