"""Cases of sharded weights: captured, refused with the reason of the table, or eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.loops import utilities
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_cudagraph import (
    CaptureError,
    CUDAGraphCallback,
    CUDAGraphError,
    PeerError,
    RunSummary,
    UnsupportedError,
)
from tests.distributed.cases import Here
from tests.harness import Net, Trace, assert_same, cosine, differences, loader

STEPS = 6


class Sharded(pl.LightningModule):
    """Each layer is gathered when it is needed."""

    reshard: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(self, mesh=mesh, reshard_after_forward=self.reshard)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ReshardedAlways(Sharded):
    reshard = True


class ReshardedNever(Sharded):
    reshard = False


class TensorParallel(Sharded):
    """Each matrix is sharded over the processes."""

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


class Whole(Sharded):
    """The strategy shards the module as a whole."""

    def configure_model(self) -> None:
        pass


def _fit(
    here: Here,
    build: type[Sharded],
    strategy: Any,
    callback: CUDAGraphCallback | None,
    batches: DataLoader[Any],
) -> list[Any]:
    pl.seed_everything(3, verbose=False)
    module = build()
    trainer = pl.Trainer(
        accelerator=here.accelerator,
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[] if callback is None else [callback],
        default_root_dir=here.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, batches)
    weights = [getattr(p, "_local_tensor", p).detach().clone() for p in module.parameters()]
    dist.barrier()
    return [module.losses, weights, trainer.global_step]


def _refused_or_eager(here: Here, build: type[Sharded], strategy: Any, reason: str) -> None:
    """Check that a run raises with the reason, and with the other policy reports it and trains eagerly.

    Args:
        here: the process and its folder.
        build: makes the module.
        strategy: makes the strategy.
        reason: part of the reason.
    """
    batches = loader(ragged=False, seed=here.rank, batches=STEPS)
    with pytest.raises(UnsupportedError, match=f"(?s){reason}"):
        _fit(here, build, strategy(), CUDAGraphCallback(), batches)
    callback = CUDAGraphCallback(on_unsupported="eager")
    with pytest.warns(UserWarning, match=reason) if here.rank == 0 else _nothing():
        eager = _fit(here, build, strategy(), callback, batches)
    plain = _fit(here, build, strategy(), None, batches)
    found = differences(plain, eager)
    assert not found, found[:8]
    assert plain[2] == STEPS
    assert "all steps eager" in str(callback.summary), callback.summary


class _nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class ShardedNet(Net):
    """Dropout, batch norm, logs and a schedule; each layer is gathered when it is needed."""

    reshard: bool | None = None
    precision = MixedPrecisionPolicy()

    def configure_model(self) -> None:
        arguments: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],
            "reshard_after_forward": self.reshard,
            "mp_policy": self.precision,
        }
        for layer in (self.features[0], self.head):
            fully_shard(layer, **arguments)
        fully_shard(self, **arguments)


class NetReshardedAlways(ShardedNet):
    reshard = True


class NetReshardedNever(ShardedNet):
    reshard = False


class NetInMixedPrecision(ShardedNet):
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def __init__(self) -> None:
        super().__init__()
        self.features[1] = nn.LayerNorm(24)  # batch norm has buffers, which stay in float32


def _all_sharded() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


_SHARDED: dict[str, Any] = {
    "build": ShardedNet,
    "strategy": _all_sharded,
    "checkpoint_every": 0,
    "enable_checkpointing": False,
    "val_loader": loader(ragged=False, seed=1, batches=2),
}


def _same_when_sharded(
    here: Here, build: Callable[[], ShardedNet], captures: int = 1, **kwargs: Any
) -> Trace:
    _, graph = here.assert_same_runs(**_SHARDED | {"build": build} | kwargs)
    assert graph.counts.captures == captures, graph.counts
    assert graph.counts.replayed >= 10, graph.counts
    return graph


def fully_sharded(here: Here) -> None:
    """FSDP2, with the outermost module's weights gathered from forward to backward pass."""
    _same_when_sharded(here, ShardedNet)


