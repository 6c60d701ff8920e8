"""One rank's place in an engine, and a way to build that rank's shard of a model in another process.

`RankParallelismConfig` is what an engine tells about a rank (`/parallelism_config`); inside `ParallelismContext`
upstream's model code believes itself on that rank, so `get_model` builds its shard on any device, without process
groups. A real engine has process groups (`parallel_state.py`); the stand-ins here hold ranks and can't communicate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from sglang.srt import runtime_context

_PAIRS = ("tp", "pp", "ep", "moe_tp", "attn_tp", "attn_dp")


class NestedParallelismError(RuntimeError):
    """A `ParallelismContext` was entered while one is active in this process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankParallelismConfig:
    """Where one rank stands. Sizes default to 1 and ranks to 0: a single rank."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    ep_size: int = 1
    """Width of expert parallelism, inside the TP group."""
    ep_rank: int = 0
    moe_tp_size: int = 1
    """Over how many ranks one expert's matrices are split."""
    moe_tp_rank: int = 0
    attn_tp_size: int = 1
    """Over how many ranks one attention layer's heads are split."""
    attn_tp_rank: int = 0
    attn_dp_size: int = 1
    attn_dp_rank: int = 0
    world_size: int = 1
    """Ranks of one replica: TP times PP."""
    global_rank: int = 0
    """Place among the ranks of the replica, pipeline stages outside."""
    local_rank: int = 0
    """Index of the device on its node; 0 on a CPU."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{field.name} must be an int, got {value!r}")
        ranks = [(f"{name}_rank", f"{name}_size") for name in _PAIRS]
        for rank, size in [*ranks, ("global_rank", "world_size")]:
            if not 0 <= getattr(self, rank) < getattr(self, size):
                raise ValueError(
                    f"{rank}={getattr(self, rank)!r} is no rank of {size}={getattr(self, size)!r}"
                )

    @property
    def has_dp_attention(self) -> bool:
        return self.attn_dp_size > 1

    @property
    def has_expert_parallelism(self) -> bool:
        return self.ep_size > 1

    def to_dict(self) -> dict[str, int]:
        """As JSON; `from_dict` takes it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> RankParallelismConfig:
        """Raises ValueError for a name that is no field: this client is older or newer than the engine."""
        fields = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - fields):
            raise ValueError(
                f"{unknown!r} are no fields of RankParallelismConfig, which has {sorted(fields)!r}"
            )
        return cls(**values)

    @classmethod
    def of_this_process(cls) -> RankParallelismConfig:
        """The place of the scheduler process that calls this; call it where upstream's parallel state is set."""
        parallel = runtime_context.get_parallel()
        return cls(
            tp_size=parallel.tp_size,
            tp_rank=parallel.tp_rank,
            pp_size=parallel.pp_size,
            pp_rank=parallel.pp_rank,
            ep_size=parallel.moe_ep_size,
            ep_rank=parallel.moe_ep_rank,
            moe_tp_size=parallel.moe_tp_size,
            moe_tp_rank=parallel.moe_tp_rank,
            attn_tp_size=parallel.attn_tp_size,
            attn_tp_rank=parallel.attn_tp_rank,
            attn_dp_size=parallel.attn_dp_size,
            attn_dp_rank=parallel.attn_dp_rank,
            world_size=parallel.launch_world_size,
            global_rank=parallel.launch_world_rank,
            local_rank=runtime_context.get_device().gpu_id or 0,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandInGroup:
    """What model code reads of a process group while it is being built; it can't communicate."""

    name: str
    ranks: list[int]
    rank_in_group: int
    cpu_group: None = None
    device_group: None = None

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        return self.ranks[self.rank_in_group]

    @property
    def first_rank(self) -> int:
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(
            f"the {self.name} group has no {attribute!r}: in a ParallelismContext groups are stand-ins, "
            f"for building a model, not for running it"
        )


class ParallelismContext:
    """Inside the `with` block this process builds models as the given rank of an engine does.

    The engine's server args must have been published before (`set_global_server_args_for_scheduler`). The block runs on
    a runtime context of its own, which is dropped at the end whatever happened in it: nothing of the process's own
    state is written. Upstream's context belongs to the process, so other threads see the block's while it lasts, and a
    second one is refused. One object may be entered again and again.

    Raises:
        ValueError: no server args are published, or the rank contradicts them.
        NestedParallelismError: another `ParallelismContext` is active.
    """

    _lock = threading.Lock()
    _active: ParallelismContext | None = None

    def __init__(self, config: RankParallelismConfig) -> None:
        self.config = config
        self._scopes: contextlib.ExitStack | None = None

    def __repr__(self) -> str:
        return f"ParallelismContext({self.config!r})"

    def __enter__(self) -> ParallelismContext:
        with ParallelismContext._lock:
            if ParallelismContext._active is not None:
                raise NestedParallelismError(
                    f"{self!r} was entered inside {ParallelismContext._active!r}; leave that one first, "
                    f"a process can be on one rank at a time"
                )
            ParallelismContext._active = self
        scopes = contextlib.ExitStack()
        scopes.callback(self._deactivate)
        try:
            scopes.enter_context(_as_rank(self.config))
        except BaseException:
            scopes.close()
            raise
        self._scopes = scopes
        return self

    def __exit__(self, *exception: object) -> None:
        scopes, self._scopes = self._scopes, None
        assert scopes is not None, "left without having been entered"
        scopes.close()

    @staticmethod
    def _deactivate() -> None:
        ParallelismContext._active = None


@contextlib.contextmanager
def _as_rank(config: RankParallelismConfig) -> Iterator[None]:
    """Make a copy of the published runtime context the current one, with this rank's parallel state."""
    outer = runtime_context.get_context()
    try:
        server_args = outer.server_args
    except ValueError as error:
        raise ValueError(
            "no server args are published in this process; publish the engine's first: "
            "sglang.srt.server_args.set_global_server_args_for_scheduler(server_args)"
        ) from error
    inner = runtime_context.create_context(server_args, role="scheduler")
    for source, fields in outer.overrides_log():
        inner.override(source, **fields)
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(runtime_context.use_context(inner))
        scopes.enter_context(inner.parallel.override(**_parallel_state(config, inner.parallel)))
        _initialize_flags(server_args)
        yield


def _initialize_flags(server_args: Any) -> None:
    """What a scheduler process derives from its args before it builds a model; held by the current context."""
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.layers.moe import initialize_moe_config

    initialize_dp_attention_flags(server_args)
    initialize_moe_config()  # type: ignore[no-untyped-call]


def _parallel_state(config: RankParallelismConfig, published: Any) -> dict[str, Any]:
    """Upstream's names and values for this rank. Context and MoE data parallelism come from the published args."""
    config = _completed(config, published)
    attn_cp_rank = config.tp_rank // config.attn_tp_size % published.attn_cp_size
    moe_dp_rank = config.tp_rank // (config.moe_tp_size * config.ep_size)
    return {
        "tp_size": config.tp_size,
        "tp_rank": config.tp_rank,
        "pp_size": config.pp_size,
        "pp_rank": config.pp_rank,
        "ep_size": config.ep_size,
        "moe_ep_size": config.ep_size,
        "moe_ep_rank": config.ep_rank,
        "moe_tp_size": config.moe_tp_size,
        "moe_tp_rank": config.moe_tp_rank,
        "moe_dp_rank": moe_dp_rank,
        "attn_tp_size": config.attn_tp_size,
        "attn_tp_rank": config.attn_tp_rank,
        "attn_dp_size": config.attn_dp_size,
        "attn_dp_rank": config.attn_dp_rank,
        "attn_dp_enabled": config.has_dp_attention,
        "attn_cp_rank": attn_cp_rank,
        "launch_world_rank": config.global_rank,
        "launch_world_size": config.tp_size * config.pp_size,
        **_groups(config, published, attn_cp_rank=attn_cp_rank, moe_dp_rank=moe_dp_rank),
    }


def _completed(config: RankParallelismConfig, published: Any) -> RankParallelismConfig:
    """Fill in what follows from TP alone where attention or MoE was left at its defaults; check the rest."""
    attn_cp, moe_dp = published.attn_cp_size, published.moe_dp_size
    changes: dict[str, int] = {}
    if config.attn_tp_size == config.attn_dp_size == 1 and config.tp_size % attn_cp == 0:
        width = config.tp_size // attn_cp
        changes |= {"attn_tp_size": width, "attn_tp_rank": config.tp_rank % width}
    if config.moe_tp_size == config.ep_size == 1 and config.tp_size % moe_dp == 0:
        width = config.tp_size // moe_dp
        changes |= {"moe_tp_size": width, "moe_tp_rank": config.tp_rank % width}
    if config.world_size == 1:
        rank = config.pp_rank * config.tp_size + config.tp_rank
        changes |= {"world_size": config.tp_size * config.pp_size, "global_rank": rank}
    config = dataclasses.replace(config, **changes)
    for axis, split, published_width in (
        ("attn_tp_size * attn_dp_size", config.attn_tp_size * config.attn_dp_size, attn_cp),
        ("moe_tp_size * ep_size", config.moe_tp_size * config.ep_size, moe_dp),
    ):
        if split * published_width != config.tp_size:
            other = "attn_cp_size" if axis.startswith("attn") else "moe_dp_size"
            raise ValueError(
                f"{axis} = {split}, times {other} = {published_width} of the published server args, is not "
                f"tp_size = {config.tp_size}: publish the server args of the engine that {config!r} comes from"
            )
    return config


def _groups(
    config: RankParallelismConfig, published: Any, *, attn_cp_rank: int, moe_dp_rank: int
) -> dict[str, StandInGroup]:
    stage = config.pp_rank * config.tp_size

    def within_stage(name: str, rank: int, size: int, stride: int) -> StandInGroup:
        first = stage + config.tp_rank - rank * stride
        ranks = [first + i * stride for i in range(size)]
        return StandInGroup(name=name, ranks=ranks, rank_in_group=rank)

    moe_width = config.moe_tp_size * config.ep_size
    groups = [
        within_stage("tp_group", config.tp_rank, config.tp_size, 1),
        within_stage("attn_tp_group", config.attn_tp_rank, config.attn_tp_size, 1),
        within_stage("attn_cp_group", attn_cp_rank, published.attn_cp_size, config.attn_tp_size),
        within_stage("moe_tp_group", config.moe_tp_rank, config.moe_tp_size, 1),
        within_stage("moe_ep_group", config.ep_rank, config.ep_size, config.moe_tp_size),
        within_stage("moe_dp_group", moe_dp_rank, published.moe_dp_size, moe_width),
        StandInGroup(
            name="pp_group",
            ranks=[config.tp_rank + i * config.tp_size for i in range(config.pp_size)],
            rank_in_group=config.pp_rank,
        ),
        StandInGroup(
            name="world_group",
            ranks=list(range(config.tp_size * config.pp_size)),
            rank_in_group=stage + config.tp_rank,
        ),
    ]
    if (shared := published.shared_experts_tp_size) is not None and shared > 1:
        groups.append(within_stage("shared_experts_tp_group", config.tp_rank % shared, shared, 1))
    return {group.name: group for group in groups}
