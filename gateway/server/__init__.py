"""HTTP server for clients and operators."""
