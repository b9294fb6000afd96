"""Before the first step: model source, layout checks, memory estimate, model."""
