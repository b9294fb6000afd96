"""Configs of trainers for Hugging Face models: LLaMA-Factory, axolotl, TRL and ms-swift."""
