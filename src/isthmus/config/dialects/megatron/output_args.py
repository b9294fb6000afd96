"""What is saved and loaded, and what is told on the way."""

from __future__ import annotations

import posixpath

from isthmus.config.dialects.megatron.arguments import Arguments
from isthmus.config.dialects.translation import Translation


def put_out(args: Arguments, translation: Translation, name: str) -> None:
    """The run folder; one called ``name`` for a script that saves nothing."""
    if args.said("save"):
        translation.put("out", args.get("save"), args.words("save"))
    else:
        translation.put("out", posixpath.join("runs", name), "not said: there is no --save")


def put_checkpoints(args: Arguments, translation: Translation) -> None:
    """What is saved when, and where a run goes on."""
    save, load = args.get("save"), args.get("load")
    if save is None:
        translation.put("checkpoint.save_final", False, "not said: there is no --save")
    if args.get("save_interval") and save is not None:
        translation.put("checkpoint.every", args.get("save_interval"), args.words("save_interval"))
        if args.said_of_this_run("save_interval"):
            why = "The newest checkpoint.keep checkpoints are kept (2), not all of them."
            translation.remark(args.words("save_interval"), "otherwise", why)
    starting = args.get("pretrained_checkpoint") or (load if args.get("finetune") else None)
    if starting is not None:
        words = args.words("pretrained_checkpoint", "load" if args.get("finetune") else "", "finetune")
        folder = f"{posixpath.basename(starting.rstrip('/'))}-hf"
        why = (
            f"The model begins with random weights. For those: isthmus convert {starting} {folder}, then "
            f"model.path={folder} with model.init=hf and without model.config."
        )
        translation.remark(words, "not at all", why)
        translation.put("checkpoint.resume", "never", words)
    elif load is None:
        translation.put("checkpoint.resume", "never", "not said: there is no --load")
    elif load != save:
        translation.put("checkpoint.resume", load, args.words("load"))
    else:
        translation.put("checkpoint.resume", "auto", args.words("load"))
    if load is not None and starting is None:
        why = "A run goes on from checkpoints of Isthmus; of one that Megatron-LM wrote isthmus convert makes a model."
        translation.remark(args.words("load"), "otherwise", why)
    for what in ("optim", "rng"):
        if args.get(f"no_load_{what}") and starting is None and load is not None:
            why = "A run goes on with all of its state; to begin anew with weights alone give them as model.path."
            translation.remark(args.words(f"no_load_{what}"), "not at all", why)
    if args.said("ckpt_format") and args.get("ckpt_format") != "torch_dist":
        why = "Checkpoints are torch_dist; isthmus convert --to torch makes the other kind of them."
        translation.remark(args.words("ckpt_format"), "otherwise", why)


def put_logging(args: Arguments, translation: Translation) -> None:
    """What is told on the way."""
    translation.put("logging.every", args.get("log_interval"), args.words("log_interval"))
    if args.said("tensorboard_dir"):
        translation.put("logging.tensorboard", True, args.words("tensorboard_dir"))
        translation.remark(args.words("tensorboard_dir"), "otherwise", "Its files are written into the run folder.")
