"""Answers to Anthropic's `diagnostics` field."""
