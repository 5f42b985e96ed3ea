"""What docs/metrics.md promises: the tables of its sections, as sets of (name, kind)."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "metrics.md"
SUFFIXES = ("_bucket", "_sum", "_count")


def documented(section: str) -> set[tuple[str, str]]:
    """Names without the prefix `quiesce:`. A histogram has the three names that it is exported under."""
    text = DOCUMENT.read_text("utf-8").split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    found: set[tuple[str, str]] = set()
    for line in text.splitlines():
        if line.startswith("| `"):
            name, kind = (cell.strip().strip("`") for cell in line.split("|")[1:3])
            names = [name + suffix for suffix in SUFFIXES] if kind == "histogram" else [name]
            found |= {(each, kind) for each in names}
    return found
