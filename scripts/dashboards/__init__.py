"""Makes the Grafana dashboards and the tables of their panels in docs/dashboards.md: `python -m scripts.dashboards`."""
