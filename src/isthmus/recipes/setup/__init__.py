"""What a recipe builds before the first step: model source, layout checks, memory estimate, session."""
