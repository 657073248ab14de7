"""The seat in Lightning's training loop: a step as it is captured, and what stays on the host."""
