"""What stands in for torch's own names while virtual GPUs are enabled."""
