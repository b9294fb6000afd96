"""Modelling files in a model folder: those that Isthmus writes, and others, which run only with permission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.errors import DataError, UnsafeInput, UsageError
from isthmus.extras import install_command, missing_packages
from isthmus.hf.model_folder import ModelFolder, modeling_files


def folder_classes(folder: ModelFolder, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """The config class and the causal language model of a folder with ``auto_map``.

    Files with the content that this Isthmus writes are not run: the same classes are imported from Isthmus. Raises
    UnsafeInput for other files unless ``trust_remote_code``, UsageError if they import packages that are not installed,
    and DataError if they cannot be imported for another reason.
    """
    shim_files = modeling_files()
    unlike = [path.name for path in shim_files if not _same(folder.path / path.name, path)]
    if not unlike and set(_modules(folder)) <= {path.stem for path in shim_files}:
        from isthmus.hf.shim.configuration_isthmus import IsthmusConfig
        from isthmus.hf.shim.modeling_isthmus import IsthmusForCausalLM

        return IsthmusConfig, IsthmusForCausalLM
    auto_map = folder.config["auto_map"]
    if not trust_remote_code:
        raise UnsafeInput(
            f"{folder} has its own modelling code ({auto_map['AutoModelForCausalLM']}), which this Isthmus did not "
            "write, and this command would run it. If you trust it, add --trust-remote-code."
        )
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        network: Any = get_class_from_dynamic_module(auto_map["AutoModelForCausalLM"], str(folder.path))
        config: Any = network.config_class
        if "AutoConfig" in auto_map:
            config = get_class_from_dynamic_module(auto_map["AutoConfig"], str(folder.path))
    except (OSError, ImportError, AttributeError, SyntaxError, ValueError) as error:
        if isinstance(error, ImportError) and (packages := missing_packages(str(error))):
            raise UsageError(f"{folder}: {error}. Run {install_command(*packages)}.") from error
        raise DataError(f"{folder}: its modelling code cannot be imported: {error}. Correct it.") from error
    return config, network


def _modules(folder: ModelFolder) -> list[str]:
    """Names of the modules in ``auto_map``; a reference to another repository keeps its prefix."""
    return [str(reference).rpartition(".")[0] for reference in folder.config["auto_map"].values()]


def _same(file: Path, other: Path) -> bool:
    return file.is_file() and file.read_bytes() == other.read_bytes()
