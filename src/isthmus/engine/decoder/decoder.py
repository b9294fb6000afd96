"""A Megatron-Core decoder built from an :class:`~isthmus.families.architecture.Architecture`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.rope import frequency_sets, rotary_tables
from isthmus.engine.decoder.embedding import TokenEmbedding
from isthmus.engine.decoder.layer_inputs import LayerInputs
from isthmus.engine.decoder.mtp import MtpLayer
from isthmus.engine.decoder.neftune import with_noise
from isthmus.engine.decoder.spec import build_layer, build_norm
from isthmus.engine.decoder.stack import DecoderStack, LayerStack
from isthmus.engine.decoder_config import DecoderConfig, padded_vocab_size
from isthmus.engine.layers.dropout import EMBEDDING, hidden_dropout
from isthmus.engine.linear.linear import ReplicatedLinear
from isthmus.engine.lora.adapter import AdapterSet
from isthmus.engine.loss.cross_entropy_cpu import Smoothing
from isthmus.engine.loss.linear_cross_entropy import (
    VocabShard,
    linear_cross_entropy,
    linear_distillation,
    sampling_at,
    token_cross_entropies,
    token_scores,
)
from isthmus.engine.loss.policy_values import policy_values
from isthmus.engine.moe.load_balancing import token_groups
from isthmus.engine.moe.router_replay import local_experts
from isthmus.engine.parallel.fsdp import FullyShardedDataParallel
from isthmus.engine.parallel.live_parameters import freeze
from isthmus.engine.parallel.pipeline_layout import stage_layers
from isthmus.engine.parallel.sharded_params import init_empty_weights
from isthmus.engine.tensor_names import spelling_of
from isthmus.families.architecture import Architecture


@dataclass(frozen=True, slots=True)
class LastStates:
    """Hidden states behind the last layer and its norm."""

    hidden: Tensor
    """[T, 1, H], or [T / tp, 1, H] under sequence parallelism; U rows in place of T with shared prefixes."""
    batch: PackedBatch
    tables: Tensor | None
    """Rotary tables, for MTP layers."""

    @property
    def labels(self) -> Tensor:
        assert self.batch.labels is not None
        return self.batch.labels

    def rows(self, positions: Tensor) -> Tensor:
        """The rows of the hidden states of all ranks at int64 [n] positions of the packed sequence."""
        return positions if self.batch.shared is None else self.batch.shared.rows[positions]


class OutputLayer(ColumnParallelLinear):
    """The output projection; what is computed with its weight is computed in its forward pass."""

    fsdp_unit: str | None = None

    def forward(self, hidden: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        return compute(hidden)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        logits: Tensor = super().forward(hidden, weight=weight, runtime_gather_output=True)[0]
        return logits


class Decoder(MegatronModule):
    """A pipeline stage of a decoder-only model: embedding, layers, MTP layers and output layer.

    It has the attributes that Megatron-Core's schedules, gradient reductions and checkpoints read, the forward pass of
    a packed batch, and a loss that never materializes all logits.
    """

    model_type = ModelType.encoder_or_decoder
    embedding: Any
    mtp: Any
    output_layer: Any

    def __init__(
        self,
        architecture: Architecture,
        config: DecoderConfig,
        *,
        first: bool,
        last: bool,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.architecture = architecture
        self.vp_stage = vp_stage
        self.pre_process = first
        self.post_process = last
        self.mtp_process: bool = last and config.mtp_num_layers is not None
        self.share_embeddings_and_output_weights: bool = architecture.head.tie_embeddings
        rows = config.vocab_rows or padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size)
        if first or self.mtp_process:
            self.embedding = TokenEmbedding(config, architecture, rows)
            if architecture.embedding.layer_input_size:
                self.embedding.layer_inputs = LayerInputs(config, architecture, rows)
        has_norm = first and architecture.embedding.embedding_norm
        self.embedding_norm: nn.Module | None = build_norm(architecture, config) if has_norm else None
        self.decoder: DecoderStack = _decoder_stack(architecture, config, vp_stage or 0, final_norm=last)
        if self.mtp_process:
            depths = range(1, (config.mtp_num_layers or 0) + 1)
            self.mtp = LayerStack(config, (MtpLayer(config, architecture, depth) for depth in depths))
        if last:
            self.output_layer = self._build_output_layer(rows)
        self.frozen: Collection[str] = ()
        """Canonical names of the tensors that are not trained, also of other stages."""
        self.adapters: AdapterSet | None = None
        """Adapters of all stages."""
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequency_sets(architecture), persistent=False)
        # Parameters on the meta device get memory later.
        self._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(config.device))
        self._mark_sharded_parameters()
        self._mark_embedding()

    def _build_output_layer(self, rows: int) -> nn.Module:
        config = self.config
        if self.architecture.head.score_head:
            return nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        shared = self.share_embeddings_and_output_weights and hasattr(self, "embedding")
        kwargs = {"config": config, "init_method": config.init_method, "skip_weight_param_allocation": shared}
        layer = OutputLayer(config.hidden_size, rows, bias=False, **kwargs)
        layer.fsdp_unit = None if self.share_embeddings_and_output_weights else "output"
        if self.architecture.head.output_bias:
            layer.bias = nn.Parameter(torch.zeros(layer.output_size_per_partition, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(layer.bias, True, 0, 1)
        return layer

    def _mark_embedding(self) -> None:
        """Attributes for the data-parallel wrapper and the gradient norm: stages may have copies of the embedding."""
        if self.pre_process and self.architecture.embedding.position == "learned":
            positions = self.embedding.position_embeddings.to(self.config.params_dtype).weight
            # Read by finalize_model_grads: each rank looks up only its part of the sequence.
            positions.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        if not (self.share_embeddings_and_output_weights or self.config.mtp_num_layers):
            return
        weight: Any = self.shared_embedding_or_output_weight()
        if self.config.pipeline_model_parallel_size == 1:
            weight.zero_out_wgrad = True  # lookup and projection both add to the gradient
        elif weight is not None:
            weight.shared_embedding = True
            weight.shared = not self.pre_process

    def _mark_sharded_parameters(self) -> None:
        """Needed by the gradient norm; Megatron-Core marks them only when it initializes weights."""
        for module in self.modules():
            if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
                dim = 0
            elif isinstance(module, RowParallelLinear):
                dim = 1
            else:
                continue
            if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(module.weight, True, dim, 1)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Hidden states from the previous stage, set by the pipeline schedule."""
        (self.decoder.input_tensor,) = input_tensor

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """This stage's copy of the embedding, if the last stage has one too: read by ``finalize_model_grads``."""
        if hasattr(self, "embedding"):
            weight: Tensor = self.embedding.word_embeddings.weight
            return weight
        return self.output_layer.weight if self.post_process else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Entries with Megatron-Core's keys; copies of the embedding are replicas of the first stage's."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.pop(f"{prefix}output_layer._extra_state", None)
        names = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
        embedding, output, bias = (prefix + name for name in names)
        for entry in (state[name] for name in (output, bias) if name in state):
            entry.allow_shape_mismatch = True  # its padding depends on the layout
        if self.share_embeddings_and_output_weights and not self.pre_process and output in state:
            state[output].key = embedding
        for entry in (state[name] for name in (embedding, output) if name in state):
            if entry.key == embedding and not self.pre_process:
                entry.replica_id = (1, *entry.replica_id[1:])
        return state

    def forward(
        self, batch: PackedBatch, output: DecoderOutput | None = None, *, loss_positions: Tensor | None = None
    ) -> Tensor:
        """Run this stage.

        Args:
            batch: on this device; this rank's part under context parallelism. T is a multiple of tp under sequence
                parallelism.
            output: what the last stage computes from its hidden states: a method of this class, with its further
                arguments bound.
            loss_positions: int64 [n], positions of loss tokens if there is no ``output``: :meth:`loss_sum`, or
                :meth:`token_values` of a reward model; without both, :meth:`logits`.

        Returns:
            Last stage: the result of ``output``. Other stages: hidden states [T, 1, H], or [T / tp, 1, H] under
            sequence parallelism.
        """
        if self.config.num_moe_experts is not None:
            batch = self._routed(batch)
        inputs = batch.layer_inputs()
        hidden = self._embed(inputs) if self.pre_process else None
        tables = self._rotary_tables(inputs)
        hidden = self.decoder(
            hidden, rotary_pos_emb=tables, packed_seq_params=inputs, **self._layer_arguments(hidden, inputs)
        )
        if not self.post_process:
            return hidden
        states = LastStates(hidden, batch, tables)
        if output is None:
            if loss_positions is None:
                output = Decoder.logits
            else:
                method = Decoder.token_values if self.architecture.head.score_head else Decoder.loss_sum
                output = partial(method, positions=loss_positions)
        if self.architecture.head.score_head:
            return output(self, states)
        result: Tensor = self.output_layer(hidden, lambda hidden: output(self, replace(states, hidden=hidden)))
        return result

    def _routed(self, batch: PackedBatch) -> PackedBatch:
        """The batch with what routers need of the rows of this rank."""
        ranks = parallel_state.get_tensor_model_parallel_world_size() if self.config.sequence_parallel else 1
        place = (parallel_state.get_tensor_model_parallel_rank() % ranks, ranks, self.config.device)
        groups = token_groups(batch, *place) if self.training and batch.sample_weights else None
        return replace(batch, token_groups=groups, routed_experts=local_experts(batch, *place))

    def logits(self, states: LastStates) -> Tensor:
        """Logits [T, V] of all positions, or scores [T, 1] of a reward model."""
        if self.architecture.head.score_head:
            scores = self._rewards(states.hidden, None)
            return scores if states.batch.shared is None else scores[states.batch.shared.rows]
        logits = self.output_layer.logits(self._scaled(states.hidden), self._projection())
        logits = logits[:, 0, : self.architecture.vocab_size]
        if states.batch.shared is not None:
            logits = logits[states.batch.shared.rows]
        cap = self.architecture.head.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def loss_sum(self, states: LastStates, positions: Tensor, mtp_positions: Sequence[Tensor] = ()) -> Tensor:
        """Summed cross entropy of int64 [n] positions, a scalar; with MTP layers those of all depths, [1 + depths].

        ``mtp_positions`` are, for each MTP depth k, from 1, the positions whose label k tokens later counts; without
        them the MTP layers do not run.
        """
        batch, losses = states.batch, [self._loss(states, positions)]
        depths = zip(self.mtp.layers, mtp_positions, strict=True) if mtp_positions else ()
        for depth, (layer, depth_positions) in enumerate(depths, start=1):
            # The roll crosses sample boundaries, but no position in ``mtp_positions`` depends on such a token.
            embedded = self._embed(replace(batch, input_ids=batch.input_ids.roll(-depth)), depth)
            states = replace(states, hidden=layer(states.hidden, embedded, states.tables, batch))
            weight = self.config.mtp_loss_scaling_factor / len(mtp_positions)
            losses.append(self._loss(states, depth_positions, depth, weight=weight))
        return torch.stack(losses) if mtp_positions else losses[0]

    def distillation_sums(self, states: LastStates, positions: Tensor) -> Tensor:
        """Sums over int64 [n] positions, [3], for the teacher of the batch; see :func:`linear_distillation`."""
        inputs = self._loss_inputs(states, positions)
        scale = self._grad_scale(None, states.hidden.device)
        return linear_distillation(*inputs, teacher=states.batch.teacher, grad_scale=scale)

    def token_values(self, states: LastStates, positions: Tensor) -> Tensor:
        """Cross entropies of int64 [n] positions, float32 [n], or the scores of a reward model; without MTP layers."""
        if self.architecture.head.score_head:
            return self._rewards(states.hidden, states.rows(positions))
        return token_cross_entropies(*self._loss_inputs(states, positions))

    def policy_values(self, states: LastStates, positions: Tensor, *, entropy_gradient: bool) -> Tensor:
        """Cross entropies and entropies of int64 [n] positions at the temperature of the rollout, float32 [2, n]."""
        assert states.batch.rollout is not None
        hidden, weight, labels, shard = self._loss_inputs(states, positions)
        shard = replace(shard, temperature=states.batch.rollout.temperature)
        return policy_values(hidden, weight, labels, shard, entropy_gradient=entropy_gradient)

    def token_scores(self, states: LastStates, positions: Tensor) -> Tensor:
        """Cross entropies of int64 [n] positions and the most probable tokens, float64 [2, n].

        With ``sampling`` of the batch the tokens are random ones.
        """
        inputs = self._loss_inputs(states, positions)
        return token_scores(*inputs, sampling=sampling_at(positions, states.batch))

    def next_tokens(self, states: LastStates, positions: Tensor) -> Tensor:
        """The tokens of :meth:`token_scores` and their cross entropies, float64 [2, n], cross entropies first."""
        weight, shard = self.output_projection()
        hidden = self.projection_inputs(states, positions)
        return token_scores(hidden, weight, None, shard, sampling=sampling_at(positions, states.batch))

    def projection_inputs(self, states: LastStates, positions: Tensor) -> Tensor:
        """Inputs [n, H] of the output projection at int64 [n] positions."""
        hidden = states.hidden
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        elif self.config.tensor_model_parallel_size > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return self._scaled(hidden)[:, 0].index_select(0, states.rows(positions))

    def _rotary_tables(self, batch: PackedBatch) -> Tensor | None:
        if self.architecture.embedding.position != "rope":
            return None
        return rotary_tables(self.architecture, self.frequencies, batch, self.config.params_dtype)

    def _layer_arguments(self, hidden: Tensor | None, batch: PackedBatch) -> dict[str, Any]:
        """Inputs of layers besides the hidden states; models that have them have one stage."""
        arguments: dict[str, Any] = {}
        if self.architecture.embedding.layer_input_size:
            layer_inputs = self.embedding.layer_inputs(hidden, batch.input_ids, packed_seq_params=batch)
            arguments["layer_inputs"] = layer_inputs.unbind()
        if self.architecture.pattern.key_sharing_layers:
            arguments["key_sources"] = {n: self.architecture.key_source(n) for n in range(self.architecture.num_layers)}
        return arguments

    def _embed(self, batch: PackedBatch, mtp_depth: int = 0) -> Tensor:
        hidden: Tensor = self.embedding(batch)
        if self.training:
            hidden = self._perturbed(hidden, batch, mtp_depth)
        return hidden if self.embedding_norm is None else self.embedding_norm(hidden)

    def _perturbed(self, hidden: Tensor, batch: PackedBatch, mtp_depth: int) -> Tensor:
        """Embeddings in training, with noise and dropout."""
        layer = mtp_depth and self.architecture.num_layers + mtp_depth
        hidden = with_noise(hidden, batch, self.config.neftune_alpha, layer=layer)
        recomputes = self.config.recompute_granularity is not None or self.config.recomputed
        if recomputes and torch.is_grad_enabled() and self._is_trained:
            # A recomputed block has gradients only if its input has, which it does not have from a frozen embedding.
            hidden.requires_grad_()
        return hidden_dropout(hidden, batch, self.config.embedding_dropout, layer=layer, place=EMBEDDING)

    @property
    def _is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def _rewards(self, hidden: Tensor, positions: Tensor | None) -> Tensor:
        """Scores, float32, of int64 [n] positions, or [T, 1] of all.

        Equal on all tp ranks, and so is their gradient: each takes its part of it, without a reduction.
        """
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        weight = self.output_layer.weight.float()
        if positions is None:
            return hidden[:, 0].float() @ weight.t()
        return hidden[:, 0].index_select(0, positions).float() @ weight[0]

    def _projection(self) -> Tensor:
        weight = self.shared_embedding_or_output_weight() if self.architecture.head.tie_embeddings else None
        return self.output_layer.weight if weight is None else weight

    def _loss(
        self, states: LastStates, positions: Tensor, mtp_depth: int = 0, *, weight: float | None = None
    ) -> Tensor:
        """Summed cross entropy of int64 [n] positions; ``weight`` is its factor in the total loss."""
        scale = self._grad_scale(weight, states.hidden.device)
        return linear_cross_entropy(*self._loss_inputs(states, positions, mtp_depth), grad_scale=scale)

    def _loss_inputs(
        self, states: LastStates, positions: Tensor, mtp_depth: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, VocabShard]:
        """Hidden states [n, H] at int64 [n] positions, weights of the projection, and labels [n]."""
        weight, shard = self.output_projection()
        return self.projection_inputs(states, positions), weight, states.labels[positions + mtp_depth], shard

    def output_projection(self) -> tuple[Tensor, VocabShard]:
        """This rank's rows of the output projection, [V / tp, H], on the last stage."""
        weight = self._projection()
        group = parallel_state.get_tensor_model_parallel_group() if self.config.tensor_model_parallel_size > 1 else None
        start = parallel_state.get_tensor_model_parallel_rank() * weight.size(0)
        rows = max(0, min(weight.size(0), self.architecture.vocab_size - start))
        rate, vocab_size = self.config.label_smoothing if self.training else 0.0, self.architecture.vocab_size
        smoothing = Smoothing(rate, rate / vocab_size) if rate else None
        bias = self.output_layer.bias if self.architecture.head.output_bias else None
        return weight, VocabShard(start, rows, group, self.architecture.head.logits_softcap, smoothing, bias)

    def matmul_weights(self) -> Iterator[Tensor]:
        """Weights of linear layers without FP8 and the rows of the output projection, as matmuls have them."""
        for module in self.decoder.modules():
            is_parallel = isinstance(module, ColumnParallelLinear | RowParallelLinear)
            if isinstance(module, ReplicatedLinear) or (is_parallel and module.fp8 is None):
                yield module.weight
        if self.post_process:
            weight, shard = self.output_projection()
            yield weight[: shard.rows]

    def _grad_scale(self, weight: float | None, device: torch.device) -> Tensor | None:
        """Gradient of a loss: its weight times the float16 loss scale; None means 1."""
        loss_scale = self.config.grad_scale_func
        scale = None if weight is None else torch.full((), weight, device=device)
        if not self.config.fp16 or loss_scale is None:
            return scale
        return loss_scale(torch.ones((), device=device) if scale is None else scale).view(())

    def _scaled(self, hidden: Tensor) -> Tensor:
        multiplier = self.architecture.head.logits_multiplier
        return hidden if multiplier == 1 else hidden * multiplier


