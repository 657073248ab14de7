"""Private names of other packages, their probes, and the features that depend on them."""
