"""One gateway of several processes: commands for all of them, reloads, start-up, workers."""
