"""``isthmus sft``."""

from __future__ import annotations

from isthmus.cli.run_recipe import Data, Debug, DryRun, HfEvery, Json, Model, Nproc, Out, Request, Words, train


def sft(
    words: Words = None,
    model: Model = None,
    data: Data = None,
    out: Out = None,
    nproc: Nproc = 1,
    hf_every: HfEvery = None,
    dry_run: DryRun = False,
    debug: Debug = False,
    json: Json = False,
) -> int:
    """Fine-tune a model on chats: the loss is on what the assistant says."""
    request = Request(
        words=words,
        model=model,
        data=data,
        out=out,
        nproc=nproc,
        hf_every=hf_every,
        dry_run=dry_run,
        debug=debug,
        json=json,
    )
    return train("sft", request)
