"""``isthmus config``: configs, presets, and translations of other programs' settings."""
