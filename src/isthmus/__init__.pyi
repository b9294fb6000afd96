from isthmus.convert.transfer import convert as convert
from isthmus.families.registry import register_family as register_family
from isthmus.recipes.model.auto_bridge import AutoBridge as AutoBridge
from isthmus.recipes.model.load_model import load_model as load_model
from isthmus.recipes.run import distill as distill
from isthmus.recipes.run import dpo as dpo
from isthmus.recipes.run import grpo as grpo
from isthmus.recipes.run import kto as kto
from isthmus.recipes.run import pretrain as pretrain
from isthmus.recipes.run import reward as reward
from isthmus.recipes.run import sft as sft
from isthmus.train.callbacks import Callback as Callback

__version__: str
__all__ = [
    "AutoBridge",
    "Callback",
    "__version__",
    "convert",
    "distill",
    "dpo",
    "grpo",
    "kto",
    "load_model",
    "pretrain",
    "register_family",
    "reward",
    "sft",
]
