"""What metering and the ledger cost."""
