"""The training step as it is captured: Lightning's own code, on the static batch."""
