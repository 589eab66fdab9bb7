"""What the gateway reports about itself: metrics and logs."""
