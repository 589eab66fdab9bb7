"""Workflows: graphs of model calls in one request."""
