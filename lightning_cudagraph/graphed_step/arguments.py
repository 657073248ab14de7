"""Checks of the arguments that `GraphedStep` and the callback share."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from lightning_cudagraph.capture.decisions.stream_choice import MAX_STREAMS, are_streams
from lightning_cudagraph.checks.verify.settings import Verification
from lightning_cudagraph.device.backend_for import BackendName
from lightning_cudagraph.errors import wrong_argument


def check_shared_arguments(
    owner: str,
    *,
    warmup_steps: object,
    on_unsupported: object,
    verify: object,
    harmless: object,
    backend: object,
    max_graphs: object,
    streams: object,
) -> None:
    """Raise `ConfigurationError` if an argument is invalid; `owner` documents them."""
    for name, value in (("warmup_steps", warmup_steps), ("max_graphs", max_graphs)):
        if type(value) is not int or value < 1:
            raise wrong_argument(owner, name, value, "an int of at least 1")
    for name, value, allowed in (
        ("on_unsupported", on_unsupported, ("raise", "eager")),
        ("backend", backend, get_args(BackendName)),
    ):
        if value not in allowed:
            expected = f"one of {', '.join(map(repr, allowed))}"
            raise wrong_argument(owner, name, value, expected)
    if verify is not None and not isinstance(verify, Verification):
        expected = "a `Verification`, such as `Verification(replays=4)`, or None for no checks"
        raise wrong_argument(owner, "verify", verify, expected)
    if not are_streams(streams):
        expected = f'an int from 1 to {MAX_STREAMS}, "auto" for the fastest number up to 8, or the same'
        raise wrong_argument(
            owner, "streams", streams, f"{expected} within `AutoStreams(memory_bytes=...)`"
        )
    if isinstance(harmless, str) or not (
        isinstance(harmless, Collection) and all(isinstance(name, str) for name in harmless)
    ):
        raise wrong_argument(
            owner, "harmless", harmless, 'a list of names, such as `["counter", "print"]`'
        )
