"""Who the replicas are, and how they are."""
