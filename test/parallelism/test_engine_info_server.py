"""The bootstrap server and its clients without an engine: real sockets, real HTTP."""

import logging
import socket
import threading
import time
import types

import pytest
import requests
from shards import Topology

from sglang.srt.arg_groups.engine_info import DEFAULT_PORT, BootstrapAddress
from sglang.srt.distributed.parallel_state import RankParallelismConfig
from sglang.srt.entrypoints import rank_registration
from sglang.srt.entrypoints.engine_info_server import (
    EngineInfoServer,
    EngineShape,
    RankKey,
    start_engine_info_server,
    with_engine_info_server,
)
from sglang.srt.server_args import ServerArgs, prepare_server_args

SHAPE = EngineShape(dp_size=2, pp_size=2, tp_size=2)


@pytest.fixture
def server():
    server = EngineInfoServer(host="127.0.0.1", port=0, shape=SHAPE)
    yield server
    server.close()


def get(server, path, **parameters):
    return requests.get(f"http://127.0.0.1:{server.port}/{path}", params=parameters, timeout=10)


def put(server, path, body):
    return requests.put(f"http://127.0.0.1:{server.port}/{path}", json=body, timeout=10)


def args_of(folder, **values):
    return ServerArgs(model_path=str(folder), device="cpu", dtype="float32", **values)


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_ranks_are_ordered_by_replica_then_stage_then_tp():
    keys = [SHAPE.key(rank) for rank in range(SHAPE.num_ranks)]
    assert keys == [
        RankKey(dp_rank=dp, pp_rank=pp, tp_rank=tp)
        for dp in (0, 1)
        for pp in (0, 1)
        for tp in (0, 1)
    ]
    assert SHAPE.key(8) is None
    assert SHAPE.key(-1) is None


def test_a_rank_is_served_after_it_registered_and_retryable_before(server):
    config = RankParallelismConfig(tp_size=2, tp_rank=1, pp_size=2, pp_rank=1)
    early = get(server, "parallelism_config", rank=7)
    assert early.status_code == 503
    assert int(early.headers["Retry-After"]) > 0
    body = {"dp_rank": 1, "pp_rank": 1, "tp_rank": 1, "parallelism_config": config.to_dict()}
    assert put(server, "register_parallelism_config", body).status_code == 200
    assert (
        RankParallelismConfig.from_dict(get(server, "parallelism_config", rank=7).json()) == config
    )
    assert get(server, "parallelism_config", rank=3).status_code == 503  # the other replica's


@pytest.mark.parametrize("rank", [-1, 8, 1000])
def test_a_rank_that_does_not_exist_is_404(server, rank):
    answer = get(server, "parallelism_config", rank=rank)
    assert answer.status_code == 404
    assert f"no rank {rank}" in answer.json()["error"]["message"]


def test_a_retried_registration_is_the_same_one_and_another_is_refused(server):
    body = {"dp_rank": 0, "pp_rank": 0, "tp_rank": 0, "parallelism_config": {"tp_size": 2}}
    assert put(server, "register_parallelism_config", body).status_code == 200
    assert put(server, "register_parallelism_config", body).status_code == 200
    other = {**body, "parallelism_config": {"tp_size": 4}}
    refused = put(server, "register_parallelism_config", other)
    assert refused.status_code == 400
    assert "registered" in refused.json()["error"]["message"]
    assert get(server, "parallelism_config", rank=0).json()["tp_size"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tp_rank": 2, "parallelism_config": {}},
        {"tp_rank": 0, "parallelism_config": {"no_field": 1}},
        {"tp_rank": "x", "parallelism_config": {}},
    ],
)
def test_a_malformed_registration_is_refused(server, body):
    assert put(server, "register_parallelism_config", body).status_code == 400


def test_seeds_are_kept_by_rank_and_answered_as_upstream_does(server):
    for pp_rank in (0, 1):
        info = {"session_id": f"host:{pp_rank}", "weights_info_dict": {"w": [1, 2, 3]}}
        body = {"pp_rank": pp_rank, "tp_rank": 1, "transfer_engine_info": info}
        assert put(server, "register_transfer_engine_info", body).status_code == 200
    assert get(server, "get_transfer_engine_info", rank=3).json() == {
        "rank": 3,
        "remote_instance_transfer_engine_info": ["host:1", {"w": [1, 2, 3]}],
    }
    assert server.get_transfer_engine_info(1)[0] == "host:0"
    assert get(server, "get_transfer_engine_info", rank=0).status_code == 404


