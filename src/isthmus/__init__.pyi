from isthmus.convert.transfer import convert as convert
from isthmus.families.registry import register_family as register_family
from isthmus.recipes.distill import run as distill
from isthmus.recipes.dpo import run as dpo
from isthmus.recipes.kto import run as kto
from isthmus.recipes.model.auto_bridge import AutoBridge as AutoBridge
from isthmus.recipes.model.load_model import load_model as load_model
from isthmus.recipes.pretrain import run as pretrain
from isthmus.recipes.reward import run as reward
from isthmus.recipes.sft import run as sft
from isthmus.train.callbacks import Callback as Callback

__version__: str
__all__ = [
    "AutoBridge",
    "Callback",
    "__version__",
    "convert",
    "distill",
    "dpo",
    "kto",
    "load_model",
    "pretrain",
    "register_family",
    "reward",
    "sft",
]
