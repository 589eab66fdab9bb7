"""Measurement: load, mock replicas, CPU, reports."""
