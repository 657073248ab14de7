"""The processes of a run: votes, errors, and `DistributedDataParallel`. Knows nothing of Lightning."""
