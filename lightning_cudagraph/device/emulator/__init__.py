"""The CPU emulator: the semantics of a CUDA graph, without its speed.

A capture records every aten op of forward, backward and optimizer with the tensors that it used, and
undoes all effects at its end, because a capture on a GPU executes nothing. A replay runs the ops again
into the same storage: Python values stay frozen as they were at capture, a tensor that has been replaced
since is not seen, random numbers are drawn again, and what a capture on a GPU refuses is refused.

With it, this package can be tested, and a step be examined, on a machine without a GPU. Ops on several
streams run one after the other, in orders that the streams allow. Not emulated: the user's own streams,
reuse of memory inside a pool, asynchronous execution, the boundary between host and device. A generator
whose state is set inside the step is refused.
"""
