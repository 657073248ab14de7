"""The host arithmetic of an optimizer's step, traced in a capture and repeated before each replay."""
