"""How Megatron-Core spells a tensor in a live model and in a ``torch_dist`` checkpoint; no Megatron is needed for it.

Inside Isthmus a tensor has its canonical name: unfused, with the numbers of its layer and of its expert. In a
checkpoint the layers of a model that are all alike are stacked along a first axis, the experts of a layer always are,
and a norm goes by the name of the projection behind it where TransformerEngine has the two in one module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRACKER = "latest_checkpointed_iteration.txt"
"""The file that names the newest of the checkpoints beside it."""
FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""A norm's own name in a layer, and the one it has in a checkpoint."""
LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": FUSED_NORMS["pre_mlp_layernorm."],
}
"""The same for a layer with latent attention, whose first norm always stands alone."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_AHEAD = re.compile(r"(mtp\.layers\.(\d+)\.transformer_layer\.)(.+)")
_EXPERT = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")
_LINEAR = re.compile(r"(.*\.(?:linear_\w+|eh_proj)|output_layer)\.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a ``torch_dist`` checkpoint: in the tensor ``key``, at ``index`` of its first axes."""

    key: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    """How long these axes are: layers and experts, or one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """What of a model decides the names of its tensors."""

    num_layers: int
    num_experts: int = 0
    moe_layers: frozenset[int] = frozenset()
    """Counted from 0; layers behind the last, which predict ahead, count on."""
    latent: bool = False
    """Attention has low-rank queries, keys and values."""

    @property
    def alike(self) -> bool:
        """Whether all layers have the same tensors, and so are stacked."""
        return len([layer for layer in self.moe_layers if layer < self.num_layers]) in (0, self.num_layers)

    def places(self, canonical: str) -> list[Place]:
        """Where to write a tensor so that every kind of layer finds it: once, or a norm under both of its names."""
        names = self._spelled(canonical)
        return [self._place(name, stacked=self.alike) for name in names]

    def possible_places(self, canonical: str) -> list[Place]:
        """All places where Megatron-Core may have saved a tensor, the usual one first."""
        names = [*self._spelled(canonical), canonical, *_renamed(canonical, FUSED_NORMS), *_lent(canonical)]
        names = list(dict.fromkeys(names))
        return [self._place(name, stacked=stacked) for stacked in (self.alike, not self.alike) for name in names]

    def extra_states(self, canonical: Iterable[str]) -> list[str]:
        """Keys of the empty objects that Megatron-Core looks for beside its linear layers, given all tensors' names."""
        found = []
        for name in canonical:
            linear = _LINEAR.fullmatch(name)
            if linear is None or name == "output_layer.weight":
                continue
            place = self._place(name, stacked=self.alike)
            which = ".".join(map(str, place.index)) + "_" + ".".join(map(str, place.sizes)) if place.index else "0_1"
            found.append(f"{place.key.removesuffix('.weight')}._extra_state/shard_{which}")
        return found

    def _spelled(self, canonical: str) -> list[str]:
        """A norm's names in checkpoints of Megatron-Core's kinds of layers: TransformerEngine's first, then plain."""
        if (ahead := _AHEAD.fullmatch(canonical)) is not None:
            layer = self.num_layers + int(ahead[2])
        elif (number := layer_of(canonical)) is not None:
            layer = number
        else:
            return [canonical]
        if layer in self.moe_layers and "pre_mlp_layernorm." in canonical:
            return [canonical] if self.latent else [canonical, *_renamed(canonical, FUSED_NORMS)]
        if self.latent:
            return [*_renamed(canonical, LATENT_NORMS), canonical]
        return _renamed(canonical, FUSED_NORMS) or [canonical]

    def _place(self, name: str, *, stacked: bool) -> Place:
        index: tuple[int, ...] = ()
        sizes: tuple[int, ...] = ()
        if (layer := _LAYER.fullmatch(name)) is not None and stacked:
            name = f"decoder.layers.{layer[2]}"
            index, sizes = (int(layer[1]),), (self.num_layers,)
        if (expert := _EXPERT.fullmatch(name)) is not None:
            name = f"{expert[1]}experts.{expert[3]}.{expert[4]}"
            index, sizes = (*index, int(expert[2])), (*sizes, self.num_experts)
        return Place(name, index, sizes)


def live_names(canonical: str) -> list[str]:
    """A tensor's names in a model of plain modules and in those of TransformerEngine's, norms fused, experts grouped.

    Numbers of layers and experts are those of the name that is given.
    """
    if (expert := _EXPERT.fullmatch(canonical)) is not None:
        return [canonical, f"{expert[1]}{expert[3]}.{expert[4]}{expert[2]}"]
    names = [canonical, *_renamed(canonical, FUSED_NORMS), *_renamed(canonical, LATENT_NORMS), *_lent(canonical)]
    return list(dict.fromkeys(names))


def transformer_engine_name(canonical: str, spelling: Spelling) -> str:
    """A tensor's name in a live model of TransformerEngine's modules with grouped experts."""
    if (expert := _EXPERT.fullmatch(canonical)) is not None:
        return f"{expert[1]}{expert[3]}.{expert[4]}{expert[2]}"
    return spelling._spelled(canonical)[0]


def renumbered(canonical: str, *, layer: int | None = None, expert: int | None = None) -> str:
    """The same tensor with the number that its layer or its expert has on one rank."""
    if layer is not None and (found := _LAYER.fullmatch(canonical)) is not None:
        canonical = f"decoder.layers.{layer}.{found[2]}"
    if expert is not None and (found := _EXPERT.fullmatch(canonical)) is not None:
        canonical = f"{found[1]}local_experts.{expert}.{found[3]}.{found[4]}"
    return canonical


def layer_of(canonical: str) -> int | None:
    """The number of a tensor's layer."""
    found = _LAYER.fullmatch(canonical)
    return int(found[1]) if found else None


def expert_of(canonical: str) -> int | None:
    """The number of a tensor's expert."""
    found = _EXPERT.fullmatch(canonical)
    return int(found[2]) if found else None


def is_linear(canonical: str) -> bool:
    """Whether a tensor is the weight of a linear layer, beside which a state dict has an ``_extra_state``."""
    return _LINEAR.fullmatch(canonical) is not None


def is_model_key(key: str) -> bool:
    """Whether a key of a checkpoint is a tensor of the model, and not of the optimizer or of the run."""
    return key.startswith(("decoder.", "embedding.", "output_layer.", "mtp.")) and "._extra_state" not in key


def _lent(canonical: str) -> tuple[str, ...]:
    """The model's own tensors, which serve the layers ahead in a checkpoint where these have none."""
    ahead = re.fullmatch(r"mtp\.layers\.\d+\.(embed_tokens|output_layer)\.weight", canonical)
    if ahead is None:
        return ()
    embedding = "embedding.word_embeddings.weight"
    return (embedding,) if ahead[1] == "embed_tokens" else ("output_layer.weight", embedding)


def _renamed(canonical: str, names: dict[str, str]) -> list[str]:
    """The other name of a norm; none for what is no norm."""
    plain = canonical
    if (layer := _LAYER.fullmatch(canonical)) is not None:
        plain = layer[2]
    elif (ahead := _AHEAD.fullmatch(canonical)) is not None:
        plain = ahead[3]
    head = canonical.removesuffix(plain)
    return [f"{head}{new}{plain.removeprefix(own)}" for own, new in names.items() if plain.startswith(own)]
