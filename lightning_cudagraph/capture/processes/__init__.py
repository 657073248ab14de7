"""The processes of a run: their votes, their errors, and their collectives."""
