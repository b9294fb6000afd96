"""Modelling files that are copied into the export of a model that transformers has no class for.

They run without Isthmus, so they import only torch and transformers.
"""
