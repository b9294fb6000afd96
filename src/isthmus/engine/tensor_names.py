"""Megatron-Core's tensor names in a model and in a ``torch_dist`` checkpoint, without importing Megatron-Core.

A canonical name is unfused and has layer and expert numbers. A checkpoint stacks homogeneous layers and the experts
of a layer, and names a norm after the projection behind it if TransformerEngine fuses the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from isthmus.families.architecture import Architecture

COMMON_FILE = "common.pt"
"""What is not a tensor, as megatron-core reads it."""
COMMON_OBJECT = "common_state/shard_0_1"
"""The same as an object in the index: a list of one dict. megatron-core 0.19 writes only this."""
_FUSED_INPUT_NORMS = {
    "attention": "self_attention.linear_qkv.layer_norm_",
    "gated_delta_net": "self_attention.in_proj.layer_norm_",
    "mamba2": "mixer.in_proj.layer_norm_",
}
"""Name in a checkpoint of the norm before a mixer that Megatron-Core fuses with the mixer's first projection."""
_FUSED_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Latent attention has these in place of a fused norm before its first projection."""
MAMBA2_SECTIONS: dict[str, tuple[str, ...]] = {"in_proj": ("z", "x", "B", "C", "dt"), "conv1d": ("x", "B", "C")}
"""Rows of Mamba-2 layers that are tensors of their own in a checkpoint, such as ``mixer.in_proj.weight.z``."""
_MIXER_ROWS = re.compile(r"decoder\.layers\.(\d+)\.mixer\.(in_proj|conv1d)\.(?:weight|bias)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP = re.compile(r"(mtp\.layers\.(\d+)\.transformer_layer\.)(.+)")
_EXPERT = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
_LINEAR = re.compile(r"(.*\.(?:linear_\w+|eh_proj|in_proj|out_proj)|output_layer)\.weight")


@dataclass(frozen=True, slots=True)
class CheckpointSlot:
    """A tensor in a ``torch_dist`` checkpoint: ``index`` into the first axes of the tensor ``key``."""

    key: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    """Sizes of the indexed axes: layers, experts, or both."""
    rows: tuple[int, int] | None = None
    """First and last row + 1 of the canonical tensor that it has; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    num_layers: int
    num_experts: int = 0
    moe_layers: frozenset[int] = frozenset()
    """From 0; MTP layers come last."""
    latent: bool = False
    """Multi-head latent attention."""
    mixers: tuple[tuple[str, ...], ...] = ()
    """Mixers of each layer of a model whose layers have other tensors or shapes; empty: attention in every layer."""
    single_blocks: bool = False
    """Each layer is a mixer or a feed-forward block, as in Megatron-Core's HybridModel."""

    @property
    def homogeneous(self) -> bool:
        """Whether a checkpoint stacks the layers: all of them have tensors of the same names and shapes."""
        num_moe = sum(layer < self.num_layers for layer in self.moe_layers)
        return not self.mixers and num_moe in (0, self.num_layers)

    @property
    def final_norm(self) -> str:
        return "final_norm." if self.single_blocks else "final_layernorm."

    def slots(self, canonical: str, part_rows: Sequence[int] = ()) -> list[CheckpointSlot]:
        """Slots to write a tensor to, so that every layer class finds it: a norm may have two names.

        ``part_rows`` are the rows of the parts of the tensor, in order; Mamba-2 has a slot for each.
        """
        if sections := self._sections(canonical):
            starts = list(accumulate(part_rows, initial=0))
            rows = zip(sections, pairwise(starts), strict=True)
            return [CheckpointSlot(f"{canonical}.{section}", rows=between) for section, between in rows]
        names = self._checkpoint_names(canonical)
        return [self._slot(name, stacked=self.homogeneous) for name in names]

    def alternatives(self, canonical: str, part_rows: Sequence[int] = ()) -> list[list[CheckpointSlot]]:
        """Where Megatron-Core may have saved a tensor, the usual slots first; those of a list together have it."""
        if self._sections(canonical):
            return [self.slots(canonical, part_rows)]
        return [[slot] for slot in self.candidate_slots(canonical)]

    def _sections(self, canonical: str) -> tuple[str, ...]:
        match = _MIXER_ROWS.fullmatch(canonical)
        is_mamba2 = match is not None and self.mixers and "mamba2" in self.mixers[int(match[1])]
        return MAMBA2_SECTIONS[match[2]] if match is not None and is_mamba2 else ()

    def candidate_slots(self, canonical: str) -> list[CheckpointSlot]:
        """Slots where Megatron-Core may have saved a tensor without sections, the usual one first."""
        names = [
            *self._checkpoint_names(canonical),
            canonical,
            *_renamed(canonical, fused_norms(("attention",), latent=False, moe=False)),
            *_shared_with_mtp(canonical),
        ]
        names = list(dict.fromkeys(names))
        return [
            self._slot(name, stacked=stacked) for stacked in (self.homogeneous, not self.homogeneous) for name in names
        ]

    def extra_states(self, canonical: Iterable[str]) -> list[str]:
        """Keys of the empty objects that Megatron-Core expects next to linear layers."""
        keys = []
        for name in canonical:
            linear = _LINEAR.fullmatch(name)
            if linear is None or name == "output_layer.weight":
                continue
            slot = self._slot(name, stacked=self.homogeneous)
            which = ".".join(map(str, slot.index)) + "_" + ".".join(map(str, slot.sizes)) if slot.index else "0_1"
            keys.append(f"{slot.key.removesuffix('.weight')}._extra_state/shard_{which}")
        return keys

    def _checkpoint_names(self, canonical: str) -> list[str]:
        """TransformerEngine's name first, then that of the local layer class."""
        if (mtp := _MTP.fullmatch(canonical)) is not None:
            layer = self.num_layers + int(mtp[2])
        elif (number := layer_of(canonical)) is not None:
            layer = number
        else:
            return [canonical.replace("decoder.final_layernorm.", f"decoder.{self.final_norm}")]
        mixers = self.mixers[layer] if layer < len(self.mixers) else ("attention",)
        latent = self.latent and "attention" in mixers
        fused = _renamed(canonical, fused_norms(mixers, latent=latent, moe=False))
        if layer in self.moe_layers and "pre_mlp_layernorm." in canonical:
            return [canonical] if latent else [canonical, *fused]
        return [*fused, canonical] if latent else fused or [canonical]

    def _slot(self, name: str, *, stacked: bool) -> CheckpointSlot:
        index: tuple[int, ...] = ()
        sizes: tuple[int, ...] = ()
        if (layer := _LAYER.fullmatch(name)) is not None and stacked:
            name = f"decoder.layers.{layer[2]}"
            index, sizes = (int(layer[1]),), (self.num_layers,)
        if (expert := _EXPERT.fullmatch(name)) is not None:
            name = f"{expert[1]}experts.{expert[3]}.{expert[4]}"
            index, sizes = (*index, int(expert[2])), (*sizes, self.num_experts)
        return CheckpointSlot(name, index, sizes)


