"""The parts of prepare.py."""
