"""The contestants of the loading benchmark."""
