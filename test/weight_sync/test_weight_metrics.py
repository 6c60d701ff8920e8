"""What the metrics say after syncs that came through, failed early, and tore the engine."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY

from sglang.srt.ray.weight_metrics import WeightMetrics
from sglang.srt.ray.weight_sync.ledger import PullReport, RankStatus
from sglang.srt.ray.weight_sync.states import WeightState


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"sglang_weight_sync_{name}", labels) or 0.0


def proved_rank(rank: int) -> RankStatus:
    report = PullReport(
        rank=rank, total_bytes=3_000_000_000, wire_seconds=1.5, verify_seconds=0.2, verified=True
    )
    return RankStatus(
        rank=rank,
        transaction="t",
        session_open=False,
        written=True,
        in_flight=False,
        failure=None,
        report=report,
        tensors_written=1,
        tensors_total=1,
    )


def ended(metrics: WeightMetrics, outcome: str, state: WeightState, ranks: Any = ()) -> None:
    metrics.ended(outcome, state, step_seconds={"end": 0.5}, pause_seconds=2.0, ranks=ranks)


def test_each_outcome_bytes_speeds_and_torn_are_told(ray_address: str):
    metrics = WeightMetrics(own_endpoint=True)
    before = {outcome: value("syncs_total", outcome=outcome) for outcome in ("committed", "torn")}
    ended(metrics, "committed", WeightState.SERVING, [proved_rank(0), proved_rank(1)])
    assert value("syncs_total", outcome="committed") == before["committed"] + 1
    assert value("bytes_total", rank="1") >= 3e9
    assert value("gigabytes_per_second", rank="1") == 2.0
    assert value("pause_seconds_sum") >= 2.0
    assert value("rank_seconds_count", phase="verify", rank="0") >= 1
    ended(metrics, "torn", WeightState.TORN)
    assert (value("torn"), value("syncs_total", outcome="torn")) == (1.0, before["torn"] + 1)
    metrics.mended()
    assert value("torn") == 0.0
    WeightMetrics(own_endpoint=True)  # a second engine of this process shares the registry
