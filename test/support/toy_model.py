"""A small module with a loader that does what SGLang's do: fuses by shard id, shards by rank, ties its head."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Fused(torch.nn.Module):
    """qkv fused from three tensors by shard id, a tied head, a norm; loads as SGLang's models do."""

    HIDDEN, HEADS, KV_HEADS, HEAD = 8, 4, 2, 2
    STACKED = (("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v"))

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.sizes = [n * self.HEAD // ranks for n in (self.HEADS, self.KV_HEADS, self.KV_HEADS)]
        self.embed = torch.nn.Embedding(6, self.HIDDEN)
        self.qkv_proj = torch.nn.Linear(self.HIDDEN, sum(self.sizes))
        self.o_proj = torch.nn.Linear(self.HEADS * self.HEAD // ranks, self.HIDDEN, bias=False)
        self.norm = torch.nn.LayerNorm(self.HIDDEN, bias=False)
        self.head = torch.nn.Linear(self.HIDDEN, 6, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.qkv_proj.parameters():
            parameter.weight_loader = self.load_qkv
        self.o_proj.weight.weight_loader = self.load_columns
        self.dtype = torch.bfloat16
        self.to(self.dtype)

    def load_qkv(self, parameter: torch.nn.Parameter, loaded: torch.Tensor, shard: str) -> None:
        index = "qkv".index(shard)
        size = self.sizes[index]
        parameter.data.narrow(0, sum(self.sizes[:index]), size).copy_(
            loaded.narrow(0, self.rank * size, size)
        )

    def load_columns(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        size = parameter.shape[1]
        parameter.data.copy_(loaded.narrow(1, self.rank * size, size))

    def load_norm(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        parameters["norm.weight"].weight_loader = self.load_norm
        for name, loaded in weights:
            for fused, part, shard in self.STACKED:
                if part in name:
                    parameter = parameters[name.replace(part, fused)]
                    parameter.weight_loader(parameter, loaded, shard)
                    break
            else:
                if name not in parameters:
                    continue  # as upstream's loaders do: warn at most
                parameter = parameters[name]
                loader = getattr(parameter, "weight_loader", lambda p, w: p.data.copy_(w))
                loader(parameter, loaded)


def weights_of(model: Fused) -> dict[str, torch.Tensor]:
    full = model.HEADS * model.HEAD, model.KV_HEADS * model.HEAD
    shapes = {
        "embed.weight": (6, 8),
        "q_proj.weight": (full[0], 8),
        "k_proj.weight": (full[1], 8),
        "v_proj.weight": (full[1], 8),
        "q_proj.bias": (full[0],),
        "k_proj.bias": (full[1],),
        "v_proj.bias": (full[1],),
        "o_proj.weight": (8, full[0]),
        "norm.weight": (8,),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}
