"""The options of `quiesce plan`. Imports nothing heavy: the command line reads it whenever it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

WORKLOAD = Group("Workload", sort_key=1)
CLUSTER = Group("Cluster", sort_key=2)
HOLDS = Group("Holds", sort_key=3)
OUTPUT = Group("Output", sort_key=4)


@Parameter(name="*")
@dataclass(frozen=True)
class Workload:
    trace: Annotated[
        Path | None,
        Parameter(
            group=WORKLOAD,
            help="Trace, one JSON object a line with timestamp (ms), input_length and output_length (tokens), as "
            "Mooncake publishes them. Its order and lengths are used; repeated when --requests is more.",
        ),
    ] = None
    rate: Annotated[
        float | None,
        Parameter(group=WORKLOAD, help="Requests a second. By default the trace's own; 10 without a trace."),
    ] = None
    requests: Annotated[
        int | None,
        Parameter(group=WORKLOAD, help="How many to simulate. By default all of the trace; 20,000 without one."),
    ] = None
    prompt: Annotated[
        str,
        Parameter(
            group=WORKLOAD,
            help="Prompt tokens without a trace: fixed:N, uniform:LOW,HIGH, exponential:MEAN or "
            "lognormal:MEDIAN,SIGMA.",
        ),
    ] = "lognormal:6909,1.1"
    answer: Annotated[str, Parameter(group=WORKLOAD, help="Answer tokens without a trace, likewise.")] = (
        "exponential:350"
    )
    context_length: Annotated[int, Parameter(group=WORKLOAD, help="Longer requests are cut to this.")] = 131_072
    abort_rate: Annotated[float, Parameter(group=WORKLOAD, help="Share of requests whose client leaves early.")] = 0.1
    abort_after: Annotated[
        float, Parameter(group=WORKLOAD, help="Seconds after which such a client leaves, mean (exponential).")
    ] = 5.0
    seed: Annotated[int, Parameter(group=WORKLOAD, help="The same seed gives the same figures.")] = 1


@Parameter(name="*")
@dataclass(frozen=True)
class Cluster:
    prefill: Annotated[
        int | None, Parameter(group=CLUSTER, help="Prefill workers. By default as many as the workload needs.")
    ] = None
    decode: Annotated[int | None, Parameter(group=CLUSTER, help="Decode workers, likewise.")] = None
    target: Annotated[
        float, Parameter(group=CLUSTER, help="Share of its capacity that a worker is to be used at most.")
    ] = 0.7
    page_size: Annotated[int, Parameter(group=CLUSTER, help="Tokens of one KV page.")] = 16
    page_bytes: Annotated[int, Parameter(group=CLUSTER, help="Bytes of one KV page.")] = 2 << 20
    prefill_pages: Annotated[int, Parameter(group=CLUSTER, help="Pages in a prefill worker's pool.")] = 32_768
    decode_pages: Annotated[int, Parameter(group=CLUSTER, help="Pages in a decode worker's pool.")] = 65_536
    max_running_requests: Annotated[int, Parameter(group=CLUSTER, help="Requests of one decode worker.")] = 64
    prefill_speed: Annotated[
        float, Parameter(group=CLUSTER, help="Prompt tokens a second that one prefill worker computes.")
    ] = 20_000.0
    decode_speed: Annotated[float, Parameter(group=CLUSTER, help="Answer tokens a second of one request.")] = 40.0
    chunked_prefill_size: Annotated[int, Parameter(group=CLUSTER, help="Prompt tokens computed in one step.")] = 2048
    transport: Annotated[
        float, Parameter(group=CLUSTER, help="GB/s that one prefill worker writes into decode workers.")
    ] = 10.0
    post_window: Annotated[int, Parameter(group=CLUSTER, help="Chunks that one hand-off keeps under way.")] = 4


@Parameter(name="*")
@dataclass(frozen=True)
class Holds:
    ack_latency: Annotated[
        float, Parameter(group=HOLDS, help="Milliseconds from ABORT to its answer when nothing is under way.")
    ] = 10.0
    loss: Annotated[
        float, Parameter(group=HOLDS, help="Share of ABORTs or their answers that get lost; they are repeated.")
    ] = 0.0
    hold_timeout: Annotated[
        float, Parameter(group=HOLDS, help="Seconds without an answer after which a fence is asked for.")
    ] = 30.0
    fence: Annotated[
        float, Parameter(group=HOLDS, help="Seconds that a fence takes, where the transport has one.")
    ] = 0.1
    fence_disrupts: Annotated[
        bool,
        Parameter(
            group=HOLDS,
            negative="",
            help="A fence is the death of what writes for a prefill worker (shm), so that all its open hand-offs "
            "fail; otherwise it is of the pages in question (tcp).",
        ),
    ] = False
    max_retained: Annotated[
        float, Parameter(group=HOLDS, help="Share of a pool kept without proof above which a worker restarts.")
    ] = 0.25
    drain_timeout: Annotated[
        float, Parameter(group=HOLDS, help="Seconds that running requests get before such a restart.")
    ] = 10.0
    restart: Annotated[float, Parameter(group=HOLDS, help="Seconds until a restarted worker serves again.")] = 30.0
    storm: Annotated[
        float, Parameter(group=HOLDS, help="Abort storm: share of all requests whose clients leave within it.")
    ] = 0.5
    storm_seconds: Annotated[float, Parameter(group=HOLDS, help="How long the storm lasts.")] = 10.0
    outage: Annotated[
        float | None,
        Parameter(group=HOLDS, help="Seconds from a storm's begin that no ABORT is answered. By default to the end."),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True)
class Output:
    plot: Annotated[
        list[Path] | None,
        Parameter(group=OUTPUT, help="Draw the curves into this .png or .svg (needs the extra `plot`); repeatable."),
    ] = None
    json: Annotated[Path | None, Parameter(group=OUTPUT, help="Write every figure here.")] = None
    check: Annotated[
        bool,
        Parameter(
            group=OUTPUT,
            negative="",
            help="Compare four small clusters with `quiesce sim`, not only two: also lost messages and a small pool.",
        ),
    ] = False
