"""What bench.transfer says of its figures: goals met and missed, kept figures, the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import transfer_report as report


def case(key: str, speed: float, share: float) -> dict[str, Any]:
    name = report.COLUMNS[key]
    return {
        "key": key,
        "case": name,
        "layer_gb_s": speed,
        "bare_gb_s": speed / share,
        "share": share,
        "cpu_share": share,
        "pairs": 20,
    }


def result(engine: str, *cases: dict[str, Any], latency: float | None = None) -> dict[str, Any]:
    return {"engine": engine, "cases": list(cases), "latency_us": latency}


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (result("shm", case("pages", 9.0, 0.90), latency=100.0), []),
        (result("shm", case("pages", 9.0, 0.89)), ["shm: 2,000 pages of 23 KiB"]),
        (result("shm", latency=100.5), ["shm: latency"]),
        (result("tcp", case("block", 2.0, 0.91), latency=199.0), []),
        (result("nixl/tcp", case("block", 0.5, 0.94), latency=5000.0), ["nixl/tcp: one block of 64 MiB"]),
        (result("mooncake/tcp", case("block", 0.5, 0.95)), []),
    ],
)
def test_goals(found: dict[str, Any], missed: list[str]) -> None:
    assert report.missed([found]) == missed
    assert sum("MISSED" in line for line in report.lines(found)) == len(missed)


def test_ours_over_tcp_has_to_be_ahead_of_the_others_over_tcp() -> None:
    ours = result("tcp", case("pages", 2.0, 1.0), case("crowd", 0.4, 1.0))
    theirs = result("nixl/tcp", case("pages", 1.9, 1.0), case("crowd", 0.5, 1.0))
    assert report.missed([ours, theirs]) == ["tcp is not ahead of nixl/tcp: crowd"]


def test_what_is_measured_again_replaces_what_was_kept_of_it_alone(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    report.keep(file, [result("shm", case("pages", 1.0, 0.5), case("block", 3.0, 0.95), latency=90.0)], {})
    both = report.keep(file, [result("shm", case("pages", 2.0, 0.97)), result("tcp", latency=120.0)], {"cores": 2})
    assert report.missed(both) == []
    kept = json.loads(file.read_text())
    assert kept["machine"] == {"cores": 2}
    assert report.table(kept)[2:] == [
        "| shm | 2.00 of 2.06 GB/s, **97%** |  | 3.00 of 3.16 GB/s, **95%** | 90 us |",
        "| tcp |  |  |  | 120 us |",
    ]
