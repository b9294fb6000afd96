"""The contestants of the fine-tuning benchmark; each module runs in a separate process."""
