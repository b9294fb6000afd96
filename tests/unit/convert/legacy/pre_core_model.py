"""Checkpoints as Megatron-LM wrote them before Megatron-Core, and as its fork for MegaBlocks does, with random weights.

:func:`logits` is the forward pass of ``megatron/model`` and of MegaBlocks' layers in plain PyTorch, on the files: each
tensor parallel rank computes its part from its own file. It shares no code with the conversion.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS, H, HEADS, FFN, POSITIONS, VOCAB, PADDED, EPS = 4, 32, 4, 48, 24, 77, 80, 1e-5
D = H // HEADS
Experts = Literal["dmoe", "moe", "glu", "first_release", "switch", "switch_2023"]
Rank = tuple[int, int, int]
"""Tensor parallel, pipeline and data parallel rank."""


@dataclass(frozen=True, kw_only=True)
class OldModel:
    tp: int = 1
    pp: int = 1
    version: float = 3.0
    llama: bool = False
    """RMSNorm, SwiGLU, rotary embedding, grouped query attention, an untied output layer, and no biases."""
    experts: Experts | None = None
    number: int = 4
    """Of experts."""
    top_k: int = 1
    normalized: bool = False
    dp: int = 1
    """Ranks that share the experts."""
    old_names: bool = False
    """Those before 2021."""

    @property
    def groups(self) -> int:
        return 2 if self.llama else HEADS

    @property
    def megablocks(self) -> bool:
        return self.experts is not None and not self.experts.startswith("switch")

    @property
    def sharing(self) -> tuple[int, int]:
        """Over how many ranks the number of experts is divided, and their width."""
        by_number = min(self.dp, self.number)
        return by_number, self.dp // by_number

    def ranks(self) -> Iterator[Rank]:
        return ((tp, pp, dp) for tp in range(self.tp) for pp in range(self.pp) for dp in range(self.dp))

    def folder(self, rank: Rank) -> str:
        tp, pp, dp = rank
        return f"mp_rank_{tp:02d}" + (f"_{dp:03d}" if self.dp > 1 else "") + (f"_{pp:03d}" if self.pp > 1 else "")

    def args(self) -> Namespace:
        args: dict[str, Any] = {
            "num_layers": LAYERS,
            "hidden_size": H,
            "num_attention_heads": HEADS,
            "max_position_embeddings": POSITIONS,
            "layernorm_epsilon": EPS,
            "padded_vocab_size": PADDED,
            "tokenizer_type": "GPT2BPETokenizer",
            "bias_gelu_fusion": True,
            "params_dtype": torch.float32,
        }
        if self.version >= 3:
            args |= {"ffn_hidden_size": FFN, "kv_channels": D, "apply_query_key_layer_scaling": True}
            args |= {"tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp}
            args |= {"world_size": self.tp * self.pp * self.dp}
        else:
            args |= {"model_parallel_size": self.tp}
        if self.llama:
            args |= {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope"}
            args |= {
                "add_bias_linear": False,
                "untie_embeddings_and_output_weights": True,
                "add_position_embedding": True,
            }
            args |= {"group_query_attention": True, "num_query_groups": self.groups, "use_mcore_models": False}
        if self.megablocks:
            args |= {"moe_num_experts": self.number, "moe_top_k": self.top_k, "glu": self.experts == "glu"}
            args |= {"moe_capacity_factor": int(self.experts == "moe"), "moe_expert_model_parallelism": self.dp > 1}
            args |= {"moe_normalize_expert_weights": 1 if self.normalized else None}
        elif self.experts is not None:
            args["num_experts"] = self.number
        return Namespace(**args)


class Files:
    """The contents of all ranks' files."""

    def __init__(self, model: OldModel) -> None:
        self.model = model
        self._random = torch.Generator().manual_seed(1)
        self._shared: dict[tuple[Any, ...], Tensor] = {}
        self.states = {rank: self._state(rank) for rank in model.ranks()}

    def save(self, folder: Path) -> Path:
        for rank, state in self.states.items():
            file = folder / "iter_0000010" / self.model.folder(rank) / "model_optim_rng.pt"
            file.parent.mkdir(parents=True)
            version = {} if self.model.version == 0 else {"checkpoint_version": self.model.version}
            torch.save(
                {
                    "args": self.model.args(),
                    **version,
                    "iteration": 10,
                    "model": state,
                    "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}},
                    "rng_state": [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}],
                },
                file,
            )
        (folder / "latest_checkpointed_iteration.txt").write_text("10")
        return folder

    def _tensor(self, key: tuple[Any, ...], *shape: int, mean: float = 0.0) -> Tensor:
        """The same values for the same key."""
        if key not in self._shared:
            self._shared[key] = mean + 0.2 * torch.randn(shape, generator=self._random)
        return self._shared[key].clone()

    def _state(self, rank: Rank) -> dict[str, Any]:
        tp, pp, dp = rank
        model, first, last = self.model, pp == 0, pp == self.model.pp - 1
        words = {"weight": self._tensor(("words", tp), PADDED // model.tp, H)}
        language: dict[str, Any] = {}
        if first:
            language["embedding"] = {"word_embeddings": words}
            if not model.llama:
                language["embedding"]["position_embeddings"] = {"weight": self._tensor(("positions",), POSITIONS, H)}
        layers: dict[str, Tensor] = {}
        for local in range(LAYERS // model.pp):
            number = pp * LAYERS // model.pp + local
            layers |= {f"layers.{local}.{name}": tensor for name, tensor in self._layer(number, tp, dp).items()}
        if last:
            layers |= self._norm("final_norm" if model.llama else "final_layernorm", "final")
        language["transformer" if model.old_names else "encoder"] = layers
        if last and model.llama:
            language["output_layer"] = {"weight": self._tensor(("output", tp), PADDED // model.tp, H)}
        state = {"language_model": language}
        if last and not first and not model.llama:
            state["word_embeddings_for_head"] = words
        return state

    def _norm(self, name: str, *key: Any) -> dict[str, Tensor]:
        values = {f"{name}.weight": self._tensor((*key, "norm"), H, mean=1.0)}
        return values if self.model.llama else values | {f"{name}.bias": self._tensor((*key, "norm bias"), H)}

    def _layer(self, number: int, tp: int, dp: int) -> dict[str, Tensor]:
        model, attention = self.model, "attention" if self.model.old_names else "self_attention"
        rows = (HEADS + 2 * model.groups) * D // model.tp
        result = self._norm("input_norm" if model.llama else "input_layernorm", number, "input")
        result |= self._norm("post_attention_norm" if model.llama else "post_attention_layernorm", number, "post")
        result[f"{attention}.query_key_value.weight"] = self._tensor((number, "qkv", tp), rows, H)
        result[f"{attention}.dense.weight"] = self._tensor((number, "dense", tp), H, H // model.tp)
        if not model.llama:
            result[f"{attention}.query_key_value.bias"] = self._tensor((number, "qkv bias", tp), rows)
            result[f"{attention}.dense.bias"] = self._tensor((number, "dense bias"), H)
        if model.experts is None:
            return result | {f"mlp.{name}": tensor for name, tensor in self._mlp((number,), tp).items()}
        return result | (self._megablocks(number, dp) if model.megablocks else self._switch(number, tp))

    def _mlp(self, key: tuple[Any, ...], tp: int) -> dict[str, Tensor]:
        width = (4 * H if self.model.version < 3 else FFN) // self.model.tp
        values = {"dense_h_to_4h.weight": self._tensor((*key, "h4", tp), width * (1 + self.model.llama), H)}
        values["dense_4h_to_h.weight"] = self._tensor((*key, "4h", tp), H, width)
        if not self.model.llama:
            values["dense_h_to_4h.bias"] = self._tensor((*key, "h4 bias", tp), width)
            values["dense_4h_to_h.bias"] = self._tensor((*key, "4h bias"), H)
        return values

    def _switch(self, number: int, tp: int) -> dict[str, Tensor]:
        values = {"mlp.router.weight": self._tensor((number, "router"), self.model.number, H)}
        list_name = "experts"
        if self.model.experts == "switch":
            values["mlp.router.bias"] = self._tensor((number, "router bias"), self.model.number)
        else:
            list_name = "local_experts"
        for expert in range(self.model.number):
            inner = self._mlp((number, expert), tp)
            values |= {f"mlp.{list_name}.{expert}.{name}": tensor for name, tensor in inner.items()}
        return values

    def _megablocks(self, number: int, dp: int) -> dict[str, Tensor]:
        kind, (by_number, by_width) = self.model.experts, self.model.sharing
        experts, width = self.model.number // by_number, FFN // by_width
        inner = "mlp.moe." if kind == "first_release" else "mlp.moe.experts."
        values = {"mlp.moe.router.layer.weight": self._tensor((number, "router"), self.model.number, H)}
        bias = (1, 1, H) if kind == "first_release" else (H,)
        values[f"{inner}bias"] = self._tensor((number, "bias"), *bias)
        shapes = {"w1": (experts, H, width), "w2": (experts, width, H)}
        if kind != "moe":
            shapes = dict.fromkeys(("w1", "w2", *(("v1",) if kind == "glu" else ())), (experts * width, H))
        return values | {f"{inner}mlp.{name}": self._tensor((number, name, dp), *size) for name, size in shapes.items()}


def logits(files: Files, ids: Tensor) -> Tensor:
    """float32 [S, VOCAB] of int64 [S]."""
    model = files.model
    stages = [[files.states[tp, pp, 0] for tp in range(model.tp)] for pp in range(model.pp)]
    embedding = [state["language_model"]["embedding"] for state in stages[0]]
    words = torch.cat([item["word_embeddings"]["weight"] for item in embedding])
    hidden = words[ids]
    if not model.llama:
        hidden = hidden + embedding[0]["position_embeddings"]["weight"][: len(ids)]
    body = "transformer" if model.old_names else "encoder"
    for pp in range(model.pp):
        for local in range(LAYERS // model.pp):
            ranks = [_inside(files.states[tp, pp, 0]["language_model"][body], local) for tp in range(model.tp)]
            shares = [_inside(files.states[0, pp, dp]["language_model"][body], local) for dp in range(model.dp)]
            hidden = hidden + _attention(model, ranks, _normed(model, hidden, ranks[0], "input"))
            normed = _normed(model, hidden, ranks[0], "post_attention")
            hidden = hidden + _feed_forward(model, ranks, shares, normed)
    last = [state["language_model"] for state in stages[-1]]
    hidden = _normed(model, hidden, last[0][body], "final")
    head = words
    if model.llama:
        head = torch.cat([state["output_layer"]["weight"] for state in last])
    elif model.pp > 1:
        head = torch.cat([state["word_embeddings_for_head"]["weight"] for state in stages[-1]])
    return (hidden @ head.T)[:, :VOCAB]


def _inside(layers: dict[str, Tensor], local: int) -> dict[str, Tensor]:
    prefix = f"layers.{local}."
    return {name.removeprefix(prefix): tensor for name, tensor in layers.items() if name.startswith(prefix)}


def _normed(model: OldModel, x: Tensor, weights: dict[str, Tensor], which: str) -> Tensor:
    if model.llama:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weights[f"{which}_norm.weight"]
    name = f"{which}_layernorm"
    return F.layer_norm(x, (H,), weights[f"{name}.weight"], weights[f"{name}.bias"], EPS)


def _attention(model: OldModel, ranks: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    name = "attention" if model.old_names else "self_attention"
    heads, groups, length = HEADS // model.tp, model.groups // model.tp, len(x)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    out = torch.zeros_like(x)
    for rank in ranks:
        mixed = x @ rank[f"{name}.query_key_value.weight"].T + rank.get(f"{name}.query_key_value.bias", 0.0)
        if model.version == 0:
            q, k, v = mixed.view(length, 3, heads, D).unbind(1)
        elif model.version == 1:
            q, k, v = mixed.view(length, heads, D, 3).unbind(-1)
        else:
            q, k, v = mixed.view(length, groups, -1).split([heads // groups * D, D, D], dim=-1)
            q, k, v = q.reshape(length, heads, D), *(t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        if model.llama:
            q, k = _rotated(q), _rotated(k)
        scores = torch.einsum("qnd,knd->nqk", q, k) / D**0.5
        weights = scores.masked_fill(mask, -10000.0).softmax(-1)
        out = out + torch.einsum("nqk,knd->qnd", weights, v).reshape(length, -1) @ rank[f"{name}.dense.weight"].T
    return out + ranks[0].get(f"{name}.dense.bias", 0.0)


def _rotated(x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(len(x)).float(), 1.0 / 10000 ** (torch.arange(0, D, 2) / D)).repeat(1, 2)[:, None]
    left, right = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-right, left), dim=-1) * angles.sin()


def _feed_forward(
    model: OldModel, ranks: list[dict[str, Tensor]], shares: list[dict[str, Tensor]], x: Tensor
) -> Tensor:
    if model.experts is None:
        return _dense(model, [{name.removeprefix("mlp."): t for name, t in rank.items()} for rank in ranks], x)
    if model.megablocks:
        return _moe(model, shares, x)
    scores = x @ ranks[0]["mlp.router.weight"].T
    if model.experts == "switch":
        best, chosen = (scores + ranks[0]["mlp.router.bias"]).softmax(-1).max(-1)
    else:
        best, chosen = scores.sigmoid().max(-1)
    list_name = "experts" if model.experts == "switch" else "local_experts"
    rows = []
    for row, expert in enumerate(chosen.tolist()):
        prefix = f"mlp.{list_name}.{expert}."
        weights = [{name.removeprefix(prefix): t for name, t in rank.items()} for rank in ranks]
        rows.append(_dense(model, weights, x[row]) * best[row])
    return torch.stack(rows)


def _dense(model: OldModel, ranks: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    out = torch.zeros(H)
    for rank in ranks:
        wide = x @ rank["dense_h_to_4h.weight"].T + rank.get("dense_h_to_4h.bias", 0.0)
        if model.llama:
            gate, up = wide.chunk(2, dim=-1)
            wide = F.silu(gate) * up
        else:
            wide = F.gelu(wide, approximate="tanh")
        out = out + wide @ rank["dense_4h_to_h.weight"].T
    return out + ranks[0].get("dense_4h_to_h.bias", 0.0)


def _moe(model: OldModel, shares: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    inner = "mlp.moe." if model.experts == "first_release" else "mlp.moe.experts."
    by_number, _ = model.sharing
    in_share = model.number // by_number
    scores = (x @ shares[0]["mlp.moe.router.layer.weight"].T).softmax(-1)
    best, chosen = scores.topk(model.top_k, dim=-1)
    if model.normalized:
        best = best / best.norm(p=1, dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(best[row], chosen[row].tolist(), strict=True):
            for dp, share in enumerate(shares):
                if dp % by_number != expert // in_share:
                    continue
                local = expert % in_share
                w = {name: share[f"{inner}mlp.{name}"] for name in ("w1", "w2", "v1") if f"{inner}mlp.{name}" in share}
                w = {name: tensor.view(in_share, -1, tensor.shape[-1])[local] for name, tensor in w.items()}
                wide = F.gelu(x[row] @ (w["w1"] if model.experts == "moe" else w["w1"].T), approximate="tanh")
                wide = wide * (x[row] @ w["v1"].T) if "v1" in w else wide
                out[row] += weight * (wide @ w["w2"])
    return out + shares[0][f"{inner}bias"].flatten()
