"""Audit of the step's Python: values that a capture would freeze, and effects that it would lose."""
