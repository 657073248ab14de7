"""Destinations of times: the report, tables, pictures, trace files, and TensorBoard."""