def test_closing_frees_the_port_and_may_be_done_twice(server):
    server.close()
    server.close()
    with socket.socket() as again:
        again.bind(("127.0.0.1", server.port))


def test_the_default_port_gives_way_and_the_args_name_the_one_taken(config_folder):
    first_args, second_args = (args_of(config_folder("qwen2"), tp_size=2) for _ in range(2))
    first, second = start_engine_info_server(first_args), start_engine_info_server(second_args)
    try:
        assert second.port not in (DEFAULT_PORT, first.port)
        assert second.shape.num_ranks == 2
        assert second_args.engine_info_bootstrap_url == f"http://127.0.0.1:{second.port}"
        assert requests.get(f"{second_args.engine_info_bootstrap_url}/health", timeout=10).ok
    finally:
        first.close()
        second.close()


def test_a_taken_port_that_was_asked_for_is_refused_by_name(config_folder, taken_port):
    args = args_of(config_folder("qwen2"), engine_info_bootstrap_port=taken_port)
    with pytest.raises(
        RuntimeError, match=f"engine_info_bootstrap_port={taken_port} can't be bound"
    ):
        start_engine_info_server(args)


def test_args_that_an_earlier_launch_published_can_be_launched_again(config_folder):
    from sglang.srt.runtime_context import publish

    args = args_of(config_folder("qwen2"))
    publish(args, role="tokenizer")
    blocker = start_engine_info_server(args_of(config_folder("qwen2")))  # has the default port
    server = start_engine_info_server(args)
    try:
        assert server.port != DEFAULT_PORT
        assert args.engine_info_bootstrap_url.endswith(f":{server.port}")
    finally:
        server.close()
        blocker.close()


@pytest.mark.parametrize(
    ("flags", "registers", "needs"),
    [
        ([], False, False),
        (["--enable-engine-info-bootstrap"], True, True),
        (["--enable-rdt-weight-sync"], True, True),
        (["--remote-instance-weight-loader-start-seed-via-transfer-engine"], False, True),
    ],
)
def test_which_flags_start_the_server(flags, registers, needs):
    args = prepare_server_args(["--model-path", "unread", *flags])
    assert args.registers_parallelism_config() is registers
    assert args.needs_engine_info_bootstrap() is needs


def launched(server_args, result=None, error=None):
    """What `Engine._launch_subprocesses` becomes, with a launch that only says what it saw."""
    seen = {}

    @with_engine_info_server
    def launch(cls, args):
        seen["answers"] = requests.get(f"{args.engine_info_bootstrap_url}/health", timeout=10).ok
        if error is not None:
            raise error
        return (None, None, None, result, None, None)

    seen["result"] = launch(object, server_args)
    return seen


def test_a_launch_finds_the_server_running_and_hands_it_over(config_folder):
    args = args_of(config_folder("qwen2"), enable_engine_info_bootstrap=True)
    result = types.SimpleNamespace(engine_info_bootstrap_server=None)
    assert launched(args, result)["answers"]
    result.engine_info_bootstrap_server.close()


def test_a_launch_that_fails_leaves_no_server(config_folder):
    args = args_of(config_folder("qwen2"), enable_engine_info_bootstrap=True)
    with pytest.raises(ZeroDivisionError):
        launched(args, error=ZeroDivisionError())
    assert "sglang-engine-info" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(requests.exceptions.ConnectionError):
        requests.get(f"{args.engine_info_bootstrap_url}/health", timeout=10)


def test_an_engine_without_ray_closes_it_when_it_is_shut_down(server, monkeypatch):
    from sglang.srt.entrypoints import engine as upstream

    engine = object.__new__(upstream.Engine)
    engine._attached, engine.tokenizer_manager = False, None
    result = upstream.SchedulerInitResult(scheduler_infos=[], engine_info_bootstrap_server=server)
    engine._scheduler_init_result = result
    killed = []  # what the engine kills are all children of this process, which are others' here
    monkeypatch.setattr(upstream, "kill_process_tree", lambda *a, **_: killed.append(a))
    engine.shutdown()
    assert killed
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))


