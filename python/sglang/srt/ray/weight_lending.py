"""A rank hands its live weights to the same rank of another engine: how a newcomer gets the published version.

The other half is `weight_sync.receiver`, unchanged: the newcomer can't tell a peer from a trainer. Runs on the rank's
`weights` thread, where its own pulls run too, so nothing can change the weights while they are read.
"""

from __future__ import annotations

from typing import Any

import ray

from sglang.srt.ray.weight_sync import transports
from sglang.srt.ray.weight_sync.digest import algorithm_for, tensor_digest
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    EngineTornError,
    TransferError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.layout import WeightLayout
from sglang.srt.ray.weight_sync.ledger import PullReport

_ANSWER_MARGIN_S = 2.0


def send_weights(
    scheduler: Any, receiver: Any, *, transaction: str, deadline_s: float
) -> PullReport:
    """Have `receiver` (a SchedulerActor handle) pull every parameter of this rank, verified.

    Args:
        transaction: what the receiver's engine has open.
        deadline_s: for the transfer, in seconds.

    Raises:
        EngineTornError: this rank's weights are being written.
        WeightSyncError: whatever the receiver refuses or fails with; its engine then says in what state it is.
    """
    if scheduler.weight_updater._session is not None:
        raise EngineTornError("this rank's weights are being written: it can't lend them now")
    model = scheduler.tp_worker.model_runner.model
    layout = WeightLayout.of_model(model)
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    algorithm = algorithm_for([layout.device])
    digests = {name: tensor_digest(data, algorithm) for name, data in parameters.items()}
    ref = transports.put(list(parameters.values()))
    call = receiver.commit_weights.remote(
        transaction, layout.fingerprint, [ref], list(parameters), digests, deadline_s
    )
    try:
        report: PullReport = ray.get(call, timeout=deadline_s + _ANSWER_MARGIN_S)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceededError(
            f"the newcomer had not pulled the weights after {deadline_s:g} s", phase="wire"
        ) from error
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, WeightSyncError):
            raise cause from error
        raise TransferError(f"the newcomer failed: {error}", phase="wire") from error
    return report
