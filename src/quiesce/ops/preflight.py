"""What `quiesce serve` refuses before it starts anything, in one sentence."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from quiesce.api.access import read_keys
from quiesce.channel.tls import Certificates
from quiesce.core.admission import refuse_pool
from quiesce.engine.context import context_of, raw_config
from quiesce.options import ClusterOptions, EngineOptions, HandOffOptions, HttpOptions, SizeOptions
from quiesce.options_router import RoutingOptions
from quiesce.roles.settings import SettingsError

MOST_WORKERS = 64
BYTES = {"bfloat16": 2, "float32": 4}


def check_cluster(cluster: ClusterOptions) -> None:
    """Raises SettingsError."""
    if cluster.colocated:
        if (cluster.prefill, cluster.decode) != (1, 1):
            raise SettingsError("--colocated runs one engine without a hand-off: leave out --prefill and --decode.")
        return
    for option, count in (("--prefill", cluster.prefill), ("--decode", cluster.decode)):
        if not 1 <= count <= MOST_WORKERS:
            raise SettingsError(f"{option} must be between 1 and {MOST_WORKERS}, not {count}.")


def check_routing(routing: RoutingOptions, hand_off: HandOffOptions) -> None:
    """Raises SettingsError."""
    if hand_off.strict_disaggregation and routing.local_prefill_below:
        raise SettingsError(
            "--strict-disaggregation says that decode computes no prompt and --local-prefill-below "
            f"{routing.local_prefill_below} that it does: leave out one of them."
        )


def check_model(
    folder: Path, sizes: SizeOptions, engine: EngineOptions, workers: int, *, colocated: bool = False
) -> None:
    """The sizes against each other, the model and this machine (guard D3). Raises SettingsError."""
    config = _config(folder)
    own = context_of(config)
    if sizes.context_length is not None and own is not None and sizes.context_length > own:
        raise SettingsError(f"--context-length is {sizes.context_length} but the model's own limit is {own} tokens.")
    context = sizes.context_length or own
    pool = sizes.pool_tokens(own) // sizes.page_size * sizes.page_size
    if context is not None and (refusal := refuse_pool(context, pool, "KV")) is not None:
        raise SettingsError(refusal[0].upper() + refusal[1:])
    if engine.device == "cpu" or not colocated:  # a device pool's pages lie once more in host memory, to be moved
        _check_memory(config, pool, engine, workers)


def check_keys(file: Path | None) -> None:
    """Raises SettingsError for a file of API keys that cannot be used."""
    if file is not None:
        try:
            read_keys(file)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--api-keys: {error}.") from error


def certificates(http: HttpOptions) -> Certificates | None:
    """Those of HTTPS; None: it is plain HTTP."""
    return Certificates.named(http.tls_cert, http.tls_key, http.tls_client_ca)


def check_tls(http: HttpOptions) -> None:
    """Raises SettingsError for certificates that cannot be used."""
    if (found := certificates(http)) is not None:
        try:
            found.try_out()
        except ValueError as error:
            raise SettingsError(f"--tls-cert: {error}.") from error


def _config(folder: Path) -> dict[str, Any]:
    try:
        return raw_config(folder)
    except (OSError, ValueError) as error:
        raise SettingsError(f"The model's {folder / 'config.json'} cannot be read: {error}.") from error


def _check_memory(config: dict[str, Any], pool: int, engine: EngineOptions, workers: int) -> None:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    layers, kv_heads = config.get("num_hidden_layers"), config.get("num_key_value_heads", heads)
    if not (isinstance(heads, int) and isinstance(hidden, int) and isinstance(layers, int)) or heads < 1:
        return  # not a shape that is known here: the engine will say what it cannot run
    head_dim = config.get("head_dim") or hidden // heads
    need = workers * pool * layers * 2 * (kv_heads or heads) * head_dim * BYTES[engine.dtype]
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        raise SettingsError(
            f"{workers} KV pools of {pool} tokens{'' if engine.device == 'cpu' else ', mirrored in host memory,'} "
            f"need {need / 2**30:.1f} GiB and this machine has "
            f"{have / 2**30:.1f} GiB: lower --max-total-tokens."
        )


def choose_port(host: str, port: int) -> int:
    """The port, a free one for 0. Raises SettingsError when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise SettingsError(f"Cannot listen on {host} port {port}: {error.strerror or error}.") from error
