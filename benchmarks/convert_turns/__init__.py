"""The contestants of the conversion benchmark."""
