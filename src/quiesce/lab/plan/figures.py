"""What a course amounts to: held pages over time, delays, and the check by Little's law."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quiesce.lab.plan.case import Course
from quiesce.lab.plan.requests import Floats


@dataclass(frozen=True)
class Check:
    """`abort rate x hold time x pages per request`, each factor, and what the simulation held on average."""

    rate: float  # holds that began a second
    hold: float  # seconds
    pages: float
    simulated: float
    together: float  # hold seconds x pages of each, on average: Little's law itself, however the two go together

    @property
    def law(self) -> float:
        """Held on average / what Little's law says: 1 but for holds that reach over an end of what was looked at."""
        wanted = self.rate * self.together
        return self.simulated / wanted if wanted else 1.0 if not self.simulated else float("inf")

    @property
    def predicted(self) -> float:
        return self.rate * self.hold * self.pages

    @property
    def ratio(self) -> float:
        return self.simulated / self.predicted if self.predicted else 1.0 if not self.simulated else float("inf")

    def text(self) -> str:
        return (
            f"{self.rate:.3g} aborts/s x {self.hold:.3g} s x {self.pages:,.0f} pages = {self.predicted:,.1f} "
            f"predicted, {self.simulated:,.1f} simulated, ratio {self.ratio:.2f}"
        )


@dataclass(frozen=True)
class Figures:
    name: str
    held_mean: float
    held_p99: float
    held_max: int
    held_worst: float  # largest share of one worker's pool
    holds: int
    delay_mean: float
    delay_p99: float
    first_p50: float
    first_p99: float
    restarts: int
    cut: int
    refused: int
    check: Check | None


def figures(course: Course) -> Figures:
    held = np.array(course.held)
    first = course.first[~np.isnan(course.first)]
    delay = course.delay[~np.isnan(course.delay)]
    return Figures(
        course.case.name,
        held_mean=mean_over(course, 0.0, course.seconds),
        held_p99=quantile_over(course, 0.99),
        held_max=int(held.max()),
        held_worst=course.most_share,
        holds=len(course.holds),
        delay_mean=_mean(delay),
        delay_p99=_quantile(delay, 0.99),
        first_p50=_quantile(first, 0.5),
        first_p99=_quantile(first, 0.99),
        restarts=course.restarts,
        cut=course.cut,
        refused=course.refused,
        check=check(course),
    )


def mean_over(course: Course, start: float, end: float) -> float:
    """Held pages on average between two moments."""
    times, held = np.array(course.times), np.array(course.held)
    edges = np.clip(np.append(times, max(end, times[-1])), start, end)
    return float((held * np.diff(edges)).sum() / (end - start)) if end > start else 0.0


def quantile_over(course: Course, share: float) -> float:
    """The number of held pages that was not passed for that share of the time in which requests arrive."""
    times, held = np.array(course.times), np.array(course.held)
    lasts = np.diff(np.clip(np.append(times, max(course.seconds, times[-1])), 0.0, course.seconds))
    order = np.argsort(held)
    total = np.cumsum(lasts[order])
    return float(held[order][np.searchsorted(total, share * total[-1])]) if total[-1] else 0.0


def check(course: Course) -> Check | None:
    """From the storm on, where there is one, until the last hold has ended. None where some never do."""
    start = 0.0 if course.case.storm is None else course.case.storm[0]
    holds = [hold for hold in course.holds if hold[0] >= start]
    if not holds or any(np.isinf(hold[2]) for hold in holds):
        return None
    end = max(course.seconds, course.times[-1])
    _, pages, lasted = np.array(holds, dtype=float).T
    held = mean_over(course, start, end)
    return Check(
        len(holds) / (end - start), float(lasted.mean()), float(pages.mean()), held, float((lasted * pages).mean())
    )


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else 0.0


def as_json(found: Figures) -> dict[str, Any]:
    row = asdict(found)
    if found.check is not None:
        row["check"] |= {"predicted": found.check.predicted, "ratio": found.check.ratio, "law": found.check.law}
    return row
