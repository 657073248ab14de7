"""Refusals of what no graph can hold, in the user's words, with a remedy."""
