"""Attribution of each moment of a step to layers, by hooks on modules and on autograd nodes.

The forward pass is tracked by hooks on modules, the backward pass by hooks on autograd nodes. The nodes
of a layer's call are a range of sequence numbers, and the engine runs the nodes of a thread in falling
order (`CompareNodeTaskTime` in torch/csrc/autograd/engine.cpp). So a layer's backward pass begins with
the first of its nodes that runs, and ends when one runs that is not its own. Two simpler ways fail: full
backward hooks break models with in-place activations, and the nodes of a layer's inputs do not show its
end, because three projections of one input share them.

The hooks exist only during a capture, or a timed step.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import is_dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_cudagraph.compat.method_patches import no_hook
from lightning_cudagraph.timing.layers.encoder_layers import unseen_by_encoder_layers
from lightning_cudagraph.timing.layers.layer_calls import LayerCalls, Layers
from lightning_cudagraph.timing.layers.recomputation import Recomputation
from lightning_cudagraph.timing.readings.spans import BACKWARD_TAG, FORWARD_TAG

_NONE: Layers = frozenset()

_NOT_CALLED = "the step does not call it, or past its hooks only (`.forward()`, compiled code)"

# The sequence number of every `AccumulateGrad` node. It runs as soon as its gradient is there, and is
# part of the layer that made the gradient.
_OF_PARAMETERS = 2**64 - 1


def _tensors_of_layer(tree: Any) -> Iterator[Tensor]:
    """The tensors in a layer's output, found without a call of user code.

    Of more containers than `tensors_in` of `tensors/writes.py` knows, because it runs once a call of a
    layer, and not for each op. Those of unknown types are skipped: a mark is lost then, and not the run.
    """
    pending, seen = [tree], set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
            continue
        if isinstance(value, UserDict):
            value = value.data
        members: Iterable[Any] = ()
        if isinstance(value, dict):
            members = dict.values(value)
        elif isinstance(value, list):
            members = list.__iter__(value)
        elif isinstance(value, tuple):
            members = tuple.__iter__(value)
        elif is_dataclass(value) and not isinstance(value, type):
            members = getattr(value, "__dict__", {}).values()  # properties may compute, or raise
        if id(value) not in seen:  # a container may contain itself
            seen.add(id(value))
            pending += members


def _nodes_of(tree: Any) -> list[Any]:
    """The nodes that have made the tensors of a tree."""
    nodes = []
    for tensor in _tensors_of_layer(tree):
        # A view whose base was written to may have no node any more. That is an error only if the step
        # uses the view.
        with suppress(RuntimeError):
            nodes.append(tensor.grad_fn)
    return [node for node in nodes if node is not None]


def _after(node: Any) -> list[Any]:
    """The nodes that consume the gradients of a node."""
    return [after for after, _ in node.next_functions if after is not None]


def _out_of_reach(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Reasons for layers that cannot have hooks, by name."""
    compiled: set[int] = set()
    dynamo: Any = sys.modules.get("torch._dynamo")  # not imported here: that takes long
    for layer in layers.values():
        if dynamo is not None and isinstance(layer, dynamo.OptimizedModule):
            compiled.update(map(id, layer._orig_mod.modules()))
        elif layer._compiled_call_impl is not None:
            compiled.update(map(id, layer.modules()))
    found = {
        # A hook would change the compiled code.
        name: "it is compiled, or part of what is"
        for name, layer in layers.items()
        if id(layer) in compiled or "_orig_mod" in name.split(".")
    }
    for name, layer in layers.items():
        if isinstance(layer, torch.jit.ScriptModule):
            found[name] = "a ScriptModule takes no hooks"
    return found


