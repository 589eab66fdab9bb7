"""What the inference server costs."""
