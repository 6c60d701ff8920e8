"""Commands, outcomes and members, without Ray: who answers, who is late, who is dead, and that nobody is left out."""

from __future__ import annotations

import asyncio
import time

from sglang.srt.ray.serve import fleet
from sglang.srt.ray.serve.results import ReplicaResult, status_of, summary
from sglang.srt.ray.serve.roster import Member, Roster


class Deaths:
    """Who is dead, as the roster would find out by asking."""

    def __init__(self) -> None:
        self.dead: set[str] = set()

    async def __call__(self, member: Member) -> bool:
        await asyncio.sleep(0)
        return member.id in self.dead


async def obey(roster: Roster, member: str, outcome: str = "ok", times: int = 1) -> None:
    for _ in range(times):
        for command in await roster.next_commands(member, wait_s=5):
            roster.report(command.id, result(member, outcome, {"verb": command.verb}))


def result(member: str, outcome: str, state: dict | None = None) -> ReplicaResult:
    error = None if outcome == "ok" else {"type": "T", "message": "m", "status": 409}
    return ReplicaResult(replica=member, outcome=outcome, state=state, error=error)  # type: ignore[arg-type]


def test_every_member_performs_the_verb_and_says_so_by_name():
    async def run() -> None:
        roster = Roster(Deaths())
        roster.join("a", {})
        roster.join("b", {})
        obeying = asyncio.gather(obey(roster, "a"), obey(roster, "b"))
        results = await roster.call("pause", {}, deadline_s=5)
        await obeying
        assert [(r.replica, r.outcome, r.state) for r in results] == [
            ("a", "ok", {"verb": "pause"}),
            ("b", "ok", {"verb": "pause"}),
        ]
        assert status_of(results) == 200
        assert summary("pause", results)["status"] == "ok"

    asyncio.run(run())


def test_a_member_that_dies_meanwhile_ends_the_wait_at_once_and_makes_the_result_partial():
    async def run() -> None:
        deaths = Deaths()
        roster = Roster(deaths)
        roster.join("a", {})
        roster.join("b", {})
        deaths.dead.add("b")
        obeying = asyncio.ensure_future(obey(roster, "a"))
        started = time.monotonic()
        results = await roster.call("pause", {}, deadline_s=30)
        assert time.monotonic() - started < 3
        await obeying
        assert [r.outcome for r in results] == ["ok", "dead"]
        assert status_of(results) == 207

    asyncio.run(run())


def test_a_silent_member_is_late_and_the_others_results_stay(monkeypatch):
    monkeypatch.setattr("sglang.srt.ray.serve.roster.ANSWER_MARGIN_S", 0.1)

    async def run() -> None:
        roster = Roster(Deaths())
        roster.join("a", {})
        roster.join("b", {})
        obeying = asyncio.ensure_future(obey(roster, "a"))
        results = await roster.call("pause", {}, deadline_s=0.2)
        await obeying
        assert [r.outcome for r in results] == ["ok", "late"]
        assert "'b' did not answer 'pause'" in results[1].error["message"]

    asyncio.run(run())


def test_a_dead_member_stays_in_every_result_until_another_takes_its_place():
    async def run() -> None:
        deaths = Deaths()
        roster = Roster(deaths)
        roster.join("a", {})
        deaths.dead.add("a")
        assert [r.outcome for r in await roster.call("pause", {}, deadline_s=5)] == ["dead"]
        assert [r.outcome for r in await roster.call("pause", {}, deadline_s=5)] == ["dead"]
        roster.join("c", {})
        assert [member.id for member in roster.members] == ["c"]

    asyncio.run(run())


def test_one_that_leaves_is_no_longer_asked_and_an_unknown_one_is_dead():
    async def run() -> None:
        roster = Roster(Deaths())
        roster.join("a", {})
        roster.leave("a")
        assert await roster.call("pause", {}, deadline_s=1) == []
        assert status_of([]) == 503
        (gone,) = await roster.call("pause", {}, deadline_s=1, only=["a"])
        assert gone.outcome == "dead"

    asyncio.run(run())


def test_one_that_says_its_engine_died_is_dead_with_its_cause_though_its_process_answers():
    async def run() -> None:
        roster = Roster(Deaths())
        member = roster.join("a", {})
        member.serving = True
        roster.bury("a", "rank 0 died")
        assert not member.serving
        assert roster.living == []
        roster.leave("a")
        (result,) = await roster.call("pause", {}, deadline_s=5)
        assert result.outcome == "dead"
        assert "rank 0 died" in result.error["message"]

    asyncio.run(run())


def test_an_answer_after_the_deadline_is_dropped():
    async def run() -> None:
        roster = Roster(Deaths())
        roster.join("a", {})
        roster.report("unknown", result("a", "ok"))
        assert await roster.next_commands("a", wait_s=0.05) == []

    asyncio.run(run())


def test_the_status_is_the_worst_when_nobody_did_it():
    assert status_of([result("a", "refused"), result("b", "refused")]) == 409
    assert status_of([result("a", "refused"), result("b", "late")]) == 504
    assert status_of([result("a", "ok"), result("b", "refused")]) == 207


def test_a_replacement_takes_the_place_of_one_whose_death_nobody_has_noticed(monkeypatch):
    deaths = Deaths()
    monkeypatch.setattr(fleet, "_process_is_dead", deaths)

    async def run() -> None:
        control = fleet.FleetControl()
        for member in ("killed", "living"):
            await control.join(member, {})
        deaths.dead.add("killed")
        assert not any(each["dead"] for each in await control.replicas())
        await control.join("replacement", {})
        assert [each["replica"] for each in await control.replicas()] == ["living", "replacement"]

    asyncio.run(run())
