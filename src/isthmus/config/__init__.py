"""What a run is asked to do: a strict schema, and YAML with overrides read into it."""
