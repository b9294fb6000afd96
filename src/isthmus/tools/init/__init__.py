"""A first run config: looks at the data and writes settings with their reasons."""
