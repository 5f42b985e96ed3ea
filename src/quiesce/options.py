"""The options of the command line: what each is called, its default, its unit and what it is for.

A group of options is a dataclass; `arguments` turns one back into the words of a command line, which is how
`quiesce serve` hands its own options on to the processes that it starts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from quiesce.core.admission import pages_for
from quiesce.roles.settings import (
    AttentionBackend,
    Direction,
    Dtype,
    Expiry,
    LogFormat,
    NativeLevel,
    Quantization,
    Reserve,
    ToolCallParser,
)

SUPERVISED = "QUIESCE_SUPERVISED"  # set for the children of `serve`: it has read environment and file for them

# A pool's memory is all taken when a worker starts: by default that of a context, within these.
LEAST_POOL, LARGEST_DEFAULT_POOL = 20_480, 65_536  # tokens

LogLevel = Literal["debug", "info", "warning", "error"]

CLUSTER = Group("Cluster", sort_key=1)
HTTP = Group("HTTP", sort_key=2)
SIZES = Group("Sizes", sort_key=3)
ENGINE = Group("Engine", sort_key=4)
HAND_OFF = Group("Hand-off", sort_key=5)
PROCESS = Group("Process", sort_key=6)
WIRING = Group("Wiring (what `quiesce serve` does by itself)", sort_key=7)


@Parameter(name="*")
@dataclass(frozen=True)
class ClusterOptions:
    prefill: Annotated[int, Parameter(group=CLUSTER, help="Prefill workers to run.")] = 1
    decode: Annotated[int, Parameter(group=CLUSTER, help="Decode workers to run.")] = 1
    colocated: Annotated[
        bool,
        Parameter(
            group=CLUSTER,
            negative="",
            help="One engine does prefill and decode, without a hand-off. Excludes --prefill and --decode.",
        ),
    ] = False
    served_model_name: Annotated[
        str | None,
        Parameter(group=CLUSTER, help="Name that clients ask for. By default MODEL, or its folder's name."),
    ] = None
    start_timeout: Annotated[
        float,
        Parameter(group=CLUSTER, help="Seconds within which a worker must be ready, else it is restarted."),
    ] = 300.0


@Parameter(name="*")
@dataclass(frozen=True)
class HttpOptions:
    host: Annotated[str, Parameter(group=HTTP, help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1"
    port: Annotated[int, Parameter(group=HTTP, help="TCP port; 0 takes a free one and says which.")] = 8000
    max_inflight: Annotated[
        int, Parameter(group=HTTP, help="Requests in the system; one more is answered 503 with Retry-After.")
    ] = 1024
    max_body: Annotated[int, Parameter(group=HTTP, help="Bytes that one request's body may have.")] = 8 << 20
    request_timeout: Annotated[
        float, Parameter(group=HTTP, help="Seconds from a request's arrival to its last byte.")
    ] = 600.0
    http_port: Annotated[
        str | None,
        Parameter(
            group=HTTP,
            help="Ports of single workers, for other PD routers that speak SGLang's dialect: "
            "prefill-0=31001,decode-0=31002. A prefill worker's bootstrap port is its port here.",
        ),
    ] = None
    http_hosts: Annotated[
        str | None,
        Parameter(
            group=HTTP, help="Names by which those routers know this machine, besides --host and loopback: a,b."
        ),
    ] = None
    api_keys: Annotated[
        Path | None,
        Parameter(
            group=HTTP,
            help="TOML file with a [[key]] for each API key: tenant, key or sha256, and quotas. Without it everybody "
            "who reaches the port may ask.",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        Parameter(
            group=HTTP,
            help="Certificate for HTTPS, a PEM file. `quiesce keys` makes some; docs/security.md tells how.",
        ),
    ] = None
    tls_key: Annotated[Path | None, Parameter(group=HTTP, help="Its private key, readable by its owner alone.")] = (
        None
    )
    tls_client_ca: Annotated[
        Path | None,
        Parameter(
            group=HTTP,
            help="Clients must show a certificate of this authority. --tls-cert must be one too: our probes show it.",
        ),
    ] = None
    allow_open_http: Annotated[
        bool,
        Parameter(
            group=HTTP,
            help="Listen beyond this machine without TLS, or for everybody. Without this it is refused.",
        ),
    ] = False
    tool_call_parser: Annotated[
        ToolCallParser,
        Parameter(
            group=HTTP,
            help="How the model writes tool calls: hermes (Qwen too), llama3_json or mistral; auto goes by its chat "
            "template.",
        ),
    ] = "auto"


@Parameter(name="*")
@dataclass(frozen=True)
class SizeOptions:
    context_length: Annotated[
        int | None,
        Parameter(
            group=SIZES,
            help="Tokens of prompt and answer together. By default the model's own; a pool that is smaller "
            "is refused, so lower this to serve a long-context model from a small pool.",
        ),
    ] = None
    page_size: Annotated[int, Parameter(group=SIZES, help="Tokens of one KV page. The same on all workers.")] = 16
    max_total_tokens: Annotated[
        int | None,
        Parameter(
            group=SIZES,
            help="Tokens in each worker's KV pool, whose memory is taken at the start. By default those of the "
            f"context, at least {LEAST_POOL:,} and at most {LARGEST_DEFAULT_POOL:,}.",
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int, Parameter(group=SIZES, help="Prompt tokens computed in one step; their pages leave while the next runs.")
    ] = 512
    max_running_requests: Annotated[int, Parameter(group=SIZES, help="Requests in one batch.")] = 64
    max_queued_requests: Annotated[
        int, Parameter(group=SIZES, help="Requests that a worker holds, waiting ones included.")
    ] = 512
    schedule_conservativeness: Annotated[
        float,
        Parameter(
            group=SIZES,
            help="How much of what running answers may still need is kept free for them: 1, as much as answers "
            "have used lately; 0, nothing. When the pool runs short all the same, the youngest answer gives its "
            "pages back and is computed again later.",
        ),
    ] = 1.0

    def pool_tokens(self, own_context: int | None) -> int:
        """own_context: the model's, where it says one. A context above the largest default needs a pool by name."""
        if self.max_total_tokens is not None:
            return self.max_total_tokens
        page = max(self.page_size, 1)
        context = pages_for(self.context_length or own_context or 0, page) * page
        return min(max(context, LEAST_POOL), LARGEST_DEFAULT_POOL)


