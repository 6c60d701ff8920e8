"""The fence over fake effects and ranks: every step failing, hanging and repeated; owners that vanish or are replaced.

Real engines fail in `test_faults_of_a_live_engine.py`; here time is short and every order of events can be made.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import pytest

from sglang.srt.ray import rank_calls, weight_fence
from sglang.srt.ray.weight_fence import WeightFence
from sglang.srt.ray.weight_sync.control import OpenRequest
from sglang.srt.ray.weight_sync.errors import (
    DeadlineExceededError,
    EngineRequestError,
    EngineTornError,
    StaleTransactionError,
    TransactionBusyError,
    UnknownTransactionError,
    WeightSyncError,
)
from sglang.srt.ray.weight_sync.ledger import PullReport, RankStatus

STEPS = ("pause", "begin", "end", "flush", "version")


class FakeEngine:
    """Effects that are only written down; one of them can be made to raise or to hang."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.raising: dict[str, Exception] = {}
        self.hanging: set[str] = set()
        self.on_hanging: Any = lambda: None
        self.flushes = True
        self.paused = False
        self.failed_with: str | None = None

    async def _do(self, step: str) -> None:
        if step in self.hanging:
            self.on_hanging()
            await asyncio.sleep(3600)
        if step in self.raising:
            raise self.raising[step]
        self.did.append(step)

    async def hold_generation(self, mode: str) -> None:
        self.paused = True
        await self._do("pause")

    async def let_generation_go(self) -> None:
        self.paused = False
        await self._do("resume")

    async def begin_session(self) -> None:
        await self._do("begin")

    async def end_session(self) -> None:
        await self._do("end")

    async def try_flush_cache(self) -> bool:
        await self._do("flush")
        return self.flushes

    async def move_version_label(self, version: str) -> None:
        await self._do("version")

    async def fail_open_requests(self, reason: str) -> None:
        self.failed_with = reason


