"""A rank's side of the bootstrap server: say who it is, and offer its memory to other instances where the fabric can.

Ranks of a Ray engine are asked through their actor handles instead (`engine_info_server.py`), so only ranks that are
plain processes send anything from here. What is sent is small and local; what may fail is waited for with a deadline.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.engine_info import BootstrapAddress
from sglang.srt.distributed.rank_parallelism import RankParallelismConfig
from sglang.srt.entrypoints.engine_info_server import RankKey
from sglang.srt.runtime_context import (
    get_device,
    get_model,
    get_parallel,
    get_server_args,
    get_serving,
)

logger = logging.getLogger(__name__)

REGISTRATION_TIMEOUT_S = 30.0
_REQUEST_TIMEOUT_S = 5.0
_RETRY_S = 0.5
_registered: set[tuple[str, RankKey]] = set()


class RegistrationError(RuntimeError):
    """A rank could not tell the bootstrap server about itself."""


def this_rank() -> RankKey:
    """The rank that the calling scheduler process is."""
    parallel = get_parallel()
    replica = parallel.dp_rank if parallel.dp_size > 1 else 0
    return RankKey(dp_rank=replica or 0, pp_rank=parallel.pp_rank, tp_rank=parallel.tp_rank)


def register_this_rank() -> None:
    """Send this rank's parallelism, once a process: a draft model's runner is on the same rank.

    Called by the model runner when the model has been loaded.

    Raises:
        RegistrationError: the server could not be reached in time, or refused.
    """
    if not get_server_args().registers_parallelism_config() or get_device().use_ray:
        return
    key, url = this_rank(), _bootstrap_url()
    if (url, key) in _registered:
        return
    config = RankParallelismConfig.of_this_process().to_dict()
    _put(f"{url}/register_parallelism_config", key, {"parallelism_config": config})
    _registered.add((url, key))


def seed_through(transporter: Any) -> None:
    """Register the model's memory for other instances to load from, and tell the bootstrap server.

    Where the fabric can't do that (EFA, no verbs), this engine is no seed and everything else goes on.

    Args:
        transporter: upstream's `RemoteInstanceWeightTransporter`, whose engine has been initialized.
    """
    from sglang.srt.model_loader.remote_instance_weight_loader_utils import register_memory_region

    try:
        regions = register_memory_region(  # type: ignore[no-untyped-call]
            transporter.model, transporter.engine
        )
    except (RuntimeError, OSError, AssertionError) as error:
        _warn_no_seed("its memory could not be registered", error)
        return
    transporter.weight_info = regions
    info = {"session_id": transporter.session_id, "weights_info_dict": regions}
    url = f"{_bootstrap_url()}/register_transfer_engine_info"
    try:
        _put(url, this_rank(), {"transfer_engine_info": info})
    except RegistrationError as error:
        _warn_no_seed("the bootstrap server does not know its memory", error)


def without_a_fabric_no_seed(init_engine: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorates the transporter's `init_engine`: to seed is optional, to load from a remote instance is not."""

    @functools.wraps(init_engine)
    def init_or_warn(transporter: Any) -> None:
        try:
            init_engine(transporter)
        except (RuntimeError, OSError) as error:
            if get_model().load_format == "remote_instance":
                raise
            transporter.engine = None
            _warn_no_seed("the transfer engine could not be initialized", error)

    return init_or_warn


def _warn_no_seed(what: str, error: BaseException) -> None:
    logger.warning(
        "%s can't seed other instances: %s: %s: %s. Loading, serving and RDT weight sync are not affected.",
        this_rank(),
        what,
        type(error).__name__,
        error,
    )


def _bootstrap_url() -> str:
    parallel = get_parallel()
    return BootstrapAddress.of(
        host=get_serving().host,
        port=get_model().engine_info_bootstrap_port,
        nnodes=parallel.nnodes,
        dist_init_addr=parallel.dist_init_addr,
    ).url


def _put(url: str, key: RankKey, body: dict[str, Any]) -> None:
    """PUT until it is answered or the deadline is over; a refusal is final."""
    import requests

    payload = {"dp_rank": key.dp_rank, "pp_rank": key.pp_rank, "tp_rank": key.tp_rank, **body}
    deadline = time.monotonic() + REGISTRATION_TIMEOUT_S
    while True:
        try:
            answer = requests.put(url, json=payload, timeout=_REQUEST_TIMEOUT_S)
            break
        except requests.exceptions.RequestException as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise RegistrationError(
                    f"{key!r} could not register at {url} within {REGISTRATION_TIMEOUT_S:g} s: {error}"
                ) from error
        time.sleep(_RETRY_S)
    if answer.status_code != 200:
        raise RegistrationError(
            f"{key!r} was refused at {url} with status {answer.status_code}: {answer.text}"
        )
