"""Named modules as graphs with autograd; the rest of a step runs eagerly."""
