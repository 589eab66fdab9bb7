"""Keys and tokens towards operators and issuers."""
