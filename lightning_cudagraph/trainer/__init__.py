"""The seat in Lightning: training, evaluation, logs and metrics. All that knows Lightning is here."""
