"""Checks before a model serves: its answers equal the answers of plain transformers."""
