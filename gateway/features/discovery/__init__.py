"""Discovery of replicas: DNS, Kubernetes, a file."""
