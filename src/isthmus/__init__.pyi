from isthmus.convert.transfer import convert as convert
from isthmus.recipes.dpo import run as dpo
from isthmus.recipes.pretrain import run as pretrain
from isthmus.recipes.setup.load_model import load_model as load_model
from isthmus.recipes.sft import run as sft

__version__: str
__all__ = ["__version__", "convert", "dpo", "load_model", "pretrain", "sft"]
