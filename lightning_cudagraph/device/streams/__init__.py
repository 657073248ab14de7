"""The streams of a capture: which op goes on which, by what it reads and writes."""
