"""Seeds that were drawn for this run are said at its end, whether or not something failed."""

from __future__ import annotations

from typing import Any

SEEDS = "simulated seeds"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    drawn = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == SEEDS and getattr(report, "when", "") == "call"
    ]
    if drawn:
        terminalreporter.write_line(f"{SEEDS} (`quiesce sim --seed N`): {', '.join(drawn)}")
