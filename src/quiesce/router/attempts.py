"""When a failed answer is tried again elsewhere, and what the next attempt is asked for.

Again means: a new pairing id, a new request id, and only after every leg of the failed attempt is known to be over.
Before the first token it is a retry; after it, a failover, which hands the tokens that were given to the next worker
as an answer already begun, so that nothing is repeated, skipped or drawn twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quiesce.api.backend import Ask, Verdict
from quiesce.core.messages import Address, Start
from quiesce.roles.settings import Failover, Policy
from quiesce.router.breaker import BreakerRules

RETRY_SHARE = 0.1  # attempts beyond the first that the long run of requests may cost
RETRY_BURST = 16.0


@dataclass(frozen=True)
class Rules:
    """What the router does with requests. `eos`: tokens that end an answer. `deadline`: seconds; a request that had
    so long and was not answered counts against the worker it was at."""

    policy: Policy = "least-loaded"
    retries: int = 2
    failover: Failover = "exact"
    local_prefill_below: int = 0  # prompts of fewer tokens are computed on decode; 0: none
    breaker: BreakerRules = field(default_factory=BreakerRules)
    eos: frozenset[int] = frozenset()
    deadline: float = 600.0


@dataclass
class RetryBudget:
    """So many attempts may follow a failure that retries never become the load that they are meant to survive."""

    tokens: float = RETRY_BURST

    def request(self) -> None:
        self.tokens = min(RETRY_BURST, self.tokens + RETRY_SHARE)

    def take(self) -> bool:
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


def finished(ask: Ask, emitted: list[int], eos: frozenset[int]) -> Verdict | None:
    """The verdict on tokens that are a whole answer, although the worker's last word about it was lost."""
    if not emitted:
        return None
    sampling = ask.sampling
    if emitted[-1] in sampling.stop_token_ids or (emitted[-1] in eos and not sampling.ignore_eos):
        return Verdict("stop")
    return Verdict("length") if len(emitted) >= sampling.max_tokens else None


def may_continue(ask: Ask, emitted: list[int], failover: Failover) -> bool:
    """Whether the rules allow another attempt: always before the first token, else as `--failover` says."""
    if not emitted:
        return True
    return failover == "always" or (failover == "exact" and ask.exact)


def leg(
    ask: Ask,
    *,
    rid: str,
    room: int,
    epoch: int,
    remaining: float,
    emitted: list[int],
    prefill: Address | None,
    local: bool,
) -> Start:
    """One leg's message. Sampling stays as it was asked for: the split between prompt and answer moves instead.
    `remaining`: seconds."""
    sampling = ask.sampling
    if emitted and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # the first attempt has told them
    return Start(
        rid=rid,
        router_epoch=epoch,
        room=room,
        token_ids=(*ask.token_ids, *emitted),
        sampling=sampling,
        deadline_ms=max(1, int(remaining * 1000)),
        prefill=prefill,
        priority=ask.priority,
        group="" if emitted else ask.group,
        tenant=ask.tenant,
        salt=ask.salt,
        resumed=len(emitted),
        local=local,
    )
