"""The audit: claims of replicas, compared with bounds that the gateway knows."""
