"""Medians, ratios, goals and the table: everything after the measuring, without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

STARTUP_GOAL = 20.0  # seconds from the command to the first answer, model in the cache
SAME_ENOUGH = 0.9  # in float32; near ties may turn a few answers
RATIO_GOAL = 1.0  # of plain transformers, same core, same run


@dataclass(frozen=True)
class Window:
    """One timed stretch, in seconds of wall and of CPU time;"""

    count: int  # tokens computed
    wall: float
    cpu: float
    tokens: list[list[int]]

    @property
    def rate(self) -> float:
        return self.count / self.wall

    @property
    def core_share(self) -> float:
        return self.cpu / self.wall


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float
    n: int

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}..{self.high:.{digits}f})"


@dataclass(frozen=True)
class Compared:
    """One case and dtype. `ratio` is of windows taken one after the other: Quiesce's over transformers'."""

    case: str
    dtype: str
    quiesce: Spread
    transformers: Spread
    ratio: Spread
    cpu_ratio: Spread  # the same by CPU time: what is left of a neighbour is the cache and memory it uses
    ceiling: float  # tokens a second that this core's bandwidth and arithmetic allow
    of_ceiling: float  # what Quiesce reaches of it, by CPU time
    agreement: float  # share of greedy tokens that both engines gave alike, up to the first difference
    disturbed: int  # windows kept although the core was shared
    core_share: float  # the lowest of the kept windows


@dataclass(frozen=True)
class Goal:
    what: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def text(self) -> str:
        sign = "at most" if self.at_most else "at least"
        return f"{'met   ' if self.met else 'MISSED'}  {self.what}: {self.value:.2f}, goal {sign} {self.limit:g}"


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError for nothing at all: no figure stands in for one that was not measured."""
    if not values:
        raise ValueError("no values were measured")
    return Spread(median(values), min(values), max(values), len(values))


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens that are alike up to each answer's first difference (after one, contexts differ)."""
    alike = 0
    for a, b in zip(ours, theirs, strict=True):
        differs = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        alike += differs
    return alike / sum(len(a) for a in ours)


def compare(case: str, dtype: str, windows: dict[str, list[Window]], *, ceiling: float, enough: float) -> Compared:
    """`windows` has one list for "quiesce" and one for "transformers", equally long, in order of time."""
    ours, theirs = windows["quiesce"], windows["transformers"]
    kept = ours + theirs
    return Compared(
        case=case,
        dtype=dtype,
        quiesce=spread([w.rate for w in ours]),
        transformers=spread([w.rate for w in theirs]),
        ratio=spread([a.rate / b.rate for a, b in zip(ours, theirs, strict=True)]),
        cpu_ratio=spread([b.cpu / a.cpu for a, b in zip(ours, theirs, strict=True)]),
        ceiling=ceiling,
        of_ceiling=median(w.count / w.cpu for w in ours) / ceiling,
        agreement=agreement(ours[0].tokens, theirs[0].tokens),
        disturbed=sum(w.core_share < enough for w in kept),
        core_share=min(w.core_share for w in kept),
    )


def goals(compared: Sequence[Compared], first_answer: Spread | None) -> list[Goal]:
    """Speed goals for all that was compared, and the start-up goal where it was measured.

    Ratios are of wall time, unless most windows had to share the core: then chance decides those, and CPU time
    is compared instead.
    """
    found = []
    for one in compared:
        shared = 2 * one.disturbed > one.quiesce.n + one.transformers.n
        ratio, clock = (one.cpu_ratio, ", by CPU time for the core was shared") if shared else (one.ratio, "")
        found.append(Goal(f"{one.case}, {one.dtype}, over transformers{clock}", ratio.median, RATIO_GOAL))
    if first_answer is not None:
        found.append(
            Goal("seconds from `quiesce serve` to the first answer", first_answer.median, STARTUP_GOAL, True)
        )
    return found


def doubts(compared: Sequence[Compared]) -> list[str]:
    """What a reader should know before believing the figures."""
    found = []
    for one in compared:
        what, n = f"{one.case}, {one.dtype}", one.quiesce.n + one.transformers.n
        if one.disturbed:
            found.append(f"{what}: {one.disturbed} of {n} windows had as little as {one.core_share:.0%} of the core")
        if one.dtype == "float32" and one.agreement < SAME_ENOUGH:
            found.append(f"{what}: only {one.agreement:.0%} of the greedy tokens are alike; is it the same work?")
    return found


def engines_table(compared: Sequence[Compared]) -> str:
    head = [
        "one core, tokens/s",
        "dtype",
        "Quiesce",
        "transformers",
        "ratio",
        "by CPU time",
        "of limit",
        "same tokens",
        "disturbed",
    ]
    lines = [head]
    for one in compared:
        lines.append(
            [
                one.case,
                one.dtype,
                one.quiesce.text(1),
                one.transformers.text(1),
                one.ratio.text(2),
                one.cpu_ratio.text(2),
                f"{one.of_ceiling:.0%} of {one.ceiling:.0f}",
                f"{one.agreement:.0%}",
                f"{one.disturbed} of {one.quiesce.n + one.transformers.n}",
            ]
        )
    return aligned(lines)


def serving_table(serving: dict[str, dict[str, Spread]]) -> str:
    """`serving` maps a way of serving to its figures by name; all share the same names."""
    names = list(next(iter(serving.values())))
    head = ["over HTTP, one client", *names]
    return aligned([head, *([way, *(figures[name].text(1) for name in names)] for way, figures in serving.items())])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, with a rule under the head."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rows[0], "  ".join("-" * width for width in widths), *rows[1:]])


def as_json(value: Any) -> Any:
    """Dataclasses to dicts, at any depth of dicts and lists."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, Goal):
        return asdict(value) | {"met": value.met}
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
