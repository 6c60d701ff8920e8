"""Build the shard of any rank in this process, as a trainer does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import ParallelismContext, RankParallelismConfig
from sglang.srt.model_loader import get_model
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler


@dataclasses.dataclass(frozen=True)
class Topology:
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-ep{self.ep}"

    def ranks(self) -> list[RankParallelismConfig]:
        """Every rank in world order, as the engine of this topology tells about it."""
        moe_tp = self.tp // self.ep
        return [
            RankParallelismConfig(
                tp_size=self.tp,
                tp_rank=tp_rank,
                pp_size=self.pp,
                pp_rank=pp_rank,
                ep_size=self.ep,
                ep_rank=tp_rank // moe_tp,
                moe_tp_size=moe_tp,
                moe_tp_rank=tp_rank % moe_tp,
                attn_tp_size=self.tp,
                attn_tp_rank=tp_rank,
                world_size=self.tp * self.pp,
                global_rank=pp_rank * self.tp + tp_rank,
                local_rank=0,
            )
            for pp_rank in range(self.pp)
            for tp_rank in range(self.tp)
        ]


def publish_args(folder: Path, **values: object) -> ServerArgs:
    server_args = ServerArgs(model_path=str(folder), device="cpu", dtype="float32", **values)
    set_global_server_args_for_scheduler(server_args)
    return server_args


def build_shard(server_args: ServerArgs, rank: RankParallelismConfig) -> torch.nn.Module:
    with ParallelismContext(rank):
        return get_model(
            model_config=ModelConfig.from_server_args(server_args),
            load_config=LoadConfig(load_format="dummy"),
            device_config=DeviceConfig("cpu"),
        )
