"""Costs of the inference server."""
