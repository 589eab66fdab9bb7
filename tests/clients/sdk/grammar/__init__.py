"""What streams have to look like: the SDKs' types for each event, a small grammar for their order, the sum of the events."""