def _number(handle: RemovableHandle, number: int) -> None:
    """Give a hook a fixed id: Dynamo guards on ids of hooks, and would recompile in each timed step."""
    tables = [ref() for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    ours = [table for table in tables if table is not None and handle.id in table]
    if any(number in table for table in ours):
        return
    for table in ours:
        table[number] = table.pop(handle.id)
    handle.id = number


class _Hook:
    """A hook on a layer that does nothing in compiled code, and is not copied with the layer.

    In code that torch.compile traces, it would cause a graph break, and split a fused kernel.
    """

    def __init__(self, layer: nn.Module, act: Callable[..., None]) -> None:
        self._layer = layer
        self._act = act

    def __call__(self, module: nn.Module, *args: Any) -> None:
        # A shallow copy of the layer has this same hook, for good.
        if not torch.compiler.is_compiling() and module is self._layer:
            self._act(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return no_hook()


class LayerMarks:
    """Tracker of a step through its layers.

    At each change, `turn_to` is called with the tags of the layers' passes that the time from then on
    belongs to.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], turn_to: Callable[[frozenset[str]], None]
    ) -> None:
        self._layers = layers
        self._out_of_reach = _out_of_reach(layers)
        self._tell = turn_to
        # The pass under way; None after the backward pass.
        self._pass: str | None = FORWARD_TAG
        self._calls = LayerCalls()
        self._captured = True
        self._recomputation = Recomputation(lambda: self._here, self._recomputation_moved)
        # The layers of the node that runs now.
        self._at_node: Layers = _NONE
        self._watched: set[tuple[int, int]] = set()
        self._runs: set[int] = set()
        self._made_nodes: set[str] = set()
        self._unhooked: set[nn.Module] = set()
        self._differentiated_twice = False
        self._has_ended_forward = False

    @contextmanager
    def followed(self, captured: bool) -> Iterator[None]:
        """Context in which the layers have hooks.

        In a capture every node is watched. In an eager step, whose host time counts, only nodes at which
        the layer changes are, if they run in the expected order.
        """
        self._captured = captured
        with ExitStack() as stack:
            stack.callback(self._leave)
            stack.enter_context(self._recomputation.noticed())
            stack.enter_context(unseen_by_encoder_layers(_Hook, self._unhooked.add))
            for name, layer in self._layers.items():
                if name not in self._out_of_reach:
                    for handle in self._hook(name, layer):
                        stack.callback(handle.remove)
            yield

    def _leave(self) -> None:
        """Stop all callbacks: nodes to which user code holds references may run after the step's end.

        Without the callback, the events are freed at once, and not by Python's collector of cycles.
        """
        self._pass = None
        self._tell = lambda tags: None

    def begin_forward(self) -> None:
        """Note the beginning of a forward pass; a step may have several."""
        self._pass = FORWARD_TAG
        self._at_node = _NONE

    def end_forward(self, output: Any) -> None:
        self._turn_to(_NONE)
        # Calls of layers from here on are recomputation, and count for the backward pass.
        self._pass = BACKWARD_TAG
        self._has_ended_forward = True
        if self._captured:
            self._watch_tensors(output)
        else:
            self._watch_changes(output)

    def end_backward(self) -> None:
        """Note the end of the backward pass; a second call does nothing."""
        self._turn_to(_NONE)
        self._pass = None

    def untimed(self, timed: frozenset[str]) -> dict[str, str]:
        """Reasons for layers that are not timed, by their names in words."""
        found: dict[str, str] = {}
        for name, layer in self._layers.items():
            if name in self._out_of_reach:
                found[f"`{name}`"] = self._out_of_reach[name]
            elif FORWARD_TAG + name not in timed and layer in self._unhooked:
                found[f"`{name}`"] = (
                    "the `TransformerEncoderLayer` around it is in evaluation mode, where torch computes"
                    " it in one piece if there are no hooks in it"
                )
            elif FORWARD_TAG + name not in timed:
                found[f"`{name}`"] = _NOT_CALLED
            elif self._differentiated_twice:
                found[f"the backward pass of `{name}`"] = (
                    "the step differentiates with `create_graph=True`, and the nodes that it makes by"
                    " that cannot be told from those of layers"
                )
            elif BACKWARD_TAG + name not in timed:
                found[f"the backward pass of `{name}`"] = self._why_no_backward(name)
        return found

    def _why_no_backward(self, name: str) -> str:
        if name not in self._made_nodes:
            return "it computes nothing that needs a gradient"
        if not self._has_ended_forward:
            return "the step has no backward pass"
        return "no gradient came to what it computes"

    @property
    def backward_is_known(self) -> bool:
        """True if the nodes of the backward pass could be attributed to layers."""
        return not self._differentiated_twice

    @property
    def _here(self) -> Layers:
        """The layers whose calls, recomputation or nodes run now."""
        if self._calls.stack:
            return self._calls.stack[-1].layers
        recomputed = self._recomputation.layers
        return self._at_node if recomputed is None else recomputed

    def _recomputation_moved(self) -> None:
        if self._pass == BACKWARD_TAG:
            self._turn_to(self._here)

    def _turn_to(self, layers: Layers) -> None:
        if self._pass is not None:
            self._tell(frozenset(self._pass + name for name in layers))

    def _hook(self, name: str, layer: nn.Module) -> list[Any]:
        def before(args: Any, kwargs: Any) -> None:
            call = self._calls.begin(self._here | {name})
            self._turn_to(call.layers)

        def after(args: Any, kwargs: Any, output: Any) -> None:
            if not self._calls.stack or name not in self._calls.stack[-1].layers:
                return  # a hook before ours has raised, so that the call has not begun
            if self._calls.stack.pop().end():
                self._made_nodes.add(name)
            self._turn_to(self._here)
            self._watch_tensors(output)

        # First and last: the work of user hooks counts for the layer.
        first = layer.register_forward_pre_hook(_Hook(layer, before), with_kwargs=True, prepend=True)
        # Called on exceptions too, by one of which checkpointing ends recomputation inside a call.
        last = layer.register_forward_hook(_Hook(layer, after), with_kwargs=True, always_call=True)
        _number(first, -1)
        _number(last, -2)
        hooks: Any = layer._forward_pre_hooks
        hooks.move_to_end(first.id, last=False)
        return [first, last]

    def _watch_tensors(self, tree: Any) -> None:
        for node in _nodes_of(tree):
            self._watch(node, get_ident(), self._at_node)

    def _watch_changes(self, tree: Any) -> None:
        """Watch the nodes of the graph behind an output at which the layer changes."""
        thread = get_ident()
        nodes: dict[int, Any] = {}
        pending = _nodes_of(tree)
        while pending:
            node = pending.pop()
            number: int = node._sequence_nr()
            if number != _OF_PARAMETERS and number not in nodes:
                nodes[number] = node
                pending += _after(node)
        before = _NONE
        for number in sorted(nodes, reverse=True):
            layers = self._calls.around(number, thread) or _NONE
            if layers != before:
                self._watch(nodes[number], thread, _NONE)
            before = layers
        self._watched.update((thread, number) for number in nodes)

    def _watch(self, node: Any, thread: int, outside: Layers) -> None:
        """Have a node report its run, and then watch the nodes that run after it.

        A node that `thread` made outside of all layers' calls is attributed to the layers `outside`.
        """
        number: int = node._sequence_nr()
        if number == _OF_PARAMETERS or (thread, number) in self._watched:
            return
        self._watched.add((thread, number))
        # Emptied when the node runs: a chain of closures would be freed recursively.
        following = _after(node)

        def about_to_run(gradients: Any) -> None:
            if torch.is_grad_enabled():
                self._differentiated_twice = True
            while following:
                self._watch(following.pop(), thread, outside)
            if self._pass == BACKWARD_TAG:
                self._notice_end(torch._C._current_graph_task_id())
                self._at_node = self._calls.around(number, thread) or outside
                self._turn_to(self._at_node)

        node.register_prehook(about_to_run)

    def _notice_end(self, run: int) -> None:
        """Restore the current layers at the end of an autograd run, which may be nested in a node."""
        if run in self._runs:
            return
        self._runs.add(run)
        before = self._at_node

        def ended() -> None:
            self._at_node = before
            if self._pass == BACKWARD_TAG:
                self._turn_to(self._here)

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(ended)
