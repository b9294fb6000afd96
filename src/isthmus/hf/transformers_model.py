"""A Hugging Face model run with the code of transformers, on weights from any source.

It is loaded whole with ``from_pretrained``, or layer by layer: the same loader gets the tensors of one layer, since it
knows which tensors are merged into one parameter, such as experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from isthmus.errors import DataError, UsageError
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.modeling_code import folder_classes
from isthmus.hf.tiny_model import no_progress_bars

try:
    from transformers import conversion_mapping, core_model_loading
    from transformers.modeling_utils import LoadStateDictConfig
except ImportError:  # an older transformers
    core_model_loading = None  # type: ignore[assignment]

_LANGUAGE = "language_model"
"""Part of the path of a multimodal model's language model."""
_EXACT = {"dtype": torch.float32, "attn_implementation": "eager"}


class Source(Protocol):
    """Named tensors that are read one by one."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """All tensors by name."""

    def read(self, name: str) -> Tensor:
        """Read one tensor."""


class TransformersModel:
    """A decoder in float32 on the CPU, with its layers accessible one by one."""

    def __init__(self, folder: ModelFolder, source: Source, *, by_layer: bool, trust_remote_code: bool = False) -> None:
        """Build the model, and load it unless ``by_layer``: ``fill`` does then, and parameters have no memory before.

        ``source`` has the tensors of ``folder``, dequantized. An UnsafeInput if the folder has modelling code that
        Isthmus did not write, unless ``trust_remote_code``.
        """
        self._source = source
        config_class, self._class = model_classes(folder, trust_remote_code=trust_remote_code)
        settings = config_class.from_dict(dict(folder.config))
        with no_progress_bars(warnings=False):  # missing and mismatched keys are checked here
            self.module: Any = self._class._from_config(settings, **_EXACT) if by_layer else self._loaded(settings)
        self.module.eval()
        self._prefix = self._layers_name(settings.get_text_config().num_hidden_layers)
        self.layers: Sequence[nn.Module] = list(self.module.get_submodule(self._prefix))
        self._sources: dict[str, list[str]] = {}
        if by_layer:
            self._map_tensors()

    @property
    def parts(self) -> list[list[str]]:
        """Names of parameters: those before the layers, those of each layer, those after the layers."""
        groups: list[list[str]] = [[] for _ in range(len(self.layers) + 2)]
        after = False
        for name in self.module.state_dict():
            if name.startswith(f"{self._prefix}."):
                groups[1 + int(name.removeprefix(f"{self._prefix}.").partition(".")[0])].append(name)
                after = True
            else:
                groups[-1 if after else 0].append(name)
        return groups

    def fill(self, names: Sequence[str]) -> None:
        """Allocate these parameters and load their weights."""
        tied = self.module.all_tied_weights_keys
        tied_to = {name: tied[name] for name in names if name in tied and name not in self._sources}
        targets = dict.fromkeys([*names, *tied_to.values()])
        before = {name: self.module.get_parameter(name) for name in tied_to.values() if name not in names}
        with no_progress_bars(warnings=False):
            self._load([file for name in targets for file in self._sources.get(name, [])])
        tied_parameters = {name: self.module.get_parameter(target) for name, target in tied_to.items()}
        for name, parameter in {**tied_parameters, **before}.items():
            module, _, attribute = name.rpartition(".")
            self.module.get_submodule(module).register_parameter(attribute, parameter)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits [B * S, V] of int64 [B, S]."""
        logits: Tensor = self.module(input_ids=input_ids, use_cache=False).logits
        return logits.flatten(0, 1)

    @staticmethod
    def hidden(states: Any) -> Tensor:
        """Hidden states [B * S, H] in the arguments or the result of a layer."""
        tensor: Tensor = states[0] if isinstance(states, tuple) else states
        return tensor.flatten(0, 1)

    def _layers_name(self, number: int) -> str:
        lists = [(name, module) for name, module in self.module.named_modules() if isinstance(module, nn.ModuleList)]
        names = [name for name, module in lists if len(module) == number]
        names = [name for name in names if _LANGUAGE in name.split(".")] or names  # of a multimodal model
        outer = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
        if len(outer) != 1:
            raise UsageError(
                f"{type(self.module).__name__}: cannot tell which ModuleList contains the layers. Omit --logits."
            )
        return outer[0]

    def _loaded(self, settings: Any) -> Any:
        lazy = {name: _LazyTensor(self._source, name) for name in self._source.tensors}
        try:
            result = self._class.from_pretrained(
                None, config=settings, state_dict=lazy, output_loading_info=True, **_EXACT
            )
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"{self._source}: transformers cannot load the weights: {' '.join(str(error).split())}"
            ) from error
        module, info = result
        self._check_missing(info["missing_keys"])
        return module

    def _check_missing(self, names: set[str]) -> None:
        if names:
            some = ", ".join(sorted(names)[:4])
            raise DataError(
                f"{self._source}: transformers finds no tensor for {some}. Correct config.json or the weights."
            )

    def _map_tensors(self) -> None:
        """Find the tensors of each parameter, with the conversion table of transformers."""
        if core_model_loading is None:
            raise UsageError(
                "the installed transformers cannot load a model layer by layer, and the whole model does not fit into "
                "memory. Use transformers 5 as in constraints/, or more memory."
            )
        self._mapping: Any = conversion_mapping.get_model_conversion_mapping(self.module)
        renamings = [entry for entry in self._mapping if isinstance(entry, core_model_loading.WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, core_model_loading.WeightConverter)]
        parameters, prefix = self.module.state_dict(), self.module.base_model_prefix
        for name in self._source.tensors:
            target, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, parameters)
            self._sources.setdefault(target, []).append(name)
            targets = next((entry.target_patterns for entry in converters if pattern in entry.source_patterns), [])
            for other in targets[1:]:  # loaded together with the first
                self._sources.setdefault(target.replace(targets[0], other), [])
        tied = self.module.all_tied_weights_keys
        absent = {name for name in parameters if name not in self._sources and tied.get(name) not in self._sources}
        self._check_missing(absent)

    def _load(self, files: Sequence[str]) -> None:
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(
            model=self.module,
            state_dict={name: _LazyTensor(self._source, name) for name in files},
            load_config=LoadStateDictConfig(dtype=torch.float32, weight_mapping=self._mapping),
        )
        if faults := [*info.mismatched_keys, *info.conversion_errors.values(), *info.error_msgs]:
            raise DataError(f"{self._source}: transformers cannot load the weights: {faults[0]}.")


def model_classes(folder: ModelFolder, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """The classes of the config and of the model: those of transformers, else those of the folder."""
    kind = str(folder.config.get("model_type"))
    # The causal class of a multimodal type may be its language model alone.
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in mapping:
            return CONFIG_MAPPING[kind], mapping[CONFIG_MAPPING[kind]]
    if "AutoModelForCausalLM" in (folder.config.get("auto_map") or {}):
        return folder_classes(folder, trust_remote_code=trust_remote_code)
    raise UsageError(f"the installed transformers has no causal language model of type {kind}. Install a newer one.")


class _LazyTensor:
    """Replaces a slice of a safetensors file: reads the tensor when transformers indexes it."""

    def __init__(self, source: Source, name: str) -> None:
        self._source, self._name = source, name

    def __getitem__(self, index: Any) -> Tensor:
        return self._source.read(self._name)[index]
