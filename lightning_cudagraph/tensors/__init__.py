"""The tensors of a step: batches and static inputs, state, gradients, and the memory they lie in."""
