"""Sample answers, model cards, publication, and evaluation with lm-evaluation-harness, in real commands."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from faults.command import rows
from faults.fork_server import ForkServer

PROMPTS = ["Say the number 5.", "Say the number 61."]


def greedy_answer(folder: Path, prompt: str, new_tokens: int) -> str:
    """The answer of transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(answer[0, ids.size(1) :], skip_special_tokens=True))


def test_answers_at_each_evaluation(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    """Also of a resumed run, which answers again at the step from which it resumes; at the end as transformers do."""
    prompts = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": PROMPTS[1]}]}
    prompts.write_text(json.dumps(PROMPTS[0]) + "\n\n" + json.dumps(chat) + "\n")
    more = ["train.eval_every=2", "eval.generate=true", f"eval.prompts={prompts}", "eval.max_new_tokens=8"]
    more += ["train.precision=fp32"]
    first = isthmus(*sft_args, *more, "train.steps=3", "optim.schedule=constant")
    assert first.returncode == 0, first.stderr
    out = tmp_path / "out"
    assert [row["step"] for row in rows(out, "samples.jsonl")] == [0, 0, 2, 2, 3, 3]
    done = isthmus(*sft_args, *more, "train.steps=30", "train.eval_every=15", "optim.schedule=constant")
    assert done.returncode == 0, done.stderr
    found = rows(out, "samples.jsonl")
    assert [row["step"] for row in found] == [0, 0, 2, 2, 3, 3, 15, 15, 30, 30]
    assert [row["prompt"] for row in found[-2:]] == PROMPTS
    for row in found[-2:]:
        assert row["answer"] == greedy_answer(out / "hf", row["prompt"], 8) and row["answer"]
    assert f"({out / 'samples.jsonl'})" in done.stderr and f"{PROMPTS[0]} -> " in done.stderr