def fully_sharded_with_default_optimizers(here: Here) -> None:
    """Lists of tensors with numbers in tensors, on a schedule."""
    for make in (torch.optim.AdamW, torch.optim.Adam, _with_momentum):

        def built(make: Any = make) -> Any:
            return ShardedNet(lambda parameters: make(parameters, lr=1e-2), cosine)

        _same_when_sharded(here, built)


def _with_momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.1)


def fully_sharded_in_windows(here: Here) -> None:
    """Accumulation, with gradients reduced in each batch, and clipping by the norm of all."""
    _same_when_sharded(
        here,
        ShardedNet,
        captures=3,  # the first of a window, those in the middle, the last
        max_epochs=6,
        accumulate_grad_batches=4,
        gradient_clip_val=0.1,
    )


class Unfinished(Callback):
    """In one epoch, reductions are waited for once in an accumulation window, after its last batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch in (2, 3):
            pl_module.set_is_last_backward(trainer.current_epoch == 3 or batch_idx % 4 == 3)


def fully_sharded_in_windows_that_wait_once(here: Here) -> None:
    """No graph waits for reductions that an eager step has left pending."""
    runs = {"max_epochs": 6, "accumulate_grad_batches": 4, **_SHARDED}
    plain = here.train("plain", None, callbacks=(Unfinished(),), **runs)
    graph = here.train("graph", CUDAGraphCallback(), callbacks=(Unfinished(),), **runs)
    # On a GPU they are still being reduced while this looks at them; what comes of them is compared.
    on_their_way = [f"[[]{step}][[]'gradients'" for step in (16, 17, 18, 20, 21, 22)]
    assert_same(plain, graph, ignore=("_ms/", *on_their_way))
    eager = [n for reason, n in graph.counts.eager.items() if "gradients wait to be reduced" in reason]
    # All of the third epoch, the last of each window too, but the first, which finds weights gathered.
    assert sum(eager) == 7, graph.counts
    assert graph.counts.replayed >= 10, graph.counts


class SyncedBehind(Callback):
    """Gradients are reduced with those of the next batch; a hook in the step resets the switch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.set_requires_gradient_sync(trainer.current_epoch != 2 or batch_idx % 2 == 1)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.set_requires_gradient_sync(True)


def fully_sharded_with_a_switch_that_is_back(here: Here) -> None:
    """Pending work of an eager step is detected, even if the switches are reset."""
    runs = {"max_epochs": 5, **_SHARDED}
    plain = here.train("plain", None, callbacks=(SyncedBehind(),), **runs)
    graph = here.train("graph", CUDAGraphCallback(), callbacks=(SyncedBehind(),), **runs)
    assert_same(plain, graph, ignore=("_ms/",))
    eager = [n for reason, n in graph.counts.eager.items() if "gradients wait to be reduced" in reason]
    assert sum(eager) == 7, graph.counts
    assert graph.counts.replayed >= 10, graph.counts