def spelling_of(arch: Architecture) -> Spelling:
    shares_keys = arch.pattern.key_sharing_layers or arch.setting("indexer.shared_layers")
    hybrid = bool(
        arch.pattern.mixers or arch.pattern.layers_without_mlp or arch.windows.window_attention or shares_keys
    )
    blocks = {len(layer.mixers) + (layer.feed_forward is not None) for layer in arch.layers}
    return Spelling(
        num_layers=arch.num_layers,
        num_experts=arch.moe.num_experts if arch.moe is not None else 0,
        moe_layers=frozenset(layer.number for layer in arch.all_layers if layer.experts is not None),
        latent=arch.latent is not None,
        mixers=tuple(layer.mixer_kinds for layer in arch.layers) if hybrid else (),
        single_blocks=hybrid and blocks == {1},
    )


def fused_norms(mixers: tuple[str, ...], *, latent: bool, moe: bool) -> dict[str, str]:
    """Name of a norm in a layer -> in a checkpoint, if TransformerEngine fuses it with the projection behind it."""
    fused = {} if moe else dict(_FUSED_MLP_NORM)
    if latent and "attention" in mixers:
        fused |= _LATENT_NORMS
    elif len(mixers) == 1 and mixers[0] in _FUSED_INPUT_NORMS:
        fused["input_layernorm."] = _FUSED_INPUT_NORMS[mixers[0]]
    return fused


def live_names(canonical: str) -> list[str]:
    """Names with local modules and with TransformerEngine's (fused norms, grouped experts), numbers unchanged."""
    if (expert := _EXPERT.fullmatch(canonical)) is not None:
        return [canonical, f"{expert[1]}{expert[3]}.{expert[4]}{expert[2]}"]
    fused = [*(fused_norms((mixer,), latent=False, moe=False) for mixer in _FUSED_INPUT_NORMS), _LATENT_NORMS]
    names = [canonical, *(name for norms in fused for name in _renamed(canonical, norms)), *_shared_with_mtp(canonical)]
    names.append(canonical.replace("decoder.final_layernorm.", "decoder.final_norm."))  # of layers with one block
    return list(dict.fromkeys(names))


def transformer_engine_name(canonical: str, spelling: Spelling) -> str:
    if (expert := _EXPERT.fullmatch(canonical)) is not None:
        return f"{expert[1]}{expert[3]}.{expert[4]}{expert[2]}"
    return spelling._checkpoint_names(canonical)[0]


def renumbered(canonical: str, *, layer: int | None = None, expert: int | None = None) -> str:
    if layer is not None and (match := _LAYER.fullmatch(canonical)) is not None:
        canonical = f"decoder.layers.{layer}.{match[2]}"
    if expert is not None and (match := _EXPERT.fullmatch(canonical)) is not None:
        canonical = f"{match[1]}local_experts.{expert}.{match[3]}.{match[4]}"
    return canonical


def layer_of(canonical: str) -> int | None:
    match = _LAYER.fullmatch(canonical)
    return int(match[1]) if match else None


def expert_of(canonical: str) -> int | None:
    match = _EXPERT.fullmatch(canonical)
    return int(match[2]) if match else None


def is_linear(canonical: str) -> bool:
    """Whether a tensor is the weight of a linear layer, which has an ``_extra_state``."""
    return _LINEAR.fullmatch(canonical) is not None


def is_model_key(key: str) -> bool:
    return key.startswith(("decoder.", "embedding.", "output_layer.", "mtp.")) and "._extra_state" not in key


def _shared_with_mtp(canonical: str) -> tuple[str, ...]:
    """Tensors that a checkpoint does not repeat for MTP layers."""
    mtp = re.fullmatch(r"mtp\.layers\.\d+\.(embed_tokens|output_layer)\.weight", canonical)
    if mtp is None:
        return ()
    embedding = "embedding.word_embeddings.weight"
    return (embedding,) if mtp[1] == "embed_tokens" else ("output_layer.weight", embedding)


def _renamed(canonical: str, names: dict[str, str]) -> list[str]:
    """Alternative name of a norm; empty for other tensors."""
    plain = canonical
    if (layer := _LAYER.fullmatch(canonical)) is not None:
        plain = layer[2]
    elif (mtp := _MTP.fullmatch(canonical)) is not None:
        plain = mtp[3]
    head = canonical.removesuffix(plain)
    return [f"{head}{new}{plain.removeprefix(old)}" for old, new in names.items() if plain.startswith(old)]
