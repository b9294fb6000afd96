"""Register the weight mapping of a new architecture, here Qwen3 under other names, and convert a model of it.

python examples/python/register_family.py QWEN3_DIR OUT_DIR
"""

# %% A model of the new architecture: in practice your own folder
import json
import sys
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

import isthmus
from isthmus.convert.verify.compare import compare_models
from isthmus.families.models.qwen3 import FAMILY as QWEN3
from isthmus.families.rules.rule import renamed

NAMES = {"model.layers": "net.blocks", "model.embed_tokens": "net.tokens", "model.norm": "net.norm_out"}
source, out = Path(sys.argv[1]), Path(sys.argv[2])
acme = out / "acme"
acme.mkdir(parents=True)
tensors = load_file(source / "model.safetensors")
for old, new in NAMES.items():
    tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
save_file(tensors, acme / "model.safetensors", {"format": "pt"})
config = json.loads((source / "config.json").read_text())
config |= {"model_type": "acme", "architectures": ["AcmeForCausalLM"], "n_embed": config["hidden_size"]}
del config["hidden_size"]
(acme / "config.json").write_text(json.dumps(config))

# %% Its family: the table of Qwen3 with other tensor names, and another config key
isthmus.register_family(
    replace(
        QWEN3,
        name="acme",
        hf_architecture="AcmeForCausalLM",
        keys=QWEN3.keys | {"hidden_size": replace(QWEN3.keys["hidden_size"], hf="n_embed")},
        rules=renamed(QWEN3.rules, NAMES),
    )
)

# %% Conversion, training and export now take the model
bridge = isthmus.AutoBridge.from_hf_pretrained(acme)
bridge.import_ckpt(acme, out / "megatron")
bridge.export_ckpt(out / "megatron", out / "acme-again")
print(compare_models(acme, out / "acme-again"))
(model,) = bridge.to_megatron_model()
bridge.save_hf_pretrained([model], out / "acme-live")
print(compare_models(acme, out / "acme-live"))
