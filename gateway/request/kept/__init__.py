"""Requests whose history the gateway keeps."""
