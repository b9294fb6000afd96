"""Rank tasks that compare Isthmus with transformers."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BitsAndBytesConfig

from isthmus.cli.main import main
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.data.batching.batches import Batches, BatchSettings
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.layers.dropout import (
    ATTENTION_OUTPUT,
    EMBEDDING,
    MLP_OUTPUT,
    AttentionDropout,
    drop,
    dropout_keys,
    hidden_dropout,
    keep_mask,
)
from isthmus.engine.parallel.process_groups import open_groups
from isthmus.errors import UsageError
from isthmus.families import registry
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.registry import FAMILIES_ENV, all_families, family_for
from isthmus.families.rules.shard import assemble
from isthmus.hf.tiny_model import effective_config
from isthmus.recipes.model.load_model import load_model, model_logits
from isthmus.tools.learn.learn import prove
from isthmus.tools.learn.probe_model import ProbeModel, logits_difference, relative_difference
from parity.strange_models import strange_config
from ranks.pool_worker import platform
from ranks.tasks import CLIP_GRAD
from ranks.tiny import GLOBAL_BATCH_SIZE, SEQ_LENGTH, load_network, open_samples, restore_names


def logits(*, model: str, other: str | None, lengths: list[int], vocab_size: int) -> dict[str, Any]:
    """Largest differences, in fp32, over samples of these lengths.

    ``theirs``: each sample alone, compared with transformers. ``packed``: all samples in one packed sequence, compared
    with each sample alone. ``other``: compared with transformers' logits of model folder ``other``, where the tested
    setting is off.
    """
    samples = _samples(lengths, vocab_size)
    ours = load_model(model)
    alone = [model_logits(ours, sample) for sample in samples]
    result = {"theirs": _max_difference(alone, _transformers(model, samples))}
    with torch.no_grad():
        packed = ours(PackedBatch.for_inference(samples))
    result["packed"] = _max_difference(list(packed.cpu().split(lengths)), alone)
    if other is not None:
        result["other"] = _max_difference(alone, _transformers(other, samples))
    return result


def limited_logits(
    *, model: str, routed: list[float | None], others: list[float | None], lengths: list[int], vocab_size: int
) -> dict[str, float]:
    """Largest differences of an architecture of Ling 3 with limits of SwiGLU, which its class does not have.

    ``limited``: compared with the class with limits in its experts; ``theirs``: without.
    """
    samples, read = _samples(lengths, vocab_size), Family.to_architecture

    def with_limits(*args: Any, **kwargs: Any) -> Architecture:
        arch = read(*args, **kwargs)
        assert arch.moe is not None
        return arch.with_settings(
            {"swiglu_limits": tuple(others), "moe": replace(arch.moe, swiglu_limits=tuple(routed))}
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Family, "to_architecture", with_limits)
        ours = load_model(model)
    alone = [model_logits(ours, sample) for sample in samples]
    network = load_network(model, dtype=torch.float32).eval()
    values: dict[str, float] = {}
    for name in ("theirs", "limited"):
        with torch.no_grad():
            theirs = [network(sample[None]).logits[0] for sample in samples]
        values[name] = _max_difference(alone, theirs)
        _limit_experts(network, routed, others)
    return values


def _limit_experts(network: Any, of_routed: list[float | None], of_others: list[float | None]) -> None:
    def limited(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    def shared(module: Any, limit: float, x: Tensor) -> Tensor:
        return module.down_proj(limited(module.gate_proj(x), module.up_proj(x), limit))

    def routed(module: Any, limit: float, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        of_experts = x.new_zeros(len(x), module.num_experts).scatter(-1, chosen, weights)
        gate, up = torch.einsum("th,eih->tei", x, module.gate_up_proj).chunk(2, dim=-1)
        outputs = torch.einsum("tei,ehi->teh", limited(gate, up, limit), module.down_proj)
        return (outputs * of_experts[..., None]).sum(1)

    for layer, limit_of_routed, limit_of_shared in zip(network.model.layers, of_routed, of_others, strict=True):
        if limit_of_routed:
            layer.mlp.experts.forward = functools.partial(routed, layer.mlp.experts, limit_of_routed)
        if limit_of_shared:
            layer.mlp.shared_experts.forward = functools.partial(shared, layer.mlp.shared_experts, limit_of_shared)


def convert_with_inferred_family(*, models: list[str], lengths: list[int], vocab_size: int) -> list[dict[str, Any]]:
    """Convert models with ``--learn``, then load them with the inferred family; see ``logits``.

    Families of their types are disregarded.

    For a model ``m``, ``m-megatron`` is the checkpoint and ``m-families`` the folder of the family.
    """
    done = []
    for model in models:
        with pytest.MonkeyPatch.context() as patch:
            disregard_family(patch, Path(model))
            line = ["convert", model, f"{model}-megatron", "--learn", "--keep", f"{model}-families"]
            (result,) = commands(command_lines=[line])
            if result["code"] == 0:
                patch.setenv(FAMILIES_ENV, f"{model}-families")
                result |= logits(model=model, other=None, lengths=lengths, vocab_size=vocab_size)
            done.append(result)
    return done


def disregard_family(patch: pytest.MonkeyPatch, model: Path) -> None:
    """Treat the model's type as one without a family, so that tests of inference do not depend on new families."""
    model_type = json.loads((model / "config.json").read_text())["model_type"]
    others = {name: family for name, family in all_families().items() if name != model_type}
    patch.setattr(registry, "_installed", lambda: others)


