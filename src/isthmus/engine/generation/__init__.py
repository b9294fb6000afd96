"""Scores and answers of the parallel model: the schedule of sequences, their forward passes, what is recorded."""
