"""Replicas that Kubernetes runs."""
