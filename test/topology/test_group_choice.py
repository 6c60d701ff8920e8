"""The one rule that chooses an engine's placement group, and what makes a group unusable. Real Ray, no engine."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from sglang.srt.ray.placement import (
    PlacementError,
    choose_group,
    place_ranks,
    use_placement_group,
)

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture
def make_group():
    groups = []

    def make(*bundles: dict[str, float]):
        groups.append(placement_group(list(bundles)))
        assert groups[-1].wait(30)
        return groups[-1]

    yield make
    for group in groups:
        remove_placement_group(group)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv("SGLANG_RAY_PLACEMENT_TIMEOUT_S", "2")


def chosen(explicit=None):
    return choose_group(explicit, device="cpu", ranks=1, nodes=1)


@ray.remote(num_cpus=0)
class Holder:
    def pid(self) -> int:
        return os.getpid()

    def choose(self):
        from sglang.srt.ray.placement import choose_group  # this module is not on the workers

        choice = choose_group(None, device="cpu", ranks=1, nodes=1)
        return choice.source, choice.group.id.hex()


def on_bundle(group, index, **options):
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    return Holder.options(scheduling_strategy=strategy, **options).remote()


def test_the_keyword_wins_over_the_context(make_group):
    keyword, context = make_group({"CPU": 1}), make_group({"CPU": 1})
    with use_placement_group(context):
        assert chosen(keyword).group.id == keyword.id
        assert chosen().group.id == context.id
    assert not chosen(keyword).owned


def test_without_either_the_group_of_the_calling_actor_is_taken(make_group):
    group = make_group({"CPU": 2})
    before = len(placement_group_table())
    actor = on_bundle(group, 0, num_cpus=1)
    assert ray.get(actor.choose.remote()) == ("current", group.id.hex())
    assert len(placement_group_table()) == before
    ray.kill(actor)


def test_without_any_a_group_is_made_and_removed_again():
    choice = chosen()
    assert choice.owned
    choice.remove()
    deadline = time.monotonic() + 10
    while placement_group_table(choice.group)["state"] != "REMOVED":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_context_belongs_to_its_thread(make_group):
    group, seen = make_group({"CPU": 1}), []

    def other_thread():
        choice = chosen()
        seen.append(choice.source)
        choice.remove()

    with use_placement_group(group):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join(60)
    assert seen == ["own"]


def test_the_context_belongs_to_its_task(make_group):
    groups = [make_group({"CPU": 1}), make_group({"CPU": 1})]

    async def task(group):
        with use_placement_group(group):
            await asyncio.sleep(0.1)  # the other task has set its own by now
            return (await asyncio.to_thread(chosen)).group.id

    async def both():
        return await asyncio.gather(*map(task, groups))

    assert asyncio.run(both()) == [group.id for group in groups]


def test_a_removed_group_is_refused(make_group):
    group = make_group({"CPU": 1})
    remove_placement_group(group)
    with pytest.raises(PlacementError, match=rf"{group.id.hex()}.*was removed; create a new one"):
        chosen(group)


@pytest.mark.usefixtures("impatient")
def test_a_group_that_never_becomes_ready_says_what_the_cluster_lacks():
    group = placement_group([{"CPU": 64}])
    try:
        with pytest.raises(
            PlacementError, match=r"not ready within 2 s(?s:.*)'CPU': 64.*(?s:.*)'CPU': 4.0"
        ):
            chosen(group)
    finally:
        remove_placement_group(group)


@pytest.mark.usefixtures("impatient")
def test_bundles_that_another_actor_holds_are_refused_and_taken_when_it_dies(make_group):
    group = make_group({"CPU": 1}, {"CPU": 1})
    actor = on_bundle(group, 1, num_cpus=1)
    pid = ray.get(actor.pid.remote())
    with pytest.raises(PlacementError, match=r"no room within 2 s.*needed 2.*found 1"):
        place_ranks(chosen(group), device="cpu", ranks=2, replicas=1)
    assert [p.bundle for p in place_ranks(chosen(group), device="cpu", ranks=1, replicas=1)] == [0]
    os.kill(pid, signal.SIGKILL)
    places = place_ranks(chosen(group), device="cpu", ranks=2, replicas=1)
    assert [place.bundle for place in places] == [0, 1]


def test_an_actors_own_bundle_is_shared_with_its_ranks_only_where_there_is_room(make_group):
    group = make_group({"CPU": 1}, {"CPU": 2})
    actor = on_bundle(group, 0, num_cpus=1)
    ray.get(actor.pid.remote())
    with use_placement_group(group):
        choice = chosen()
    assert [p.bundle for p in place_ranks(choice, device="cpu", ranks=1, replicas=1)] == [1]
    ray.kill(actor)
