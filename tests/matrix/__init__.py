"""Matrix of tests: places that hold state, moments at which it changes, and effects of a step.

No case may be silently wrong. `places.py`, `moments.py` and `effects.py` are lists of small classes;
`runs.py` runs one case, `judge.py` finds its outcome, and `cases.py` selects cases. `python -m
tests.matrix` prints the table.
"""
