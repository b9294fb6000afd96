"""Reference training with MTP layers, with modules of transformers and torch only."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from isthmus.data.batching.batches import Batches, BatchSettings
from isthmus.data.batching.packed_batch import PackedBatch
from ranks.tasks import CLIP_GRAD
from ranks.tiny import GLOBAL_BATCH_SIZE, SEQ_LENGTH, open_samples
from ranks.tiny_families import bailing_moe


class MtpLayer(nn.Module):
    """One MTP depth of arXiv 2412.19437, section 2.2; embedding and output layer are shared with the model."""

    def __init__(self, config: Any, tensors: dict[str, Tensor], layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(width, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, layer)
        layer_tensors = {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in tensors.items()}
        layer_tensors = {name: tensor for name, tensor in layer_tensors.items() if not name.startswith("model.")}
        for name in ("enorm", "hnorm", "eh_proj"):
            getattr(self, name).load_state_dict({"weight": layer_tensors.pop(f"{name}.weight")})
        self.norm.load_state_dict({"weight": layer_tensors.pop("shared_head.norm.weight")})
        experts = [
            {part: layer_tensors.pop(f"mlp.experts.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for expert in range(config.n_routed_experts)
        ]
        layer_tensors["mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat([item["gate"], item["up"]]) for item in experts]
        )
        layer_tensors["mlp.experts.down_proj"] = torch.stack([item["down"] for item in experts])
        del (
            layer_tensors["embed_tokens.weight"],
            layer_tensors["shared_head.head.weight"],
            layer_tensors["lm_head.weight"],
        )
        self.layer.load_state_dict(layer_tensors)

    def predict(self, hidden: Tensor, embedded: Tensor, rotary: nn.Module) -> Tensor:
        """Hidden states of the previous depth and embeddings of the shifted tokens, [1, n, H] each."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        length = joined.size(1)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = rotary(joined, torch.arange(length)[None])
        normed: Tensor = self.norm(self.layer(joined, attention_mask=mask, position_embeddings=angles))
        return normed


class LingMtpLayer(nn.Module):
    """That of Ling 2, whose files have no copies of the embedding and the output layer."""

    def __init__(self, config: Any, tensors: dict[str, Tensor], layer: int) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.final_layernorm = (
            bailing_moe.Norm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = bailing_moe.Layer(config, layer)
        prefix, names = f"model.layers.{layer}.", ("enorm", "hnorm", "eh_proj", "final_layernorm")
        layer_tensors = {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        self.load_state_dict(
            {(name if name.startswith(names) else f"layer.{name}"): layer_tensors[name] for name in layer_tensors}
        )

    def predict(self, hidden: Tensor, embedded: Tensor, _rotary: None) -> Tensor:
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        normed: Tensor = self.final_layernorm(self.layer(joined))
        return normed


def train(
    *, model: str, samples: str, lr: list[float], mtp_loss_weight: float, weight_decay: float = 0.1
) -> dict[str, list[float]]:
    """Like :func:`parity.tasks.train`, with the MTP layers of the folder; ``lr`` has one entry per step."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").train()
    tensors = load_file(Path(model) / "model.safetensors")
    layers = range(network.config.num_hidden_layers, network.config.num_hidden_layers + 9)
    kind = LingMtpLayer if network.config.model_type == "bailing_moe" else MtpLayer
    added = (
        kind(network.config, tensors, layer) for layer in layers if f"model.layers.{layer}.enorm.weight" in tensors
    )
    network.mtp = getattr(network.model, "mtp_layers", None) or nn.ModuleList(added)
    with_decay = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    without_decay = [parameter for parameter in network.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": with_decay, "weight_decay": weight_decay}, {"params": without_decay, "weight_decay": 0.0}],
        lr=0.0,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    batches = Batches(
        open_samples(samples),
        BatchSettings(seq_length=SEQ_LENGTH, micro_batch_size=2, global_batch_size=GLOBAL_BATCH_SIZE, packing=True),
    )
    curves: dict[str, list[float]] = {"loss": [], "mtp_loss": [], "grad_norm": []}
    for step, rate in enumerate(lr):
        sums = torch.stack([_sums(network, batch) for batch in batches.step(step)]).sum(dim=0)
        loss_sum, loss_tokens, mtp_sum, mtp_tokens = sums
        optimizer.zero_grad()
        ((loss_sum + mtp_loss_weight / len(network.mtp) * mtp_sum) / loss_tokens.detach()).backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP_GRAD)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        curves["loss"].append((loss_sum / loss_tokens).item())
        curves["mtp_loss"].append((mtp_sum / mtp_tokens).item())
        curves["grad_norm"].append(norm.item())
    return curves


def _sums(network: Any, batch: PackedBatch) -> Tensor:
    """Loss sums and loss tokens of the model and of all MTP layers, computed per sample."""
    total = torch.zeros(4)
    for begin, end in itertools.pairwise(itertools.accumulate(batch.lengths, initial=0)):
        assert batch.labels is not None and batch.loss_mask is not None
        tokens, labels, mask = batch.input_ids[begin:end], batch.labels[begin:end], batch.loss_mask[begin:end]
        embed, rotary = network.get_input_embeddings(), getattr(network.model, "rotary_emb", None)
        # The plain reference takes embeddings and returns hidden states.
        hidden = network.model(embed(tokens[None])) if rotary is None else network.model(tokens[None]).last_hidden_state
        total = total + _sum(network, hidden, labels, mask, 0)
        for depth, mtp in enumerate(network.mtp, start=1):
            if depth >= end - begin:
                break
            hidden = mtp.predict(hidden[:, :-1], embed(tokens[None, depth:]), rotary)
            total = total + _sum(network, hidden, labels[depth:], mask[depth:], 2)
    return total


def _sum(network: Any, hidden: Tensor, labels: Tensor, mask: Tensor, column: int) -> Tensor:
    sums = [torch.zeros(())] * 4
    if mask.any():
        sums[column] = cross_entropy(network.lm_head(hidden[0][mask]), labels[mask], reduction="sum")
        sums[column + 1] = mask.sum().float()
    return torch.stack(sums)
