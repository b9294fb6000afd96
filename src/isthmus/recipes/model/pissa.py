"""PiSSA (arXiv 2404.02948): adapters start as the principal components of the weights, which are left with the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.convert.weight_source import WeightSource
from isthmus.engine.lora.adapter import Adapter, AdapterSet, Role
from isthmus.families.adapted_linears import HfLinear
from isthmus.hf.peft_folder import AdapterConfig, LoraFactors

PISSA = "pissa"


class PissaAdapters:
    """The initial adapters of all linear layers that this rank has; of the whole model on rank 0."""

    def __init__(
        self,
        init: str,
        adapters: AdapterSet,
        source: WeightSource,
        local_linears: Collection[HfLinear],
        device: torch.device,
    ) -> None:
        """A collective: each rank decomposes a part of the weights, read whole from ``source`` in float32.

        ``init`` is ``pissa``, or ``pissa_niter_N`` for a randomized decomposition with N power iterations.
        """
        self._values: dict[HfLinear, LoraFactors] = {}
        iterations = int(init.rpartition("_")[2]) if init != PISSA else None
        all_adapters = [adapter for weight_adapters in adapters.by_weight.values() for adapter in weight_adapters]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        parts = {
            adapter.linear: principal_part(adapter, source, iterations, device) for adapter in all_adapters[rank::ranks]
        }
        for number, adapter in enumerate(all_adapters):
            shapes = [adapter.shape(role) for role in ("lora_A", "lora_B")]
            tensors = parts.pop(adapter.linear, None) or [torch.empty(shape, device=device) for shape in shapes]
            for tensor in tensors:
                dist.broadcast(tensor, number % ranks)
            if not rank or adapter.linear in local_linears:
                self._values[adapter.linear] = LoraFactors(tensors[0].cpu(), tensors[1].cpu(), adapter.scale)

    def __call__(self, adapter: Adapter, role: Role) -> Tensor | None:
        values = self._values[adapter.linear]
        return {"lora_A": values.a, "lora_B": values.b}.get(role)

    def relative_to_original(self, linear: HfLinear, trained: LoraFactors) -> LoraFactors:
        """The adapter of twice the rank that gives the same model with the original weights, as PEFT converts it."""
        initial = self._values[linear]
        a, b = torch.cat([trained.a, initial.a.to(trained.a)]), torch.cat([trained.b, -initial.b.to(trained.b)], 1)
        return LoraFactors(a, b, trained.scale)


def doubled(config: AdapterConfig) -> AdapterConfig:
    """Twice the rank and the same scale."""
    return replace(config, r=2 * config.r, lora_alpha=config.lora_alpha * (2**0.5 if config.use_rslora else 2))


def principal_part(
    adapter: Adapter, source: WeightSource, iterations: int | None, device: torch.device
) -> list[Tensor]:
    """A and B whose product is the part of the largest singular values, as in PEFT."""
    linear, rank = adapter.linear, adapter.rank
    (name,) = linear.tensors
    weight = source.read(name).float().to(device)
    weight = weight.mT if linear.transposed else weight
    if iterations is None:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    else:
        seed = int.from_bytes(hashlib.sha256(linear.module.encode()).digest()[:8], "big") >> 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            u, s, v = torch.svd_lowrank(weight.cpu(), rank, niter=iterations)
        u, s, vh = u.to(device), s.to(device), v.mT.to(device)
    root = (s[:rank] / adapter.scale).sqrt()
    return [(root.diag() @ vh[:rank]).contiguous(), (u[:, :rank] @ root.diag()).contiguous()]
