"""The times of a fit: what is measured, and where in a step."""
