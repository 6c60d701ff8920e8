"""How a replica becomes current, with a fake engine and a fake fleet: retries, waits, and pauses that stay pauses."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.ray.serve import joining
from sglang.srt.ray.serve.fleet import Admission, Peer, Wanted
from sglang.srt.ray.serve.joining import MAX_FAILURES, Joining
from sglang.srt.ray.serve.publication import PublishedWeights
from sglang.srt.ray.weight_sync.errors import TransferError, WeightMismatchError
from sglang.srt.ray.weight_sync.states import Transaction, WeightState, WeightStateMachine

SECOND = PublishedWeights(version="2", sequence=2)
PEER = Peer(replica="a", ranks=["rank"])
WANTED = Wanted(weights=SECOND, generation=1, peer=PEER, in_progress=False)


class Engine:
    """The product's state machine, and no weights."""

    def __init__(self) -> None:
        self.machine = WeightStateMachine("default")
        self.weight_fence = self
        self.tokenizer_manager = self
        self.scheduler_actors = ["rank"]

    def config_value(self, name: str) -> str:
        assert name == "weight_version"
        return self.machine.version

    async def open(self, request: Any, *, timeout_s: float, own: bool) -> None:
        fields = {"id": request.transaction, "sequence": request.sequence, "owner": request.owner}
        self.machine.open(Transaction(version=request.version, own=own, **fields))

    async def seal(self, transaction: str, **options: Any) -> None:
        assert options["resume"]
        assert options["stay_paused"]
        self.machine.seal(transaction)
        self.machine.resume(transaction, verified=True)

    async def abort(self, transaction: str, reason: str, *, timeout_s: float) -> None:
        self.machine.fail(transaction, reason=reason, written=True)


class Verbs:
    """What the replica's generation does."""

    def __init__(self) -> None:
        self.paused = True

    async def state(self) -> dict[str, Any]:
        return {"paused": self.paused}

    async def pause(self, **_: Any) -> None:
        self.paused = True

    async def resume(self, **_: Any) -> None:
        await asyncio.sleep(0)
        self.paused = False


class Fleet:
    """Answers in turn; the last one stays."""

    def __init__(self, *wanted: Wanted, paused: str | None = None) -> None:
        self.answers = list(wanted)
        self.paused = paused
        self.admitted: list[str] = []

    async def wanted(self) -> Wanted:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def admit(self, version: str, generation: int) -> Admission:
        self.admitted.append(version)
        return Admission(verdict="serve", paused=self.paused)


@dataclasses.dataclass(kw_only=True)
class Joined:
    engine: Engine
    verbs: Verbs
    transfers: int


def join(monkeypatch: Any, fleet: Fleet, *failures: Exception) -> Joined:
    monkeypatch.setattr(joining, "_LOOK_AGAIN_S", 0.0)
    left = list(failures)
    joined = Joined(engine=Engine(), verbs=Verbs(), transfers=0)

    class Failing(Joining):
        async def _receive(self, peer: Peer, transaction: str) -> None:
            joined.transfers += 1
            if left:
                raise left.pop(0)

    agent: Any = fleet
    verbs: Any = joined.verbs
    asyncio.run(Failing(agent, joined.engine, verbs, "b").become_current())
    return joined


def test_a_failed_transfer_is_tried_again_at_the_same_sequence(monkeypatch):
    fleet = Fleet(WANTED)
    joined = join(monkeypatch, fleet, TransferError("a"), TransferError("b"))
    assert joined.transfers == 3
    assert fleet.admitted == ["2"]
    assert joined.engine.machine.state is WeightState.SERVING
    assert joined.engine.machine.last_sequence == SECOND.sequence
    assert not joined.verbs.paused


def test_it_gives_up_when_every_transfer_fails_and_at_once_when_none_can_succeed(monkeypatch):
    failures = [TransferError(str(n)) for n in range(MAX_FAILURES)]
    with pytest.raises(TransferError, match=str(MAX_FAILURES - 1)):
        join(monkeypatch, Fleet(WANTED), *failures)
    with pytest.raises(WeightMismatchError, match="ranks"):
        join(monkeypatch, Fleet(WANTED), WeightMismatchError("other ranks"))


def test_it_waits_while_weights_are_written_and_while_nobody_can_lend_them(monkeypatch):
    writing = dataclasses.replace(WANTED, in_progress=True)
    alone = dataclasses.replace(WANTED, peer=None)
    fleet = Fleet(writing, alone, writing, WANTED)
    assert join(monkeypatch, fleet).transfers == 1
    assert fleet.admitted == ["2"]


def test_a_fleet_without_published_weights_admits_the_checkpoint(monkeypatch):
    fleet = Fleet(dataclasses.replace(WANTED, weights=None))
    assert join(monkeypatch, fleet).transfers == 0
    assert fleet.admitted == ["default"]


def test_a_newcomer_of_a_paused_fleet_stays_paused(monkeypatch):
    joined = join(monkeypatch, Fleet(WANTED, paused="retract"))
    assert joined.verbs.paused


def test_a_pause_that_comes_with_the_admission_is_not_undone():
    async def run() -> bool:
        verbs, fleet = Verbs(), Fleet(dataclasses.replace(WANTED, weights=None))
        stand_in: Any = SimpleNamespace(wanted=fleet.wanted, admit=None)
        replica = Joining(stand_in, Engine(), verbs, "b")  # type: ignore[arg-type]
        commands: list[asyncio.Task[None]] = []

        async def pause() -> None:
            async with replica.gate:
                await verbs.pause()

        async def admit(version: str, generation: int) -> Admission:
            commands.append(asyncio.ensure_future(pause()))
            await asyncio.sleep(0.01)
            return await fleet.admit(version, generation)

        stand_in.admit = admit
        await replica.become_current()
        await asyncio.gather(*commands)
        return verbs.paused

    assert asyncio.run(run())
