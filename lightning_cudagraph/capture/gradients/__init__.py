"""Gradients around replays: what a captured step expects of them, and what user code keeps of them."""
