"""``train_llama2.sh`` and ``train_llama3.sh`` of ROCm's Megatron-LM, versions of 2025 and 2026."""

from __future__ import annotations

from pathlib import Path

from isthmus.config.dialects.rocm_scripts.script_run import (
    CURRENT_SCALING,
    TIME,
    ScriptRun,
    add_remarks,
    name_of_all_nodes,
    put_data,
    put_integers,
    put_null_tokenizer,
    read_world,
    script_run,
)
from isthmus.config.dialects.script_variables import Variables
from isthmus.config.dialects.translation import Translation

_MODELS = {
    "llama2": {"7": "llama2-7b", "13": "llama2-13b", "70": "llama2-70b"},
    "llama3": {"8": "llama3.1-8b", "70": "llama3.1-70b"},
}
_VOCAB = {"llama2": 32000, "llama3": 128256}
_TOKENIZERS = {"llama2": "NousResearch/Llama-2-7b-chat-hf", "llama3": "meta-llama/Llama-3.1-8B"}
_DATA_DIR = "/root/.cache/data"
_SEQ_LENGTH, _PORT = {"llama2": 4096, "llama3": 2048}, {"llama2": 6020, "llama3": 6000}


def read_llama(script: str, v: Variables) -> ScriptRun:
    t = Translation(recipe="pretrain")
    size = v.text("MODEL_SIZE", "70").upper().removesuffix("B")
    if size not in _MODELS[script]:
        v.refuse("MODEL_SIZE", f"must be {' or '.join(_MODELS[script])} (also with a B at the end)")
        size = "70"
    if not v.has("MODEL_SIZE"):
        small = min(_MODELS[script], key=int)
        nodes = ", and for two nodes NNODES=2, NODE_RANK and MASTER_ADDR on each"
        t.remark(
            "MODEL_SIZE",
            "mistake",
            f"not given, so the script trains the 70B model. For the {small}B model of some examples, set "
            f"MODEL_SIZE={small}{'' if v.has('NNODES') else nodes}",
        )
    t.put("model.path", f"preset:{_MODELS[script][size]}", v.origin("MODEL_SIZE", 70))
    t.put("model.init", "random", f"train_{script}.sh loads no weights")
    if script == "llama3":
        t.remark(
            "train_llama3.sh",
            "different",
            "the model is the published Llama 3.1, with RoPE base 500000 and RoPE scaling; the script keeps base "
            "10000, which does not fit the Hugging Face weights",
        )
    put_integers(
        t,
        v,
        ("train.steps", "TOTAL_ITERS", 10),
        ("train.micro_batch_size", "MBS", 2),
        ("train.global_batch_size", "BS", 8),
        ("data.seq_length", "SEQ_LENGTH", _SEQ_LENGTH[script]),
    )
    _put_layout(t, v)
    _put_precision(t, v)
    _put_optimizer(script, t, v)
    path = f"{v.text('DATA_DIR', _DATA_DIR)}/bookcorpus_text_sentence"
    mock = put_data(t, v, default_path=path, prefix_of="DATA_DIR", implied=True)
    _put_tokenizer(script, t, v, mock=mock)
    steps = t.settings["train.steps"]
    if v.switch("ENABLE_PROFILING", False):
        last = min(steps, 12)
        t.put("train.profile", f"{max(1, last - 2)}-{last}", v.origin("ENABLE_PROFILING"))
    add_remarks(t, v, "llama")
    t.world = read_world(v, _PORT[script], t)
    s = t.settings
    name = (
        f"{t.world.nnodes}nodes_rank{t.world.node_rank}_train_{size}B_mbs{s['train.micro_batch_size']}"
        f"_bs{s['train.global_batch_size']}_tp{s['parallel.tp']}_pp{s['parallel.pp']}_cp{s['parallel.cp']}_iter{steps}"
        f"/TE_FP8_{int(s['train.precision'] == 'fp8')}/{TIME}"
    )
    log_folder = v.text("LOG_DIR", f"experiment/{name}")
    _put_output(t, v, v.text("LOG_DIR", f"experiment/{name_of_all_nodes(name, t.world)}"))
    log = f"{log_folder}/output_{v.text('EXP_NAME', 'perf')}.log"
    return script_run(f"train_{script}.sh", t, v, log_folder, log, no_training=v.switch("NO_TRAINING", False))


def _put_layout(t: Translation, v: Variables) -> None:
    tp, fsdp = v.integer("TP", 8), v.switch("FSDP", False) or v.switch("MEGATRON_FSDP", False)
    fsdp_origin = v.origin("FSDP") if v.switch("FSDP", False) else v.origin("MEGATRON_FSDP")
    if fsdp and tp > 1:
        if v.has("TP"):
            t.remark(v.origin("TP"), "different", f"{fsdp_origin} sets it to 1, as in the script")
        tp = 1
    t.put("parallel.tp", tp, fsdp_origin if fsdp else v.origin("TP", 8))
    if tp > 1 and not v.switch("SEQ_PARALLEL", True):
        t.put("parallel.sp", False, v.origin("SEQ_PARALLEL"))
    t.put("parallel.pp", v.integer("PP", 1), v.origin("PP", 1))
    t.put("parallel.cp", v.integer("CP", 1), v.origin("CP", 1))
    if fsdp:
        t.put("parallel.fsdp", True, fsdp_origin)
    t.put("parallel.timeout_s", 7200.0, "--distributed-timeout-minutes 120")
    if v.switch("RECOMPUTE", False):
        t.put("train.recompute", "full", v.origin("RECOMPUTE"))