@Parameter(name="*")
@dataclass(frozen=True)
class EngineOptions:
    device: Annotated[str, Parameter(group=ENGINE, help="Torch device of every worker: cpu, cuda, cuda:1.")] = "cpu"
    dtype: Annotated[Dtype, Parameter(group=ENGINE, help="Of weights and KV cache.")] = "bfloat16"
    deterministic: Annotated[
        bool,
        Parameter(
            group=ENGINE,
            help="A request's tokens do not depend on what else is in the batch. Free with the native step, slower "
            "without.",
        ),
    ] = False
    threads: Annotated[int, Parameter(group=ENGINE, help="CPU threads of each engine.")] = 1
    quantization: Annotated[
        Quantization,
        Parameter(
            group=ENGINE,
            help="int8: weights as 8-bit numbers, half the memory to read; int4: 5 bits a weight, a third. "
            "Same on all workers.",
        ),
    ] = "none"
    native_level: Annotated[
        NativeLevel,
        Parameter(
            group=ENGINE,
            help="Instruction set of the native CPU step: by default the best one here; off runs plain PyTorch.",
        ),
    ] = "auto"
    attention_backend: Annotated[
        AttentionBackend,
        Parameter(
            group=ENGINE,
            help="Attention on a device: by default the first of flashinfer, triton and torch that is there and "
            "gives the right answer on scratch memory.",
        ),
    ] = "auto"
    cuda_graphs: Annotated[
        bool, Parameter(group=ENGINE, help="On CUDA: replay the decode step as a graph where it can be recorded.")
    ] = True


