"""Inferring the weight mapping of an unsupported model type (``convert --learn``)."""
