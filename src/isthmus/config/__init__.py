"""The settings of a run: a strict schema, and YAML with overrides."""