class FakeRank:
    """A rank whose verbs answer at once, or never, or by dying."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fields: dict[str, Any] = {}
        self.silent = False
        self.dead = False
        self.isolated: list[str] = []
        self.weight_status = _Verb(self, self._status)
        self.isolate_prefix_cache = _Verb(self, self.isolated.append)
        self.admitted: list[str | None] = []
        self.admit_transaction = _Verb(self, self.admitted.append)

    def wrote(self, transaction: str, *, failure: str | None = None, verified: bool = True) -> None:
        report = PullReport(
            rank=self.rank, total_bytes=8, wire_seconds=0.1, verify_seconds=0.0, verified=verified
        )
        done = report if failure is None else None
        self.fields = {
            "transaction": transaction,
            "written": True,
            "failure": failure,
            "report": done,
        }

    def _status(self) -> RankStatus:
        blank: dict[str, Any] = {
            "rank": self.rank,
            "transaction": None,
            "session_open": False,
            "written": False,
            "in_flight": False,
            "failure": None,
            "report": None,
            "tensors_written": 0,
            "tensors_total": 3,
        }
        return RankStatus(**(blank | self.fields))


class _Verb:
    def __init__(self, rank: FakeRank, call: Any) -> None:
        self._rank, self._call = rank, call

    def remote(self, *arguments: Any) -> _Verb:
        self._arguments = arguments
        return self

    def future(self) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        if self._rank.dead:
            future.set_exception(ConnectionError("the actor died"))
        elif not self._rank.silent:
            future.set_result(self._call(*self._arguments))
        return future


class World:
    def __init__(self, ranks: int = 2) -> None:
        self.engine = FakeEngine()
        self.ranks = [FakeRank(rank) for rank in range(ranks)]
        self.fence = WeightFence(self.engine, self.ranks, version="0")

    async def open(
        self, number: int = 1, *, ttl_s: float = 60.0, timeout_s: float = 5.0, **changes: Any
    ) -> Any:
        fields: dict[str, Any] = {
            "transaction": f"t{number}",
            "sequence": number,
            "owner": "trainer",
            "version": str(number),
            "pause": "retract",
            "ttl_s": ttl_s,
        }
        return await self.fence.open(OpenRequest(**(fields | changes)), timeout_s=timeout_s)

    def all_wrote(self, transaction: str = "t1") -> None:
        for rank in self.ranks:
            rank.wrote(transaction)

    async def seal(
        self, transaction: str = "t1", *, resume: bool = True, timeout_s: float = 5.0
    ) -> Any:
        return await self.fence.seal(transaction, resume=resume, timeout_s=timeout_s)

    @property
    def state(self) -> str:
        return str(self.fence.status()["state"])


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario(), timeout=30))


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rank_calls, weight_fence):
        monkeypatch.setattr(module, "RANK_ANSWER_TIMEOUT_S", 0.2)


def test_a_whole_sync_does_every_step_once_and_in_order():
    async def scenario() -> None:
        world = World()
        await world.open()
        world.all_wrote()
        status = await world.seal()
        assert world.engine.did == ["pause", "begin", "end", "flush", "version", "resume"]
        assert (status["state"], status["version"], status["verified"]) == ("SERVING", "1", True)
        assert set(status["step_seconds"]) == set(STEPS)
        assert [rank.admitted for rank in world.ranks] == [["t1"], ["t1"]]

    run(scenario)


def test_a_version_that_stays_paused_is_served_by_whoever_lets_generation_go():
    async def scenario() -> None:
        world = World()
        await world.open()
        world.all_wrote()
        status = await world.fence.seal("t1", resume=True, timeout_s=5, stay_paused=True)
        assert (status["state"], status["version"]) == ("SERVING", "1")
        assert world.engine.paused
        await world.fence.check_may_resume()

    run(scenario)


@pytest.mark.parametrize("fault", ["raising", "hanging"])
def test_a_committed_version_that_could_not_go_on_says_so_and_a_repeated_resume_mends_it(fault):
    async def scenario() -> None:
        world = World()
        await world.open()
        world.all_wrote()
        if fault == "raising":
            world.engine.raising["resume"] = RuntimeError("no")
        else:
            world.engine.hanging.add("resume")
        with pytest.raises(WeightSyncError, match="is committed but generation did not") as failed:
            await world.seal(timeout_s=0.3)
        assert failed.value.phase == "resume"
        status = world.fence.status()
        assert (status["state"], status["version"], status["resume_pending"]) == (
            "SERVING",
            "1",
            True,
        )
        world.engine.raising.clear()
        world.engine.hanging.clear()
        status = await world.fence.resume("t1", timeout_s=5)
        assert not status["resume_pending"]
        assert world.engine.did[-1] == "resume"
        await world.fence.resume("t1", timeout_s=5)
        assert world.engine.did.count("resume") == 1

    run(scenario)


def test_repeated_calls_do_nothing_twice():
    async def scenario() -> None:
        world = World()
        for _ in range(2):
            await world.open()
        world.all_wrote()
        for _ in range(2):
            await world.seal(resume=False)
        for _ in range(2):
            await world.fence.resume("t1", timeout_s=5)
        await world.fence.abort("t1", "a late one", timeout_s=5)
        assert world.engine.did == ["pause", "begin", "end", "flush", "version", "resume"]
        assert world.state == "SERVING"

    run(scenario)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", ["raises", "hangs"])
@pytest.mark.parametrize("written", [False, True])
def test_a_failing_step_reaches_the_caller_and_leaves_the_right_state(step, fault, written):
    async def scenario() -> None:
        world = World()
        if fault == "raises":
            world.engine.raising[step] = RuntimeError(f"no {step} today")
        else:
            world.engine.hanging.add(step)
        if written:
            world.all_wrote()
        expected = RuntimeError if fault == "raises" else DeadlineExceededError

        async def a_sync() -> None:
            await world.open(timeout_s=0.3)
            world.all_wrote()
            await world.seal(timeout_s=0.3)

        text = r"no .* today" if fault == "raises" else step
        with pytest.raises(WeightSyncError, match=text) as caught:
            await a_sync()
        assert caught.value.phase == step
        assert isinstance(caught.value, (expected, EngineRequestError))
        landed = written or step in ("end", "flush", "version")
        assert world.state == ("TORN" if landed else "SERVING")
        assert (world.engine.failed_with is not None) == landed
        assert world.fence.status()["version"] == "0"

    run(scenario)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda rank: rank.wrote("t1", failure="digest differs"), "digest differs"),
        (lambda rank: rank.wrote("t0"), "belongs to 't0'"),
        (lambda rank: rank.fields.update(in_flight=True), "still in flight"),
    ],
)
def test_one_rank_that_did_not_prove_the_version_fails_all(damage, text):
    async def scenario() -> None:
        world = World()
        await world.open()
        world.all_wrote()
        damage(world.ranks[1])
        with pytest.raises(EngineRequestError, match=text) as caught:
            await world.seal()
        assert caught.value.rank == 1
        assert world.state == "TORN"
        assert "version" not in world.engine.did

    run(scenario)


@pytest.mark.parametrize("fault", ["silent", "dead"])
def test_a_rank_that_does_not_answer_counts_as_written(fault):
    async def scenario() -> None:
        world = World()
        await world.open()
        setattr(world.ranks[1], fault, True)
        status = await world.fence.abort("t1", "the trainer gave up", timeout_s=5)
        assert status["state"] == "TORN"

    run(scenario)


def test_a_refused_flush_isolates_the_old_prefixes_on_every_rank():
    async def scenario() -> None:
        world = World()
        world.engine.flushes = False
        await world.open(pause="in_place")
        world.all_wrote()
        status = await world.seal()
        assert status["state"] == "SERVING"
        assert [rank.isolated for rank in world.ranks] == [["t1"], ["t1"]]

    run(scenario)


@pytest.mark.parametrize("written", [False, True])
def test_an_owner_that_vanishes_loses_the_engine_when_its_time_is_over(written):
    async def scenario() -> None:
        world = World()
        await world.open(ttl_s=0.2)
        if written:
            world.all_wrote()
        await asyncio.sleep(0.6)
        assert world.state == ("TORN" if written else "SERVING")
        assert world.engine.paused == written
        with pytest.raises(UnknownTransactionError):
            await world.seal()
        await world.open(2, owner="another")
        assert world.state == "SYNCING"

    run(scenario)


def test_another_owner_has_to_wait_unless_it_forces():
    async def scenario() -> None:
        world = World()
        await world.open()
        with pytest.raises(TransactionBusyError, match="'trainer'"):
            await world.open(2, owner="another")
        await world.open(2, owner="another", force=True)
        assert world.fence.status()["transaction"]["owner"] == "another"
        with pytest.raises(UnknownTransactionError):
            await world.seal("t1")

    run(scenario)


def test_a_zombie_owner_cannot_come_back():
    async def scenario() -> None:
        world = World()
        await world.open(2, owner="successor")
        world.all_wrote("t2")
        await world.seal("t2")
        with pytest.raises(StaleTransactionError):
            await world.open(1, owner="zombie", force=True)
        assert world.fence.status()["version"] == "2"

    run(scenario)


def test_a_step_that_never_returns_bars_the_next_sync_by_name():
    async def scenario() -> None:
        world = World()
        world.engine.hanging.add("begin")
        world.engine.on_hanging = lambda: setattr(world.ranks[1], "silent", True)
        with pytest.raises(DeadlineExceededError, match=r"rank\(s\) \[1\] do not answer"):
            await world.open(timeout_s=0.3)
        assert world.state == "TORN"
        with pytest.raises(TransactionBusyError, match="'begin' has not come back"):
            await world.open(2)

    run(scenario)


def test_resume_by_hand_is_refused_while_torn_or_in_a_publishers_transaction():
    async def scenario() -> None:
        world = World()
        await world.fence.check_may_resume()
        await world.open()
        with pytest.raises(TransactionBusyError, match="resumes generation itself"):
            await world.fence.check_may_resume()
        world.all_wrote()
        await world.fence.abort("t1", "x", timeout_s=5)
        with pytest.raises(EngineTornError, match="Sync again completely, or reload"):
            await world.fence.check_may_resume()
        with pytest.raises(EngineTornError):
            world.fence.check_serving()
        await world.fence.reloaded("disk")
        await world.fence.check_may_resume()

    run(scenario)


def test_a_clients_own_session_ends_unverified_and_keeps_the_label():
    async def scenario() -> None:
        world = World()

        async def done() -> tuple[bool, str]:
            return True, "ok"

        await world.fence.client_begin(done, ttl_s=60)
        for rank in world.ranks:
            rank.fields = {"session_open": True, "written": True}
        with pytest.raises(EngineTornError, match="call end_weight_update"):
            await world.fence.check_may_resume()
        await world.fence.client_end(done)
        status = world.fence.status()
        assert (status["state"], status["version"], status["verified"]) == ("SERVING", "0", False)

    run(scenario)


def test_a_failed_pull_of_a_client_makes_end_report_torn():
    async def scenario() -> None:
        world = World()

        async def done() -> tuple[bool, str]:
            return True, "ok"

        await world.fence.client_begin(done, ttl_s=60)
        world.ranks[1].fields = {
            "session_open": True,
            "written": True,
            "failure": "rank 1 lost its source",
        }
        with pytest.raises(EngineTornError, match="rank 1 lost its source"):
            await world.fence.client_end(done)
        assert world.state == "TORN"

    run(scenario)


def test_a_torn_engine_is_mended_by_whole_syncs_only():
    async def scenario() -> None:
        world = World()
        await world.open()
        world.all_wrote()
        await world.fence.abort("t1", "x", timeout_s=5)

        async def done() -> tuple[bool, str]:
            return True, "ok"

        with pytest.raises(EngineTornError, match="a partial sync can't mend"):
            await world.open(2, partial=True)
        await world.fence.client_begin(done, ttl_s=60)
        for rank, tensors in zip(world.ranks, (3, 2), strict=True):
            rank.fields = {"session_open": True, "written": True, "tensors_written": tensors}
        with pytest.raises(EngineTornError, match="rank 1 received only 2 of 3"):
            await world.fence.client_end(done)
        await world.fence.client_begin(done, ttl_s=60)
        world.ranks[1].fields["tensors_written"] = 3
        await world.fence.client_end(done)
        assert world.state == "SERVING"

    run(scenario)


def test_two_operations_at_once_are_told_of_each_other():
    async def scenario() -> None:
        world = World()
        world.engine.hanging.add("begin")
        first = asyncio.ensure_future(world.open(timeout_s=2.0))
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceededError, match="another weight operation"):
            await world.fence.abort("t1", "impatient", timeout_s=0.2)
        with pytest.raises(DeadlineExceededError):
            await first

    run(scenario)
