"""Modes that check each op of a step, refuse those that no graph can hold, and rewrite some."""
