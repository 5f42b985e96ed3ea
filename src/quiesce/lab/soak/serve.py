"""`quiesce serve` with the lab's workers: `python -m quiesce.lab.soak.serve MODEL ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from quiesce.ops import serve
from quiesce.ops.supervisor import Plan


def main() -> int:
    from quiesce.cli import main as command  # noqa: PLC0415

    make = serve.make_plans

    def make_with_chaos(*arguments: Any) -> list[Plan]:
        return [plan if plan.is_router else replace(plan, command=_lab(plan.command)) for plan in make(*arguments)]

    setattr(serve, "make_plans", make_with_chaos)  # noqa: B010
    return command(["serve", *sys.argv[1:]])


def _lab(product: Callable[[int], Sequence[str]]) -> Callable[[int], list[str]]:
    def words(epoch: int) -> list[str]:
        python, dash_m, _, *rest = product(epoch)
        return [python, dash_m, "quiesce.lab.soak.chaos", *rest]

    return words


if __name__ == "__main__":
    sys.exit(main())
