"""Rollouts: answers that the model generates to prompts, their rewards, and the batches of the updates on them."""
