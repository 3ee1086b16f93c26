"""How long it takes to import sosie and to ask for help, beside starting Python itself."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from measuring import show, write

WAYS = {
    "python -c pass": ["-c", "pass"],
    "import sosie": ["-c", "import sosie"],
    "sosie --help": ["-m", "sosie", "--help"],
    "sosie measures": ["-m", "sosie", "measures"],
    "import torch": ["-c", "import torch"],
}


def main() -> None:
    rows = []
    for name, arguments in WAYS.items():
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
            seconds.append(time.perf_counter() - start)
        rows.append({"command": name, "seconds": statistics.median(seconds[1:])})
    show("From start to end of the process", rows)
    write("startup", {"what": __doc__, "rows": rows})


if __name__ == "__main__":
    main()
