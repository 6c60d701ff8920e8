"""What the last syncs leave for people to look at, over the real fence with fake effects and ranks."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from test_weight_fence import FakeEngine, FakeRank

from sglang.srt.ray.weight_fence import WeightFence
from sglang.srt.ray.weight_history import KEPT
from sglang.srt.ray.weight_sync.control import OpenRequest
from sglang.srt.ray.weight_sync.errors import EngineRequestError


def request(number: int) -> OpenRequest:
    return OpenRequest(
        transaction=f"t{number}",
        sequence=number,
        owner="trainer:7",
        version=str(number),
        pause="retract",
        ttl_s=60,
    )


class Fleet:
    def __init__(self, ranks: int = 2) -> None:
        self.engine = FakeEngine()
        self.ranks = [FakeRank(rank) for rank in range(ranks)]
        self.fence = WeightFence(self.engine, self.ranks, version="0")

    async def sync(self, number: int) -> None:
        await self.fence.open(request(number), timeout_s=5)
        for rank in self.ranks:
            rank.wrote(f"t{number}")
        await self.fence.seal(f"t{number}", resume=True, timeout_s=5)


def test_a_sync_is_remembered_with_owner_versions_phases_bytes_and_speed() -> None:
    async def run() -> dict[str, Any]:
        fleet = Fleet()
        await fleet.sync(1)
        return await fleet.fence.overview()

    before = time.time()
    told = asyncio.run(run())
    (record,) = told["history"]
    assert (record["owner"], record["from_version"], record["version"]) == ("trainer:7", "0", "1")
    assert (record["outcome"], record["reason"]) == ("committed", None)
    assert set(record["step_seconds"]) == {"pause", "begin", "wire", "verify", "end", "flush", "version"}  # fmt: skip
    # Two ranks of 8 bytes in 0.1 s each (see FakeRank.wrote).
    assert (record["total_bytes"], record["gigabytes_per_second"]) == (16, pytest.approx(1.6e-7))
    assert before <= record["started_at"] <= record["ended_at"] <= time.time()
    assert record["pause_seconds"] <= time.time() - before
    assert [rank["state"] for rank in told["ranks"]] == ["VERIFIED", "VERIFIED"]
    json.dumps(told)  # plain values only


def test_a_torn_sync_keeps_its_reason_and_a_reload_mends() -> None:
    async def run() -> dict[str, Any]:
        fleet = Fleet()
        await fleet.sync(1)
        await fleet.fence.open(request(2), timeout_s=5)
        fleet.ranks[1].wrote("t2", failure="the cable broke")
        with pytest.raises(EngineRequestError):
            await fleet.fence.seal("t2", resume=True, timeout_s=5)
        fleet.ranks[0].dead = True
        torn = await fleet.fence.overview()
        await fleet.fence.reloaded("9")
        return {"torn": torn, "after": await fleet.fence.overview()}

    told = asyncio.run(run())
    last = told["torn"]["history"][0]
    assert (last["outcome"], last["version"], last["total_bytes"]) == ("torn", "2", 0)
    assert "rank 0 has not completed" in last["reason"]
    assert [rank["state"] for rank in told["torn"]["ranks"]] == ["SILENT", "FAILED"]
    assert "cable" in told["torn"]["ranks"][1]["reason"]
    assert [record["outcome"] for record in told["after"]["history"]] == ["reloaded", "torn", "committed"]  # fmt: skip
    assert told["after"]["history"][0]["version"] == "9"


def test_an_attempt_that_wrote_nothing_is_an_aborted_one() -> None:
    async def run() -> list[dict[str, Any]]:
        fleet = Fleet()
        await fleet.fence.open(request(1), timeout_s=5)
        await fleet.fence.abort("t1", "the trainer changed its mind", timeout_s=5)
        await fleet.fence.abort("t1", "said twice", timeout_s=5)
        return fleet.fence.history.as_json()

    (record,) = asyncio.run(run())
    assert (record["outcome"], record["reason"]) == ("aborted", "the trainer changed its mind")


def test_a_rank_that_does_not_answer_is_silent_within_its_deadline() -> None:
    async def run() -> dict[str, Any]:
        fleet = Fleet()
        fleet.ranks[1].silent = True
        return await asyncio.wait_for(fleet.fence.overview(), timeout=6)

    told = asyncio.run(run())
    assert [rank["state"] for rank in told["ranks"]] == ["UNTOUCHED", "SILENT"]
    assert "rank 1 did not answer" in told["ranks"][1]["reason"]


def test_the_oldest_are_forgotten() -> None:
    async def run() -> list[dict[str, Any]]:
        fleet = Fleet(ranks=1)
        for number in range(1, KEPT + 4):
            await fleet.sync(number)
        return fleet.fence.history.as_json()

    kept = asyncio.run(run())
    assert [record["version"] for record in kept] == [str(n) for n in range(KEPT + 3, 3, -1)]
