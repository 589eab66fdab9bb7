"""Several gateways before one fleet."""
