"""Costs and quality of decisions."""
