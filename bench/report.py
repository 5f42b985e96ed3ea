"""Medians, ratios, doubts and tables: everything after the measuring, without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

SAME_ENOUGH = 0.9  # of greedy tokens in float32; in bfloat16 near ties turn more of them
SAME_BFLOAT16 = 0.5


@dataclass(frozen=True)
class Window:
    """One timed stretch, in seconds of wall and of CPU time."""

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
class Against:
    """Quiesce beside one peer, of windows taken one after the other."""

    ratio: Spread  # of tokens a second
    cpu_ratio: Spread  # of tokens in a CPU second: what is left of a neighbour is the cache and memory it uses
    agreement: float  # share of greedy tokens that both gave alike, up to each answer's first difference


@dataclass(frozen=True)
class Compared:
    """One case: each engine's tokens a second, and Quiesce (`ours`) against each other one."""

    case: str
    dtype: str
    ours: str
    rates: dict[str, Spread]
    against: dict[str, Against]
    ceiling: float  # tokens a second that this core's bandwidth and arithmetic allow
    of_ceiling: float  # what Quiesce reaches of it, by CPU time
    disturbed: int  # windows kept although the core was shared
    core_share: float  # the lowest of the kept windows

    @property
    def shared(self) -> bool:
        """Whether most windows shared the core: then chance decides ratios of wall time."""
        return 2 * self.disturbed > sum(spread.n for spread in self.rates.values())

    def over(self, peer: str) -> tuple[float, str]:
        """Quiesce's median ratio to `peer`, and a remark on the clock it is of."""
        found = self.against[peer]
        if self.shared:
            return found.cpu_ratio.median, ", by CPU time, for the core was shared"
        return found.ratio.median, ""


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
    """`windows` has a list for each engine, equally long, in order of time; Quiesce's name begins with its own."""
    ours = next(name for name in windows if name.startswith("quiesce"))
    mine, kept = windows[ours], [window for taken in windows.values() for window in taken]
    return Compared(
        case=case,
        dtype=dtype,
        ours=ours,
        rates={name: spread([w.rate for w in taken]) for name, taken in windows.items()},
        against={
            name: Against(
                spread([a.rate / b.rate for a, b in zip(mine, theirs, strict=True)]),
                spread([(a.count / a.cpu) / (b.count / b.cpu) for a, b in zip(mine, theirs, strict=True)]),
                agreement([t for w in mine for t in w.tokens], [t for w in theirs for t in w.tokens]),
            )
            for name, theirs in windows.items()
            if name != ours
        },
        ceiling=ceiling,
        of_ceiling=median(w.count / w.cpu for w in mine) / ceiling,
        disturbed=sum(w.core_share < enough for w in kept),
        core_share=min(w.core_share for w in kept),
    )


def doubts(compared: Sequence[Compared]) -> list[str]:
    """What a reader should know before believing the figures."""
    found = []
    for one in compared:
        what, n = f"{one.case}, {one.dtype}", sum(spread.n for spread in one.rates.values())
        if one.disturbed:
            found.append(f"{what}: {one.disturbed} of {n} windows had as little as {one.core_share:.0%} of the core")
        enough = SAME_ENOUGH if one.dtype == "float32" else SAME_BFLOAT16
        for name, beside in one.against.items():
            if beside.agreement < enough and "Q4_1" not in name:  # whose weights are others, and known to be
                found.append(
                    f"{what}: only {beside.agreement:.0%} of the greedy tokens are {name}'s; is it the same work?"
                )
    return found


def engines_table(compared: Sequence[Compared]) -> str:
    """A line for each engine of each case."""
    lines = [["one core", "engine", "tokens/s", "Quiesce is", "by CPU time", "same tokens", "of limit", "disturbed"]]
    for one in compared:
        for name, rate in one.rates.items():
            beside, mine = one.against.get(name), name == one.ours
            n = sum(spread.n for spread in one.rates.values())
            lines.append(
                [
                    one.case if mine else "",
                    name,
                    rate.text(1),
                    f"{beside.ratio.text(2)} times" if beside else "",
                    f"{beside.cpu_ratio.median:.2f}" if beside else "",
                    f"{beside.agreement:.0%}" if beside else "",
                    f"{one.of_ceiling:.0%} of {one.ceiling:.0f}" if mine else "",
                    f"{one.disturbed} of {n}" if mine else "",
                ]
            )
    return aligned(lines)


def serving_table(serving: dict[str, dict[str, dict[str, Spread]]]) -> str:
    """`serving`: way -> requests at once -> figure by name."""
    names = ["tokens/s", "TTFT ms", "TPOT ms"]
    lines = [["over HTTP", "at once", *names]]
    for way, levels in serving.items():
        for level, figures in levels.items():
            lines.append([way, level, *(figures[name].text(1) for name in names)])
    return aligned(lines)


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
    return as_json(asdict(value)) if hasattr(value, "__dataclass_fields__") else value


def compared_of(found: dict[str, Any]) -> Compared:
    """A Compared from its JSON."""
    rates = {name: Spread(**rate) for name, rate in found["rates"].items()}
    against = {
        name: Against(Spread(**one["ratio"]), Spread(**one["cpu_ratio"]), one["agreement"])
        for name, one in found["against"].items()
    }
    return Compared(**found | {"rates": rates, "against": against})


def serving_of(found: dict[str, Any]) -> dict[str, dict[str, dict[str, Spread]]]:
    return {
        way: {level: {name: Spread(**one) for name, one in figures.items()} for level, figures in levels.items()}
        for way, levels in found.items()
    }
