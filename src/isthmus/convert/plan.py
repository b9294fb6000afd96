"""Plans a conversion: format, and dtype and shape of every tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from isthmus.convert.canonical import Destination, unique_placements
from isthmus.convert.hf.hf_tensors import HfWriter
from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.legacy.megatron_args import megatron_args
from isthmus.convert.legacy.megatron_support import unsupported_features
from isthmus.convert.legacy.to_legacy import LegacyWriter, LiveSpelling, padded_vocab_size
from isthmus.convert.open_model import Format, OpenedModel
from isthmus.convert.torch_dist.to_torch_dist import TorchDistWriter, common_content
from isthmus.convert.weight_source import TensorSpec
from isthmus.errors import UsageError, disk_errors
from isthmus.families.family_transfer import transfer_architecture
from isthmus.families.registry import all_families


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    model: OpenedModel
    """The source model, with the family and architecture to write."""
    format: Format
    tensors: dict[str, TensorSpec]
    """By canonical name."""
    layout: LegacyLayout
    spelling: LiveSpelling
    unsupported: list[str]
    """Features of the model that Megatron-LM has no option for; empty for Hugging Face folders."""

    @property
    def main_dtype(self) -> torch.dtype:
        """The most common dtype."""
        dtypes = [spec.dtype for spec in self.tensors.values()]
        return max(dict.fromkeys(dtypes), key=dtypes.count)

    def create_files(self, folder: Path) -> Destination:
        family, arch = self.model.family, self.model.arch
        dtypes = {name: spec.dtype for name, spec in self.tensors.items()}
        if self.format == "hf":
            return HfWriter(folder, family, arch, dtypes)
        inner = folder / "release"
        with disk_errors(inner):
            inner.mkdir()
        if self.format == "torch_dist":
            return TorchDistWriter(inner, family, arch, dtypes, common_content(megatron_args(arch, self.main_dtype)))
        rows = padded_vocab_size(arch, self.layout)
        args = megatron_args(arch, self.main_dtype, layout=self.layout, padded_vocab_size=rows, spelling=self.spelling)
        common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
        return LegacyWriter(inner, family, arch, dtypes, common, self.layout, self.spelling)


def plan_conversion(
    model: OpenedModel,
    to: Format | None,
    *,
    dtype: torch.dtype | None,
    hf_family: str | None,
    layout: LegacyLayout | None,
    spelling: LiveSpelling | None,
) -> ConversionPlan:
    """A UsageError if the options do not fit the format or the model."""
    target = to or ("torch_dist" if model.format == "hf" else "hf")
    if target != "torch" and (layout is not None or spelling is not None):
        raise UsageError(
            f"{target} has no layout and no spelling: any layout can read it. "
            "Omit --tp, --pp, --vpp, --ep, --etp and --spelling, or use --to torch."
        )
    if hf_family is not None:
        if target != "hf":
            raise UsageError(
                f"--hf-family is for Hugging Face folders, and this writes {target}. Omit it, or use --to hf."
            )
        if (family := all_families().get(hf_family)) is None:
            raise UsageError(f"--hf-family {hf_family} is not known. Known are {', '.join(all_families())}.")
        model = replace(model, family=family, arch=transfer_architecture(model.arch, model.family, family))
    layout = layout or LegacyLayout()
    layout.check(model.arch)
    tensors = {
        name: TensorSpec(
            dtype if dtype is not None and placed.rule.dtype is None else model.weights.dtype(name),
            placed.rule.canonical_shape(model.arch),
        )
        for name, placed in unique_placements(model.family, model.arch).items()
    }
    unsupported = unsupported_features(model.arch) if target != "hf" else []
    return ConversionPlan(model, target, tensors, layout, spelling or "te", unsupported)
