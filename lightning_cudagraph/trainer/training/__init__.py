"""The training loop: a batch on its way to the replay, and the host's work after it."""
