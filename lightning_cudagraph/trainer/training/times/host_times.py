"""Host time between replays, by part: hooks, loader, loggers, and what this package and Lightning take.

One step in some is measured on the fast path, from the fetch of its batch to that of the next: the
host's clock is read before and after each part. At the next launch an event tells if the device has
waited for the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

from lightning.pytorch.callbacks import Callback, TQDMProgressBar

from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.trainer.training.times.baseline import has_speed

# A prime number, so that work in every 10th or 50th step is met as often as it happens.
_EVERY_N_STEPS = 17
# Fewer measured steps give no line.
_MIN_STEPS = 20

LOADER, LOGGERS, SCHEDULERS = "the loader", "loggers", "learning rate schedulers"
AT_BREAKS = "hooks in the middle of the step"
_OWN = "this package and Lightning's loop"
DEVICE = "waits for the device (timing events or the outcome of a step in fp16)"
# Parts that are named in the report have at least this share of a step.
_MIN_SHARE = 0.02
# A remedy is named for a part with at least this share.
_LARGE_SHARE = 0.1
_OFTEN_WAITING = 0.5
_NOTHING = nullcontext()


class HostTimes(AbstractContextManager[None]):
    """The host's time in measured steps; on the emulator nothing is measured.

    Attributes:
        waits: for each place where the host waits for the device between replays, the seconds so far.
        launches: number of launches at which the device was looked at.
        waiting: number of those at which it had nothing left to do.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.waits: list[Callable[[], float]] = []
        self._is_measured = has_speed(backend)
        self._count = 0
        self._total_s: dict[str, float] = defaultdict(float)
        self._step_s: dict[str, float] = defaultdict(float)  # of the step under way
        self._part = _OWN
        self._last_s = self._waited_before_s = 0.0
        self._event = backend.event()
        self._is_marked = False  # the end of a measured step, for the next launch
        self.is_on = False
        self.steps = self.launches = self.waiting = 0

    def _waited_s(self) -> float:
        return sum(waited_s() for waited_s in self.waits)

    def begin(self) -> None:
        if self.is_on:
            self._end()
        self._count += 1
        self.is_on = self._is_measured and self._count % _EVERY_N_STEPS == 0
        if self.is_on:
            self._step_s.clear()
            self._waited_before_s = self._waited_s()
            self._last_s = perf_counter()

    def of(self, part: str) -> AbstractContextManager[None]:
        if not self.is_on:
            return _NOTHING
        self._part = part
        return self

    def of_hook(self, owner: object, name: str) -> AbstractContextManager[None]:
        return self.of(f"`{type(owner).__qualname__}.{name}`") if self.is_on else _NOTHING

    def __enter__(self) -> None:
        self._lap(_OWN)

    def __exit__(self, *error: object) -> None:
        self._lap(self._part)

    def _lap(self, part: str) -> None:
        now_s, waited_before_s = perf_counter(), self._waited_before_s
        self._waited_before_s = self._waited_s()
        waited_s = self._waited_before_s - waited_before_s
        self._step_s[part] += now_s - self._last_s - waited_s
        if waited_s:
            self._step_s[DEVICE] += waited_s
        self._last_s = now_s

    def look(self) -> None:
        """Look at the device, before a launch."""
        if self._is_marked:
            self._is_marked = False
            self.launches += 1
            self.waiting += self._event.query()

    def abandon(self) -> None:
        """Drop the step under way: it is more than a replay, or the last one before other code."""
        self.is_on = self._is_marked = False

    def _end(self) -> None:
        self._lap(_OWN)
        for part, time_s in self._step_s.items():
            self._total_s[part] += time_s
        self.steps += 1
        self._backend.mark(self._event)  # behind the replay, and what hooks have launched
        self._is_marked = True

    @property
    def parts_us(self) -> dict[str, float]:
        """Mean microseconds of a step by part, the longest first."""
        by_time = sorted(self._total_s.items(), key=lambda item: -item[1])
        return {part: 1e6 * total_s / self.steps for part, total_s in by_time}


def host_lines(times: HostTimes, callbacks: Sequence[Callback]) -> list[str]:
    """Lines of the report on what bounds the steps: the device, or the host, and with what."""
    if times.steps < _MIN_STEPS or times.launches < _MIN_STEPS:
        return []
    share = times.waiting / times.launches
    looks = f"of {times.launches} launches that were looked at"
    if share < _OFTEN_WAITING:
        return [f"  host      ahead of the device, which was busy at {1 - share:.0%} {looks}"]
    parts_us = times.parts_us
    total_us = sum(parts_us.values())
    named = {part: us for part, us in parts_us.items() if us >= _MIN_SHARE * total_us or part == _OWN}
    texts = [f"{part} {us:.0f}" for part, us in named.items()]
    if rest_us := total_us - sum(named.values()):
        texts.append(f"the rest {rest_us:.0f}")
    line = (
        f"  host      the device waits for it, at {share:.0%} {looks}; us a step ({times.steps} steps):"
        f" {', '.join(texts)}"
    )
    return [line] + [f"{'':<12}{text}" for text in _remedies(parts_us, total_us, callbacks)]


def _remedies(parts_us: dict[str, float], total_us: float, callbacks: Sequence[Callback]) -> list[str]:
    def is_large(part: str) -> bool:
        return parts_us.get(part, 0.0) >= _LARGE_SHARE * total_us

    found = []
    for callback in callbacks:
        name = type(callback).__qualname__
        if isinstance(callback, TQDMProgressBar) and is_large(f"`{name}.on_train_batch_end`"):
            found.append(f"`{name}(refresh_rate=50)` draws less often than {callback.refresh_rate}")
    if is_large(LOADER):
        found.append(
            "a loader with more `num_workers`, or with `pin_memory=True` and `persistent_workers=True`,"
            " has batches ready sooner"
        )
    if is_large(LOGGERS):
        found.append("`Trainer(log_every_n_steps=...)` with a larger number logs less often")
    return found
