"""The report of a run, and tables of its times, as text."""
