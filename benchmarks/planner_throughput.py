"""The planner's throughput against published figures.

    python benchmarks/planner_throughput.py --record

Rows differ in software (TransformerEngine, torchtitan, Primus), and the cost model has none of it: it estimates what
good software reaches on a part. Every third row is for fitting, the others are held out; ``--fit`` repeats the fit. The
constants are the same for all rows. Where a source does not state a setting, the row has a note with the assumption,
the same in all rows of a source.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from certificate import certificate, publish_result

from isthmus.config.schema import ParallelConfig
from isthmus.families.architecture import Architecture, from_settings
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.blocks.latent_attention import Latent
from isthmus.platforms.parts import Part, part_named
from isthmus.tools.planner.cost import kernels, layer_time
from isthmus.tools.planner.cost.cluster import Cluster
from isthmus.tools.planner.cost.step_time import StepTime, step_time
from isthmus.tools.planner.cost.workload import Workload


def model(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, **others: Any) -> Architecture:
    others = {"kv_channels": hidden // heads, "family": "published"} | others
    return from_settings({
        "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_query_groups": groups, "vocab_size": vocab, "max_position_embeddings": 1 << 17, "norm_epsilon": 1e-5,
        **others,
    })  # fmt: skip


def gpt(layers: int, hidden: int, heads: int) -> Architecture:
    """The GPT models of Megatron-LM's table."""
    return model(
        layers, hidden, 4 * hidden, heads, heads, 131072,
        gated=False, activation="gelu", normalization="LayerNorm", position="learned", tie_embeddings=True,
    )  # fmt: skip


MODELS = {
    "Llama 2 7B": model(32, 4096, 11008, 32, 32, 32000),
    "Llama 3 8B": model(32, 4096, 14336, 32, 8, 128256),
    "Llama 3 70B": model(80, 8192, 28672, 64, 8, 128256),
    "Llama 3.1 405B": model(126, 16384, 53248, 128, 8, 128256),
    "Mixtral 8x22B": model(56, 6144, 16384, 48, 8, 32000, moe=Experts(num_experts=8, top_k=2, ffn_hidden_size=16384)),
    "Qwen3 30B-A3B": model(
        48, 2048, 6144, 32, 4, 151936, kv_channels=128, qk_norm=True,
        moe=Experts(num_experts=128, top_k=8, ffn_hidden_size=768),
    ),
    "Qwen3 235B-A22B": model(
        94, 4096, 12288, 64, 4, 151936, kv_channels=128, qk_norm=True,
        moe=Experts(num_experts=128, top_k=8, ffn_hidden_size=1536),
    ),
    "gpt-oss 120B": model(
        36, 2880, 2880, 64, 8, 201088, kv_channels=64, attention_sinks=True, sliding_window=128,
        full_attention_layers=tuple(range(1, 36, 2)), moe=Experts(num_experts=128, top_k=4, ffn_hidden_size=2880),
    ),
    "DeepSeek-V3": model(
        61, 7168, 18432, 128, 128, 129280, kv_channels=192,
        mla=Latent(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536),
        moe=Experts(
            num_experts=256, top_k=8, ffn_hidden_size=2048, shared_ffn_hidden_size=2048, dense_layers=(0, 1, 2),
        ),
    ),
    "GPT 1.7B": gpt(24, 2048, 16),
    "GPT 7.1B": gpt(30, 4096, 32),
    "GPT 16B": gpt(32, 6144, 48),
    "GPT 32B": gpt(48, 7168, 56),
    "GPT 70B": gpt(84, 8192, 64),
    "GPT 119B": gpt(92, 10240, 80),
    "GPT 177B": gpt(96, 12288, 96),
    "GPT 314B": gpt(96, 16384, 128),
    "GPT 462B": gpt(112, 18432, 144),
}  # fmt: skip

H100 = part_named("H100")
_AT_500_W = (500 / 700) ** (1 / 3)
"""The power of a chip grows with the cube of its clock."""
PARTS = {
    "H100 500 W": replace(
        H100, name="H100 500 W", memory_gib=94, memory_gb_s=2400,
        measured_tflops={name: tflops * _AT_500_W for name, tflops in H100.measured_tflops.items()},
    ),
}  # fmt: skip
"""Variants that the table of parts does not have: Meta's H100 with HBM2e and a power limit of 500 W."""

