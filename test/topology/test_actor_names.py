"""Names of the ranks' actors: unique, computable, free again as soon as their holder is dead. Real Ray, no engine."""

from __future__ import annotations

import itertools
import os
import signal
import time
import types

import pytest
import ray

from sglang.srt.ray import get_scheduler_actor_name
from sglang.srt.ray.identity import NameTakenError, await_name, free_engine_index

PLACE = {"node_ip": "10.0.0.1", "dp_rank": 0, "pp_rank": 0, "tp_rank": 0, "bundle_index": 0}


def group(number: int):
    # Ids of real groups that were made one after the other share their beginning or their end.
    text = f"{'ab' * 8}{number:04x}{'0' * 12}"
    return types.SimpleNamespace(id=types.SimpleNamespace(hex=lambda: text))


def test_every_rank_of_every_engine_has_a_name_of_its_own():
    names = {
        get_scheduler_actor_name(
            group(number), node_ip=ip, dp_rank=dp, pp_rank=pp, tp_rank=tp, bundle_index=bundle,
            engine_index=engine,
        )
        for number, ip, dp, pp, tp, bundle, engine in itertools.product(
            range(2), ("10.0.0.1", "10.0.0.2"), *[range(2)] * 5
        )
    }  # fmt: skip
    assert len(names) == 2**7


def test_the_whole_group_id_is_in_the_name():
    assert group(7).id.hex() in get_scheduler_actor_name(group(7), **PLACE)


@ray.remote(num_cpus=0)
class Holder:
    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
class Loading:
    def __init__(self) -> None:
        time.sleep(600)


@pytest.mark.usefixtures("local_ray")
class TestNames:
    def test_a_name_is_free_within_a_second_of_its_holders_kill(self):
        holder = Holder.options(name="killed").remote()
        os.kill(ray.get(holder.pid.remote()), signal.SIGKILL)
        assert await_name("killed", namespace=None)
        Holder.options(name="killed").remote()

    def test_a_living_holder_of_a_one_device_bundle_is_an_error(self):
        holder = Holder.options(name="alive").remote()
        ray.get(holder.pid.remote())
        with pytest.raises(
            NameTakenError, match=r"living engine holds.*\['alive'\].*BUNDLE_INDICES"
        ):
            free_engine_index(lambda index: ["alive"], shared=False, namespace=None)

    def test_a_rank_that_still_loads_counts_as_living(self):
        loading = Loading.options(name="loading").remote()
        assert not await_name("loading", namespace=None)
        ray.kill(loading)

    def test_a_second_engine_of_a_shared_bundle_takes_the_next_index(self):
        holder = Holder.options(name="shared-0").remote()
        ray.get(holder.pid.remote())
        assert free_engine_index(lambda i: [f"shared-{i}"], shared=True, namespace=None) == 1

    def test_another_namespace_has_names_of_its_own(self):
        holder = Holder.options(name="spaced", namespace="there").remote()
        ray.get(holder.pid.remote())
        assert await_name("spaced", namespace=None)
        assert not await_name("spaced", namespace="there")
