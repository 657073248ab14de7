"""How a training step becomes a graph. Knows torch, and nothing of Lightning."""
