"""A decoder on Megatron-Core, built from an :class:`~isthmus.families.architecture.Architecture`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from isthmus.engine.layers.attention import Segments
from isthmus.engine.layers.embedding import embed, embed_positions
from isthmus.engine.layers.linear_cross_entropy import linear_cross_entropy, token_cross_entropies
from isthmus.engine.layers.mtp_layer import ahead_spec
from isthmus.engine.layers.rope import frequency_sets, line_tables
from isthmus.engine.model_config import DecoderConfig, padded_vocab_size
from isthmus.engine.moe.moe_layer import MoeBlock, tell_line
from isthmus.engine.spec import decoder_spec
from isthmus.families.architecture import Architecture


class Decoder(GPTModel):
    """Megatron-Core's GPT with a forward pass for packed lines and a loss that never holds all logits.

    Parameters, stages, sharding and checkpoint names are the parent's.
    """

    def __init__(
        self,
        architecture: Architecture,
        config: DecoderConfig,
        *,
        first: bool,
        last: bool,
        vp_stage: int | None = None,
    ) -> None:
        first_layer = get_transformer_layer_offset(config, vp_stage)
        layers = range(first_layer, first_layer + get_num_layers_to_build(config, vp_stage))
        super().__init__(
            config=config,
            transformer_layer_spec=decoder_spec(architecture, layers, config.experts),  # type: ignore[arg-type]
            vocab_size=padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=architecture.tie_embeddings,
            # Rotary positions are the packed line's own, see line_tables.
            position_embedding_type="learned_absolute" if architecture.position == "learned" else "none",
            mtp_block_spec=ahead_spec(architecture, config.experts) if last and config.mtp_num_layers else None,
            vp_stage=vp_stage,
        )
        self.architecture = architecture
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequency_sets(architecture), persistent=False)
        device = torch.cuda.current_device()
        self._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # some may get memory later
        self._mark_sharded_parameters()
        for layer in self._layers():
            if isinstance(layer.mlp, MoeBlock):
                layer.register_forward_pre_hook(tell_line, with_kwargs=True)
        self._choose_recomputed_blocks()
        if first and architecture.position == "learned":
            positions = self.embedding.position_embeddings.to(config.params_dtype).weight
            # finalize_model_grads reads this mark: each rank looks up only its part of the line.
            positions.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def _set_attention_backend(self) -> None:
        """Megatron-Core's sets TransformerEngine's variables, and fails where the user has set them otherwise."""

    def _choose_recomputed_blocks(self) -> None:
        """Tell dense feed-forward blocks from experts: Megatron-Core's layer does not know the latter's class."""
        chosen = self.config.recompute_modules if self.config.recompute_granularity == "selective" else ()
        for layer in self._layers():
            experts = isinstance(layer.mlp, MoeBlock)
            layer.recompute_mlp = not experts and "mlp" in chosen
            if experts:
                layer.mlp.recomputed = "moe" in chosen

    def _layers(self) -> list[TransformerLayer]:
        """All layers of this stage, those that predict ahead included."""
        return [module for module in self.modules() if isinstance(module, TransformerLayer)]

    def _mark_sharded_parameters(self) -> None:
        """Say which parameters are sharded: Megatron-Core does so only while drawing initial weights.

        Without the mark the gradient norm would count a sharded weight on the first tp rank alone.
        """
        for module in self.modules():
            if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
                dim = 0
            elif isinstance(module, RowParallelLinear):
                dim = 1
            else:
                continue
            if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(module.weight, True, dim, 1)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segments: Segments,
        labels: Tensor | None = None,
        learned: Tensor | None = None,
        ahead: Sequence[Tensor] = (),
        each: bool = False,
    ) -> Tensor:
        """Run this stage on one packed line, or on the T tokens of it that this context parallel rank has.

        Args:
            input_ids: int64 [T]; under sequence parallelism T is a multiple of tp.
            position_ids: int64 [T], restarting in each sample.
            segments: the samples of the whole line, and which of its tokens these are.
            labels: int64 [T], the next tokens; None asks for logits.
            learned: int64 [n], the places among the T whose label counts.
            ahead: for each depth k, from 1, the places from which the label k places on counts; none asks no layer
                to predict ahead.
            each: whether the loss of each learned place is wanted, and not their sum; without layers ahead.

        Returns:
            On the last stage the summed loss (a scalar, or [1 + depths] with those of the layers ahead behind it), the
            losses [n] of the learned places, or the logits [T, V] of the whole vocabulary;
            before it the hidden states [T, 1, H] (or [T / tp, 1, H]) for the next stage.
        """
        hidden = self._embedded(input_ids, position_ids) if self.pre_process else None
        tables = None
        if self.architecture.position == "rope":
            dtype = self.config.params_dtype
            tables = line_tables(
                self.architecture, self.frequencies, position_ids, segments.lengths, dtype, segments.spans
            )
        hidden = self.decoder(
            hidden_states=hidden, attention_mask=None, rotary_pos_emb=tables, packed_seq_params=segments
        )
        if not self.post_process:
            return hidden
        if labels is None:
            return self._logits(hidden)
        assert learned is not None
        if each:
            return token_cross_entropies(**self._projected(hidden, learned, labels[learned]))
        losses = [self._loss(hidden, learned, labels[learned])]
        for depth, (layer, places) in enumerate(zip(self.mtp.layers, ahead, strict=True) if ahead else (), start=1):
            # Rolled over the line: where a sample ends this is another's token, and no place before it sees that one.
            embedded = self._embedded(input_ids.roll(-depth), position_ids)
            hidden = layer(hidden, embedded, tables, segments)
            share = self.config.mtp_loss_scaling_factor / len(ahead)
            losses.append(self._loss(hidden, places, labels[places + depth], share=share))
        return torch.stack(losses) if ahead else losses[0]

    def _embedded(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        sequence_parallel = self.config.sequence_parallel
        hidden = embed(self.embedding.word_embeddings, input_ids, sequence_parallel=sequence_parallel)
        if self.architecture.embedding_multiplier != 1:
            # Rounded to the model's dtype first, as transformers has it.
            hidden = hidden * torch.tensor(self.architecture.embedding_multiplier, dtype=hidden.dtype)
        if self.architecture.position == "learned":
            hidden = hidden + embed_positions(
                self.embedding.position_embeddings.weight, position_ids, sequence_parallel=sequence_parallel
            )
        return hidden

    def _projection(self) -> Tensor:
        weight = self.shared_embedding_or_output_weight() if self.architecture.tie_embeddings else None
        return self.output_layer.weight if weight is None else weight

    def _loss(self, hidden: Tensor, places: Tensor, labels: Tensor, *, share: float | None = None) -> Tensor:
        """Summed cross entropy of these places of the line and their labels, int64 [n] both.

        ``share`` is what it will be multiplied by before its gradient is taken; None is one.
        """
        return linear_cross_entropy(**self._projected(hidden, places, labels), grad_scale=self._grad_scale(share))

    def _projected(self, hidden: Tensor, places: Tensor, labels: Tensor) -> dict[str, Any]:
        """What a cross entropy takes: these places of a line, their labels, this rank's part of the projection."""
        group = parallel_state.get_tensor_model_parallel_group() if self.config.tensor_model_parallel_size > 1 else None
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        elif group is not None:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        hidden = self._scaled(hidden)
        weight = self._projection()
        start = parallel_state.get_tensor_model_parallel_rank() * weight.size(0)
        return {
            "hidden": hidden[:, 0].index_select(0, places),
            "weight": weight,
            "labels": labels,
            "vocab_start": start,
            "num_rows": max(0, min(weight.size(0), self.architecture.vocab_size - start)),
            "group": group,
            "softcap": self.architecture.logits_softcap,
        }

    def _grad_scale(self, share: float | None) -> Tensor | None:
        """What a loss will be multiplied by before its gradient is taken, the loss scale of fp16 too; None is one."""
        scaled = self.config.grad_scale_func
        device = torch.cuda.current_device()
        scale = None if share is None else torch.tensor(share, device=device)
        if not self.config.fp16 or scaled is None:
            return scale
        return scaled(torch.ones((), device=device) if scale is None else scale).view(())  # type: ignore[no-any-return]

    def _logits(self, hidden: Tensor) -> Tensor:
        hidden = self._scaled(hidden)
        logits, _ = self.output_layer(hidden, weight=self._projection(), runtime_gather_output=True)
        logits = logits[:, 0, : self.architecture.vocab_size]
        cap = self.architecture.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Hidden states for logits that are multiplied: there are far fewer of them than logits."""
        multiplier = self.architecture.logits_multiplier
        return hidden if multiplier == 1 else hidden * multiplier


def build_model(architecture: Architecture, config: DecoderConfig, vp_stage: int | None = None) -> Decoder:
    """A stage of this rank, with memory for its weights and nothing in it yet.

    Args:
        architecture: decides everything.
        config: from :func:`transformer_config`.
        vp_stage: which of this rank's stages, from 0; None where it has one.
    """
    place: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return Decoder(
        architecture,
        config,
        first=parallel_state.is_pipeline_first_stage(**place),
        last=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=vp_stage,
    )


def build_stages(architecture: Architecture, config: DecoderConfig) -> list[Decoder]:
    """All stages of this rank in the order of their layers: one, or ``parallel.vpp`` of them."""
    if (vpp := config.virtual_pipeline_model_parallel_size) is None:
        return [build_model(architecture, config)]
    return [build_model(architecture, config, vp_stage) for vp_stage in range(vpp)]


def live_tensors(model: Any) -> dict[str, Tensor]:
    """This rank's parameters under canonical names: Megatron-Core's, layers and experts counted over the model.

    ``model`` is a :class:`Decoder`, wrapped or not, or the list of all those of this rank.

    A tied model holds a second copy of the embedding on its last stage; it appears as ``output_layer.weight``
    there, and is filled from the embedding. One with layers that predict ahead holds a copy there as well, which keeps
    the embedding's name.
    """
    if isinstance(model, list):
        return {name: tensor for chunk in model for name, tensor in live_tensors(chunk).items()}
    decoder = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    first_expert = 0
    if (experts := decoder.config.num_moe_experts) is not None:
        ep = parallel_state.get_expert_model_parallel_world_size()
        first_expert = parallel_state.get_expert_model_parallel_rank() * experts // ep
    names: dict[str, Tensor] = {}
    for name, parameter in decoder.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(decoder.decoder.layers[int(parts[2])].layer_number - 1)
        if "local_experts" in parts:
            place = parts.index("local_experts") + 1
            parts[place] = str(first_expert + int(parts[place]))
        names[".".join(parts)] = parameter.data
    return names


def copied_tensors(model: list[Any]) -> dict[str, Tensor]:
    """What layers that predict ahead share with the model, under the canonical names of the copies in their files.

    It is on the last stage; elsewhere, and where there are no such layers, there is none.
    """
    last = get_attr_wrapped_model(model[-1], "mtp_process", return_model_obj=True)
    if not last.mtp_process:
        return {}
    shared = {"embed_tokens": last.embedding.word_embeddings.weight, "output_layer": last._projection()}
    depths = range(last.config.mtp_num_layers)
    return {f"mtp.layers.{depth}.{name}.weight": weight.data for depth in depths for name, weight in shared.items()}
