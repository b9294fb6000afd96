"""Convert a Hugging Face folder into a Megatron checkpoint and back, without building a model.

python examples/python/convert_checkpoints.py MODEL_DIR OUT_DIR
"""

# %% Hugging Face to Megatron-Core's torch_dist, which loads in any parallel layout
import sys
from pathlib import Path

import isthmus
from isthmus.convert.verify.compare import compare_models

source, out = Path(sys.argv[1]), Path(sys.argv[2])
imported = isthmus.AutoBridge.import_ckpt(source, out / "megatron")
print(f"{imported.num_tensors} tensors, {imported.num_bytes} bytes; Megatron-LM needs {imported.megatron_flags}")

# %% Megatron to Hugging Face
bridge = isthmus.AutoBridge.from_hf_pretrained(source)
bridge.export_ckpt(out / "megatron", out / "hf")

# %% The same tensors, bit by bit; CheckFailed names the first difference
print(compare_models(source, out / "hf"))
