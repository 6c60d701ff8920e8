"""FSDP: each of N processes holds some rows of every parameter (`fully_shard`), and rank 0 publishes.

What it does, honestly: `full_tensor()` gathers one parameter after the other, so rank 0 needs room for one full copy on
the CPU and reads all bytes through itself. It is correct for every model, and slower than sources that send their rows.
"""

import ray
import torch


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class ShardedTrainer:
    """One of `world_size` processes. Every method is called on all of them, each waits for the others."""

    def __init__(self, rank, world_size, address, model_path, fleet):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        from sglang.srt.ray import HttpEngineControl, WeightPublisher

        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
        self.rank = rank
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (world_size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if rank == 0:
            engines = [HttpEngineControl(url, actors) for url, actors in fleet]
            self.publisher = WeightPublisher.connect(engines)

    def step(self, tokens, version):
        tokens = torch.as_tensor(tokens)
        self.optimizer.zero_grad()
        self.model(tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        whole = self.state()
        return self.publisher.sync(whole, version=version) if self.rank == 0 else None

    def state(self):
        """Hugging Face name -> whole tensor on rank 0; the others take part and keep nothing."""
        whole = {}
        for name, shard in self.model.state_dict().items():
            full = shard.full_tensor()  # every rank calls it, for the same name
            if self.rank == 0:
                whole[name] = full
        return whole

    def local_rows(self):
        """How many rows of each parameter this process holds."""
        return {name: shard.to_local().shape[0] for name, shard in self.model.state_dict().items()}

    def close(self):
        if self.rank == 0:
            self.publisher.close()
