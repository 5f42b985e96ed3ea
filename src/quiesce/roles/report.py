"""What a worker reports of itself: metric samples under the field's names, for the router's /metrics."""

from __future__ import annotations

from quiesce.core.borrower import Borrower
from quiesce.core.ledger import Ledger
from quiesce.core.lender import Lender
from quiesce.core.messages import Sample
from quiesce.roles.generation import Generation
from quiesce.roles.legs import Legs
from quiesce.roles.sequence import Batch

OUTCOMES = ("completed", "drained", "never_started", "fenced", "gone", "unsound")


def gauge(name: str, text: str, value: float, **labels: str) -> Sample:
    return Sample(f"quiesce:{name}", "gauge", text, tuple(labels.items()), float(value))


def counter(name: str, text: str, value: float, **labels: str) -> Sample:
    return Sample(f"quiesce:{name}", "counter", text, tuple(labels.items()), float(value))


def ledger_samples(ledger: Ledger) -> list[Sample]:
    census = ledger.census()
    states = ("free", "owned", "cached", "held", "retained")
    samples = [gauge("kv_pages", "KV pages by state", getattr(census, state), state=state) for state in states]
    samples += [
        counter("lease_closed_total", "Leases closed, by proof", ledger.closed_by[outcome], outcome=outcome)
        for outcome in OUTCOMES
    ]
    return [
        *samples,
        counter("lease_opened_total", "Leases opened", ledger.opened),
        counter("lease_stale_total", "Proofs that fitted no open lease", ledger.stale),
    ]


def leg_samples(legs: Legs, batch: Batch, prompt_tokens_computed: int) -> list[Sample]:
    return [
        counter("prompt_tokens_computed_total", "Prompt tokens this engine computed", prompt_tokens_computed),
        counter("requests_started_total", "Legs that arrived at this worker", legs.started),
        gauge("num_running_reqs", "Requests in the running batch", len(batch)),
        gauge("num_queue_reqs", "Requests at this worker that are not in the batch", len(legs) - len(batch)),
        *(
            counter("requests_ended_total", "Legs that ended, by outcome", count, outcome=outcome)
            for outcome, count in sorted(legs.ended.items())
        ),
    ]


def lender_samples(lender: Lender, ledger: Ledger) -> list[Sample]:
    holds = sum(1 for transfer in lender.transfers.values() if transfer.state.value in ("holding", "quarantine"))
    return [
        *(
            counter(
                "decode_deferred_kv_release_total",
                "Leases of remote writers closed, by proof",
                ledger.closed_by[outcome],
                outcome=outcome,
            )
            for outcome in OUTCOMES
        ),
        gauge("num_decode_deferred_kv_release_reqs", "Transfers given up whose pages are held for a proof", holds),
        gauge("num_decode_transfer_queue_reqs", "Transfers under way", len(lender.transfers) - holds),
        counter("stale_messages_dropped_total", "Hand-off messages about nothing that is open", lender.stale),
    ]


def borrower_samples(borrower: Borrower) -> list[Sample]:
    return [
        counter("transfer_taints_total", "Posts that ended UNKNOWN", borrower.taints),
        gauge("num_prefill_inflight_queue_reqs", "Transfers this engine has records of", borrower.known),
        counter("stale_messages_dropped_total", "Hand-off messages about nothing that is open", borrower.stale),
        *(
            counter("prefill_transfers_total", "Transfers that ended here, by outcome", count, outcome=outcome)
            for outcome, count in sorted(borrower.ended.items())
        ),
    ]


def generation_samples(generation: Generation) -> list[Sample]:
    return [
        gauge("num_retracted_reqs", "Requests retracted and waiting to resume", len(generation.retracted)),
        counter(
            "num_retractions_total", "Times a request gave its pages back under pressure", generation.retractions
        ),
    ]