def test_a_rank_goes_on_trying_until_the_server_is_there():
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
    servers = []

    def start_late():
        time.sleep(1.5)
        servers.append(EngineInfoServer(host="127.0.0.1", port=port, shape=SHAPE))

    thread = threading.Thread(target=start_late)
    thread.start()
    key = RankKey(dp_rank=1, pp_rank=0, tp_rank=1)
    config = RankParallelismConfig(tp_size=2, tp_rank=1)
    rank_registration._put(
        f"http://127.0.0.1:{port}/register_parallelism_config",
        key,
        {"parallelism_config": config.to_dict()},
    )
    thread.join()
    assert servers[0].parallelism_config(5) == config
    servers[0].close()


def test_a_rank_that_can_not_register_says_which_one_and_where(monkeypatch):
    monkeypatch.setattr(rank_registration, "REGISTRATION_TIMEOUT_S", 1.0)
    key = RankKey(dp_rank=0, pp_rank=1, tp_rank=0)
    url = "http://127.0.0.1:9/register_parallelism_config"  # nobody listens on the discard port
    with pytest.raises(
        rank_registration.RegistrationError, match=r"pp_rank=1.*127\.0\.0\.1:9.*1 s"
    ):
        rank_registration._put(url, key, {})


def test_a_refused_registration_is_not_tried_again(server):
    key = RankKey(dp_rank=0, pp_rank=0, tp_rank=5)
    url = f"http://127.0.0.1:{server.port}/register_parallelism_config"
    started = time.monotonic()
    with pytest.raises(rank_registration.RegistrationError, match=r"status 400.*tp_rank=5"):
        rank_registration._put(url, key, {"parallelism_config": {}})
    assert time.monotonic() - started < rank_registration.REGISTRATION_TIMEOUT_S / 2


@pytest.mark.parametrize(
    ("host", "nnodes", "dist", "bind", "connect"),
    [
        ("127.0.0.1", 1, None, "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", 1, None, "0.0.0.0", "127.0.0.1"),
        ("::", 1, None, "::", "::1"),
        ("127.0.0.1", 1, "10.0.0.1:5000", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", 2, "10.0.0.1:5000", "10.0.0.1", "10.0.0.1"),
        ("0.0.0.0", 2, "10.0.0.1:5000", "0.0.0.0", "10.0.0.1"),
    ],
)
def test_ranks_reach_the_server_from_where_they_are(host, nnodes, dist, bind, connect):
    address = BootstrapAddress.of(host=host, port=1, nnodes=nnodes, dist_init_addr=dist)
    assert (address.bind_host, address.connect_host) == (bind, connect)


class FakeTransporter:
    """What upstream's transporter has once its engine has been initialized."""

    session_id = "host:1"
    weight_info = None

    def __init__(self, engine):
        self.engine = engine


def test_a_fabric_that_can_not_register_memory_is_a_warning_that_names_it(
    config_folder, monkeypatch, caplog
):
    from sglang.srt.model_loader import remote_instance_weight_loader_utils as utils

    def refuse(model, engine):
        raise RuntimeError("register memory failed for weight block, error: -202")

    transporter = FakeTransporter(engine=object())
    transporter.model = None
    monkeypatch.setattr(utils, "register_memory_region", refuse)
    on_rank(config_folder, Topology(tp=2).ranks()[1])
    with caplog.at_level(logging.WARNING):
        rank_registration.seed_through(transporter)
    assert transporter.weight_info is None
    assert "tp_rank=1" in caplog.text
    assert "error: -202" in caplog.text
    assert "RDT weight sync are not affected" in caplog.text


@pytest.mark.parametrize(("load_format", "fatal"), [("auto", False), ("remote_instance", True)])
def test_a_transfer_engine_without_verbs_is_fatal_only_to_load_through_it(
    config_folder, caplog, load_format, fatal
):
    @rank_registration.without_a_fabric_no_seed
    def init_engine(transporter):
        transporter.engine = object()
        raise RuntimeError("no RDMA device: ibv_get_device_list")

    on_rank(config_folder, Topology().ranks()[0])
    from sglang.srt.runtime_context import get_context

    get_context().override("a test", load_format=load_format)
    transporter = FakeTransporter(engine=None)
    if fatal:
        with pytest.raises(RuntimeError, match="ibv_get_device_list"):
            init_engine(transporter)
        return
    with caplog.at_level(logging.WARNING):
        init_engine(transporter)
    assert transporter.engine is None
    assert "ibv_get_device_list" in caplog.text


def on_rank(config_folder, rank):
    from sglang.srt.runtime_context import SpawnRanks, publish

    args = args_of(config_folder("qwen2"), tp_size=rank.tp_size)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank.global_rank))
