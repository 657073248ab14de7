"""TensorBoard as a destination of times: the only code here that uses it, and Lightning's loggers."""
