"""Workflows that tenants store: their versions in the store of responses, and their endpoints."""
