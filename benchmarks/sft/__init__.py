"""The contestants of the fine-tuning benchmark, each a module that runs in a process of its own."""
