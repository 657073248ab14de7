"""What the processes of a run decide together, and how they exchange it."""
