"""Python in a step that a capture would freeze or lose: what looks for it, and what it looks at."""
