"""`--compile`: a target's layers, its lm_head and a head's step through `torch.compile`.

What is compiled takes its weights as arguments, so one compiled layer serves every layer of its kind, every stage and
every generation: compiling ONE layer takes seconds, a model of them unrolled takes minutes. Whatever cannot be compiled
is an error (`NotCompiled`), never run otherwise.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.func import functional_call

from decoding.cache import KVMemory, LinearMemory, Place
from loading.target_config import LINEAR
from pipeline_model import SpeculationHead, Target
from script_utils import first_line


class NotCompiled(ValueError):
    """The target's layers cannot be compiled: there is no other way to run them then."""


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Around a first run: NotCompiled, which names `what`, where something cannot be compiled.

    On a terminal, a line says what is going on, for as long as it lasts.
    """
    shown = f"compiling {what} ..." if sys.stderr.isatty() else ""
    print(shown, end="", file=sys.stderr, flush=True)
    try:
        yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        raise NotCompiled(f"{what} cannot be compiled here ({first_line(error)}): leave --compile out") from None
    finally:
        print("\r" + " " * len(shown) + "\r" if shown else "", end="", file=sys.stderr, flush=True)


def layers_of(target: Target) -> str:
    """What `compiling` names when a target does not compile."""
    return f"the layers of model type {target.config.model_type!r}"


MOST_SHAPES = 1024  # of one compiled function in one process


def allow_shapes() -> None:
    """Let a function be compiled for so many shapes: behind torch's own limits it would run uncompiled, or fail."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_SHAPES


# What has been compiled lives as long as the model that it was compiled for: by kind.
_COMPILED: WeakKeyDictionary[Target | SpeculationHead, dict[tuple, Callable]] = WeakKeyDictionary()


def _once(model: Target | SpeculationHead, kind: tuple, make: Callable[[], Callable]) -> Callable:
    """What `make` returned when this kind was first asked for."""
    compiled = _COMPILED.setdefault(model, {})
    if kind not in compiled:
        compiled[kind] = make()
    return compiled[kind]


def _compile(function: Callable) -> Callable:
    allow_shapes()
    return torch.compile(function, dynamic=False, fullgraph=True)


def _shapes(module: nn.Module) -> tuple:
    """What two modules have in common which one compiled function can serve."""
    return tuple((name, weight.shape) for name, weight in module.named_parameters())


# ---------------------------------------------------------------------------------------------------------------------
# The target
# ---------------------------------------------------------------------------------------------------------------------


def compiled_layer(target: Target, index: int) -> Callable[..., Tensor]:
    """The forward of a decoder layer (0-based), compiled with its weights as arguments: one for all of its kind.

    (weights, hidden [W, 1, H], rope, mask, the layer's two memory tensors, nodes, parents, slots, [W] each) -> the
    layer's output. It is compiled anew for other shapes only.
    """
    layer, kind = target.layers[index], target.layer_types[index]
    memory_class = LinearMemory if kind == LINEAR else KVMemory
    kind = "layer", kind, _shapes(layer)
    return _once(target, kind, lambda: _compile(partial(_run_layer, _empty(layer), memory_class)))


def _run_layer(template, memory_class, weights, hidden, rope, mask, first, second, nodes, parents, slots):
    """A decoder layer with the weights of any layer of its kind: see `compiled_layer`."""
    memory = memory_class(first, second)
    memory.place = Place(0, first.shape[2], slots, parents, nodes)
    settings = {"attention_mask": mask, "position_embeddings": rope, "cache": memory}
    return functional_call(template, weights, (hidden,), settings, strict=True)


def compiled_logits(target: Target, head: SpeculationHead | None = None, width: int = 1) -> Callable[[Tensor], Tensor]:
    """Final norm and lm_head, the target's or a head's, of at most `width` rows: [..., H] -> [..., V].

    Compiled for `width` rows: the first one stands in for missing ones. NotCompiled where that is impossible.
    """
    owner, lm_head = (target, target.lm_head) if head is None else (head, head.lm_head)
    return _once(owner, ("logits", width, target.norm), lambda: _new_logits(target, lm_head, width))


