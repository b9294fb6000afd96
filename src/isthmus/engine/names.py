"""How Megatron-Core spells the tensors of a model in a ``torch_dist`` checkpoint; no Megatron is needed to know it.

Inside Isthmus a tensor has its canonical name: unfused, with the number of its layer. In a checkpoint the layers of a
model that are all alike are stacked along a first axis, and a norm goes by the name of the projection behind it, since
TransformerEngine has the two in one module. Both kinds of modules read that spelling.
"""

from __future__ import annotations

TRACKER = "latest_checkpointed_iteration.txt"
"""The file that names the newest of the checkpoints beside it."""
FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""A norm's own name in a layer, and the one it has in a checkpoint."""
_LAYERS = "decoder.layers."
_WITH_EXTRA_STATE = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
LINEAR_LAYERS = tuple(f"{module}.weight" for module in (*_WITH_EXTRA_STATE, "output_layer"))
"""Endings of the weights of linear layers; beside each, Megatron-Core's state dict has an empty ``_extra_state``."""


def torch_dist_key(canonical: str) -> tuple[str, int | None]:
    """Key of a tensor, and its place along the axis of the layers; None for a tensor that has no such axis."""
    return torch_dist_keys(canonical)[0]


def torch_dist_keys(canonical: str) -> list[tuple[str, int | None]]:
    """All spellings under which Megatron-Core may have saved a tensor, the usual one first."""
    if not canonical.startswith(_LAYERS):
        return [(canonical, None)]
    number, _, plain = canonical.removeprefix(_LAYERS).partition(".")
    names = [*_fused(plain), plain]
    stacked: list[tuple[str, int | None]] = [(f"{_LAYERS}{name}", int(number)) for name in names]
    return stacked + [(f"{_LAYERS}{number}.{name}", None) for name in names]


def live_names(canonical: str) -> list[str]:
    """A tensor's names in a model of plain modules and in one of TransformerEngine's, where norms are fused."""
    if not canonical.startswith(_LAYERS):
        return [canonical]
    number, _, plain = canonical.removeprefix(_LAYERS).partition(".")
    return [f"{_LAYERS}{number}.{name}" for name in (plain, *_fused(plain))]


def _fused(plain: str) -> list[str]:
    """The other name of a norm within a layer; none for what is no norm."""
    return [fused + plain.removeprefix(own) for own, fused in FUSED_NORMS.items() if plain.startswith(own)]


def extra_state_keys(num_layers: int) -> list[str]:
    """Keys of the empty objects that Megatron-Core looks for beside its linear layers."""
    return [
        f"{_LAYERS}{module}._extra_state/shard_{layer}_{num_layers}"
        for module in _WITH_EXTRA_STATE
        for layer in range(num_layers)
    ]


def is_model_key(key: str) -> bool:
    """Whether a key of a checkpoint is a tensor of the model, and not of the optimizer or of the run."""
    return key.startswith(("decoder.", "embedding.", "output_layer.", "mtp.")) and "._extra_state" not in key
