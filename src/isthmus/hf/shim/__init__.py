"""The modelling files that travel with the export of a model for which transformers has no class.

They are copied as they are and run in places where there is no Isthmus, so they import torch and transformers alone.
"""