class SwitchesInStep(ShardedNet):
    """The step itself defers its reductions to the next batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.syncs = batch_idx % 2 == 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.set_requires_gradient_sync(self.syncs)
        return super().training_step(batch, batch_idx)


def fully_sharded_with_a_switch_in_the_step(here: Here) -> None:
    """A replay would not set the switch, so the step is not captured."""
    runs = _SHARDED | {"build": SwitchesInStep, "accumulate_grad_batches": 2}
    refused = here.train("refused", CUDAGraphCallback(), raises=CaptureError, **runs)
    assert "The step changes " in str(refused.error)
    assert "reduce_grads` of `fully_shard`" in str(refused.error)
    plain = here.train("plain", None, **runs)
    eager = here.train("eager", CUDAGraphCallback(on_unsupported="eager"), **runs)
    assert_same(plain, eager, ignore=("_ms/",))
    assert eager.summary.calls.replayed == 0, eager.summary.calls


class Meddling(Callback):
    """Reads the module between two steps, writes into its weights, and gathers them too early."""

    def __init__(self) -> None:
        self.said: list[Tensor] = []
        self.found_gathered = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, n: int) -> None:
        if trainer.current_epoch == 1 and n % 4 == 1:
            with torch.no_grad():
                pl_module.eval()
                self.said.append(trainer.strategy.model(torch.ones(2, 12, device=pl_module.device)))
                pl_module.train()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        weights = [*pl_module.parameters()]
        self.found_gathered |= any(not isinstance(weight, DTensor) for weight in weights)
        with torch.no_grad():
            for weight in weights:  # of the outermost module: what is gathered, and not what is kept
                weight.mul_(0.9)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, n: int) -> None:
        if trainer.current_epoch == 2 and n % 4 == 2:
            pl_module.head.unshard(async_op=True)


def fully_sharded_and_meddled_with(here: Here) -> None:
    """Weights that are gathered already are used as they are."""
    runs = {"max_epochs": 4, **_SHARDED}
    plain, graph = Meddling(), Meddling()
    one = here.train("plain", None, callbacks=(plain,), **runs)
    other = here.train("graph", CUDAGraphCallback(), callbacks=(graph,), **runs)
    assert_same(one, other, ignore=("_ms/",))
    assert not differences(plain.said, graph.said)
    assert plain.found_gathered
    assert other.summary.fit.replayed >= 10, other.summary.fit
    assert any("weights are gathered before it" in reason for reason in other.summary.fit.eager), (
        other.summary.fit
    )


class Reading(ShardedNet):
    """Reads a value in the middle of the forward or of the backward pass."""

    in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x)
        if not self.in_backward and hidden.sum().item() > 1e9:
            return hidden
        if self.in_backward and hidden.requires_grad:
            hidden.register_hook(self._read)
        return self.head(hidden)

    def _read(self, gradient: Tensor) -> Tensor | None:
        return gradient * 0 if gradient.sum().item() > 1e9 else None


class ReadingInBackward(Reading):
    in_backward = True


def fully_sharded_and_not_captured(here: Here) -> None:
    """A capture that fails in the middle leaves nothing gathered, and no pending work."""
    for build in (Reading, ReadingInBackward):
        runs = _SHARDED | {"build": build}
        plain = here.train(f"plain {build.__name__}", None, **runs)
        callback = CUDAGraphCallback(on_unsupported="eager")
        eager = here.train(f"eager {build.__name__}", callback, **runs)
        assert_same(plain, eager, ignore=("_ms/",))
        assert eager.summary.fit.replayed == 0, eager.summary.fit
        assert any("`.item()`" in reason for reason in eager.summary.fit.eager), eager.summary.fit


def _leave(gradients: Tensor) -> None:
    """Replaces an all-reduce that a one-dimensional mesh does not have."""


class Changing(Callback):
    """Changes settings of `fully_shard` in the second and third epoch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1:
            pl_module.set_requires_gradient_sync(batch_idx % 4 > 1)
        elif trainer.current_epoch == 2:
            pl_module.set_reshard_after_backward(batch_idx != 3)
        elif trainer.current_epoch == 3:
            pl_module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
            pl_module.set_gradient_divide_factor(4.0)
        elif trainer.current_epoch == 4:
            pl_module.head.set_all_reduce_hook(_leave)


def fully_sharded_with_settings_that_change(here: Here) -> None:
    """Settings of `fully_shard` are guarded; steps that keep something on the host are eager."""
    runs = {"max_epochs": 5, **_SHARDED}
    plain = here.train("plain", None, callbacks=(Changing(),), **runs)
    graph = here.train("graph", CUDAGraphCallback(), callbacks=(Changing(),), **runs)
    assert_same(plain, graph, ignore=("_ms/",))
    for reason in ("gradients wait to be reduced", "weights stay gathered", "by code of the user's"):
        assert any(reason in text for text in graph.counts.eager), graph.counts
    assert any("of `fully_shard`" in text for text in graph.counts.recaptures), graph.counts


def fully_sharded_in_mixed_precision(here: Here) -> None:
    """Weights are gathered in bfloat16."""
    _same_when_sharded(here, NetInMixedPrecision)


class Offloaded(ShardedNet):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


