"""The prompt log."""
