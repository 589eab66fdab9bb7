"""Several gateways in front of one fleet."""
