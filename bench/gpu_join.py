"""Rows that gpu.py found in several runs, in one file a part: a GPU is often there for less time than all parts take.

    python bench/gpu_join.py FILE... [--into bench/results]

Each file is one of gpu.py's. Its rows take the places of those of the same thing; rows that stay, of an older run, say
which (`run`), and the page says so too. What is no figure of a row (date, versions, machine) is of the newest file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from paceline.bench import results

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
NAMES = ("model", "shape", "what", "who", "round", "drafter", "setting", "prompts_of", "temperature", "batch", "rate")
NAMES += ("context",)  # what a row is of; the rest was found


def join(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new file with those rows of the old one that it has not."""
    run = {"date": old["date"], "revision": old.get("revision")}
    kept = {_thing(row): {"run": run, **row} for row in old["rows"]}
    rows = {**kept, **{_thing(row): row for row in new["rows"]}}
    return {**new, "rows": sorted(rows.values(), key=lambda row: _place(row, [*old["rows"], *new["rows"]]))}


def _thing(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in NAMES)


def _place(row: Row, order: list[Row]) -> int:
    """Where it first stood."""
    return [_thing(one) for one in order].index(_thing(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="the older first")
    parser.add_argument("--into", type=Path, default=RESULTS)
    options = parser.parse_args()
    for file in options.files:
        new = json.loads(file.read_text())
        place = options.into / f"gpu_{new['part']}.json"
        joined = join(json.loads(place.read_text()), new) if place.exists() else new
        results.write(place, joined)
        print(f"{place.name}: {len(new['rows'])} new rows of {len(joined['rows'])}")


if __name__ == "__main__":
    main()
