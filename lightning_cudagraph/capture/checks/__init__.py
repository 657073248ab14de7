"""Whether a graph still holds: what it has baked in, and replays held against eager steps."""
