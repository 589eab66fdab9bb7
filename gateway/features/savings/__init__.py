"""Savings of the routing in comparison with other policies."""
