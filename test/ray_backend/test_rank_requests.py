"""Exact aborts on a rank, against upstream's own abort_request over a scheduler of plain objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.ray.rank_requests import exactly, stages_of


def request(rid: str, *, finished: bool = False) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, finished=lambda: finished)


def scheduler(queued: list[SimpleNamespace], running: list[SimpleNamespace]) -> SimpleNamespace:
    return SimpleNamespace(
        waiting_queue=queued,
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        chunked_req=None,
        collect_inflight_reqs=lambda: list(running),
    )


def by_prefix(held: SimpleNamespace, recv_req: SimpleNamespace) -> list[str]:
    """What upstream does: whichever id begins with the one that is meant."""
    everybody = [*held.waiting_queue, *held.collect_inflight_reqs()]
    return [r.rid for r in everybody if recv_req.abort_all or r.rid.startswith(recv_req.rid)]


def test_only_the_request_of_that_id_is_meant_and_the_others_keep_theirs():
    queued, running = [request("r-1"), request("r-10")], [request("r-11"), request("r-2")]
    held = scheduler(queued, running)
    meant = SimpleNamespace(abort_all=False, rid="r-1")
    assert by_prefix(held, meant) == ["r-1", "r-10", "r-11"]
    assert exactly(by_prefix)(held, meant) == ["r-1"]
    assert [r.rid for r in queued + running] == ["r-1", "r-10", "r-11", "r-2"]


def test_ids_are_restored_when_the_abort_fails():
    queued = [request("r-10")]

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        exactly(broken)(scheduler(queued, []), SimpleNamespace(abort_all=False, rid="r-1"))
    assert queued[0].rid == "r-10"


def test_abort_all_means_all():
    held = scheduler([request("a")], [request("b")])
    assert exactly(by_prefix)(held, SimpleNamespace(abort_all=True, rid="")) == ["a", "b"]


def test_stages_are_told_of_what_has_not_finished():
    held = scheduler([request("q")], [request("r"), request("done", finished=True)])
    assert stages_of(held, ["q", "r", "done", "nobody"]) == {"q": "queued", "r": "running"}
