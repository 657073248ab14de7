"""Integration with Lightning: training, evaluation, logs and metrics; other folders know torch alone."""
