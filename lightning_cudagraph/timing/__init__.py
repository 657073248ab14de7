"""The clock inside a graph, and where its times are shown."""
