"""What operators see: structured logs and metrics."""
