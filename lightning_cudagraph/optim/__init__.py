"""The optimizer without host synchronisation. Knows torch, and nothing of Lightning."""
