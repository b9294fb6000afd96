"""Writes the weights of a model, and the tokens of a case in the order in which every contestant trains them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from sft.workload import Shape, make_workload

from gpu_turns.cases import DESCRIPTION, MODELS, Turn, model_config

CHATS = 2000
"""At most so many are used."""


def run(spec: dict[str, Any]) -> None:
    """Write what does not exist yet: ``spec["weights"]``, and unless it is None ``spec["tokens"]`` of a turn."""
    name, weights = spec["model"], Path(spec["weights"])
    keys = model_config(name, tiny=spec["dry"])
    if not (weights / DESCRIPTION).exists():
        shutil.rmtree(weights, ignore_errors=True)
        facts = {"model": MODELS[name][0], "parameters": _random_weights(weights, keys, spec)}
        (weights / DESCRIPTION).write_text(json.dumps(facts))
    if spec["turn"] is None or (Path(spec["turn"]["tokens"]) / DESCRIPTION).exists():
        return
    turn = Turn(**spec["turn"])
    tokens = Path(turn.tokens)
    shutil.rmtree(tokens, ignore_errors=True)
    tokens.mkdir(parents=True)
    facts = _chats(tokens, keys, turn) if turn.chats else _sequences(tokens, keys["vocab_size"], turn)
    torch.save(_steps(turn), tokens / "steps.pt")
    (tokens / DESCRIPTION).write_text(json.dumps(facts))


def _random_weights(folder: Path, keys: dict[str, Any], spec: dict[str, Any]) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    from isthmus.hf.tiny_model import train_tokenizer
    from isthmus.hf.tokenizer.tokenizer import save_tokenizer

    config = AutoConfig.for_model(**keys)
    torch.manual_seed(0)
    with torch.device(spec["device"]):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    # SFTTrainer wants a tokenizer, also for tokens; the chats of a dry run use it.
    texts = [message["content"] for number in range(CHATS) for message in _counting(number)]
    save_tokenizer(train_tokenizer(texts, vocab_size=512), folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _sequences(folder: Path, vocabulary: int, turn: Turn) -> dict[str, Any]:
    """Documents of one sample; small tokens are frequent, so that the loss changes within a few steps."""
    import numpy as np

    from isthmus.data.store.indexed_dataset import IndexedWriter, write_manifest

    random, length = np.random.default_rng(0), turn.seq_length + 1
    documents = turn.accumulation * (turn.steps + turn.profiled_steps)
    with IndexedWriter(folder / "prepared", np.int32) as writer:
        for _ in range(documents):
            writer.extend((random.random(length) ** 4 * (vocabulary - 1)).astype(np.int32), (length,))
            writer.end_documents((1,))
    write_manifest(folder / "prepared", {"pair": writer.close()})
    return {"documents": documents, "tokens": documents * length}


def _chats(folder: Path, keys: dict[str, Any], turn: Turn) -> dict[str, Any]:
    """The documentation of Python's standard library; the tokenizer goes into the folder of the tokens."""
    few = folder / "few.jsonl"
    if turn.dry:
        few.write_text("".join(json.dumps({"messages": _counting(number)}) + "\n" for number in range(400)))
    tiny = Shape(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=keys["vocab_size"])
    described = make_workload(
        folder,
        data=few if turn.dry else None,
        tokenizer=Path(turn.weights) if turn.dry else None,
        seq_length=turn.seq_length,
        num_samples=CHATS,
        shape=tiny,
    )
    result: dict[str, Any] = described["data"]
    return result


def _counting(number: int) -> list[dict[str, str]]:
    answer = " ".join(str(number + offset) for offset in range(1, 4 + number % 7))
    return [{"role": "user", "content": "Continue counting."}, {"role": "assistant", "content": answer}]


def _steps(turn: Turn) -> list[list[dict[str, Any]]]:
    """The micro batches of each step of the run of Isthmus: ids and labels (-100 without loss), int64 [T]; lengths."""
    from gpu_turns.isthmus_turn import recipe_of, settings
    from isthmus.config.load import load_config
    from isthmus.engine.parallel.process_groups import FIRST_RANK
    from isthmus.hf.tokenizer.tokenizer_kinds import NumberTokenizer, open_tokenizer
    from isthmus.recipes.data.corpus import split_sources
    from isthmus.recipes.data.data_sources import data_settings, find_data_sources
    from isthmus.recipes.data.source_samples import open_sources

    chosen = settings(turn, Path("unused"))
    config = load_config(recipe_of(turn), None, flags=chosen)
    tokenizer = (
        open_tokenizer(Path(turn.tokens) / "model", None)
        if turn.chats
        else NumberTokenizer(chosen["tokenizer.vocab_size"])
    )
    sources = find_data_sources(config)
    stores = open_sources(data_settings(config), sources, Path(turn.tokens), tokenizer, 10**9, lambda _: None, {})
    batches, _, _ = split_sources(config.data, sources, stores).batches(
        config, FIRST_RANK, 1, eod=tokenizer.eos_id, device_type="cpu"
    )
    steps = []
    for step in range(turn.steps + turn.profiled_steps):
        micro = []
        for batch in batches.step(step):
            assert batch.loss_mask is not None and batch.labels is not None
            labels = torch.where(batch.loss_mask, batch.labels, -100)
            micro.append({"ids": batch.input_ids, "labels": labels, "lengths": batch.lengths})
        steps.append(micro)
    return steps
