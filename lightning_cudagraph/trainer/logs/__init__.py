"""Logged values of a step: recorded, added up in the graph, handed to Lightning after each replay."""
