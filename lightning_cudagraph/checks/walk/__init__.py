"""Walks over the objects that a step reaches: a record of their parts, and the comparison with it."""