TITAN_2024 = (
    "torchtitan, Llama 3.1 on H100, 2024-12",
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
)
TITAN_ASYNC = (
    "torchtitan, async TP on H100, 2025-06",
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
)
TITAN_H200 = (
    "torchtitan, Llama 3.1 8B on H200, 2025-06",
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
)
TITAN_A100 = (
    "torchtitan, performance.md (Llama 3 on A100), 2024",
    "https://github.com/pytorch/torchtitan/blob/main/docs/performance.md",
)
AWS = (
    "AWS, Llama 3 pre-training with torchtitan on SageMaker, 2024",
    "https://aws.amazon.com/blogs/machine-learning/efficient-pre-training-of-llama-3-like-model-architectures-using-torchtitan-on-amazon-sagemaker/",
)
TORCHAO = "torchao, Quantized Training", "https://docs.pytorch.org/ao/main/workflows/training.html"
MEGATRON = "Megatron-LM, README (Megatron-Core 0.8)", "https://github.com/NVIDIA/Megatron-LM"
MEGATRON_LLAMA = (
    "Megatron-LM, examples/llama",
    "https://github.com/NVIDIA/Megatron-LM/blob/main/examples/llama/README.md",
)
BRIDGE = (
    "Megatron Bridge, Performance Archive",
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary-archive.md",
)
META = "The Llama 3 Herd of Models, table 4", "https://arxiv.org/abs/2407.21783"
PRIMUS = (
    "AMD performance results (2026-01), in Primus, Projection",
    "https://github.com/AMD-AGI/Primus/blob/main/docs_deprecated/tech_blogs/projection/projection.md",
)
PRIMUS_PP = (
    "Primus, Primus-pipeline",
    "https://github.com/AMD-AGI/Primus/blob/main/docs_deprecated/tech_blogs/primus_pipeline/primus_pipeline.md",
)

HALF = (
    "per-op selective recomputation, which repeats every second matmul, counts as full recomputation of half the layers"
)
VPP = "vpp is not stated: one layer per virtual stage, without which the published MFU would be impossible"
TP_OVERLAP = "overlapped tensor-parallel communication counts as parallel.async_tp"


@dataclass(frozen=True, kw_only=True)
class Row:
    source: tuple[str, str]
    model: str
    part: str
    devices: int
    batch: int
    """Global, in sequences."""
    seq: int = 8192
    precision: str = "bf16"
    micro: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    """ParallelConfig; data parallelism is what is left."""
    work: dict[str, Any] = field(default_factory=dict)
    """More fields of Workload."""
    tokens_per_s: float | None = None
    """Published, per device. Or:"""
    full_tflops: float | None = None
    """Model TFLOP/s per device that count attention without the causal mask."""
    note: str = ""
    devices_per_node: int = 8

    def published(self) -> float:
        """Tokens/s per device."""
        if self.tokens_per_s is not None:
            return self.tokens_per_s
        assert self.full_tflops is not None
        return self.full_tflops * 1e12 / flops_with_full_attention(MODELS[self.model], self.seq)

    def planned(self) -> StepTime:
        work = Workload(
            architecture=MODELS[self.model], precision=self.precision, seq_length=self.seq,
            global_batch_size=self.batch, micro_batch_size=self.micro, **self.work,
        )  # fmt: skip
        nodes, rest = divmod(self.devices, self.devices_per_node)
        cluster = Cluster(self.gpu(), self.devices_per_node if nodes else rest, max(1, nodes))
        return step_time(work, ParallelConfig(**self.layout), cluster)

    def gpu(self) -> Part:
        return PARTS.get(self.part) or part_named(self.part)


def flops_with_full_attention(a: Architecture, seq: int) -> float:
    """Per token, as Megatron-LM and the PaLM paper count them."""
    attention = a.hidden_size * (2 * a.hidden_size + 2 * a.attention.num_query_groups * a.attention.kv_channels)
    layer = attention + (3 if a.mlp.gated else 2) * a.hidden_size * a.mlp.ffn_hidden_size
    return 6.0 * (a.num_layers * layer + a.hidden_size * a.vocab_size) + 12.0 * a.num_layers * a.hidden_size * seq


