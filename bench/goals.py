"""The goals, as ratios within one run, and the verdict on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.report import Compared, Spread

# case -> (peer, floor, goal): Quiesce's tokens a second over the peer's
SPEED = {
    "decode-1": ("llama.cpp", 1.25, 1.45),
    "decode-8": ("vllm", 2.1, 2.6),
    "decode-32": ("vllm", 1.7, 2.0),
    "prefill-512": ("vllm", 1.1, 1.2),
    "prefill-2048": ("vllm", 1.1, 1.2),
    "requests-32": ("vllm", 1.4, 1.6),
    "int8-decode-1": ("llama.cpp Q4_1", 1.4, 1.4),
    "int4-decode-1": ("llama.cpp Q4_1", 1.4, 1.4),
}
OURS, THEIRS, AT_ONCE = "Quiesce PD", ("vLLM PD", "vLLM PD float32"), "32"
SERVED = {"tokens/s": 2.5, "TTFT ms": 3.0, "TPOT ms": 3.0}  # how many times better than vLLM's PD
START_SECONDS, IDLE_GIB = 10.0, 1.2


@dataclass(frozen=True)
class Goal:
    what: str
    value: float
    floor: float
    goal: float
    at_most: bool = False

    def reaches(self, limit: float) -> bool:
        return self.value <= limit if self.at_most else self.value >= limit

    @property
    def met(self) -> bool:
        """Whether at least the floor is reached."""
        return self.reaches(self.floor)

    def text(self) -> str:
        word = "goal" if self.reaches(self.goal) else "floor" if self.met else "MISSED"
        sign = "at most" if self.at_most else "at least"
        limits = f"{self.floor:g}" if self.floor == self.goal else f"{self.floor:g}, better {self.goal:g}"
        return f"{word:6}  {self.what}: {self.value:.2f}; {sign} {limits}"


def speed(compared: Sequence[Compared]) -> list[Goal]:
    """A goal for each case whose peer was measured, and once more where it was measured in float32 as well; beside
    plain transformers, Quiesce is to be no slower at all."""
    found = []
    for one in compared:
        if one.case in SPEED:
            peer, floor, goal = SPEED[one.case]
            for name in (peer, f"{peer} float32"):
                if name in one.against:
                    value, clock = one.over(name)
                    found.append(Goal(f"{one.case} over {name}{clock}", value, floor, goal))
        if "transformers" in one.against:
            value, clock = one.over("transformers")
            found.append(Goal(f"{one.case} over transformers{clock}", value, 1.0, 1.0))
    return found


def served(serving: dict[str, dict[str, dict[str, Spread]]]) -> list[Goal]:
    """Prefill and decode on two cores, all requests at once, against vLLM's."""
    found = []
    for peer in THEIRS:
        try:
            ours, theirs = serving[OURS][AT_ONCE], serving[peer][AT_ONCE]
        except KeyError:
            continue
        for name, floor in SERVED.items():
            a, b = ours[name].median, theirs[name].median
            better = a / b if name == "tokens/s" else b / a
            found.append(Goal(f"{OURS}, {AT_ONCE} at once, {name}: times better than {peer}", better, floor, floor))
    return found


def started(first_answer: Spread | None, idle_gib: dict[str, float]) -> list[Goal]:
    found = []
    if first_answer:
        what = "seconds from `quiesce serve` to the first answer"
        found.append(Goal(what, first_answer.median, START_SECONDS, START_SECONDS, True))
    for worker, size in idle_gib.items():
        found.append(Goal(f"GiB of an idle {worker} worker", size, IDLE_GIB, IDLE_GIB, True))
    return found
