"""What real engines tell about their ranks, and the shards that a trainer builds from it.

The right answers are the live ranks' own layouts and the server args that the engines were started with.
"""

import os
import socket
from collections.abc import Iterator

import families
import msgspec
import pytest
import ray
import requests
from live_engine import HEADERS, free_port, hosted_engine, plain_server, ray_engine
from shards import build_shard

from sglang.srt.distributed.parallel_state import RankParallelismConfig
from sglang.srt.ray.weight_sync.layout import WeightLayout
from sglang.srt.runtime_context import ParallelContext, RuntimeContext, use_context
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def a_process_that_published_nothing() -> None:
    """Not here: the engine's host is this process, and it must find what it published."""


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # two ranks on one NUMA node
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = families.write_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture(scope="module")
def engine(local_ray, checkpoint):
    with ray_engine(checkpoint("qwen2"), enable_rdt_weight_sync=True) as launched:
        yield launched


def ask(port, path, **parameters):
    url = f"http://127.0.0.1:{port}/{path}"
    return requests.get(url, params=parameters, headers=HEADERS, timeout=60)


def test_a_rank_is_told_about_on_the_engines_own_port(engine):
    _, server_args = engine
    answer = ask(server_args.port, "parallelism_config", rank=0)
    assert answer.status_code == 200
    assert RankParallelismConfig.from_dict(answer.json()) == RankParallelismConfig()


@pytest.mark.parametrize(("rank", "status"), [(1, 404), (-1, 404), ("x", 400), (None, 400)])
def test_a_rank_that_is_none_is_refused(engine, rank, status):
    _, server_args = engine
    assert ask(server_args.port, "parallelism_config", rank=rank).status_code == status


def test_the_api_key_protects_it(engine):
    _, server_args = engine
    url = f"http://127.0.0.1:{server_args.port}/parallelism_config?rank=0"
    assert requests.get(url, timeout=60).status_code == 401


def test_a_rank_that_has_not_registered_yet_is_a_retryable_status(engine):
    launched, server_args = engine
    server = launched.scheduler_init_result.engine_info_bootstrap_server
    asked = server._parallelism.copy()
    server._parallelism.clear()  # as before the ranks have registered
    try:
        answer = ask(server_args.port, "parallelism_config", rank=0)
    finally:
        server._parallelism.update(asked)
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0


def own_fields(server_info):
    names = {field.name for field in msgspec.structs.fields(ServerArgs)}
    return {name: value for name, value in server_info.items() if name in names}


def test_server_info_rebuilds_equal_server_args(engine):
    _, server_args = engine
    rebuilt = ServerArgs(**own_fields(ask(server_args.port, "server_info").json()))
    assert rebuilt == ServerArgs(**server_args.resolved_dict())
    rebuilt.resolve_once()
    differing = {
        name
        for name, value in server_args.resolved_dict().items()
        if value != rebuilt.resolved_dict()[name]
    }
    # Upstream switches the fraction off for args that state a ratio, and the rebuilt ones state the default.
    assert differing <= {"hicache_host_memory_fraction"}


def test_a_trainer_builds_what_the_rank_holds(engine):
    launched, server_args = engine
    assert_shards_equal_live_ranks(launched.scheduler_actors, server_args.port)


def assert_shards_equal_live_ranks(actors, port):
    """As a trainer: everything it knows came over HTTP; only the expected value is asked of the actors."""
    layouts = ray.get([actor.weight_layout.remote() for actor in actors], timeout=60)
    received = ServerArgs(**own_fields(ask(port, "server_info").json()))
    for rank, layout in enumerate(layouts):
        told = ask(port, "parallelism_config", rank=rank).json()
        with use_context(RuntimeContext(parallel=ParallelContext())):
            set_global_server_args_for_scheduler(received)
            shard = build_shard(received, RankParallelismConfig.from_dict(told))
        assert WeightLayout.of_model(shard) == layout


def test_ending_the_engine_frees_its_bootstrap_port(engine):
    # The last test of this engine.
    launched, server_args = engine
    server = launched.scheduler_init_result.engine_info_bootstrap_server
    assert server_args.engine_info_bootstrap_url.endswith(f":{server.port}")
    launched.shutdown()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))


TWO_RANKS = [
    pytest.param("qwen3-moe", {"tp_size": 2, "ep_size": 2}, id="qwen3-moe-ep2"),
    pytest.param("qwen3-moe", {"tp_size": 2}, id="qwen3-moe-tp2", marks=pytest.mark.slow),
    pytest.param("llama", {"pp_size": 2}, id="llama-pp2", marks=pytest.mark.slow),
    *(
        pytest.param(family, {"tp_size": 2}, id=f"{family}-tp2", marks=pytest.mark.slow)
        for family in families.FAMILIES
        if family != "qwen3-moe"
    ),
]


@pytest.mark.parametrize(("family", "sizes"), TWO_RANKS)
def test_a_trainer_builds_what_each_of_two_ranks_holds(local_ray, checkpoint, family, sizes):
    values = {
        "enable_rdt_weight_sync": True,
        "disable_overlap_schedule": "pp_size" in sizes,
        **sizes,
    }
    with hosted_engine(checkpoint(family), **values) as (actors, port):
        told = [ask(port, "parallelism_config", rank=rank).json() for rank in (0, 1)]
        assert [rank["global_rank"] for rank in told] == [0, 1]
        assert {rank["world_size"] for rank in told} == {2}
        assert ask(port, "parallelism_config", rank=2).status_code == 404
        assert_shards_equal_live_ranks(actors, port)


def test_ranks_without_ray_register_themselves(checkpoint, tmp_path):
    port = free_port()
    flags = ("--enable-engine-info-bootstrap", f"--engine-info-bootstrap-port={port}")
    with plain_server(checkpoint("qwen2"), tmp_path / "log", *flags) as serving:
        answer = ask(serving, "parallelism_config", rank=0)
        assert answer.status_code == 200
        assert RankParallelismConfig.from_dict(answer.json()) == RankParallelismConfig()
        direct = requests.get(f"http://127.0.0.1:{port}/parallelism_config?rank=0", timeout=60)
        assert direct.json() == answer.json()


@pytest.mark.slow
def test_an_engine_that_registers_nothing_says_which_flag_does(checkpoint, tmp_path):
    with plain_server(checkpoint("qwen2"), tmp_path / "log") as serving:
        answer = ask(serving, "parallelism_config", rank=0)
    assert answer.status_code == 404
    assert "--enable-engine-info-bootstrap" in answer.json()["error"]["message"]