def compare_inferred_families(*, configs: list[dict[str, Any]]) -> list[list[str]]:
    """Differences between built-in families and families inferred from configs."""
    return [_family_differences(config) for config in configs]


def refusals_of_inference(*, configs: list[dict[str, Any]]) -> list[str | None]:
    """Why no family is inferred from each config; None if one is."""
    return [_refusal(config) for config in configs]


def refusals_of_strange_models(*, tricks: dict[str, dict[str, Any]]) -> list[str | None]:
    """Why classes with these features are refused, see ``strange_models``; None if one is not."""
    return [_refusal(strange_config(trick, **settings)) for trick, settings in tricks.items()]


def _refusal(config: dict[str, Any]) -> str | None:
    try:
        prove(config)
    except UsageError as error:
        return str(error)
    return None


def differences_of_epsilon(*, config: dict[str, Any], epsilon: float) -> dict[str, float]:
    """Of a family with this epsilon of norms, with usual and with small weights; then of the right one."""
    family, effective = family_for(config), effective_config(config)
    keys = {name: key for name, key in family.keys.items() if name != "norm_epsilon"}
    wrong = replace(family, keys=keys, traits={**family.traits, "norm_epsilon": epsilon})
    open_groups(ParallelConfig(), platform(), seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        probe = ProbeModel.build(Path(scratch) / "usual", effective, seed=1)
        small = probe.with_small_weights(Path(scratch) / "small")
        return {
            "usual": logits_difference(wrong, probe),
            "small": relative_difference(wrong, small),
            "right": relative_difference(family, small),
        }


def _family_differences(config: dict[str, Any]) -> list[str]:
    effective = effective_config(config)
    families = prove(config), family_for(config)
    ours, theirs = (family.to_architecture(effective) for family in families)
    differences = [field.name for field in fields(ours) if getattr(ours, field.name) != getattr(theirs, field.name)]
    first, second = (
        {name: (place.hf, place.rule.blocks(theirs), place.rule.shard) for name, place in placed.items()}
        for placed in (family.placements(theirs) for family in families)
    )
    return differences + [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]


def rounding(*, model: str, lengths: list[int], vocab_size: int) -> dict[str, float]:
    """Root mean square bf16 error of the logits, in transformers and in Isthmus."""
    samples = _samples(lengths, vocab_size)
    exact = torch.cat(_transformers(model, samples))
    theirs = torch.cat(_transformers(model, samples, torch.bfloat16))
    decoder = load_model(model, precision="bf16")
    ours = torch.cat([model_logits(decoder, sample) for sample in samples])
    return {"theirs": (theirs - exact).pow(2).mean().sqrt().item(), "ours": (ours - exact).pow(2).mean().sqrt().item()}


def commands(*, command_lines: list[list[str]]) -> list[dict[str, Any]]:
    """Run command lines one after another; returns exit code, stdout and stderr of each."""
    done = []
    for args in command_lines:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(args)
        done.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
    return done


def logits_of_models(*, models: list[str], tokens: list[int]) -> list[list[float]]:
    """Load several models in one process; returns the logits of the last token of each."""
    loaded = [load_model(folder) for folder in models]
    return [model_logits(model, torch.tensor(tokens))[-1].tolist() for model in loaded]


def gradients(*, model: str, length: int, vocab_size: int) -> dict[str, float]:
    """Largest difference of each gradient, relative to its largest entry, in a custom training loop."""
    tokens, labels = _samples([length, length], vocab_size)
    decoder = load_model(model)
    ours = _own_gradients(decoder, tokens, labels)
    expected = _their_gradients(decoder, model, tokens, labels, torch.float32)
    return {name: ((ours[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in ours}


def gradient_rounding(*, model: str, length: int, vocab_size: int) -> dict[str, float]:
    """Norm of the bf16 error of all gradients, relative to their norm, in transformers and in Isthmus."""
    tokens, labels = _samples([length, length], vocab_size)
    decoder = load_model(model, precision="bf16")
    ours = _own_gradients(decoder, tokens, labels)
    exact, theirs = (
        _their_gradients(decoder, model, tokens, labels, dtype) for dtype in (torch.float32, torch.bfloat16)
    )

    def error(got: dict[str, Tensor]) -> float:
        squares = sum((got[name] - exact[name]).pow(2).sum().item() for name in exact)
        return float((squares / sum(tensor.pow(2).sum().item() for tensor in exact.values())) ** 0.5)

    return {"theirs": error(theirs), "ours": error(ours)}


def _own_gradients(decoder: Any, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    batch = replace(PackedBatch.for_inference([tokens]), labels=labels)
    decoder(batch, loss_positions=torch.arange(tokens.numel(), device=tokens.device)).backward()
    trained = {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    assert None not in trained.values(), trained
    return {name: gradient.float().cpu() for name, gradient in trained.items() if gradient is not None}


def _their_gradients(decoder: Any, model: str, tokens: Tensor, labels: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients by transformers, with the names and shapes of ``decoder``."""
    network = load_network(model, dtype=dtype).to(tokens.device)
    cross_entropy(network(tokens[None]).logits[0].float(), labels, reduction="sum").backward()
    theirs = _gradients_by_file_name(network)
    placements = family_for(network.config.to_dict()).placements(decoder.architecture)
    expected = {}
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            placed = placements[name]
            read = lambda part, index, names=placed.hf: theirs[names[part]][index]  # noqa: E731
            expected[name] = assemble(placed.rule, decoder.architecture, read, placed.expert)
    return expected


def dropout(*, model: str, length: int, vocab_size: int) -> dict[str, float]:
    """Differences in training mode, relative to the largest value, if transformers drops what the masks here drop.

    ``without``: from the logits without dropout.
    """
    tokens = _samples([length], vocab_size)[0]
    decoder = load_model(model)
    batch = replace(PackedBatch.for_inference([tokens]), sample_ids=(5,))
    evaluated = decoder(batch).detach()
    batch = replace(batch, dropout=dropout_keys(batch, seed=3, step=7))
    logits = decoder.train()(batch)
    network = load_network(model, dtype=torch.float32, attn_implementation="eager").train()
    layers = range(1, decoder.architecture.num_layers + 1)
    places = [(0, EMBEDDING)] if "embedding" in family_for(network.config.to_dict()).dropout else []
    places += [(layer, place) for layer in layers for place in (ATTENTION_OUTPUT, MLP_OUTPUT)]
    hidden, attention = iter(places), iter(layers)

    def dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if x.dim() == 3:
            layer, place = next(hidden)
            return hidden_dropout(x[0][:, None], batch, p, layer=layer, place=place)[:, 0][None]
        drops = AttentionDropout(p, next(attention), 0, batch)
        queries = drops.query_keys(x.size(1), 1)  # groups of one head
        columns = drops.key_keys(x.size(1)).transpose(1, 2)
        return x * drop(torch.ones_like(x), keep_mask(queries, columns, p), p)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", dropped)
        theirs = network(tokens[None]).logits[0]
    assert next(hidden, None) is None and next(attention, None) is None
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    logits.backward(upstream)
    theirs.backward(upstream)
    pairs = {
        "logits": (logits, theirs),
        "gradient": (decoder.embedding.word_embeddings.weight.grad, network.get_input_embeddings().weight.grad),
        "without": (evaluated, theirs),
    }
    return {name: ((ours - other).abs().max() / other.abs().max()).item() for name, (ours, other) in pairs.items()}


def _gradients_by_file_name(network: Any) -> dict[str, Tensor]:
    """Gradients by tensor names of files: transformers fuses experts in memory and splits them when saving."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        restore_names(Path(folder))
        return {name: tensor.float() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


def train(
    *,
    model: str,
    samples: str,
    lr: list[float],
    weight_decay: float,
    adapter: str | None = None,
    quantize: str | None = None,
    lr_ratio: float = 1.0,
    global_batch_size: int = GLOBAL_BATCH_SIZE,
) -> dict[str, list[float]]:
    """Reference implementation of :func:`ranks.tasks.train` with transformers and torch only.

    Samples are not packed, the loss is the mean over the loss tokens of the global batch, and torch's AdamW updates the
    weights. ``lr`` has one entry per step. With ``adapter``, PEFT trains this adapter, and bitsandbytes quantizes
    the base in NF4 with ``quantize``. ``lr_ratio`` is that of PEFT's LoRA+.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if quantize is not None:
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quantize)
    network = load_network(model, **options)
    if adapter is not None:
        import peft

        network = peft.PeftModel.from_pretrained(network, adapter, is_trainable=True)
    network.train()
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    decays = {name: entry.dim() > 1 and not name.endswith("A_log") for name, entry in trained.items()}
    with_decay = [parameter for name, parameter in trained.items() if decays[name]]
    without_decay = [parameter for name, parameter in trained.items() if not decays[name]]
    optimizer = torch.optim.AdamW(
        [{"params": with_decay, "weight_decay": weight_decay}, {"params": without_decay, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    if lr_ratio != 1:
        from peft.optimizers import create_loraplus_optimizer

        settings = {"betas": (0.9, 0.95), "eps": 1e-8, "loraplus_weight_decay": weight_decay}
        optimizer = create_loraplus_optimizer(
            network, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=lr_ratio, **settings
        )
    ratios = [group["lr"] for group in optimizer.param_groups]
    batches = Batches(
        open_samples(samples),
        BatchSettings(seq_length=SEQ_LENGTH, micro_batch_size=2, global_batch_size=global_batch_size, packing=True),
    )
    curves: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step, rate in enumerate(lr):
        micro_batches = batches.step(step)
        loss_tokens = sum(batch.num_loss_tokens for batch in micro_batches)
        optimizer.zero_grad()
        loss = sum((_loss_sum(network, batch) for batch in micro_batches), torch.zeros(())) / loss_tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP_GRAD)
        for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
            group["lr"] = rate * ratio
        optimizer.step()
        curves["loss"].append(loss.item())
        curves["grad_norm"].append(norm.item())
    return curves


def _loss_sum(network: Any, batch: PackedBatch) -> Tensor:
    total = torch.zeros(())
    for begin, end in itertools.pairwise(itertools.accumulate(batch.lengths, initial=0)):
        assert batch.loss_mask is not None and batch.labels is not None
        mask = batch.loss_mask[begin:end]
        if mask.any():
            scores = network(batch.input_ids[None, begin:end]).logits[0][mask]
            total = total + cross_entropy(scores, batch.labels[begin:end][mask], reduction="sum")
    return total


def _samples(lengths: list[int], vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    device = platform().device_type
    return [torch.randint(0, vocab_size, (length,), generator=generator).to(device) for length in lengths]


@torch.no_grad()
def _transformers(folder: str, samples: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    network = load_network(folder, dtype=dtype, attn_implementation="eager").eval()
    network.to(samples[0].device)
    return [network(sample[None]).logits[0].float().cpu() for sample in samples]


def _max_difference(some: list[Tensor], others: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))
