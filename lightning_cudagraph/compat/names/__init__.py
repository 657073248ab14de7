"""Private names of other packages, a file for each."""
