"""Code that runs in the environment of vLLM."""
