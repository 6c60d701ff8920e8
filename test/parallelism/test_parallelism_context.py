"""What `ParallelismContext` does to the process: nothing that outlives it."""

import threading

import pytest
from shards import Topology, build_shard, publish_args

from sglang.srt.distributed.parallel_state import ParallelismContext, RankParallelismConfig
from sglang.srt.distributed.rank_parallelism import NestedParallelismError
from sglang.srt.model_loader import get_model
from sglang.srt.runtime_context import (
    get_context,
    get_exec,
    get_flags,
    get_parallel,
    get_resources,
    reset_context,
    snapshot_context,
)

RANK = Topology(tp=2, ep=2).ranks()[1]


def plain(value, depth=0):
    """A copy of a snapshot's contents that later writes can't reach."""
    if isinstance(value, dict):
        return {key: plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, depth + 1) for each in value]
    if hasattr(value, "_fields") and not isinstance(value, tuple):
        return plain(dict(object.__getattribute__(value, "_fields")), depth + 1)
    if hasattr(type(value), "__struct_fields__") and depth < 6:
        fields = {name: getattr(value, name) for name in type(value).__struct_fields__}
        return plain(fields, depth + 1)
    return value


def state_of_the_process():
    parallel = get_parallel()
    return {
        "context": id(get_context()),
        "parallel": id(parallel),
        "read": [
            (name, getattr(parallel, name)) for name in ("tp_size", "attn_tp_size", "moe_ep_size")
        ],
        "snapshot": plain(snapshot_context()),
    }


@pytest.fixture
def server_args(config_folder):
    return publish_args(config_folder("qwen3-moe"))


def test_inside_the_process_is_on_the_rank(server_args):
    with ParallelismContext(RANK):
        parallel = get_parallel()
        assert (parallel.tp_size, parallel.tp_rank) == (2, 1)
        assert (parallel.moe_ep_size, parallel.moe_ep_rank, parallel.moe_tp_size) == (2, 1, 1)
        assert parallel.tp_group.ranks == [0, 1]
        assert parallel.tp_group.is_last_rank
        assert RankParallelismConfig.of_this_process() == RANK


def test_building_a_model_leaves_no_trace(server_args):
    before = state_of_the_process()
    build_shard(server_args, RANK)
    assert state_of_the_process() == before


def test_an_exception_leaves_no_trace_and_comes_through(server_args):
    before = state_of_the_process()

    def write_everywhere_and_fail():
        get_context().override("a test", max_running_requests=3)
        get_flags().moe.tbo_enabled = True
        get_resources().buffers["a test"] = object()
        get_parallel().override_permanently(attn_dcp_rank=0, max_world_size=7)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ParallelismContext(RANK):
        write_everywhere_and_fail()
    assert state_of_the_process() == before


def test_one_object_can_be_used_again_also_after_an_exception(server_args):
    context = ParallelismContext(RANK)
    with context:
        assert get_parallel().tp_rank == 1
    with pytest.raises(ZeroDivisionError), context:
        raise ZeroDivisionError
    with context:
        assert get_parallel().tp_rank == 1


def test_ranks_can_follow_each_other(server_args):
    seen = []
    for rank in Topology(tp=4).ranks():
        with ParallelismContext(rank):
            seen.append(get_parallel().tp_rank)
    assert seen == [0, 1, 2, 3]


def test_a_second_context_inside_is_refused_and_the_first_goes_on(server_args):
    with ParallelismContext(RANK):
        with pytest.raises(NestedParallelismError, match=r"tp_rank=0.*entered inside.*tp_rank=1"):
            ParallelismContext(Topology(tp=2).ranks()[0]).__enter__()
        assert get_parallel().tp_rank == 1
    with ParallelismContext(RANK):
        pass


def test_another_thread_is_refused_while_one_is_inside(server_args):
    refused = []

    def enter():
        try:
            ParallelismContext(RANK).__enter__()
        except NestedParallelismError as error:
            refused.append(error)

    with ParallelismContext(RANK):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(timeout=10)
    assert len(refused) == 1


def test_without_published_args_the_error_says_what_to_call():
    reset_context()
    with pytest.raises(ValueError, match="set_global_server_args_for_scheduler"):
        ParallelismContext(RANK).__enter__()
    with pytest.raises(ValueError, match="set_global_server_args_for_scheduler"):
        ParallelismContext(RANK).__enter__()  # the refused one is not taken for active


def test_a_rank_of_another_engine_is_refused_with_both_sizes(server_args):
    contradiction = RankParallelismConfig(tp_size=4, attn_tp_size=2)
    with pytest.raises(ValueError, match=r"attn_tp_size \* attn_dp_size = 2.*tp_size = 4"):
        ParallelismContext(contradiction).__enter__()


def test_what_was_overridden_after_publishing_holds_inside(server_args):
    get_context().override("a test", moe_runner_backend="triton")
    with ParallelismContext(RANK):
        assert get_exec().moe.moe_runner_backend == "triton"


def test_a_stand_in_group_says_why_it_cannot_communicate(server_args):
    with (
        ParallelismContext(RANK),
        pytest.raises(AttributeError, match=r"tp_group.*'all_reduce'.*not for running it"),
    ):
        get_parallel().tp_group.all_reduce(None)


def test_tp_alone_is_enough_of_a_description(server_args):
    with ParallelismContext(RankParallelismConfig(tp_size=2, tp_rank=1)):
        parallel = get_parallel()
        assert (parallel.attn_tp_size, parallel.attn_tp_rank) == (2, 1)
        assert (parallel.moe_tp_size, parallel.moe_tp_rank) == (2, 1)


def test_dp_attention_splits_attention_by_less_than_tp(config_folder):
    server_args = publish_args(config_folder("qwen3-moe"))
    attention, whole = {}, Topology(tp=2).ranks()[0]
    alone = RankParallelismConfig(tp_size=2, attn_dp_size=2, attn_tp_size=1, world_size=2)
    for name, rank in (("split", whole), ("whole", alone)):
        model = build_shard(server_args, rank)
        attention[name] = model.model.layers[0].self_attn.qkv_proj.weight.shape[0]
    assert attention["whole"] == 2 * attention["split"]


assert get_model  # imported so that model classes are registered before any snapshot is taken
