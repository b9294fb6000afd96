"""Arguments of checkpoints and logging."""

from __future__ import annotations

import posixpath

from isthmus.config.dialects.megatron.arguments import Arguments, WrittenArguments
from isthmus.config.dialects.translation import Translation


def put_out(args: Arguments, translation: Translation, name: str) -> None:
    """Translate ``--save`` to the run folder; the default is ``runs/NAME``."""
    if args.has("save"):
        args.put(translation, "out")
    else:
        translation.put("out", posixpath.join("runs", name), "not given: there is no --save")


def put_checkpoints(args: Arguments, translation: Translation) -> None:
    save, load = args.get("save"), args.get("load")
    if save is None:
        translation.put("checkpoint.save_final", False, "not given: there is no --save")
    if args.get("save_interval") and save is not None:
        args.put(translation, "checkpoint.every")
        if args.is_explicit("save_interval"):
            why = "Only the newest checkpoints are kept (checkpoint.keep, 2)."
            translation.remark(args.source("save_interval"), "different", why)
    starting = args.get("pretrained_checkpoint") or (load if args.get("finetune") else None)
    if starting is not None:
        source = args.source("pretrained_checkpoint", "load" if args.get("finetune") else "", "finetune")
        folder = f"{posixpath.basename(starting.rstrip('/'))}-hf"
        why = (
            f"The run starts from random weights. To start from these, run isthmus convert {starting} {folder}, then "
            f"set model.path={folder} and model.init=hf, and leave out model.config."
        )
        translation.remark(source, "unsupported", why)
        translation.put("checkpoint.resume", "never", source)
    elif load is None:
        translation.put("checkpoint.resume", "never", "not given: there is no --load")
    elif load != save:
        translation.put("checkpoint.resume", load, args.source("load"))
    else:
        translation.put("checkpoint.resume", "auto", args.source("load"))
    if load is not None and starting is None:
        why = "A run resumes from checkpoints of Isthmus. isthmus convert turns one of Megatron-LM into a model."
        translation.remark(args.source("load"), "different", why)
    for what in ("optim", "rng"):
        if args.get(f"no_load_{what}") and starting is None and load is not None:
            why = "A resumed run restores all of its state. To start from weights alone, give them as model.path."
            translation.remark(args.source(f"no_load_{what}"), "unsupported", why)
    if args.has("ckpt_format") and args.get("ckpt_format") != "torch_dist":
        why = "Checkpoints are torch_dist. isthmus convert --to torch writes the legacy format."
        translation.remark(args.source("ckpt_format"), "different", why)


def put_logging(args: Arguments, translation: Translation) -> None:
    args.put(translation, "logging.every")
    if args.has("tensorboard_dir"):
        translation.put("logging.to", ["tensorboard"], args.source("tensorboard_dir"))
        translation.remark(
            args.source("tensorboard_dir"), "different", "TensorBoard files are written into the run folder."
        )


def write_output(written: WrittenArguments) -> None:
    out, checkpoint = written.config.out, written.config.checkpoint
    saves = checkpoint.save_final or checkpoint.every is not None
    if saves:
        written.put("out", "checkpoint.every")
        if not checkpoint.save_final:
            written.remark("checkpoint.save_final", "different", "Megatron-LM also saves after the last step.")
    else:
        written.remark("out", "different", "Without checkpoints, Megatron-LM has no --save.")
        written.set("save", None, "checkpoint.save_final")
    load = {"auto": out, "never": None}.get(checkpoint.resume, checkpoint.resume)
    written.set("load", load, "checkpoint.resume")
    if load is not None:
        folder = posixpath.join(out, "checkpoints") if load == out else load
        why = f"Checkpoints that Isthmus has written are in {folder}: give that folder to resume from one."
        written.remark("checkpoint.resume", "different", why)
    written.put("logging.every")
    folder = posixpath.join(out, "tensorboard")
    written.set("tensorboard_dir", folder if "tensorboard" in written.config.logging.to else None, "logging.to")
