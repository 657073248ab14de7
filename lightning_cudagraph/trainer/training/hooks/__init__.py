"""User hooks: between two steps, and inside a step, where they run on the host in every replay."""
