"""Train PyTorch Lightning modules through one CUDA graph, with a clock inside."""

from importlib.metadata import version as _version

from lightning_cudagraph.compat.installed import check_installed as _check_installed

_check_installed()  # before anything of theirs is imported

from lightning_cudagraph.capture.decisions.stream_choice import AutoStreams as AutoStreams
from lightning_cudagraph.checks.verify.settings import Verification as Verification
from lightning_cudagraph.errors import BatchError as BatchError
from lightning_cudagraph.errors import CaptureError as CaptureError
from lightning_cudagraph.errors import CheckError as CheckError
from lightning_cudagraph.errors import ConfigurationError as ConfigurationError
from lightning_cudagraph.errors import CUDAGraphError as CUDAGraphError
from lightning_cudagraph.errors import Finding as Finding
from lightning_cudagraph.errors import HookError as HookError
from lightning_cudagraph.errors import PeerError as PeerError
from lightning_cudagraph.errors import StaleGraphError as StaleGraphError
from lightning_cudagraph.errors import TimerError as TimerError
from lightning_cudagraph.errors import UnsupportedError as UnsupportedError
from lightning_cudagraph.errors import VerificationError as VerificationError
from lightning_cudagraph.graphed_step.step import GraphedStep as GraphedStep
from lightning_cudagraph.tensors.buckets import Buckets as Buckets
from lightning_cudagraph.timing.events.profiler import Profiler as Profiler
from lightning_cudagraph.timing.events.timers import EventTimer as EventTimer
from lightning_cudagraph.timing.events.timers import TimerRegistry as TimerRegistry
from lightning_cudagraph.timing.layers.layer_selection import LayerTimings as LayerTimings
from lightning_cudagraph.timing.output.stages import StageSummary as StageSummary
from lightning_cudagraph.timing.output.step_times import StepTimes as StepTimes
from lightning_cudagraph.timing.output.summary import RunSummary as RunSummary
from lightning_cudagraph.timing.readings.windows import Times as Times
from lightning_cudagraph.trainer.callbacks.cuda_graph_callback import (
    CUDAGraphCallback as CUDAGraphCallback,
)
from lightning_cudagraph.trainer.callbacks.layer_timings_monitor import (
    LayerTimingsMonitor as LayerTimingsMonitor,
)
from lightning_cudagraph.trainer.doctor.diagnosis_report import DiagnosisReport as DiagnosisReport
from lightning_cudagraph.trainer.manual.frameworks import ManualOptimization as _ManualOptimization  # noqa: F401

__version__ = _version("lightning_cudagraph")
