"""Infers the meaning of an unsupported decoder's settings: sizes, multipliers, and settings to keep fixed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.inferred.json_family import parse_formula
from isthmus.families.rules.common_settings import METADATA, ROPE, WINDOW, is_dropout

_SIZES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_query_groups": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "kv_channels": ("head_dim", "attention_head_dim", "kv_channels"),
    "ffn_hidden_size": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
}
_EXPERT_SIZES: Mapping[str, tuple[str, ...]] = {
    "moe.num_experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "moe.top_k": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_topk"),
    "moe.ffn_hidden_size": ("moe_intermediate_size",),
    "moe.shared_ffn_hidden_size": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "moe.num_groups": ("n_group",),
    "moe.group_top_k": ("topk_group",),
    "moe.dense_layers": ("first_k_dense_replace",),
}
_NUMBER_OF_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_NEUTRAL: Mapping[str, int] = {
    "moe.num_groups": 1,
    "moe.group_top_k": 1,
    "moe.dense_layers": 0,
    "moe.shared_ffn_hidden_size": 0,
}
"""Values that disable the feature."""
_OFF = {word: value for name, value in _NEUTRAL.items() for word in _EXPERT_SIZES[name]} | {"decoder_sparse_step": 1}
_EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_MULTIPLIERS: Mapping[str, tuple[str, str | None]] = {
    "embedding_multiplier": ("embedding_multiplier", None),
    "residual_multiplier": ("residual_multiplier", None),
    "attention_multiplier": ("attention_scale", None),
    "query_pre_attn_scalar": ("attention_scale", "inverse_root"),
    "logits_scaling": ("logits_multiplier", "inverse"),
    "logit_scale": ("logits_multiplier", None),
    "attn_logit_softcapping": ("attention_softcap", None),
    "final_logit_softcapping": ("logits_softcap", None),
    "routed_scaling_factor": ("moe.scaling_factor", None),
}
"""Fields of the Architecture, and the conversions to and from the settings."""
_ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "activation")
_FORMULAS = {
    "num_query_groups": "{num_attention_heads}",
    "kv_channels": "{hidden_size}/{num_attention_heads}",
    "ffn_hidden_size": "4*{hidden_size}",
}
"""Sizes whose setting may be absent or null."""
SIZE_WORDS: dict[str, Sequence[str]] = {**_SIZES, **_EXPERT_SIZES, "norm_epsilon": _EPSILON, "activation": _ACTIVATION}
"""The usual keys of fields of the Architecture."""
_INIT = ("initializer_range", "init_std")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MIN_LAYERS, _MAX_LAYERS = 4, 16
_SHARED_EXPERTS = 2


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    sizes: Mapping[str, int]
    """Sizes by field of the Architecture. All sizes are different, and none is a default of a config."""
    numbers: Mapping[str, float]
    """Values of epsilon, theta and multipliers that change the logits visibly."""
    more_layers: int
    sliding_window: int


_PROBE_NUMBERS = {"epsilon": 1e-2, "rope_theta": 1000.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.6}
_PROBE_NUMBERS |= {"attention_multiplier": 0.4, "query_pre_attn_scalar": 6, "logits_scaling": 3.0, "logit_scale": 0.5}
_PROBE_NUMBERS |= {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5, "routed_scaling_factor": 1.4}
_FIRST = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 88, "vocab_size": 101}
_FIRST |= {"max_position_embeddings": 96, "moe.num_experts": 6, "moe.top_k": 2, "moe.ffn_hidden_size": 20}
_FIRST |= {"moe.shared_ffn_hidden_size": 28, "moe.num_groups": 2, "moe.group_top_k": 1, "moe.dense_layers": 1}
_SECOND = {"hidden_size": 96, "num_attention_heads": 6, "ffn_hidden_size": 136, "vocab_size": 83}
_SECOND |= {"max_position_embeddings": 112, "moe.num_experts": 8, "moe.top_k": 3, "moe.ffn_hidden_size": 28}
_SECOND |= {"moe.shared_ffn_hidden_size": 36, "moe.num_groups": 4, "moe.group_top_k": 2, "moe.dense_layers": 2}
FIRST = tuple(
    ProbeSizes(_FIRST | {"num_query_groups": groups, "kv_channels": width}, _PROBE_NUMBERS, 0, 7)
    for groups, width in ((2, 24), (2, 16), (4, 16))
)
"""Probes for the search; the first one that the model supports is used."""
SECOND = tuple(
    ProbeSizes(
        _SECOND | {"num_query_groups": groups, "kv_channels": width},
        {key: n * 2 for key, n in _PROBE_NUMBERS.items()},
        1,
        5,
    )
    for groups, width in ((3, 32), (3, 16), (6, 16))
)
"""Probes of other sizes, which verify the mapping."""


def _probe_rotary(settings: Mapping[str, Any], probe: ProbeSizes) -> dict[str, Any]:
    """Rotary settings with non-default frequencies, and an original length that a short sample exceeds."""
    rotary: dict[str, Any] = {
        name: _probe_rotary(value, probe) if isinstance(value, Mapping) else value for name, value in settings.items()
    }
    if rotary.get("rope_theta") is not None:
        rotary["rope_theta"] = probe.numbers["rope_theta"] * (1.0 if rotary["rope_theta"] < 1e5 else 1.5)
    if rotary.get("original_max_position_embeddings") is not None:
        rotary["original_max_position_embeddings"] = 16
    pairs = int(probe.sizes["kv_channels"] * rotary.get("partial_rotary_factor", 1.0)) // 2
    return rotary | {name: list(rotary[name])[:pairs] for name in ("short_factor", "long_factor") if name in rotary}


class ConfigInference:
    def __init__(self, effective: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """``effective``: the config with the defaults of transformers filled in."""
        self.effective = effective
        self.defaults = defaults
        for name, value in effective.items():
            if isinstance(value, Mapping) and value and not METADATA.fullmatch(name) and name not in ROPE:
                raise UsageError(f"config.json: {name} is an object; nested settings are not supported.")
        self.sizes: dict[str, str] = {
            name: key for name, words in _SIZES.items() if (key := self._first(words)) is not None
        }
        self.has_one_group: bool = False
        self.shared: str | None = None
        """Key of the number of shared experts, if the config does not have their width."""
        if self.effective.get(self._first(_EXPERT_SIZES["moe.num_experts"]) or ""):
            self._find_experts()
        self.epsilon: str | None = self._first(_EPSILON)
        self.activation: str | None = self._first(_ACTIVATION)
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"):
            if name not in self.sizes:
                raise UsageError(f"config.json has no known key for {name}: {' or '.join(_SIZES[name])}.")
        if unknown := {str(kind) for kind in self.layer_types} - {_FULL, _SLIDING}:
            raise UsageError(f"config.json: layer_types has {', '.join(sorted(unknown))}, which is not supported.")
        for name in self._layer_lists():
            if name != "layer_types" and len({str(entry) for entry in effective[name]}) > 1:
                raise UsageError(f"config.json: {name} differs by layer, and its meaning is not known.")

    def _find_experts(self) -> None:
        for name, words in _EXPERT_SIZES.items():
            key = next((word for word in words if self.effective.get(word) is not None), None)
            if key is not None and self.effective[key] != _NEUTRAL.get(name):
                self.sizes[name] = key
        if "moe.top_k" not in self.sizes:
            known = " or ".join(_EXPERT_SIZES["moe.top_k"])
            raise UsageError(f"config.json has no known key for the number of experts per token: {known}.")
        counted = [name for name in _NUMBER_OF_SHARED if self.effective.get(name)]
        if counted and "moe.shared_ffn_hidden_size" not in self.sizes:
            self.shared = counted[0]

    @property
    def num_layers(self) -> int:
        return int(self.effective[self.sizes["num_layers"]])

    @property
    def layer_types(self) -> list[str]:
        """Empty if the config has no list."""
        return list(self.effective.get("layer_types") or ())

    @property
    def rotary(self) -> Mapping[str, Any]:
        return self.effective.get("rope_parameters") or {}

    def probe_config(self, probe: ProbeSizes, *, all_layers: bool = False) -> dict[str, Any]:
        """A probe model's config: numbers with a known meaning are replaced, other settings are kept."""
        config = dict(self.effective)
        layers = self.num_layers if all_layers else self._min_layers() + probe.more_layers
        for name in self._layer_lists():
            config[name] = (list(config[name]) * layers)[:layers]
        for name, key in self.sizes.items():
            if name == "num_layers":
                config[key] = layers
            elif config[key] is not None or name in ("ffn_hidden_size", "kv_channels"):
                config[key] = probe.sizes[name]
        if self.shared is not None:
            config[self.shared] = _SHARED_EXPERTS
        if self.epsilon is not None:
            config[self.epsilon] = probe.numbers["epsilon"]
        if config.get("sliding_window") is not None:
            config["sliding_window"] = probe.sliding_window
        for name in _MULTIPLIERS:
            if config.get(name) is not None:
                config[name] = probe.numbers[name]
        if self.rotary:
            config["rope_parameters"] = _probe_rotary(self.rotary, probe)
        for name in ("rope_scaling", "rope_theta"):
            config.pop(name, None)
        config |= {name: None if name.startswith("pad") else 1 for name in config if name.endswith("_token_id")}
        return config

    def numbers(self) -> list[str]:
        """Numeric settings that are not sizes and may change the logits."""
        known = {*self.sizes.values(), self.shared, *ROPE, *_INIT}
        return [
            name
            for name, value in self.effective.items()
            if isinstance(value, int | float)
            and not isinstance(value, bool)
            and value != 0
            and name not in known
            and not METADATA.fullmatch(name)
            and not is_dropout(name)
        ]

    def check_meanings(self, live: Container[str]) -> None:
        """Raise UsageError if the meaning of a number that changes the logits is unknown."""
        off = [name for name, value in _OFF.items() if self.effective.get(name) == value]
        known = {*_MULTIPLIERS, *WINDOW, *off, self.epsilon}
        if unknown := [name for name in self.numbers() if name in live and name not in known]:
            settings = ", ".join(f"{name}={self.effective[name]}" for name in unknown)
            raise UsageError(f"config.json: {settings} changes the logits, and its meaning is not known.")

    def keys(self, live: Container[str]) -> dict[str, Any]:
        """The ``keys`` of the family file: fields of the Architecture that correspond to one setting."""
        keys: dict[str, Any] = {name: {"hf": key} | self._absence(name, key) for name, key in self.sizes.items()}
        if "moe.num_experts" in self.sizes and "moe.ffn_hidden_size" not in self.sizes:
            keys["moe.ffn_hidden_size"] = keys["ffn_hidden_size"]
        if "moe.dense_layers" in self.sizes:
            keys["moe.dense_layers"] |= {"as": "first_dense", "of": self.sizes["num_layers"]}
        if self.shared is not None:
            keys["moe.shared_ffn_hidden_size"] = {
                "hf": self.shared,
                "as": "number_of_experts",
                "of": keys["moe.ffn_hidden_size"]["hf"],
                "default": self.defaults.get(self.shared) or 0,
            }
        for key, (name, meaning) in _MULTIPLIERS.items():
            if key in live:
                keys[name] = {"hf": key, "kind": "float", "default": self.defaults.get(key)}
                keys[name] |= {"as": meaning} if meaning else {}
        if self.epsilon is not None and self.epsilon in live:
            keys["norm_epsilon"] = {"hf": self.epsilon, "kind": "float", "default": self.defaults[self.epsilon]}
        if (init := self._first(_INIT)) is not None:
            keys["init_std"] = {"hf": init, "kind": "float", "default": self.defaults.get(init, 0.02)}
        return keys

    def correct(self, sizes: Mapping[str, int], actual: Mapping[str, int]) -> None:
        """Drop the sizes that differ between a probe's config and its tensors; their settings mean something else."""
        for symbol, name in (("G", "num_query_groups"), ("D", "kv_channels"), ("F", "ffn_hidden_size")):
            if sizes[symbol] != actual[symbol]:
                self.sizes.pop(name, None)
        self.has_one_group = actual["G"] == 1

    def symbols(self, probe: ProbeSizes) -> dict[str, int]:
        """Sizes of a probe by symbol, see :func:`isthmus.families.rules.rule.symbol_sizes`."""
        config = self.probe_config(probe)
        configured = {name: config.get(key) for name, key in self.sizes.items()}
        heads, hidden = probe.sizes["num_attention_heads"], probe.sizes["hidden_size"]
        symbols = {
            "V": probe.sizes["vocab_size"],
            "H": hidden,
            "F": configured.get("ffn_hidden_size") or 4 * hidden,
            "P": probe.sizes["max_position_embeddings"],
            "N": heads,
            "G": configured.get("num_query_groups") or heads,
            "D": configured.get("kv_channels") or hidden // heads,
        }
        if (number := configured.get("moe.num_experts")) is not None:
            width = configured.get("moe.ffn_hidden_size") or symbols["F"]
            symbols |= {"E": number, "X": width}
            if self.shared is not None:
                symbols["S"] = _SHARED_EXPERTS * width
            elif shared := configured.get("moe.shared_ffn_hidden_size"):
                symbols["S"] = shared
        return symbols

    def derived(self) -> dict[str, str]:
        """Formulas of the sizes without a setting."""
        formulas = {name: text.format(**self.sizes) for name, text in _FORMULAS.items() if name not in self.sizes}
        return formulas | {"num_query_groups": "1"} if self.has_one_group else formulas

    def fixed(self, live: Container[str]) -> dict[str, Any]:
        """All other settings; the family only supports models with the same values."""
        keyed = {key["hf"] for key in self.keys(live).values()}
        handled = {*keyed, *ROPE, *WINDOW, "sliding_window_pattern", *self.irrelevant_numbers(live)}
        entries: dict[str, Any] = {}
        for name, value in sorted(self.effective.items()):
            if name in handled or METADATA.fullmatch(name) or isinstance(value, Mapping):
                continue
            absent = self.defaults.get(name)
            if name in self._layer_lists():
                entries[name] = {"each": value[0], "absent": absent}
            elif not is_dropout(name):
                entries[name] = {"is": value, "absent": absent}
            elif isinstance(value, int | float):
                entries[name] = {"is": 0.0, "absent": absent, "training": True}
        return entries

    def irrelevant_numbers(self, live: Container[str]) -> list[str]:
        return sorted(name for name in self.numbers() if name not in live)

    def window(self, style: str) -> dict[str, Any]:
        layers = range(1, self.num_layers + 1)
        patterns = {n: [_SLIDING if layer % n else _FULL for layer in layers] for n in range(1, self.num_layers + 2)}
        period = next((n for n, kinds in patterns.items() if self.layer_types == kinds), None)
        return {"style": style, "default": self.defaults.get("sliding_window"), "every": period}

    def rope_defaults(self) -> dict[str, Any]:
        defaults = self.defaults.get("rope_parameters") or {}
        if any(isinstance(value, Mapping) for value in defaults.values()):
            full, windowed = (defaults.get(kind) or {} for kind in (_FULL, _SLIDING))
            return {"rope_theta": full.get("rope_theta"), "rope_local_base_freq": windowed.get("rope_theta")}
        rope = {"rope_theta": defaults.get("rope_theta", 10000.0)}
        if defaults.get("rope_type", "default") != "default":
            rope["rope_parameters"] = dict(defaults)
        if self.rotary.get("partial_rotary_factor") is not None:
            rope["partial_rotary_factor"] = defaults.get("partial_rotary_factor", 1.0)
        return rope

    def _absence(self, name: str, key: str) -> dict[str, Any]:
        """The value of a size if its key is absent or null."""
        default = self.defaults.get(key)
        if name in _FORMULAS:
            meant = _FORMULAS[name].format(**self.sizes)
            return {"default": None if default == parse_formula(meant, {})(self.defaults) else default, "null": meant}
        return {} if default is None else {"default": default}

    def _first(self, names: tuple[str, ...]) -> str | None:
        """The first of these keys that the config has; keys of the transformers class have precedence."""
        present = [name for name in names if name in self.effective]
        return next((name for name in present if name in self.defaults), next(iter(present), None))

    def _layer_lists(self) -> list[str]:
        return [
            name
            for name, value in self.effective.items()
            if isinstance(value, list) and len(value) == self.num_layers and not METADATA.fullmatch(name)
        ]

    def _min_layers(self) -> int:
        """The smallest number of layers with every kind of attention."""
        kinds = self.layer_types
        counts = range(_MIN_LAYERS, _MAX_LAYERS)
        return next((count for count in counts if {*(kinds * count)[:count]} == {*kinds}), _MAX_LAYERS)
