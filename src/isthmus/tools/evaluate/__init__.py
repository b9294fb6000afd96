"""Evaluates models on tasks."""
