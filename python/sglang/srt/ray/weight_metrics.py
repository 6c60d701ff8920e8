"""Metrics of weight syncs: by outcome, phase and rank; bytes, GB/s, pauses, and whether the engine is torn.

They go to Ray's metrics agent, and to SGLang's own `/metrics` when `--enable-metrics` is on. The fence reports each
change once; nothing here is asked on a hot path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sglang.srt.ray.weight_sync.ledger import RankStatus
from sglang.srt.ray.weight_sync.states import WeightState

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
PREFIX = "sglang_weight_sync"
_Definitions = dict[str, tuple[str, tuple[str, ...]]]
"""Name -> help text and label names."""

COUNTERS: _Definitions = {
    "syncs": ("Weight syncs that ended, by outcome.", ("outcome",)),
    "bytes": ("Bytes of weights that arrived.", ("rank",)),
}
HISTOGRAMS: _Definitions = {
    "phase_seconds": ("Seconds of a step of a sync on the engine.", ("phase",)),
    "rank_seconds": ("Seconds of a rank's transfer and verification.", ("phase", "rank")),
    "pause_seconds": ("Seconds for which a sync kept generation paused.", ()),
}
GAUGES: _Definitions = {
    "gigabytes_per_second": (
        "Speed of a rank's last transfer, in 1e9 bytes per second.",
        ("rank",),
    ),
    "torn": ("1 while the engine's weights are torn and it serves nothing.", ()),
}


class _Sink(Protocol):
    def add(self, name: str, value: float, **labels: str) -> None: ...
    def observe(self, name: str, value: float, **labels: str) -> None: ...
    def set(self, name: str, value: float, **labels: str) -> None: ...


class _RaySink:
    """Through Ray's metrics agent; the process must be connected to Ray."""

    def __init__(self) -> None:
        from ray.util import metrics

        self._all: dict[str, Any] = {}
        for name, (text, labels) in COUNTERS.items():
            self._all[name] = metrics.Counter(f"{PREFIX}_{name}", text, tag_keys=labels)
        for name, (text, labels) in HISTOGRAMS.items():
            self._all[name] = metrics.Histogram(f"{PREFIX}_{name}", text, list(_SECONDS), labels)
        for name, (text, labels) in GAUGES.items():
            self._all[name] = metrics.Gauge(f"{PREFIX}_{name}", text, tag_keys=labels)

    def add(self, name: str, value: float, **labels: str) -> None:
        if value > 0:  # Ray refuses to count nothing
            self._all[name].inc(value, tags=labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._all[name].observe(value, tags=labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._all[name].set(value, tags=labels)


class _PrometheusSink:
    """Through prometheus_client's default registry, which upstream's `/metrics` serves."""

    _made: dict[str, Any] | None = None

    def __init__(self) -> None:
        if _PrometheusSink._made is None:  # one registry a process, whatever engines it had before
            from prometheus_client import Counter, Gauge, Histogram

            made: dict[str, Any] = {}
            for name, (text, labels) in COUNTERS.items():
                made[name] = Counter(f"{PREFIX}_{name}", text, labels)
            for name, (text, labels) in HISTOGRAMS.items():
                made[name] = Histogram(f"{PREFIX}_{name}", text, labels, buckets=_SECONDS)
            for name, (text, labels) in GAUGES.items():
                made[name] = Gauge(f"{PREFIX}_{name}", text, labels, multiprocess_mode="mostrecent")
            _PrometheusSink._made = made
        self._all = _PrometheusSink._made

    def _of(self, name: str, labels: Mapping[str, str]) -> Any:
        return self._all[name].labels(**labels) if labels else self._all[name]

    def add(self, name: str, value: float, **labels: str) -> None:
        self._of(name, labels).inc(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._of(name, labels).observe(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._of(name, labels).set(value)


class WeightMetrics:
    """What the fence tells. Runs in the process that launched the engine."""

    def __init__(self, *, own_endpoint: bool) -> None:
        """Args:
        own_endpoint: whether SGLang's `/metrics` is on.
        """
        self._sinks: list[_Sink] = [_RaySink()]
        if own_endpoint:
            self._sinks.append(_PrometheusSink())

    def ended(
        self,
        outcome: str,
        state: WeightState,
        *,
        step_seconds: Mapping[str, float],
        pause_seconds: float,
        ranks: Sequence[RankStatus],
    ) -> None:
        """A sync ended: `committed`, `unverified` (a client's own), `aborted` (nothing had landed) or `torn`."""
        for sink in self._sinks:
            sink.add("syncs", 1, outcome=outcome)
            sink.set("torn", float(state is WeightState.TORN))
            sink.observe("pause_seconds", pause_seconds)
            for phase, seconds in step_seconds.items():
                sink.observe("phase_seconds", seconds, phase=phase)
            for status in ranks:
                self._rank(sink, status)

    def mended(self) -> None:
        """The weights were reloaded from disk."""
        for sink in self._sinks:
            sink.set("torn", 0.0)

    @staticmethod
    def _rank(sink: _Sink, status: RankStatus) -> None:
        report, rank = status.report, str(status.rank)
        if report is None:
            return
        sink.add("bytes", report.total_bytes, rank=rank)
        sink.observe("rank_seconds", report.wire_seconds, phase="wire", rank=rank)
        sink.observe("rank_seconds", report.verify_seconds, phase="verify", rank=rank)
        if report.wire_seconds > 0:
            sink.set(
                "gigabytes_per_second", report.total_bytes / report.wire_seconds / 1e9, rank=rank
            )
