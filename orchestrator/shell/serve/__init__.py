"""What the controller serves: status and metrics."""
