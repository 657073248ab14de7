"""Places to keep state, moments at which it changes, and effects of a step: never silently wrong.

`places.py`, `moments.py` and `effects.py` are three lists, to which one adds; `runs.py` runs one case,
`judge.py` says how it came out, and `cases.py` chooses some. `python -m tests.matrix` prints the table.
"""
