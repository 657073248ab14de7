"""`GraphedStep`: graphs for loops without Lightning, for manual optimization, and for Fabric."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import FunctionType, TracebackType
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_cudagraph.capture.context import CaptureSettings
from lightning_cudagraph.capture.decisions.stream_choice import AskedStreams, streams_for
from lightning_cudagraph.capture.signatures.warm_ups import WARMUP_STEPS
from lightning_cudagraph.capture.verification.late_effects import is_rehearsing
from lightning_cudagraph.checks.unsupported_modules import refuse_nameless
from lightning_cudagraph.checks.verify.settings import DEFAULT_CHECKS, NO_CHECKS, Verification
from lightning_cudagraph.compat.features import CAPTURES, COLLECTIVES
from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.device.backend_for import BackendName, backend_for
from lightning_cudagraph.device.lines.shown_frames import leave_users_frames
from lightning_cudagraph.device.sentry.sentry import is_capturing
from lightning_cudagraph.errors import ConfigurationError, UnsupportedError, wrong_argument
from lightning_cudagraph.graphed_step.arguments import check_shared_arguments
from lightning_cudagraph.graphed_step.framework import framework_of
from lightning_cudagraph.graphed_step.processes import StepProcesses, are_several
from lightning_cudagraph.graphed_step.record import StepFunction
from lightning_cudagraph.graphed_step.replicas import StepReplicas
from lightning_cudagraph.graphed_step.run import StepRun
from lightning_cudagraph.graphed_step.wording import WORDING
from lightning_cudagraph.processes.agreement import made_by_all
from lightning_cudagraph.processes.nccl import check_nccl
from lightning_cudagraph.processes.shards import sharded_modules
from lightning_cudagraph.timing.output.summary import RunSummary

P = ParamSpec("P")
R = TypeVar("R")

_inside = threading.local()


class GraphedStep(Generic[P, R]):
    """A function as one CUDA graph: a training step, or a part of one.

    The function may run forward, backward, `zero_grad` and the steps of one or several optimizers, or
    only some of these. Its first calls are the warm-up: eager, on a side stream. Then it is captured.
    Every later call copies its tensor arguments into static inputs and replays the graph. Parameters,
    optimizer state, gradients, buffers and random numbers are those of calls of the function itself; a
    step that is known to differ is refused with the reason, or called eagerly. On a CPU an emulator
    replaces the GPU.

    In several processes the function may use a `DistributedDataParallel`, made by hand or by Fabric, or
    modules of `fully_shard`. All processes must then make the same number of calls, and vote on each;
    the graph holds the collectives. Under DDP, warm-up goes on until gradients have been averaged eleven
    times. `no_sync()` may be entered around the call or inside. Use `with`, or `close` the step before
    the process group is destroyed: NCCL waits for graphs. An error in a call or inside of `with`, or one
    that ends the program, ends the other processes too: from the construction of the step on if the
    wrapper exists, else from its first `with` or call on. With expandable segments in the allocator, set
    `NCCL_GRAPH_REGISTER=0`.

    Every call returns copies, without autograd's graph, that no later call changes. Schedulers, logging,
    printing and other host code belong outside of the function.

    Args:
        function: the step. Its arguments are tensors, in any nesting of lists, tuples, mappings and
            dataclasses, and numbers or strings that are constant over calls.
        modules: all modules that the function uses: one, a list, or a dictionary. Modules that the
            function reaches as a method's owner, through closures or globals are found without.
        optimizers: all optimizers that the function steps: one, a list, or a dictionary.
        scaler: the gradient scaler that the function uses for fp16, or None.
        warmup_steps: number of eager calls before the capture.
        verify: the replays that are compared, bit for bit, with an eager call from the same state; None
            for none.
        on_unsupported: ``"raise"`` an error if the first capture fails, or call the function eagerly
            from then on (``"eager"``) and give the reason in the report. A later capture that fails
            leaves only its own calls eager.
        harmless: names, as the errors give them, of host code in the function that may be frozen by the
            capture and left out of replays.
        backend: ``"auto"``: CUDA on a GPU, the emulator on a CPU. ``"cuda"`` and ``"emulator"`` require
            that backend. ``"off"``: all calls are eager; must be the same in all processes.
        max_graphs: the most signatures of arguments with a graph. One more is eager until it has come
            eight times since the least recently used was last replayed, and takes its place.
        streams: the number of streams for independent ops in a capture. ``"auto"``: the fastest number
            up to 8, or 1 with a process group. ``AutoStreams``: the same with a bound on memory.

    Raises:
        ConfigurationError: if an argument is invalid.

    Example::

        def train_step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        with GraphedStep(train_step, modules=model, optimizers=optimizer) as step:
            for x, y in loader:
                loss = step(x, y)
    """

    def __init__(
        self,
        function: Callable[P, R],
        modules: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module] = (),
        optimizers: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] = (),
        *,
        scaler: GradScaler | None = None,
        warmup_steps: int = WARMUP_STEPS,
        verify: Verification | None = DEFAULT_CHECKS,
        on_unsupported: Literal["raise", "eager"] = "raise",
        harmless: Sequence[str] = (),
        backend: BackendName = "auto",
        max_graphs: int = 16,
        streams: AskedStreams = "auto",
    ) -> None:
        if not callable(function):
            raise _wrong("function", function, "a function of tensors")
        check_shared_arguments(
            "GraphedStep",
            warmup_steps=warmup_steps,
            on_unsupported=on_unsupported,
            verify=verify,
            harmless=harmless,
            backend=backend,
            max_graphs=max_graphs,
            streams=streams,
        )
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise _wrong("scaler", scaler, "a `torch.amp.GradScaler` or None")
        self._function: Callable[P, R] | None = function
        self._modules = _by_name("modules", modules, nn.Module)
        self._optimizers = _by_name("optimizers", optimizers, Optimizer)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._backend_name = backend
        self._settings = CaptureSettings(
            warmup_steps=warmup_steps,
            raise_unsupported=on_unsupported == "raise",
            verify=verify or NO_CHECKS,
            harmless=frozenset(harmless),
            max_graphs=max_graphs,
            streams=streams_for(streams),
        )
        self._given = {
            "warmup_steps": warmup_steps,
            "verify": verify,
            "on_unsupported": on_unsupported,
            "harmless": sorted({*harmless}),  # the order of a set differs between processes
            "max_graphs": max_graphs,
            "streams": self._settings.streams,
        }
        self._run: StepRun | None = None
        self._processes: StepProcesses | None = None  # of the present run or the next one
        self._refused: str | None = None  # the reason if all calls are eager
        self._summary = RunSummary()  # of the last closed run
        self._join()  # a process may fail before its first call

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the function and its objects, so that copies and pickles always work."""
        emptied: dict[str, Any] = {
            "_summary": self.summary,
            "_function": None,
            "_modules": {},
            "_optimizers": {},
            "_scaler": None,
            "_run": None,
            "_processes": None,
        }
        return {**self.__dict__, **emptied}

    @property
    def summary(self) -> RunSummary:
        """Summary of the calls so far; its `str` is the report."""
        return self._summary if self._run is None else self._run.summary

    @property
    def is_off(self) -> bool:
        """True if all calls are eager: `backend="off"`."""
        return self._backend_name == "off"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, eagerly or by a replay.

        Raises:
            UnsupportedError: if the call cannot be captured. Nothing of it has happened then.
        """
        function = self._bound()
        if self._backend_name == "off" or self._refused or _is_nested():
            return function(*args, **kwargs)
        _inside.step = self
        try:
            if self._run is None:
                self._run = self._started(args, kwargs)
            result: R = self._run.call(args, kwargs)
        except UnsupportedError as error:
            WORDING.rephrase(error)
            if self._run is not None or self._settings.raise_unsupported:
                self._fail(error)
                leave_users_frames(error)
                raise
            self._refused = error.reason
            self.close()
            self._summary = RunSummary(refused=f"all calls eager. {error.reason}")
        except BaseException as error:
            self._fail(error)
            raise
        else:
            return result
        finally:
            _inside.step = None
        return function(*args, **kwargs)

    def eager(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, without a graph."""
        return self._bound()(*args, **kwargs)

    def settle(self) -> None:
        """Wait for all calls, and raise a `CheckError` if a check of a replay on the host has failed."""
        if self._run is not None:
            self._run.backend.checks.settle()

    def close(self) -> None:
        """Release the graphs and their memory, and restore the optimizers.

        The next call begins again with warm-up.

        Raises:
            CheckError: if a check of a replay on the host has failed.
        """
        try:
            self.settle()
        finally:
            self._release()

    def _release(self) -> None:
        if self._run is not None:
            self._summary = self._run.summary
        run, self._run = self._run, None
        processes, self._processes = self._processes, None
        with ExitStack() as stack:  # graphs first
            if processes is not None:
                stack.callback(processes.close)
            if run is not None:
                stack.callback(run.close)

    def __enter__(self) -> GraphedStep[P, R]:
        self._join()  # the DDP wrapper may have been made since
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
            self._release()
        else:
            self.close()

    def _fail(self, error: BaseException) -> None:
        """End the other processes too, if there are any, because of `error`."""
        if self._processes is not None:
            self._processes.fail(error)
            self._release()  # a later call starts a new run, with the processes that are left

    def _end(self, error: BaseException | None) -> None:
        """Close when Python exits, perhaps because of an error."""
        with ExitStack() as stack:
            stack.callback(self.close if error is None else self._release)
            if error is not None:
                self._fail(error)

    def _join(self) -> StepProcesses | None:
        """Join the processes that call this together; None if there is one.

        From now on, a failure of one process ends the others.
        """
        is_off = self._backend_name == "off" or self._refused is not None
        if self._processes is None and not is_off and are_several():
            require(COLLECTIVES)
            model = _as_one(self._found())
            wrappers = (m for m in model.modules() if isinstance(m, DistributedDataParallel))
            together = next(wrappers, None) or next(iter(sharded_modules(model)), None)
            if together is not None:
                device = next(together.parameters()).device
                self._processes = StepProcesses(device, weakref.WeakMethod(self._end))
        return self._processes

    def _bound(self) -> Callable[P, R]:
        if self._function is None:
            raise ConfigurationError(
                "This `GraphedStep` is a copy, or was unpickled: the function, modules and optimizers"
                " belong to the original, and it has none. Make a new one:"
                " `GraphedStep(step, modules=..., optimizers=...)`."
            )
        return self._function

    def _started(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepRun:
        """Start a run, if all processes can start the same one."""
        processes = self._join()

        def compare(run: StepRun | None, refused: UnsupportedError | None) -> None:
            if processes is not None:
                processes.compare(self._given, refused)
                processes.start()

        return made_by_all(lambda: self._made(args, kwargs), compare)

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepRun:
        """Make the run of this process."""
        require(CAPTURES)
        function = self._bound()
        if "__name__" not in getattr(inspect.unwrap(function), "__globals__", {"__name__": ""}):
            refuse_nameless(f"The function `{getattr(function, '__qualname__', function)}`")
        with contextlib.suppress(ValueError):  # written in C
            inspect.signature(function).bind(*args, **kwargs)
        found = self._found()
        owners = [getattr(function, "__self__", None), *found.values(), *self._optimizers.values()]
        framework = framework_of(owners)
        optimizers = {
            name: framework.optimizer_in(optimizer) for name, optimizer in self._optimizers.items()
        }
        model = _as_one(found)
        device = _device_of(model, optimizers, (args, kwargs))
        if self._processes is not None:
            check_nccl(device)
        scaler = self._scaler or framework.scaler()
        backend = backend_for(device, self._backend_name)
        of = StepFunction(function, model, optimizers, scaler, framework, StepReplicas(model))
        return StepRun(of, backend, self._settings, self._processes)

    def _found(self) -> dict[str, nn.Module]:
        """Return the modules that the function uses: those found in it, and those given."""
        return {**_found_in(self._function), **self._modules}


def _is_nested() -> bool:
    """True inside another step, or that of the callback: the call is a part of it."""
    return getattr(_inside, "step", None) is not None or is_capturing() or is_rehearsing()


class _Modules(nn.Module):
    """A container for all modules of a step."""


def _as_one(modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that holds all of these, each once."""
    inside = {id(i) for m in modules.values() for i in m.modules() if i is not m}
    outer = {id(m): m for m in modules.values() if id(m) not in inside}
    if len(outer) == 1:
        (module,) = outer.values()
        return module
    together = _Modules()
    for name, module in modules.items():
        if outer.pop(id(module), None) is not None:
            together.add_module(name.replace(".", "_"), module)
    return together


def _found_in(function: Any) -> dict[str, nn.Module]:
    """Find the modules that a function uses: its owner, its globals and closure, by name."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    found: dict[str, Any] = {"self": owner}
    if owner is not None and not isinstance(owner, nn.Module):
        found |= getattr(owner, "__dict__", {})
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        with contextlib.suppress(ValueError):  # a closure variable without a value yet
            variables = inspect.getclosurevars(function)
            found |= {**variables.globals, **variables.nonlocals}
    return {name: value for name, value in found.items() if isinstance(value, nn.Module)}


def _device_of(model: nn.Module, optimizers: Mapping[str, Optimizer], arguments: Any) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return parameter.device  # type: ignore[no-any-return]
    for leaf in tree_iter(arguments):
        if isinstance(leaf, Tensor):
            return leaf.device
    raise UnsupportedError(
        "The step has neither a module with parameters nor a tensor among its arguments, so that nothing"
        " says on which device it runs.",
        "Pass its modules: `GraphedStep(step, modules=...)`.",
    )


def _by_name(what: str, given: Any, kind: type) -> dict[str, Any]:
    if isinstance(given, kind):
        return {what.removesuffix("s"): given}
    try:
        found = (
            dict(given)
            if isinstance(given, Mapping)
            else {f"{what}[{index}]": value for index, value in enumerate(given)}
        )
    except TypeError:
        found = {what: given}
    for name, value in found.items():
        if not isinstance(value, kind):
            expected = f"`{kind.__qualname__}`s, and `{name}` is a `{type(value).__qualname__}`"
            raise _wrong(what, given, f"one, a list or a dictionary of {expected}")
    return found


def _wrong(name: str, value: Any, expected: str) -> ConfigurationError:
    return wrong_argument("GraphedStep", name, value, expected)
