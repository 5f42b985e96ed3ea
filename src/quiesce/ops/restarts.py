"""When a process that died is started again, and when that is pointless. Pure: times come from the caller."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY = 0.2  # seconds
LONGEST_DELAY = 10.0
HEALTHY = 30.0  # seconds of being ready after which earlier deaths are forgotten
START_FAILURES = 5  # in a row, before it was ever ready
EXIT_SETTINGS = 2  # the process says that its settings cannot work: the next start would say the same


@dataclass
class Restarts:
    """One process's history."""

    deaths: int = 0  # in a row
    ever_ready: bool = False
    ready_since: float | None = None

    def ready(self, now: float) -> bool:
        """Call while it is ready. True at the first time of this life."""
        first = self.ready_since is None
        if first:
            self.ready_since = now
        self.ever_ready = True
        return first

    def unready(self) -> None:
        self.ready_since = None

    def died(self, now: float, exit_code: int) -> float | None:
        """Seconds until the next start, or None: it never got ready and will not."""
        if self.ready_since is not None and now - self.ready_since >= HEALTHY:
            self.deaths = 0
        self.ready_since = None
        self.deaths += 1
        if not self.ever_ready and (self.deaths >= START_FAILURES or exit_code == EXIT_SETTINGS):
            return None
        return float(min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(self.deaths - 1, 16)))
