"""TensorBoard as a destination of times: the only code here that uses it, and Lightning's loggers."""

from lightning_cudagraph.timing.output.tensorboard.writer import TensorBoardWriter, other_loggers_writer

__all__ = ["TensorBoardWriter", "other_loggers_writer"]