class ReducedByHand(ShardedNet):
    def configure_model(self) -> None:
        super().configure_model()
        self.head.set_all_reduce_hook(lambda gradients: None)  # type: ignore[operator]


class Hybrid(ShardedNet):
    def configure_model(self) -> None:
        mesh = dist.init_device_mesh(self.device.type, (1, 2), mesh_dim_names=("copies", "parts"))
        fully_shard(self, mesh=mesh)


def fully_sharded_in_two_ways(here: Here) -> None:
    """Refused: some processes have copies of other processes' shards."""
    with pytest.raises(UnsupportedError, match="split between processes in more than one way"):
        here.train("graph", CUDAGraphCallback(), **_SHARDED | {"build": Hybrid})


def a_torch_that_is_built_differently(here: Here) -> None:
    """Reported when training starts."""
    with pytest.MonkeyPatch.context() as patch:

        def lose(trainer: Any, pl_module: Any) -> None:  # which torch itself needs until then
            patch.delattr(FSDPParamGroup, "is_sharded")

        with pytest.raises(CUDAGraphError, match=r"FSDPParamGroup\.is_sharded` is gone from torch"):
            here.train(
                "graph", CUDAGraphCallback(), callbacks=(LambdaCallback(on_fit_start=lose),), **_SHARDED
            )


def fully_sharded_in_ways_of_ones_own(here: Here) -> None:
    """Refused: host work or user code in each gathering of weights."""
    for build, reason in (
        (Offloaded, "keeps weights in host memory"),
        (ReducedByHand, "all_reduce_hook"),
    ):
        with pytest.raises(UnsupportedError, match=f"(?s){reason}"):
            here.train("graph", CUDAGraphCallback(), **_SHARDED | {"build": build})


def several_streams_of_sharded_weights(here: Here) -> None:
    """Ops before a resize of memory, which is no op, come before all behind it."""
    for build in (ShardedNet, NetReshardedAlways, NetReshardedNever):
        _same_when_sharded(here, build, callback=CUDAGraphCallback(streams=3))


def _same_evaluations(here: Here, build: type[ShardedNet], **kwargs: Any) -> RunSummary:
    """The summary of a run with graphs of evaluations that is equal to one without."""
    callback = CUDAGraphCallback(evaluation=True)
    val_loader = loader(ragged=False, seed=1, batches=12)  # for both
    asked = _SHARDED | {
        "build": build,
        "callback": callback,
        "val_loader": val_loader,
        "max_epochs": 5,
    }
    here.assert_same_runs(**asked | kwargs)
    return callback.summary


def evaluations_of_sharded_weights(here: Here) -> None:
    """The first batch of each leaves weights gathered, which the others read."""
    summary = _same_evaluations(here, ShardedNet)
    validate = summary.validate
    assert validate.captures == 1, summary
    assert validate.replayed >= 20, summary
    assert [*validate.eager.values()] == [5], summary
    assert "gathered in the first batch" in next(iter(validate.eager)), summary


def evaluations_that_release_all(here: Here) -> None:
    """No batch is special, but for the very first."""
    summary = _same_evaluations(here, NetReshardedAlways)
    assert summary.validate.replayed >= 24, summary
    assert [*summary.validate.eager.values()] == [1], summary


class Swaps(Callback):
    """Evaluates other weights, written where gathered ones are not renewed."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kept = [(p, p.detach().clone()) for p in pl_module.parameters()]
        for weight, _ in self.kept:
            weight.data.mul_(0.5)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == 3:
            with torch.no_grad():
                for weight, _ in self.kept:
                    weight.mul_(2.0)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with torch.no_grad():
            for weight, value in self.kept:
                weight.copy_(value)


def evaluations_of_other_weights(here: Here) -> None:
    """Writes of sharded weights are not seen by batches that find them gathered already."""
    summary = _same_evaluations(here, ShardedNet, callbacks=(Swaps(),))
    assert summary.validate.replayed >= 10, summary


class Counts(ShardedNet):
    """Counts batches of evaluations in a weight of the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.seen += 1
        super().validation_step(batch, batch_idx)
        self.log("seen", self.seen.sum())