def _megatron() -> Iterator[Row]:
    table = (
        ("GPT 1.7B", 1, 1, 48, 192, 408.8), ("GPT 7.1B", 2, 1, 96, 192, 465.9), ("GPT 16B", 4, 1, 192, 192, 489.1),
        ("GPT 32B", 8, 1, 384, 192, 459.6), ("GPT 70B", 8, 2, 768, 384, 419.7), ("GPT 119B", 8, 4, 1536, 768, 420.5),
        ("GPT 177B", 8, 6, 2304, 1152, 432.8), ("GPT 314B", 8, 8, 3072, 1536, 474.4),
        ("GPT 462B", 8, 16, 6144, 3072, 459.9), ("GPT 177B", 8, 6, 96, 1152, 0.47 * 989.4),
        ("GPT 177B", 8, 6, 4608, 1152, 0.42 * 989.4),
    )  # fmt: skip
    for name, tp, pp, devices, batch, tflops in table:
        layout = {"tp": tp, "pp": pp, "vpp": MODELS[name].num_layers // pp if pp > 1 else 1, "async_tp": tp > 1}
        yield Row(
            source=MEGATRON, model=name, part="H100", devices=devices, batch=batch, seq=4096, layout=layout,
            full_tflops=tflops, micro=4 if pp == 1 else 1,
            note=f"micro batch size is not stated: that of a replica without pipeline, 1 with; {VPP}; {TP_OVERLAP}",
        )  # fmt: skip


def _torchtitan() -> Iterator[Row]:
    half = {"recompute": "full", "recompute_layers": 16}
    small: dict[str, Any] = {"model": "Llama 3 8B", "layout": {"fsdp": True}}
    meta: dict[str, Any] = {"source": TITAN_2024, "part": "H100 500 W"}
    for devices, plain, fp8 in ((8, 6667, 8532), (128, 6514, 8380)):
        for precision, tokens in (("bf16", plain), ("fp8", fp8)):
            yield Row(
                **meta, **small, devices=devices, batch=2 * devices, micro=2, work=half, precision=precision,
                tokens_per_s=tokens, note=HALF,
            )  # fmt: skip
    for cp, seq, tokens in ((1, 32768, 3890), (2, 65536, 2540), (4, 131072, 1071), (8, 262144, 548)):
        yield Row(
            **meta, model="Llama 3 8B", devices=8, batch=8 // cp, seq=seq, layout={"fsdp": True, "cp": cp},
            work={"recompute": "full"}, precision="fp8", tokens_per_s=tokens,
        )  # fmt: skip
    full: dict[str, Any] = {"work": {"recompute": "full"}, "devices": 256, "batch": 512, "micro": 16}
    for overlap, tokens in ((False, 829), (True, 876)):
        layout = {"tp": 8, "fsdp": True, "async_tp": overlap}
        yield Row(**meta, model="Llama 3 70B", **full, layout=layout, precision="fp8", tokens_per_s=tokens)
    for vpp, tokens in ((1, 100), (2, 128)):
        yield Row(
            **meta, model="Llama 3.1 405B", devices=512, batch=256, micro=4, work={"recompute": "full"},
            precision="fp8", layout={"tp": 8, "pp": 8, "vpp": vpp, "async_tp": True}, tokens_per_s=tokens,
            note="micro batches are not stated: 8, torchtitan's default; weights stay gathered, as without fsdp",
        )  # fmt: skip
    meta["source"] = TITAN_ASYNC
    for overlap, bf16, fp8 in ((False, 597.3, 809.8), (True, 652.4, 942.4)):
        layout = {"tp": 8, "fsdp": True, "async_tp": overlap}
        yield Row(**meta, model="Llama 3 70B", **full, layout=layout, tokens_per_s=bf16)
        yield Row(**meta, model="Llama 3 70B", **full, layout=layout, precision="fp8", tokens_per_s=fp8)
    for overlap, bf16, fp8 in ((False, 4378, 5078.1), (True, 4809.4, 5570.1)):
        for precision, tokens in (("bf16", bf16), ("fp8", fp8)):
            yield Row(
                **meta, model="Llama 3 8B", devices=64, batch=96, micro=12, work=half, precision=precision, note=HALF,
                layout={"tp": 8, "fsdp": True, "async_tp": overlap}, tokens_per_s=tokens,
            )  # fmt: skip
    for devices, tokens in ((32, 10938), (64, 10753)):
        yield Row(
            source=TITAN_H200, part="H200", **small, devices=devices, batch=2 * devices, micro=2, work=half,
            precision="fp8", tokens_per_s=tokens, note=HALF,
        )  # fmt: skip
    yield Row(source=TITAN_A100, part="A100", **small, devices=64, batch=64, work=half, tokens_per_s=2973, note=HALF)
    yield Row(
        source=TITAN_A100, part="A100", model="Llama 3 70B", layout={"fsdp": True}, devices=64, batch=64,
        work={"recompute": "full"}, tokens_per_s=331,
    )  # fmt: skip
    for precision, tokens in (("bf16", 7166), ("fp8", 8624)):
        yield Row(
            source=AWS, part="H100", **small, devices=32, batch=32, work=half, precision=precision, tokens_per_s=tokens,
            note=f"batch size is not stated: 1 a device; {HALF}",
        )  # fmt: skip
    for part, bf16, fp8 in (("H100", 6150, 7689.5), ("MI300X", 5376.5, 6166)):
        for precision, tokens in (("bf16", bf16), ("fp8", fp8)):
            yield Row(
                source=TORCHAO, part=part, **small, devices=8, batch=8, work=half, precision=precision,
                tokens_per_s=tokens, note=HALF,
            )  # fmt: skip


def _bridge() -> Iterator[Row]:
    def row(
        name: str, part: str, devices: int, batch: int, tokens: float, layout: dict[str, Any], **others: Any
    ) -> Row:
        others = {"precision": "fp8", "devices_per_node": 4 if part.startswith("GB") else 8} | others
        return Row(
            source=BRIDGE,
            model=name,
            part=part,
            devices=devices,
            batch=batch,
            tokens_per_s=tokens,
            layout=layout,
            **others,
        )

    moe: dict[str, Any] = {"precision": "bf16", "seq": 4096}
    fp8_moe = moe | {"note": "published with FP8 experts; Isthmus computes experts in bfloat16"}
    overlap = {"async_tp": True, "tp": 4}
    sft: dict[str, Any] = {"seq": 4096, "note": TP_OVERLAP}
    yield row("Llama 3 8B", "H100", 8, 128, 14451, {"fsdp": True})
    yield row("Llama 3 70B", "H100", 64, 256, 1664, overlap | {"pp": 8, "vpp": 5}, note=TP_OVERLAP)
    yield row(
        "Llama 3.1 405B",
        "H100",
        1024,
        1536,
        326,
        {"tp": 8, "pp": 8, "cp": 2, "vpp": 8, "async_tp": True},
        note=TP_OVERLAP,
    )
    yield row("Llama 3 70B", "H100", 32, 32, 1638, overlap | {"pp": 4, "vpp": 5}, **sft)
    yield row(
        "Llama 3 70B", "H100", 8, 32, 2643, overlap | {"tp": 2, "pp": 4, "vpp": 20}, **sft, work={"lora_rank": 16}
    )
    yield row("Qwen3 30B-A3B", "H100", 16, 1024, 8826, {"ep": 16}, **fp8_moe)
    yield row("Qwen3 235B-A22B", "H100", 256, 8192, 1712, {"tp": 2, "pp": 8, "vpp": 4, "ep": 32, "etp": 1}, **fp8_moe)
    yield row("gpt-oss 120B", "H100", 64, 1280, 5824, {"pp": 4, "ep": 8}, **moe)
    yield row("Llama 3 8B", "GB200", 8, 128, 31508, {}, micro=2)
    yield row("Llama 3 70B", "GB200", 64, 256, 4312, {"fsdp": True}, micro=2)
    yield row(
        "Llama 3.1 405B", "GB200", 256, 1536, 843, {"tp": 4, "pp": 16, "vpp": 4, "async_tp": True}, note=TP_OVERLAP
    )
    yield row("Llama 3 70B", "GB200", 32, 32, 3864, {"pp": 8, "vpp": 10}, seq=4096)
    yield row("Llama 3 70B", "GB200", 8, 32, 6206, {"pp": 2, "vpp": 20}, seq=4096, work={"lora_rank": 16})
    yield row("Llama 3 8B", "B200", 8, 128, 30624, {}, micro=2)
    yield row(
        "Llama 3.1 405B", "B200", 128, 64, 661, {"tp": 4, "pp": 8, "cp": 2, "vpp": 8, "async_tp": True}, note=TP_OVERLAP
    )
    yield row("gpt-oss 120B", "GB200", 64, 1280, 16640, {"ep": 64}, micro=4, **moe)
    yield row("Qwen3 235B-A22B", "GB200", 256, 8192, 4916, {"pp": 8, "vpp": 3, "ep": 32}, **moe)
    yield row("DeepSeek-V3", "GB200", 256, 4096, 3139, {"pp": 4, "vpp": 4, "ep": 64}, **moe)
    for name, devices, batch, layout, tokens in (
        ("Llama 3 8B", 8, 128, {"cp": 2}, 13812),
        ("Llama 3 70B", 64, 128, overlap | {"pp": 8, "vpp": 5}, 1621),
        ("Llama 3.1 405B", 1024, 512, {"tp": 8, "pp": 8, "cp": 2, "vpp": 8, "async_tp": True}, 315),
    ):
        yield Row(
            source=MEGATRON_LLAMA, model=name, part="H100", devices=devices, batch=batch, precision="fp8",
            layout=layout, tokens_per_s=tokens, note=TP_OVERLAP if "tp" in layout else "",
        )  # fmt: skip


def _amd() -> Iterator[Row]:
    for nodes, tokens in ((1, 16224), (8, 16186)):
        yield Row(
            source=PRIMUS, model="Llama 3 8B", part="MI325X", devices=8 * nodes, batch=128 * nodes, micro=2,
            precision="fp8", tokens_per_s=tokens, note="batch is not stated: 128 sequences a node",
        )  # fmt: skip
    for nodes, micro, precision, tokens in ((1, 1, "bf16", 1135), (8, 1, "bf16", 1174), (8, 4, "fp8", 1726)):
        yield Row(
            source=PRIMUS, model="Llama 3 70B", part="MI325X", devices=8 * nodes, batch=8 * nodes * micro, micro=micro,
            precision=precision, layout={"fsdp": True}, work={"recompute": "full", "recompute_layers": 72},
            tokens_per_s=tokens, note="recomputation is not stated: 72 layers, as in Primus' config for this part",
        )  # fmt: skip
    yield Row(
        source=PRIMUS, model="Mixtral 8x22B", part="MI355X", devices=64, batch=128, micro=2, tokens_per_s=3534,
        layout={"pp": 4, "vpp": 2, "ep": 8}, note="batch is not stated: 128, as in Primus' config",
    )  # fmt: skip
    for vpp, tokens in ((1, 10057), (2, 10974)):
        yield Row(
            source=PRIMUS_PP, model="Llama 2 7B", part="MI300X", devices=8, batch=256, micro=4, seq=4096,
            layout={"pp": 8, "vpp": vpp}, tokens_per_s=tokens,
            note="batch sizes are not stated: as in Primus' config for this model",
        )  # fmt: skip


def _meta() -> Iterator[Row]:
    for devices, cp, seq, tflops in ((8192, 1, 8192, 430), (16384, 1, 8192, 400), (16384, 16, 131072, 380)):
        yield Row(
            source=META, model="Llama 3.1 405B", part="H100", devices=devices, batch=(1 << 24) // seq, seq=seq,
            layout={"tp": 8, "pp": 16, "cp": cp, "vpp": 8}, full_tflops=tflops, note=VPP,
        )  # fmt: skip


ROWS = (*_megatron(), *_torchtitan(), *_bridge(), *_amd(), *_meta())


def compare() -> list[dict[str, Any]]:
    """Each row with the planner's estimate; errors are relative, above 0 where it is too fast."""
    results = []
    for number, row in enumerate(ROWS):
        step, published = row.planned(), row.published()
        layout = " ".join(f"{name}={size}" for name, size in row.layout.items())
        results.append(
            {
                "source": row.source[0], "url": row.source[1], "model": row.model, "gpu": row.part,
                "devices": row.devices, "layout": layout, "precision": row.precision, "seq_length": row.seq,
                "micro_batch_size": row.micro, "global_batch_size": row.batch, "work": row.work, "note": row.note,
                "fitted": number % 3 == 0, "published_tokens_per_s": round(published, 1),
                "planned_tokens_per_s": round(step.tokens_per_s_per_device, 1),
                "error": round(step.tokens_per_s_per_device / published - 1, 4), "binds": step.binds,
                "mfu": round(step.mfu, 4),
                "parts": {name: round(seconds / step.total_s, 4) for name, seconds in step.parts.items() if seconds},
            }
        )  # fmt: skip
    return results


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and largest absolute error."""
    groups = {
        "all": rows,
        "fitted": [row for row in rows if row["fitted"]],
        "held out": [row for row in rows if not row["fitted"]],
    }
    return {
        name: {
            "rows": len(group),
            "median_error": round(statistics.median(abs(row["error"]) for row in group), 4),
            "largest_error": max(abs(row["error"]) for row in group),
            "within_15_percent": sum(abs(row["error"]) < 0.15 for row in group),
        }
        for name, group in groups.items()
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: the errors of each source."""
    lines = ["| source | GPUs | rows | median error | from | to |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for source in dict.fromkeys((row["source"], row["url"]) for row in rows):
        source_rows = [row for row in rows if (row["source"], row["url"]) == source]
        errors = sorted(row["error"] for row in source_rows)
        gpus = ", ".join(dict.fromkeys(row["gpu"] for row in source_rows))
        median = statistics.median(abs(error) for error in errors)
        numbers = f"{len(source_rows)} | {median:.0%} | {errors[0]:+.0%} | {errors[-1]:+.0%}"
        lines.append(f"| [{source[0]}]({source[1]}) | {gpus} | {numbers} |")
    return lines


FREE = (
    (kernels, "GEMM_SHARE", 0.6, 1.0), (kernels, "HALF_TILES", 8, 100), (kernels, "HALF_DEPTH", 64, 800),
    (kernels, "FORWARD_ATTENTION", 0.48, 0.9), (kernels, "BACKWARD_ATTENTION", 0.42, 0.8),
    (kernels, "QUANTIZE_BYTES", 3.0, 8.0), (layer_time, "HIDDEN_BY_ASYNC_TP", 0.4, 0.95),
)  # fmt: skip
"""Fitted constants and their bounds: attention is not below FlashAttention-2 on an H100 (about 300 of 795 TFLOP/s),
async TP not below the gain that torchtitan published. Shares of bandwidths are those of collective tests, not fitted.
"""


def fit(trials: int = 900) -> dict[str, float]:
    """Random search of the constants with the smallest mean error of the fitted rows."""
    rows = ROWS[::3]

    def loss() -> float:
        errors = (math.log(row.planned().tokens_per_s_per_device / row.published()) for row in rows)
        return statistics.fmean(math.hypot(error, 0.05) for error in errors)

    draw, best = random.Random(0), loss()
    for trial in range(trials):
        module, name, least, most = draw.choice(FREE)
        before = getattr(module, name)
        setattr(module, name, min(most, max(least, before * math.exp(draw.gauss(0, 0.1 * 0.6 ** (trial // 100))))))
        if (now := loss()) < best:
            best = now
        else:
            setattr(module, name, before)
    return {name: round(getattr(module, name), 3) for module, name, *_ in FREE}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--fit", action="store_true", help="print the constants that fit best, and do nothing else")
    chosen = parser.parse_args(arguments)
    if chosen.fit:
        print(fit())
        return
    certified = certificate(["benchmarks/planner_throughput.py", *(arguments or ["--record"] * chosen.record)])
    rows = compare()
    for row in rows:
        print(
            f"{row['error']:+7.1%} {'fit' if row['fitted'] else '   '} {row['published_tokens_per_s']:9.0f} "
            f"{row['planned_tokens_per_s']:9.0f}  {row['model']:16} {row['precision']} {row['devices']:5} x "
            f"{row['gpu']:10} {row['layout']:40} {row['binds']:9} {row['source']}"
        )
    result = summary(rows)
    print(*table(rows), sep="\n")
    for name, numbers in result.items():
        print(f"{name}: {numbers}")
    publish_result(
        "planner-throughput",
        {"certificate": certified, "summary": result, "rows": rows},
        record=chosen.record,
        out=chosen.out,
    )


if __name__ == "__main__":
    main()
