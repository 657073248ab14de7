"""Layers of a model: selection of those that are timed, and the begin and end of each in a step."""
