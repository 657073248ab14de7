"""What a step logs: recorded, added up in its graph, and handed to Lightning after each replay."""