def _put_precision(t: Translation, v: Variables) -> None:
    fp8, recipe = v.switch("TE_FP8", False), "delayed"
    if fp8:
        recipe = v.choice("TE_FP8_RECIPE", ("delayed", "tensorwise", "mxfp8"), "delayed")
    if v.switch("TE_FP4", False):
        v.refuse("TE_FP4", "Isthmus does not support FP4. Use TE_FP8=1, or leave it out for bf16")
    t.put("train.precision", "fp8" if fp8 else "bf16", v.origin("TE_FP8", 0))
    if fp8 and recipe == "mxfp8":
        t.put("train.fp8_scaling", "mxfp8", v.origin("TE_FP8_RECIPE"))
    if fp8 and recipe == "delayed":
        t.remark(v.origin("TE_FP8_RECIPE" if v.has("TE_FP8_RECIPE") else "TE_FP8"), "different", CURRENT_SCALING)


def _put_optimizer(script: str, t: Translation, v: Variables) -> None:
    if v.choice("OPTIMIZER", ("adam", "sgd"), "adam") == "sgd":
        v.refuse("OPTIMIZER", "the optimizer is AdamW. Leave it out")
    fixed = {
        "lr": 1e-4,
        "min_lr": 1e-5,
        "schedule": "cosine",
        "schedule_steps": 320000,
        "warmup_steps": 0,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "beta1": 0.9,
        "beta2": 0.95,
    }
    words = {
        "schedule": "--lr-decay-style cosine",
        "schedule_steps": "--lr-decay-iters 320000",
        "warmup_steps": "--lr-warmup-iters 0",
        "beta1": "--adam-beta1 0.9",
        "beta2": "--adam-beta2 0.95",
    }
    for name, value in fixed.items():
        t.put(f"optim.{name}", value, words.get(name) or f"--{name.replace('_', '-')} {value:g}")


def _put_tokenizer(script: str, t: Translation, v: Variables, *, mock: bool) -> None:
    kinds = ("HuggingFaceTokenizer", *(("Llama2Tokenizer",) if script == "llama2" else ()))
    kind = v.choice("TOKENIZER_TYPE", kinds, "HuggingFaceTokenizer")
    if mock:
        put_null_tokenizer(t, v, _VOCAB[script])
        for name in ("TOKENIZER_TYPE", "TOKENIZER_MODEL"):
            if v.has(name):
                t.remark(v.origin(name), "unsupported", "mock data has no text, so no tokenizer is loaded")
        return
    t.put("tokenizer.type", kind, v.origin("TOKENIZER_TYPE", kind))
    downloaded = f"{v.text('DATA_DIR', _DATA_DIR)}/tokenizer_{script}"  # by a script of ROCm
    default = downloaded if Path(downloaded).is_dir() else _TOKENIZERS[script]
    t.put("tokenizer.path", v.text("TOKENIZER_MODEL", default), v.origin("TOKENIZER_MODEL", default))
    if not v.has("TOKENIZER_MODEL") and default != downloaded:
        t.remark(
            "TOKENIZER_MODEL",
            "different",
            f"{_TOKENIZERS[script]} is stored in the Hugging Face cache, not in DATA_DIR/tokenizer_{script}",
        )


def _put_output(t: Translation, v: Variables, log_folder: str) -> None:
    save = v.text("SAVE_CKPT_PATH", "")
    t.put("out", save or f"{log_folder}/run", v.origin("SAVE_CKPT_PATH") if save else v.origin("LOG_DIR", log_folder))
    if save:
        put_integers(t, v, ("checkpoint.every", "SAVE_INTERVAL", 5000))
        t.remark(
            v.origin("SAVE_CKPT_PATH"), "different", "it is the run folder; checkpoints are in its folder checkpoints"
        )
    else:
        t.put("checkpoint.save_final", False, "the script saves nothing")
    t.put("checkpoint.export_final", False, "the script saves no Hugging Face model")
    if v.has("LOAD_CKPT_PATH"):
        t.put("checkpoint.resume", v.values["LOAD_CKPT_PATH"], v.origin("LOAD_CKPT_PATH"))
        t.remark(
            v.origin("LOAD_CKPT_PATH"),
            "different",
            "it must be a checkpoint of Isthmus, which is resumed with its optimizer. Convert one of Megatron-LM "
            "with isthmus convert, then set model.path and model.init=hf",
        )
    evaluations = v.integer("EVAL_ITERS", -1, least=-1)
    if evaluations > 0:
        put_integers(t, v, ("train.eval_every", "EVAL_INTERVAL", 5000))
        t.remark(v.origin("EVAL_ITERS"), "different", "each evaluation uses the whole validation set")
    else:
        t.put("data.valid_fraction", 0.0, "--eval-iters -1")
    put_integers(t, v, ("logging.every", "LOG_INTERVAL", 1))
    t.put("logging.style", "megatron", "the log format of Megatron-LM")
    if v.has("WANDB_API_KEY"):
        t.remark("WANDB_API_KEY", "unsupported", "metrics are written to metrics.jsonl and TensorBoard files")
