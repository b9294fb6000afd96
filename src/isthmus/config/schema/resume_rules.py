"""What may change when a run is resumed: each setting has one rule, and a test compares the table with the schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Literal

ResumeRule = Literal["fixed", "content", "ask", "noted", "free"]

_TABLE: Mapping[ResumeRule, str] = {
    # The state of a checkpoint, or the meaning of its step, depends on these.
    "fixed": """
        recipe data.mock data.max_samples data.columns data.valid_fraction data.test_fraction data.seq_length
        data.packing data.reset_attention_mask data.reset_position_ids data.eod_mask_loss data.seed data.loss_on
        data.overlong data.on_error chat.system chat.override_system chat.reasoning chat.split_turns
        train.global_batch_size train.freeze optim.optimizer kto.loss lora.rank lora.alpha lora.targets
        lora.modules_to_save lora.init lora.dora lora.rslora rollout.group_size grpo.updates_per_rollout
    """,
    # Names of files, whose content is compared instead.
    "content": """
        model.path model.config model.init tokenizer.path tokenizer.type tokenizer.vocab_size chat.template data.files
        data.sets data.valid_files data.test_files lora.path distill.teacher distill.teacher_config distill.teacher_init
    """,
    # The result depends on these, and a run can continue with other values: checkpoint.accept_changes.
    "ask": """
        train.precision train.initial_loss_scale train.loss_scale_window train.fp8_scaling train.fp8_format
        train.fp8_experts train.emulate_fp8 train.seed train.attention_dropout train.hidden_dropout train.neftune_alpha
        train.label_smoothing train.mtp_loss_weight optim.lr optim.lr_multipliers optim.min_lr optim.schedule
        optim.power optim.num_cycles optim.warmup_steps optim.warmup_fraction optim.schedule_steps optim.decay_steps
        optim.weight_decay optim.clip_grad optim.beta1 optim.beta2 optim.eps optim.muon_lr optim.muon_momentum
        optim.muon_ns_steps optim.muon_scale moe.capacity_factor moe.aux_loss moe.seq_aux_loss moe.z_loss
        moe.expert_bias_update_rate dpo.beta dpo.loss dpo.label_smoothing dpo.simpo_gamma dpo.sft_weight
        dpo.length_normalized distill.teacher_dtype distill.beta distill.temperature distill.top_k distill.sft_weight
        kto.beta kto.desirable_weight kto.undesirable_weight reward.center_rewards_coefficient lora.dropout
        lora.lr_ratio lora.quantize rollout.reward rollout.reward_weights rollout.max_new_tokens rollout.temperature
        rollout.top_p rollout.seed grpo.loss grpo.clip_low grpo.clip_high grpo.kl_weight grpo.kl_ratio grpo.kl_estimator
        grpo.scale_advantages grpo.mask_truncated grpo.length_penalty_tokens grpo.dynamic_sampling
        grpo.max_generations grpo.entropy_weight grpo.correction grpo.correction_cap rollout.ahead rollout.router_replay
    """,
    # Accepted without a question, logged and recorded.
    "noted": "train.steps train.epochs",
    # Layout, speed, memory, outputs: the same result to rounding.
    "free": """
        out platform callbacks model.trust_remote_code model.export_dtype data.length_buckets parallel.tp parallel.sp
        parallel.async_tp parallel.pp parallel.vpp parallel.cp parallel.ep parallel.etp parallel.fsdp
        parallel.fsdp_reduce parallel.elastic parallel.join_timeout_s parallel.timeout_s
        parallel.overlap_grad_reduce parallel.overlap_param_gather
        moe.dispatcher train.micro_batch_size train.gemm_tuning train.compile train.deterministic train.attention
        train.batch_invariant train.share_prefixes train.recompute train.recompute_modules train.recompute_layers
        train.eval_every train.early_stopping train.profile train.threads optim.offload eval.generate eval.prompts
        eval.max_new_tokens eval.temperature checkpoint.async checkpoint.every checkpoint.grace_s checkpoint.keep
        checkpoint.memory_every checkpoint.memory_dir
        checkpoint.keep_best checkpoint.store checkpoint.resume checkpoint.accept_changes checkpoint.hf_every
        checkpoint.save_final checkpoint.export_final checkpoint.export_merged checkpoint.push checkpoint.push_public
        logging.to logging.project logging.name logging.every logging.style logging.progress logging.spike_factor
        logging.ranks_every logging.straggler_share checkpoint.skip_checksums tune.file
        rollout.batch_size rollout.engine rollout.url rollout.transfer rollout.timeout_s rollout.logp_tolerance
        rollout.samples_every rollout.offload launch.nodes launch.spares launch.name launch.workdir launch.python
        launch.image launch.volumes launch.env launch.secrets launch.secret launch.queue launch.options launch.hosts
        launch.port launch.manifest
    """,
}
RESUME_RULES: Mapping[str, ResumeRule] = {name: rule for rule, names in _TABLE.items() for name in names.split()}
_ACCEPTABLE = [name for name, rule in RESUME_RULES.items() if rule == "ask"] + ["distill.teacher"]


def names_accepted(given: Iterable[str]) -> Sequence[str]:
    """The dotted settings for dotted or last names (``optim.lr``, ``lr``).

    Raises:
        ValueError: the reason, for a name that is none of a setting that a resumed run can change.
    """
    found: list[str] = []
    for name in given:
        matches = [known for known in _ACCEPTABLE if name in (known, known.rpartition(".")[2])]
        if not matches:
            raise ValueError(_reason(name))
        found += matches
    return found


def _reason(name: str) -> str:
    known = [each for each in RESUME_RULES if name in (each, each.rpartition(".")[2])]
    if any(RESUME_RULES[each] in ("noted", "free") for each in known):
        return f"{name} may change without it; leave {name} out"
    if known:
        return f"a checkpoint fits one {known[0]} only; leave {name} out, and start a new run with another --out"
    near = get_close_matches(name, [*_ACCEPTABLE, *(each.rpartition(".")[2] for each in _ACCEPTABLE)], n=1)
    return f"{name} is not a setting" + (f" (did you mean {near[0]}?)" if near else "")
