"""Traces of requests: sampling, the record of a running request, and the spans of a finished one."""
