"""Write the pages that are made from the code and from measurements."""

from __future__ import annotations

import write_benchmark
import write_facts
import write_measures
import write_reference
import write_speed

from sosie.files import write_atomically

GENERATED = (write_facts, write_measures, write_speed, write_reference, write_benchmark)

if __name__ == "__main__":
    for each in GENERATED:
        print(f"wrote {write_atomically(each.PATH, each.page())}")
