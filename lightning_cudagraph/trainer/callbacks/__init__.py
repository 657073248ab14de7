"""The callback that users add to a trainer, and the captured runs that it makes and releases."""
