"""Layers of a model: which are timed, and where in a step the time of each begins and ends."""
