"""Layers of a decoder, forward and backward: Isthmus compared with Megatron-Core's local layers and transformers.

    python benchmarks/layers.py --record

All have the same weights and the same tokens. Contestants run in alternation in one process, and medians are reported.
Their outputs and gradients are compared before the clock starts. See README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from certificate import certificate, cores, publish_result
from rounds import CpuWatch

KINDS = {
    "dense": "a decoder layer of Qwen3: GQA, QK norm, SwiGLU; one sample",
    "dense-packed": "the same, eight samples: a packed sequence in Isthmus, a batch in the others",
    "latent": "a decoder layer of DeepSeek-V3: multi-latent attention, SwiGLU; one sample",
    "loss": "the output layer and its cross entropy",
}
CONTESTANTS = ("isthmus", "megatron-core", "transformers")
"""megatron-core cannot build multi-latent attention without TransformerEngine."""
MOST_FOR_OTHERS = 0.05
"""Largest share of CPU time that other processes may use; beyond it the result is not a valid measurement."""
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 32000}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
SAMPLES = 8
AGREEMENT = {"fp32": 1e-4, "bf16": 5e-2}
"""Mean difference from Isthmus, relative to the mean magnitude, of outputs and input gradients."""
Step = Callable[[], Any]
"""Forward and backward; returns the output and the gradient of the input."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: %(default)s")
    parser.add_argument("--precision", default="fp32,bf16", help="default: %(default)s")
    parser.add_argument("--tokens", default="512,2048", help="of a sequence (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="default: all cores")
    parser.add_argument("--quick", action="store_true", help="tiny layers, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    for name, known in (("kinds", KINDS), ("precision", AGREEMENT)):
        setattr(chosen, name, getattr(chosen, name).split(","))
        if unknown := set(getattr(chosen, name)) - set(known):
            parser.error(f"not known: {', '.join(sorted(unknown))}")
    chosen.tokens = [64] if chosen.quick else [int(tokens) for tokens in chosen.tokens.split(",")]
    if chosen.record and chosen.quick:
        parser.error("--quick is not a measurement and is not recorded")
    return chosen


def decoder_layer(kind: str, dtype: Any, tokens: int, sizes: dict[str, Any]) -> dict[str, Step]:
    """The forward and backward step of each contestant's layer, with the same weights and tokens."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from transformers import AutoConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    from isthmus.data.batching.packed_batch import PackedBatch
    from isthmus.engine.attention.rope import frequency_sets, rotary_tables
    from isthmus.engine.decoder.model_config import transformer_config
    from isthmus.engine.decoder.spec import build_layer
    from isthmus.families.registry import all_families
    from isthmus.families.rules.shard import tensor_slices, unsharded

    family = "deepseek_v3" if kind == "latent" else "qwen3"
    heads = sizes["num_attention_heads"]
    width = sizes["hidden_size"] // heads
    head_sizes: dict[str, Any] = {"num_key_value_heads": heads // 2, "head_dim": width}
    if kind == "latent":
        head_sizes = {
            "num_key_value_heads": heads, "q_lora_rank": 3 * width, "kv_lora_rank": 2 * width, "v_head_dim": width,
            "qk_nope_head_dim": width, "qk_rope_head_dim": width // 2, "first_k_dense_replace": 1,
        }  # fmt: skip
    hf_config = AutoConfig.for_model(family, num_hidden_layers=1, **sizes, **head_sizes)
    arch = all_families()[family].to_architecture(hf_config.to_dict())
    config = transformer_config(arch, dtype=dtype)
    ours = build_layer(arch, config, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.fill_(1.0) if "layernorm" in name else parameter.normal_(std=0.03)
    samples = SAMPLES if kind == "dense-packed" else 1
    length = tokens // samples
    hidden = torch.randn(tokens, 1, sizes["hidden_size"]).to(dtype)
    upstream = torch.randn(hidden.shape).to(dtype)
    positions = torch.arange(length).repeat(samples)
    packed = PackedBatch.for_inference([torch.zeros(length, dtype=torch.int64)] * samples)
    tables = rotary_tables(arch, frequency_sets(arch), packed, dtype)

    def run_ours(x: Any) -> Any:
        return ours(x, rotary_pos_emb=tables, packed_seq_params=packed)

    entries = {"isthmus": _step(run_ours, hidden, upstream, ours, buffers=True)}

    def batch(x: Any) -> Any:
        return x.view(samples, length, -1)

    if kind != "latent":
        own_config = transformer_config(arch, dtype=dtype)
        own_config.use_te_activation_func = False
        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        core: Any = build_module(spec, config=own_config, layer_number=1)
        core.load_state_dict(ours.state_dict(), strict=False)
        angles = torch.outer(torch.arange(length).float(), frequency_sets(arch))
        angles = torch.cat((angles, angles), dim=-1)[:, None, None]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

        def run_core(x: Any) -> Any:
            out = core(batch(x).transpose(0, 1).contiguous(), attention_mask=mask, rotary_pos_emb=angles)[0]
            return out.transpose(0, 1).reshape(x.shape)

        entries["megatron-core"] = _step(run_core, hidden, upstream, core)
    hf_config._attn_implementation = "sdpa"
    kinds = (DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding) if kind == "latent" else (
        Qwen3DecoderLayer, Qwen3RotaryEmbedding
    )  # fmt: skip
    theirs, rotary = kinds[0](hf_config, 0).to(dtype), kinds[1](hf_config)
    state, live = theirs.state_dict(), dict(ours.named_parameters())
    for placed in all_families()[family].placements(arch).values():
        if (module_name := placed.canonical.removeprefix("decoder.layers.0.")) in live:
            for piece in tensor_slices(placed.rule, arch, unsharded(arch), placed.expert):
                name = placed.hf[piece.part].removeprefix("model.layers.0.")
                state[name][piece.hf] = piece.view(live[module_name].detach())
    theirs.load_state_dict(state)
    at = positions.view(samples, length)

    def run_theirs(x: Any) -> Any:
        out = theirs(batch(x), position_embeddings=rotary(x, at[:1]), attention_mask=None, position_ids=at)
        return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)

    return entries | {"transformers": _step(run_theirs, hidden, upstream, theirs)}


def loss(dtype: Any, tokens: int, sizes: dict[str, Any]) -> dict[str, Step]:
    """The forward and backward step of the output layer and its loss, with weight gradients."""
    import torch
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from transformers.loss.loss_utils import ForCausalLMLoss

    from isthmus.engine.loss.linear_cross_entropy import linear_cross_entropy

    torch.manual_seed(0)
    vocabulary = sizes["vocab_size"]
    weight = torch.nn.Parameter((torch.randn(vocabulary, sizes["hidden_size"]) * 0.03).to(dtype))
    hidden = torch.randn(tokens, sizes["hidden_size"]).to(dtype)
    labels = torch.randint(vocabulary, (tokens,))

    def own(x: Any) -> Any:
        return linear_cross_entropy(x, own_weight, labels)

    def core(x: Any) -> Any:
        logits = torch.nn.functional.linear(x, weight)[:, None]
        return vocab_parallel_cross_entropy(logits.float(), labels[:, None]).sum()

    def theirs(x: Any) -> Any:
        logits = torch.nn.functional.linear(x, weight)[None]
        shifted = labels.new_full((1, tokens), -100)
        return ForCausalLMLoss(logits, shifted, vocabulary, num_items_in_batch=1, shift_labels=labels[None])

    own_weight = torch.nn.Parameter(weight.detach())
    runs = {"megatron-core": core, "transformers": theirs}
    values = {name: _step(run, hidden, None, torch.nn.ParameterList([weight])) for name, run in runs.items()}
    return {"isthmus": _step(own, hidden, None, torch.nn.ParameterList([own_weight]), buffers=True)} | values


def _step(run: Callable[[Any], Any], hidden: Any, upstream: Any, module: Any, *, buffers: bool = False) -> Step:
    """With ``buffers``, gradients are accumulated in float32 buffers, as in a run; they are zeroed in each step."""
    import torch

    for parameter in module.parameters() if buffers else ():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)

    def step() -> Any:
        x = hidden.clone().requires_grad_()
        for parameter in module.parameters():
            parameter.main_grad.zero_() if buffers else setattr(parameter, "grad", None)
        out = run(x)
        out.backward(upstream)
        return out.detach(), x.grad

    return step


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants and return the result, without its certificate."""
    import torch

    torch.set_num_threads(chosen.threads)
    from isthmus.config.schema import ParallelConfig
    from isthmus.engine.parallel.process_groups import close_groups, open_groups
    from isthmus.platforms.detect import detect

    open_groups(ParallelConfig(), detect("cpu"), seed=0)
    sizes = TINY if chosen.quick else SIZES
    rows: list[dict[str, Any]] = []
    for kind in chosen.kinds:
        for precision in chosen.precision:
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
            for tokens in chosen.tokens:
                steps = loss(dtype, tokens, sizes) if kind == "loss" else decoder_layer(kind, dtype, tokens, sizes)
                rows += _turns(steps, chosen.rounds, {"kind": kind, "precision": precision, "tokens": tokens})
    close_groups()
    return {
        "kinds": {kind: KINDS[kind] for kind in chosen.kinds},
        "settings": {"sizes": sizes, "rounds": chosen.rounds, "threads": chosen.threads},
        "quiet": all(row["others_cpu_use"] <= MOST_FOR_OTHERS for row in rows),
        "rows": rows,
    }


def _turns(steps: dict[str, Step], rounds: int, row: dict[str, Any]) -> list[dict[str, Any]]:
    expected = steps["isthmus"]()
    difference = {}
    for name, step in steps.items():
        got = step()
        difference[name] = max(
            ((a.float() - b.float()).abs().mean() / b.float().abs().mean()).item()
            for a, b in zip(got, expected, strict=True)
        )
        if difference[name] > AGREEMENT[row["precision"]]:
            raise SystemExit(f"{row}: {name} differs from Isthmus by {difference[name]:.1e}")
    times: dict[str, list[float]] = {name: [] for name in steps}
    watch = CpuWatch()
    for _ in range(rounds):
        for name, step in steps.items():
            started_s = time.perf_counter()
            for _ in range(3):
                step()
            times[name].append((time.perf_counter() - started_s) / 3)
    others = watch.shares()["others_cpu_use"]
    isthmus_s = statistics.median(times["isthmus"])
    rows = []
    for name in steps:
        median_s = statistics.median(times[name])
        rows.append(
            row | {
                "contestant": name, "time_s": median_s, "time_s_rounds": times[name],
                "times_isthmus": median_s / isthmus_s, "others_cpu_use": others,
                "max_difference_from_isthmus": difference[name],
            }
        )  # fmt: skip
        print(
            f"{row['kind']:<13} {row['precision']} {row['tokens']:>5} {name:<14}{median_s * 1e3:>9.2f} ms"
            f"{median_s / isthmus_s:>7.2f} x isthmus",
            flush=True,
        )
    return rows


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    certified = certificate(["benchmarks/layers.py", *arguments])
    result = {"benchmark": "layers", "certificate": certified} | measure(chosen)
    publish_result("layers", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
