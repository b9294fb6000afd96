"""Run in a rank's process: the same model in transformers and here, side by side."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from isthmus.cli.main import main
from isthmus.convert.learn import prove
from isthmus.data.batching.batches import Batches, BatchSettings
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.families.registry import FAMILIES_ENV, family_for
from isthmus.families.rules.shard import assemble
from isthmus.hf.tiny_model import effective_config
from isthmus.recipes.setup.load_model import load_model, model_logits
from ranks.tasks import CLIP_GRAD
from ranks.tiny import SEQ_LENGTH, open_samples


def logits(*, model: str, other: str | None, lengths: list[int], vocab_size: int) -> dict[str, Any]:
    """Largest differences, in fp32, over samples of these lengths.

    ``theirs``: each sample alone, from transformers' logits. ``packed``: the samples on one line, from each alone.
    ``other``: from transformers' logits of another model folder, which lacks what this test is about.
    """
    samples = _samples(lengths, vocab_size)
    ours = load_model(model)
    alone = [model_logits(ours, sample) for sample in samples]
    result = {"theirs": _furthest(alone, _transformers(model, samples))}
    with torch.no_grad():
        line = ours(PackedBatch.for_inference(samples))
    result["packed"] = _furthest(list(line.split(lengths)), alone)
    if other is not None:
        result["other"] = _furthest(alone, _transformers(other, samples))
    return result


def learned(*, models: list[str], lengths: list[int], vocab_size: int) -> list[dict[str, Any]]:
    """Convert models of unknown types as a user would, then load each by the family that was kept; see ``logits``.

    Beside a model ``m``, ``m-there`` is the checkpoint and ``m-families`` the folder of the family.
    """
    done = commands(lines=[["convert", m, f"{m}-there", "--learn", "--keep", f"{m}-families"] for m in models])
    for model, result in zip(models, done, strict=True):
        if result["code"] == 0:
            os.environ[FAMILIES_ENV] = f"{model}-families"
            result |= logits(model=model, other=None, lengths=lengths, vocab_size=vocab_size)
            del os.environ[FAMILIES_ENV]
    return done


def learned_and_written(*, configs: list[dict[str, Any]]) -> list[list[str]]:
    """What differs between a family's own module and what is learned of it from its config alone."""
    return [_apart(config) for config in configs]


def _apart(config: dict[str, Any]) -> list[str]:
    effective = effective_config(config)
    families = prove(config), family_for(config)
    ours, theirs = (family.to_architecture(effective) for family in families)
    apart = [field.name for field in fields(ours) if getattr(ours, field.name) != getattr(theirs, field.name)]
    first, second = (
        {name: (place.hf, place.rule.blocks(theirs), place.rule.shard) for name, place in placed.items()}
        for placed in (family.placements(theirs) for family in families)
    )
    return apart + [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]


def rounding(*, model: str, lengths: list[int], vocab_size: int) -> dict[str, float]:
    """Root mean square of what bf16 does to the logits: in transformers, and here."""
    samples = _samples(lengths, vocab_size)
    exact = torch.cat(_transformers(model, samples))
    theirs = torch.cat(_transformers(model, samples, torch.bfloat16))
    decoder = load_model(model, precision="bf16")
    ours = torch.cat([model_logits(decoder, sample) for sample in samples])
    return {"theirs": (theirs - exact).pow(2).mean().sqrt().item(), "ours": (ours - exact).pow(2).mean().sqrt().item()}


def commands(*, lines: list[list[str]]) -> list[dict[str, Any]]:
    """Command lines one after the other: exit code, and what each printed to standard output and error."""
    done = []
    for words in lines:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
        done.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
    return done


def twice(*, models: list[str], tokens: list[int]) -> list[list[float]]:
    """Two models loaded one after the other in one process, as somebody who compares them would; the last logits."""
    loaded = [load_model(folder) for folder in models]
    return [model_logits(model, torch.tensor(tokens))[-1].tolist() for model in loaded]


def gradients(*, model: str, length: int, vocab_size: int) -> dict[str, float]:
    """Largest difference, relative to the largest entry, of each gradient of a model in a loop of the user's own."""
    tokens, labels = _samples([length, length], vocab_size)
    decoder = load_model(model)
    batch = replace(PackedBatch.for_inference([tokens]), labels=labels)
    decoder(batch, loss_positions=torch.arange(length)).backward()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    cross_entropy(network(tokens[None]).logits[0], labels, reduction="sum").backward()
    theirs = _gradients_as_in_files(network)
    family = family_for(network.config.to_dict())
    placements = family.placements(decoder.architecture)
    result = {}
    for name, ours in decoder.named_parameters():
        if ours.requires_grad:
            placed = placements[name]
            read = lambda part, index, names=placed.hf: theirs[names[part]][index]  # noqa: E731
            wanted = assemble(placed.rule, decoder.architecture, read, placed.expert)
            assert ours.grad is not None, name
            result[name] = ((ours.grad - wanted).abs().max() / wanted.abs().max()).item()
    return result


def _gradients_as_in_files(network: Any) -> dict[str, Tensor]:
    """Gradients by the names of files: in memory transformers fuses experts, and takes them apart when it saves."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        return {name: tensor.clone() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


def train(*, model: str, samples: str, lr: list[float], weight_decay: float) -> dict[str, list[float]]:
    """The training of :func:`ranks.tasks.train` written down once more, in nothing but transformers and torch.

    Every sample goes through the model alone, the loss is the mean over all learned tokens of the global batch, and
    torch's own AdamW updates the weights. ``lr`` has one entry a step.
    """
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").train()
    decayed = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    spared = [parameter for parameter in network.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}],
        lr=0.0,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    batches = Batches(
        open_samples(samples),
        BatchSettings(seq_length=SEQ_LENGTH, micro_batch_size=2, global_batch_size=8, packing=True),
    )
    curves: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step, rate in enumerate(lr):
        lines = batches.step(step)
        learned = sum(line.num_loss_tokens for line in lines)
        optimizer.zero_grad()
        loss = sum((_loss_sum(network, line) for line in lines), torch.zeros(())) / learned
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP_GRAD)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        curves["loss"].append(loss.item())
        curves["grad_norm"].append(norm.item())
    return curves


def _loss_sum(network: Any, line: PackedBatch) -> Tensor:
    total = torch.zeros(())
    for begin, end in itertools.pairwise(itertools.accumulate(line.lengths, initial=0)):
        assert line.loss_mask is not None and line.labels is not None
        mask = line.loss_mask[begin:end]
        if mask.any():
            scores = network(line.input_ids[None, begin:end]).logits[0][mask]
            total = total + cross_entropy(scores, line.labels[begin:end][mask], reduction="sum")
    return total


def _samples(lengths: list[int], vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def _transformers(folder: str, samples: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    return [network(sample[None]).logits[0].float() for sample in samples]


def _furthest(some: list[Tensor], others: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))
