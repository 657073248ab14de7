"""Replays compared with eager steps from the same state, tensor by tensor and op by op."""
