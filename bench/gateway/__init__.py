"""Costs of the data plane."""
