"""What the plan's two checks of itself come to: a sentence each, and whether its figures may be believed."""

from __future__ import annotations

from dataclasses import dataclass

from quiesce.lab.plan.against_sim import Compared, compare
from quiesce.lab.plan.figures import Check, Figures

LAW = (0.9, 1.1)  # held on average / holds a second x (how long x how many pages, of each)


@dataclass(frozen=True)
class Verdict:
    agrees: bool
    lines: list[str]


def verdict(found: list[Figures], seed: int, *, thorough: bool) -> Verdict:
    """Little's law in each case in which all holds end, and small clusters here and in `quiesce sim`."""
    checked = [(row.name, row.check) for row in found if row.check is not None]
    off = [(name, check) for name, check in checked if not LAW[0] <= check.law <= LAW[1]]
    small = compare(seed, all_of_them=thorough)
    agrees = not off and all(one.agrees for one in small)
    lines = [_little([check for _, check in checked])]
    lines += [f"  {name}: {check.law:.2f} is outside {LAW[0]} to {LAW[1]}" for name, check in off]
    lines += ["small clusters, here and in `quiesce sim`:", *(f"  {_line(one)}" for one in small)]
    lines.append(
        "self-check: the plan agrees with both"
        if agrees
        else "self-check: THE PLAN DISAGREES where it says so above: do not size a cluster by these figures"
    )
    return Verdict(agrees, lines)


def _little(checks: list[Check]) -> str:
    if not checks:
        return "Little's law: no holds to check it by"
    laws, products = [check.law for check in checks], [check.ratio for check in checks]
    return (
        f"Little's law: held / predicted {min(laws):.2f} to {max(laws):.2f} in {len(checks)} cases "
        f"({min(products):.2f} to {max(products):.2f} if long holds had no more pages than short ones)"
    )


def _line(one: Compared) -> str:
    low, high = one.within
    return one.text() if one.agrees else f"{one.text()}, OUTSIDE {low} to {high}"
