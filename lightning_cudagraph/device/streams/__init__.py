"""Captures on several streams: the data flow between ops, and their assignment to streams."""
