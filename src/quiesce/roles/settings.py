"""What one process of Quiesce is told when it starts. Plain values, checked once; no torch, no sockets."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quiesce.channel.private import is_loopback
from quiesce.channel.tls import Certificates

Role = Literal["prefill", "decode", "colocated"]
Dtype = Literal["bfloat16", "float32"]
Expiry = Literal["hold", "release"]
LogFormat = Literal["text", "json"]
Reserve = Literal["early", "late"]
ToolCallParser = Literal["auto", "hermes", "llama3_json", "mistral"]
Policy = Literal["round-robin", "least-loaded"]
Failover = Literal["never", "exact", "always"]
Quantization = Literal["none", "int8", "int4"]
NativeLevel = Literal["auto", "off", "avx512bf16", "avx512", "avx2", "base"]
AttentionBackend = Literal["auto", "flashinfer", "triton", "torch"]
Direction = Literal["push", "pull"]


WILDCARDS = ("tcp://*", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::")
WITHIN_ONE_HOST = ("shm", "null")  # transports that never leave it


def new_epoch() -> int:
    """64 random bits, never 0: one process life."""
    return secrets.randbits(64) | 1


class SettingsError(ValueError):
    """A setting that cannot work. The text names the option, the value and the limit."""


def _within(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise SettingsError(f"{option} must be between {low:.12g} and {high:.12g}, not {value:.12g}.")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """One engine process. Sizes are in tokens, times in seconds. Raises SettingsError."""

    role: Role
    name: str  # unique in the cluster; `<name>.key` proves it
    model: Path  # a local Hugging Face folder
    served_model_name: str

    registry: str  # the router's endpoint, e.g. ipc:///run/user/0/quiesce-1/registry
    registry_public_key: str  # z85
    keys: Path  # folder: `<name>.key` (both halves), `ring/<peer>.pub`
    run_dir: Path  # sockets live here; must be private to this user
    bind: str = ""  # control socket; empty: a fresh socket file in run_dir. Across hosts: tcp://host:*
    epoch: int = field(default_factory=new_epoch)

    device: str = "cpu"
    dtype: Dtype = "bfloat16"
    deterministic: bool = False
    threads: int = 1
    quantization: Quantization = "none"
    native_level: NativeLevel = "auto"
    attention_backend: AttentionBackend = "auto"  # of devices; named on the CPU, of the plain step
    cuda_graphs: bool = True
    context_length: int | None = None  # None: the model's own
    page_size: int = 16
    max_total_tokens: int = 65536  # size of the KV pool
    chunked_prefill_size: int = 512
    max_running: int = 64
    max_queued: int = 512
    schedule_conservativeness: float = 1.0  # share of what running answers may still need that admission keeps free

    transfer: str = "shm"  # engine, or engine/lane; auto: for each peer the best that both have
    transfer_bind: str = ""  # own address that peers on other hosts reach; empty: this host only
    transfer_tls_cert: Path | None = None  # PEM files, for tcp: all three or none
    transfer_tls_key: Path | None = None
    transfer_tls_ca: Path | None = None
    allow_open_transfer: bool = False  # pages travel to other hosts as they are, for everybody on the way to read
    max_transfer_pages: int = 256  # of one post (guard L8)
    direction: Direction = "push"  # who moves the pages: prefill writes them, or decode reads them
    allow_unproven: bool = False  # serve with a transport that cannot prove that what was posted has ended
    reserve: Reserve = "early"  # when decode takes pages: with the request, or when prefill's queue has reached it
    strict_disaggregation: bool = False  # decode computes no prompt, whatever the router asks for
    hold_timeout: float = 30.0  # then a fence is asked for; time alone never frees a page
    max_held: float = 0.4  # share of the pool that holds may have before new work is refused
    max_held_per_tenant: float = 0.5  # of that: what one tenant's holds may have
    max_retained: float = 0.25  # share of the pool; above it the worker drains and restarts
    on_hold_expiry: Expiry = "hold"
    drain_timeout: float = 10.0
    log_level: str = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum() or len(self.name) > 40:
            raise SettingsError(f"--name must be 1 to 40 letters, digits, - or _, not {self.name!r}.")
        _within("--page-size", self.page_size, 1, 1024)
        _within("--max-total-tokens", self.max_total_tokens, 2 * self.page_size, 1 << 31)
        _within("--chunked-prefill-size", self.chunked_prefill_size, 1, 1 << 20)
        _within("--max-running-requests", self.max_running, 1, 65_536)
        if self.context_length is not None:
            _within("--context-length", self.context_length, 2, 1 << 24)
        _within("--max-queued-requests", self.max_queued, 1, 1 << 20)
        _within("--schedule-conservativeness", self.schedule_conservativeness, 0.0, 1.0)
        _within("--max-transfer-pages", self.max_transfer_pages, 1, 8192)
        _within("--threads", self.threads, 1, 1024)
        _within("--hold-timeout", self.hold_timeout, 0.05, 86_400)
        _within("--max-held", self.max_held, 0.01, 1.0)
        _within("--max-held-per-tenant", self.max_held_per_tenant, 0.01, 1.0)
        _within("--max-retained", self.max_retained, 0.0, 1.0)
        _within("--drain-timeout", self.drain_timeout, 0.0, 86_400)
        tls = (self.transfer_tls_cert, self.transfer_tls_key, self.transfer_tls_ca)
        if any(tls) and not all(tls):
            raise SettingsError("--transfer-tls-cert, --transfer-tls-key and --transfer-tls-ca need each other.")
        if self.bind.startswith(WILDCARDS):
            raise SettingsError(f"--bind must name the address that others reach this worker at, not {self.bind}.")
        if self.leaves_host_open(self.transfer):
            self._refuse_open_transfer()
        if not 0 < self.epoch < 1 << 64:
            raise SettingsError(f"--epoch must be 64 bits and not 0, not {self.epoch:#x}.")

    def leaves_host_open(self, engine: str) -> bool:
        """Whether other hosts would reach its pages by an engine that cannot encrypt, or was not told how."""
        if self.allow_open_transfer or not self.transfer_bind or is_loopback(self.transfer_bind):
            return False
        encrypts = engine in ("tcp", "auto") and self.transfer_tls_cert is not None
        return not encrypts and engine not in WITHIN_ONE_HOST

    def _refuse_open_transfer(self) -> None:
        at = f"--transfer-bind {self.transfer_bind} lets other hosts reach this worker's pages"
        how = "give --keys a folder that `quiesce keys` made, or --transfer-tls-cert, -key and -ca"
        if self.transfer not in ("tcp", "auto"):
            how = f"{self.transfer} encrypts nothing: use --transfer tcp with keys"
        raise SettingsError(
            f"{at}, and what is in them would travel as it is: {how}. --allow-open-transfer takes that risk, for a "
            "network on which everybody may read every prompt."
        )


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """The process in front. Times in seconds. Raises SettingsError."""

    model: Path  # tokenizer and chat template are read from here
    served_model_name: str
    keys: Path  # folder: `router.key` (both halves), `ring/<worker>.pub`
    registry: str  # where workers register, e.g. ipc:///run/user/0/quiesce-1/registry or tcp://0.0.0.0:29500
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    max_inflight: int = 1024  # requests; the next one is answered 503
    max_body: int = 8 << 20  # bytes of one HTTP request
    tool_call_parser: ToolCallParser = "auto"  # how the model writes tool calls
    api_keys: Path | None = None  # None: everybody may ask
    worker_ports: tuple[tuple[str, int], ...] = ()  # (worker, HTTP port that stands for it)
    worker_hosts: tuple[str, ...] = ()  # names by which other routers know this machine
    request_timeout: float = 600.0
    tls_cert: Path | None = None  # PEM files, for every HTTP port; the authority's: clients must show a certificate
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    allow_open_http: bool = False  # listen beyond this machine without TLS, or for everybody
    admin: str = ""  # where operators speak to it: unix:///path or 127.0.0.1:port; empty: nowhere
    admin_key: Path | None = None  # file; for a TCP port
    hold_timeout: float = 30.0  # a worker silent for so long loses its requests; the same as the workers'
    drain_timeout: float = 10.0
    policy: Policy = "least-loaded"
    retries: int = 2  # attempts beyond the first, before the first token
    failover: Failover = "exact"  # which answers go on at another worker after their first token
    local_prefill_below: int = 0  # prompts of fewer tokens are computed on decode; 0: none
    breaker_failures: int = 5  # in a row; 0: never
    breaker_seconds: float = 5.0
    log_level: str = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        _within("--retries", self.retries, 0, 16)
        _within("--local-prefill-below", self.local_prefill_below, 0, 1 << 24)
        _within("--breaker-failures", self.breaker_failures, 0, 64)
        _within("--breaker-seconds", self.breaker_seconds, 0.05, 3600)
        _within("--port", self.port, 0, 65535)
        ports = [port for _, port in self.worker_ports]
        for name, port in self.worker_ports:
            _within(f"--http-port {name}", port, 1, 65535)
        if len({*ports, self.port}) < len(ports) + 1:
            raise SettingsError("--http-port: every worker needs a port of its own, and not the router's.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingsError("--tls-cert and --tls-key need each other.")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise SettingsError("--tls-client-ca needs --tls-cert and --tls-key.")
        if not is_loopback(self.host) and not self.allow_open_http:
            self._refuse_open_http()
        _within("--max-inflight", self.max_inflight, 1, 1 << 20)
        _within("--max-body", self.max_body, 1024, 1 << 30)
        _within("--request-timeout", self.request_timeout, 0.1, 86_400)
        _within("--hold-timeout", self.hold_timeout, 0.05, 86_400)
        _within("--drain-timeout", self.drain_timeout, 0.0, 86_400)

    @property
    def tls(self) -> Certificates | None:
        return Certificates.named(self.tls_cert, self.tls_key, self.tls_client_ca)

    def _refuse_open_http(self) -> None:
        at = f"--host {self.host or '(all addresses)'} lets other machines reach this server"
        risk = "--allow-open-http takes that risk, behind a proxy that does both, say."
        if self.tls_cert is None:
            how = "give --keys a folder that `quiesce keys` made, or --tls-cert and --tls-key"
            raise SettingsError(f"{at}, and every prompt would travel as it is: {how}. {risk}")
        if self.tls_client_ca is None and self.api_keys is None:
            raise SettingsError(
                f"{at}, and everybody may ask: give --tls-client-ca, so that clients show a certificate, or "
                f"--api-keys. {risk}"
            )
