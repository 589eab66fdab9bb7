"""How it is measured: load, mock replicas, CPU, reports."""
