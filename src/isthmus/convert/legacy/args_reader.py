"""Reads and checks Megatron-LM's args."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus.errors import DataError, UsageError

_MUST_BE_FALSE = (
    *("squared_relu", "use_legacy_models", "apply_residual_connection_post_layernorm", "attention_output_gate"),
    *("qk_l2_norm", "use_mup", "is_hybrid_model", "moe_apply_probs_on_input", "moe_router_force_load_balancing"),
)
_MUST_BE_UNSET = (
    *("spec", "experimental_attention_variant", "hybrid_override_pattern", "moe_latent_size"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
)
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_MUST_BE_FALSE, (False,)),
    **dict.fromkeys(_MUST_BE_UNSET, ()),
    "hybrid_attention_ratio": (0.0,),
    "hybrid_mlp_ratio": (0.0,),
    "rotary_seq_len_interpolation_factor": (1,),
    "softmax_type": ("vanilla", "learnable"),
    "position_embedding_type": ("rope", "learned_absolute"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "rope_type": ("rope", "yarn"),
    "moe_router_score_function": ("softmax", "sigmoid"),
}
"""Args that change the model, with their supported values; None is always supported."""


class ArgsReader:
    """Args by name; None counts as missing, as in Megatron-LM's loader."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._args = args

    def get(self, name: str, default: Any = None) -> Any:
        value = self._args.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """A positive integer, else a DataError."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(f"Megatron-LM's args have {name}={value!r}, not a number above 0.")
        return value

    def epsilon(self) -> float:
        """The epsilon of norms, renamed in 0.16."""
        value = self.get("layernorm_epsilon", self.get("norm_epsilon"))
        if not isinstance(value, float):
            raise DataError("Megatron-LM's args have no norm_epsilon.")
        return value

    def check_supported(self) -> None:
        for name, supported in _SUPPORTED_VALUES.items():
            if (value := self.get(name)) is not None and value not in supported:
                raise not_supported(f"{name}={value!r}")
        if "sinkhorn" in self.get("moe_router_load_balancing_type", ()):
            raise not_supported("moe_router_load_balancing_type=sinkhorn")

    def layers(self, name: str, num_layers: int, *, selected: Callable[[int, int], bool]) -> list[int]:
        """Layers that a list marks with 1; for an integer frequency, those with ``selected(layer + 1, frequency)``."""
        frequency = self.get(name)
        if frequency is None:
            return []
        if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0:
            return [layer for layer in range(num_layers) if selected(layer + 1, frequency)]
        if not isinstance(frequency, list) or len(frequency) != num_layers:
            raise DataError(f"Megatron-LM's args have {name}={frequency!r}, which does not fit {num_layers} layers.")
        return [layer for layer, mark in enumerate(frequency) if mark]


def not_supported(what: str) -> UsageError:
    return UsageError(f"Megatron-LM's args have {what}, which no family can express.")
