"""Routing policies: the default and the baselines."""
