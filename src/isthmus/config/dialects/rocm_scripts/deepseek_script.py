"""``train_deepseekv2.sh`` of ROCm's Megatron-LM."""

from __future__ import annotations

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

_TOKENIZER, _VOCAB = "deepseek-ai/DeepSeek-V2-Lite", 102400
_DATA = "/root/deepseek-datasets"


def read_deepseek(v: Variables) -> ScriptRun:
    t = Translation(recipe="pretrain")
    t.put("model.path", "preset:deepseek-v2-lite", "MODEL_SIZE=16B in the script")
    t.put("model.config.initializer_range", 0.008, "--init-method-std 0.008")
    t.put("model.init", "random", "the script loads no weights")
    t.remark(
        "train_deepseekv2.sh",
        "different",
        "the model is the published DeepSeek-V2-Lite with a dense first layer; the script has experts in every layer",
    )
    _put_sizes(t, v)
    precision, recompute = _put_precision(t, v)
    _put_optimizer(t, v)
    t.put("moe.aux_loss", 0.01, "--moe-aux-loss-coeff 1e-2")
    _put_tokens(t, v)
    t.put("data.valid_fraction", 0.0, "--eval-iters -1")
    add_remarks(t, v, "deepseek_v2")
    t.world = read_world(v, None, t)
    s = t.settings
    mbs, gbs = s["train.micro_batch_size"], s["train.global_batch_size"]
    length = s["data.seq_length"]
    name = (
        f"MI300X-DeepSeek-V2-Lite-{precision}-seq{length}-tp{s['parallel.tp']}pp{s['parallel.pp']}ep{s['parallel.ep']}"
        f"-mbs{mbs}gbs{gbs}-ac_{recompute}-do_true-fa_true-sp_true-{TIME}"
    )
    log_folder = v.text("LOG_DIR", "experiment")
    t.put("out", f"{log_folder}/{name_of_all_nodes(name, t.world)}", v.origin("LOG_DIR", "experiment"))
    if not v.switch("SAVE", False):
        t.put("checkpoint.save_final", False, v.origin("SAVE", 0))
    t.put("checkpoint.export_final", False, "the script saves no Hugging Face model")
    t.put("logging.style", "megatron", "the log format of Megatron-LM")
    means = {"no_training": v.switch("NO_TRAINING", False), "summary_from": 1, "with_throughput": False}
    return script_run("train_deepseekv2.sh", t, v, log_folder, f"{log_folder}/{name}.log", **means)


def _put_sizes(t: Translation, v: Variables) -> None:
    put_integers(t, v, ("train.steps", "TRAIN_ITERS", 50))
    if t.settings["train.steps"] > 50:
        t.remark(
            v.origin("TRAIN_ITERS"), "different", "Isthmus trains all steps; --exit-interval ends the script at 50"
        )
    put_integers(t, v, ("train.micro_batch_size", "MBS", 4), ("train.global_batch_size", "GBS", 256))
    put_integers(t, v, ("data.seq_length", "SEQ_LEN", 2048), ("parallel.tp", "TP", 1), ("parallel.pp", "PP", 1))
    put_integers(t, v, ("parallel.cp", "CP", 1), ("parallel.ep", "EP", 8))
    if v.has("MP_VP"):
        if t.settings["parallel.pp"] == 1:
            v.refuse("MP_VP", "virtual pipeline stages need PP above 1. Leave it out")
        else:
            v.refuse("MP_VP", "set the number of virtual stages instead, parallel.vpp=2")


def _put_precision(t: Translation, v: Variables) -> tuple[str, str]:
    """Translate PR and AC; returns their values."""
    precision = v.choice("PR", ("bf16", "fp8", "fp16"), "bf16")
    t.put("train.precision", precision, v.origin("PR", "bf16"))
    if precision == "fp8":
        t.remark(v.origin("PR"), "different", CURRENT_SCALING)
        t.remark(v.origin("PR"), "different", "experts stay in bf16; attention, dense and shared MLPs are in FP8")
    if precision == "fp16":
        t.remark(v.origin("PR"), "different", "attention scores are float32, without --apply-query-key-layer-scaling")
    recompute = v.choice("AC", ("none", "sel", "full"), "sel")
    t.put("train.recompute", {"sel": "selective"}.get(recompute, recompute), v.origin("AC", "sel"))
    return precision, recompute


def _put_optimizer(t: Translation, v: Variables) -> None:
    steps = t.settings["train.steps"]
    fixed = {
        "lr": 1e-5,
        "min_lr": 1e-6,
        "schedule": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "beta1": 0.9,
        "beta2": 0.95,
    }
    fixed |= {"schedule_steps": steps - 2} if steps > 5 else {"warmup_steps": 0}
    for name, value in fixed.items():
        t.put(f"optim.{name}", value, "fixed in the script")
    if steps <= 5:
        t.remark(v.origin("TRAIN_ITERS"), "different", "too few steps for the script's warm-up of 2, so there is none")


def _put_tokens(t: Translation, v: Variables) -> None:
    path = f"{v.text('DATA_DIR', _DATA)}/mmap_deepseekv2_datasets_text_document"
    if put_data(t, v, default_path=path, prefix_of="DATA_DIR", implied=False):
        put_null_tokenizer(t, v, _VOCAB)
        if v.has("TOKENIZER_MODEL"):
            t.remark(v.origin("TOKENIZER_MODEL"), "unsupported", "mock data has no text, so no tokenizer is loaded")
    else:
        t.put("tokenizer.type", "DeepSeekV2Tokenizer", "--tokenizer-type DeepSeekV2Tokenizer")
        t.put("tokenizer.path", v.text("TOKENIZER_MODEL", _TOKENIZER), v.origin("TOKENIZER_MODEL", _TOKENIZER))
        t.put("data.eod_mask_loss", True, "--eod-mask-loss")
