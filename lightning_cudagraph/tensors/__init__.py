"""The tensors of a step: batches and static inputs, state, gradients, and their memory."""
