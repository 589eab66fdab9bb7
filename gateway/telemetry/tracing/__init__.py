"""Traces: W3C's trace context, spans as plain values, and a thread that sends them to a collector."""
