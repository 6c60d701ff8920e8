"""Megatron-style tensor parallelism: each of N processes holds the fused shards of its heads, rank 0 publishes.

What it does, honestly: rank 0 gathers the shards and turns them into Hugging Face tensors: it needs a full copy.
Layout: `linear_qkv` has [its queries, key, value] per head group, `linear_fc1` [gate, up] per rank; these and the
vocabulary are cut along dim 0, `linear_proj` and `linear_fc2` along dim 1.
"""

import ray
import torch
import torch.distributed as dist

CUT_ALONG = {"linear_proj": 1, "linear_fc2": 1, "word_embeddings": 0, "output_layer": 0}


def to_hugging_face(name, shards, group_size, head_dim):
    """One parameter, as all ranks hold it -> its Hugging Face tensors by the last part of their names."""
    kind = name.split(".")[-2]
    if kind == "linear_qkv":
        groups = torch.cat([shard.unflatten(0, (-1, group_size + 2, head_dim)) for shard in shards])
        query, key, value = groups.split([group_size, 1, 1], dim=1)
        return {
            "q_proj": query.flatten(0, 2),
            "k_proj": key.flatten(0, 2),
            "v_proj": value.flatten(0, 2),
        }
    if kind == "linear_fc1":
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return {"gate_proj": torch.cat(gates), "up_proj": torch.cat(ups)}
    return {"": torch.cat(shards, CUT_ALONG[kind]) if kind in CUT_ALONG else shards[0]}


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class TensorParallelTrainer:
    """One of `world_size` processes. `publish` is called on all of them, each waits for the others."""

    def __init__(self, rank, world_size, address, shards, config, fleet):
        """`shards`: Megatron name -> this rank's tensor; `config`: the Hugging Face one."""
        from sglang.srt.ray import HttpEngineControl, WeightPublisher

        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
        self.rank, self.world_size, self.shards = rank, world_size, shards
        self.group_size = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        if rank == 0:
            engines = [HttpEngineControl(url, actors) for url, actors in fleet]
            self.publisher = WeightPublisher.connect(engines)

    def publish(self, version, hugging_face_name):
        """`hugging_face_name(name, part)` -> the name that the engine's model knows."""
        tensors = {}
        for name, shard in self.shards.items():
            every = [torch.empty_like(shard) for _ in range(self.world_size)]
            dist.all_gather(every, shard)
            if self.rank == 0:
                parts = to_hugging_face(name, every, self.group_size, self.head_dim)
                tensors |= {hugging_face_name(name, part): tensor for part, tensor in parts.items()}
        return self.publisher.sync(tensors, version=version) if self.rank == 0 else None
