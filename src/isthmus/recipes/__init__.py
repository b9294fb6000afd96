"""Recipes: pretrain, sft and dpo, from a config to a finished run."""
