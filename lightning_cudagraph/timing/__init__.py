"""The clock inside a graph, and the destinations of its times."""