DecoderOutput: TypeAlias = Callable[[Decoder, LastStates], Tensor]
"""What the last stage computes from its hidden states."""


def _decoder_stack(
    architecture: Architecture, config: DecoderConfig, vp_stage: int, *, final_norm: bool
) -> DecoderStack:
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    stage = vp_stage * pp + parallel_state.get_pipeline_model_parallel_rank()
    numbers, spelling = stage_layers(architecture.num_layers, pp, vpp, stage), spelling_of(architecture)
    layers = [build_layer(architecture, config, layer) for layer in numbers]
    return DecoderStack(
        config,
        layers,
        build_norm(architecture, config) if final_norm else None,
        first=numbers.start,
        stacked=architecture.num_layers if spelling.homogeneous else None,
        final_norm_key=spelling.final_norm,
    )


def build_model(architecture: Architecture, config: DecoderConfig, vp_stage: int | None = None) -> Decoder:
    """Weights are not initialized."""
    stage: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return Decoder(
        architecture,
        config,
        first=parallel_state.is_pipeline_first_stage(**stage),
        last=parallel_state.is_pipeline_last_stage(**stage),
        vp_stage=vp_stage,
    )


def build_stages(architecture: Architecture, config: DecoderConfig) -> list[Decoder]:
    """All stages of this rank in layer order: one, or ``parallel.vpp`` of them."""
    if (vpp := config.virtual_pipeline_model_parallel_size) is None:
        return [build_model(architecture, config)]
    return [build_model(architecture, config, vp_stage) for vp_stage in range(vpp)]


def build_sharded(
    architecture: Architecture,
    config: DecoderConfig,
    frozen: Collection[str] = (),
    *,
    reduces_each_micro_batch: bool = True,
) -> FullyShardedDataParallel:
    """Build a decoder and allocate only this rank's rows of each parameter, not initialized.

    ``frozen`` are canonical names, see :func:`isthmus.engine.parallel.live_parameters.freeze`.
    """
    with init_empty_weights():
        model = build_model(architecture, config)
    freeze([model], frozen)
    return FullyShardedDataParallel(model, reduces_each_micro_batch=reduces_each_micro_batch)
