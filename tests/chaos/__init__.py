"""Real processes under load and failures: no request is lost, and no resource leaks."""