@Parameter(name="*")
@dataclass(frozen=True)
class HandOffOptions:
    transfer: Annotated[
        str,
        Parameter(
            group=HAND_OFF,
            help="What moves KV pages: shm, shared memory of one machine; tcp; nixl, mooncake or mori, with a lane "
            "as in nixl/cma where one is wanted; the name of an engine that was plugged in; auto, for each pair of "
            "workers the best that both have, shm where they share a machine.",
        ),
    ] = "auto"
    hold_timeout: Annotated[
        float,
        Parameter(
            group=HAND_OFF,
            help="Seconds that pages of an ended request are held for the peer's proof before a fence is asked "
            "for. Time alone never frees them.",
        ),
    ] = 30.0
    on_hold_expiry: Annotated[
        Expiry,
        Parameter(
            group=HAND_OFF,
            help="Without proof and fence: hold keeps the pages; release frees them all the same, which can "
            "corrupt other requests and is counted as unsound.",
        ),
    ] = "hold"
    max_retained: Annotated[
        float,
        Parameter(group=HAND_OFF, help="Share of a pool that may be kept without proof; above it a worker restarts."),
    ] = 0.25
    reserve: Annotated[
        Reserve,
        Parameter(
            group=HAND_OFF,
            help="When decode takes pages for a prompt: early, with the request; late, once prefill's queue has "
            "reached it, so that a long queue there pins no pages here.",
        ),
    ] = "early"
    max_held: Annotated[
        float,
        Parameter(
            group=HAND_OFF,
            help="Share of a pool that pages of ended requests may have while they wait for proof. Above it a "
            "worker refuses new requests (503) until pages come back; what runs goes on.",
        ),
    ] = 0.4
    max_held_per_tenant: Annotated[
        float, Parameter(group=HAND_OFF, help="Share of that which requests of one API key may have.")
    ] = 0.5
    strict_disaggregation: Annotated[
        bool,
        Parameter(
            group=HAND_OFF,
            help="Decode workers compute no prompt, whatever a router asks for; excludes --local-prefill-below.",
        ),
    ] = False
    direction: Annotated[
        Direction,
        Parameter(
            group=HAND_OFF,
            help="Who moves KV pages: push, prefill writes them into decode's pool while it computes; pull, decode "
            "reads them out of prefill's once they are all there. The same on all workers.",
        ),
    ] = "push"
    allow_unproven: Annotated[
        bool,
        Parameter(
            group=HAND_OFF,
            help="Serve over a transport that cannot prove that what was posted has ended. Without this it is "
            "refused; with it, pages may stay retained until a restart, and /health says so.",
        ),
    ] = False
    transfer_bind: Annotated[
        str,
        Parameter(
            group=HAND_OFF,
            help="Address of this host at which workers on other hosts reach its pages; empty: none does.",
        ),
    ] = ""
    max_transfer_pages: Annotated[int, Parameter(group=HAND_OFF, help="Most pages that one post moves.")] = 256
    transfer_tls_cert: Annotated[
        Path | None,
        Parameter(group=HAND_OFF, help="Certificate for TLS on tcp, a PEM file; with -key and -ca, on all workers."),
    ] = None
    transfer_tls_key: Annotated[Path | None, Parameter(group=HAND_OFF, help="Its private key.")] = None
    transfer_tls_ca: Annotated[
        Path | None, Parameter(group=HAND_OFF, help="The authority that must have signed the other side's.")
    ] = None
    allow_open_transfer: Annotated[
        bool,
        Parameter(
            group=HAND_OFF,
            help="Let pages travel to other hosts unencrypted, and with engines that cannot encrypt.",
        ),
    ] = False


@Parameter(name="*")
@dataclass(frozen=True)
class ProcessOptions:
    drain_timeout: Annotated[
        float, Parameter(group=PROCESS, help="Seconds that running requests get to finish after SIGTERM or Ctrl-C.")
    ] = 10.0
    log_level: Annotated[LogLevel, Parameter(group=PROCESS, help="Least severity that is logged.")] = "info"
    log_format: Annotated[
        LogFormat,
        Parameter(group=PROCESS, help="Log lines on stderr: text for people, json one object a line for machines."),
    ] = "text"


def arguments(*groups: Any) -> list[str]:
    """The options as words of a command line, all of them, so that nothing is left to environment or file."""
    words: list[str] = []
    for group in groups:
        for option in fields(group):
            value = getattr(group, option.name)
            flag = "--" + option.name.replace("_", "-")
            if value is None:
                continue
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{option.name.replace('_', '-')}")
            else:
                words.append(f"{flag}={value}")
    return words