def _new_logits(target: Target, lm_head: nn.Linear, width: int) -> Callable[[Tensor], Tensor]:
    last = nn.Sequential(target.norm, lm_head)
    run, weights = _compile(partial(functional_call, _empty(last))), dict(last.named_parameters())

    def logits(hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        count = len(rows)
        if count < width:
            rows = torch.cat([rows, rows[:1].expand(width - count, -1)])
        return run(weights, (rows,))[:count].view(*hidden.shape[:-1], -1)

    with compiling(layers_of(target)):
        logits(target.norm.weight.new_zeros(width, target.config.hidden_size))
    return logits


# ---------------------------------------------------------------------------------------------------------------------
# A speculation head
# ---------------------------------------------------------------------------------------------------------------------


class _Projections(nn.Module):
    """The rows of all types: see `compiled_projections`."""

    def __init__(self, head: SpeculationHead):
        super().__init__()
        self.head = head

    def forward(self, features: Tensor, nodes: Tensor) -> Tensor:
        rows = [self.head.shown_rows(kind, features.index_select(0, ids)) for kind, ids in enumerate(nodes.unbind())]
        return torch.cat(rows, dim=1)


def compiled_projections(head: SpeculationHead) -> Callable[[Tensor, Tensor], Tensor]:
    """`shown_rows` of W nodes of each of K types: features [nodes, m, H], node ids [K, W] -> [D, K * W, H]."""
    whole = _Projections(head)
    run = _once(head, ("projections",), lambda: _compile(partial(functional_call, _empty(whole))))
    elsewhere = ("head.spec_layers.", "head.lm_head.")
    weights = {name: weight for name, weight in whole.named_parameters() if not name.startswith(elsewhere)}
    return lambda features, nodes: run(weights, (features, nodes))


class _RowsLayer(nn.Module):
    """A speculation layer's `run_rows` as a module's forward."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *args) -> Tensor:
        return self.layer.run_rows(*args)


def compiled_head_layer(head: SpeculationHead, index: int, asked: int) -> Callable[..., Tensor]:
    """A speculation layer over R rows, of which the last `asked` are queries; one for all layers with as many.

    (rows [1, R, H], rope, mask [asked, capacity], keys, values [1, H_kv, capacity, D], slots [R] that the rows' own
    keys and values go to) -> [1, asked, H].
    """
    layer = _RowsLayer(head.spec_layers[index])
    kind = "layer", asked, _shapes(layer)
    run = _once(head, kind, lambda: _compile(partial(_run_head_layer, _empty(layer), asked)))
    return partial(run, dict(layer.named_parameters()))


def _run_head_layer(template, asked, weights, rows, rope, mask, keys, values, slots):
    """A speculation layer with the weights of any of them: see `compiled_head_layer`."""

    def write(key, value):
        return keys.index_copy_(2, slots, key), values.index_copy_(2, slots, value)

    return functional_call(template, weights, (rows, rope, write, mask, asked), strict=True)


# ---------------------------------------------------------------------------------------------------------------------
# Modules whose weights come from outside
# ---------------------------------------------------------------------------------------------------------------------


def _empty(layer: nn.Module) -> nn.Module:
    """A copy without weights: with those of one layer, what is compiled would be for that one alone."""
    weights = {id(weight): nn.Parameter(weight.to("meta"), requires_grad=False) for weight in layer.parameters()}
    empty = copy.deepcopy(layer, weights)
    for module in empty.modules():
        if type(module) is nn.Linear:
            module.__class__ = _StreamedLinear
    return empty


class _StreamedLinear(nn.Linear):
    """A linear layer to be compiled: on a CPU, a single row's product is a sum along each row of the weights.

    Compiled, such a sum reads the weights as fast as the memory gives them; the library's product of a row and a matrix
    takes up to twice as long.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or input.shape[:-1].numel() > 1:
            return super().forward(input)
        output = (self.weight.float() * input.float().view(-1)).sum(dim=-1)
        if self.bias is not None:
            output = output + self.bias
        return output.to(input.dtype).view(*input.shape[:-1], -1)
