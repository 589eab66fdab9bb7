"""Several processes that are one gateway: commands for all of them, reloads, start-up, workers."""
