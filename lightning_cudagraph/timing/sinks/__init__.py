"""Sinks: the destinations of times, such as TensorBoard, other loggers, pictures and trace files."""
