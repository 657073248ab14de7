"""The lines of the user's code that errors, warnings and tracebacks name."""
