"""Build the shard of any rank in this process, as a trainer does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
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


def elements_landed(
    model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Load a checkpoint whose elements are numbered through, and return the numbers that stand in each parameter.

    -1 stands where nothing was loaded. Done with the model's real parameters and loader: float32 holds whole numbers
    up to 2^24 exactly, and these models are smaller.
    """
    assert sum(map(math.prod, shapes.values())) < 2**24
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    model.load_weights(numbered_checkpoint(shapes))
    return {name: p.detach().numpy().ravel().astype(int) for name, p in model.named_parameters()}


def numbered_checkpoint(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, torch.Tensor]]:
    tensors, first = [], 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        numbers = torch.arange(first, first + size, dtype=torch.float32)
        tensors.append((name, numbers.view(shape)))
        first += size
    return tensors


def tensors_by_element(shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """For each element number, the index of the checkpoint tensor it belongs to."""
    return np.repeat(np.arange(len(shapes)), [math.prod(shape) for shape in shapes.values()])
