"""Logged values of a captured step: recorded, reduced in the graph, passed on after replays."""