def evaluations_that_write_weights(here: Here) -> None:
    """Writes of weights that are gathered last until these are let go of."""
    summary = _same_evaluations(here, Counts)
    assert summary.validate.replayed >= 15, summary


class Prefetches(ShardedNet):
    """The last layer begins to gather the first, for the next forward pass."""

    def configure_model(self) -> None:
        super().configure_model()
        first: Any = self.features[0]
        last: Any = self.head
        last.set_modules_to_forward_prefetch([first])


def evaluations_with_prefetch(here: Here) -> None:
    """Weights that are on their way are no weights yet."""
    summary = _same_evaluations(here, Prefetches)
    assert any("being gathered already" in text for text in summary.validate.eager), summary


def evaluations_without_a_fit(here: Here) -> None:
    """`trainer.validate`, which has no votes of a fit; and in inference mode, as with NCCL."""
    _evaluated_alone(here, "with gloo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "_distributed_is_initialized", lambda: False)
        _evaluated_alone(here, "in inference mode")


class ShardedEverywhere(ShardedNet):
    def configure_model(self) -> None:
        if not isinstance(self, FSDPModule):  # by an evaluation before
            super().configure_model()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self(batch[0])
        return logits


def _evaluated_alone(here: Here, how: str) -> None:
    def evaluate(trainer: pl.Trainer, module: Any, _: Any, batches: Any, **kwargs: Any) -> None:
        module.told = [
            trainer.validate(module, batches, verbose=False),
            trainer.test(module, batches, verbose=False),
            trainer.predict(module, batches),
        ]

    asked = _SHARDED | {
        "build": ShardedEverywhere,
        "val_loader": loader(ragged=False, seed=1 + here.rank, batches=9),
        "use_distributed_sampler": False,
    }
    callback = CUDAGraphCallback(evaluation=True)
    told: list[Any] = []
    for name, each in (("plain", None), ("graph", callback)):
        trace = here.train(f"{name} {how}", each, fit=evaluate, **asked)
        told.append(trace.module.told)  # type: ignore[union-attr]
    assert not differences(*told), differences(*told)[:8]
    assert callback.summary.predict.replayed >= 4, callback.summary


def evaluations_that_one_refuses(here: Here) -> None:
    """Evaluations that one process cannot capture are captured by none."""

    class RefusedOnOne(ShardedNet):
        def configure_model(self) -> None:
            super().configure_model()
            if here.rank == 1:
                self.scripted = torch.jit.script(nn.ReLU())

    callback = CUDAGraphCallback(evaluation=True, on_unsupported="eager")
    with pytest.warns(UserWarning, match="eager") if here.rank == 0 else _nothing():
        here.assert_same_runs(**_SHARDED | {"build": RefusedOnOne, "callback": callback})
    assert "The module `scripted` is a TorchScript module" in str(callback.summary)


def evaluations_of_other_lengths(here: Here) -> None:
    """One process with a batch less would leave the other in a collective; the vote ends both."""
    batches = loader(ragged=False, seed=1, batches=6 - here.rank)
    asked = {"val_loader": batches, "use_distributed_sampler": False}
    with pytest.raises(PeerError, match="before batch 5 of all evaluations"):
        here.train("graph", CUDAGraphCallback(evaluation=True), **_SHARDED | asked)


def fully_sharded_always(here: Here) -> None:
    """All weights are released after the forward pass."""
    _same_when_sharded(here, NetReshardedAlways)


def fully_sharded_never(here: Here) -> None:
    """All weights stay gathered until the end of the backward pass."""
    _same_when_sharded(here, NetReshardedNever)


def tensor_parallel(here: Here) -> None:
    """A matrix of the module is sharded: each process has half of it."""

    def strategy() -> ModelParallelStrategy:
        return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)

    _refused_or_eager(here, TensorParallel, strategy, "with tensor parallelism, parameters are")


def fully_sharded_as_one(here: Here) -> None:
    """FSDP1, which Lightning has on GPUs only."""
    _refused_or_eager(here, Whole, FSDPStrategy, "FSDP1 gathers weights")
