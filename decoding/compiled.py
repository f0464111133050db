"""`--compile`: a target's layers, its lm_head and a head's step through `torch.compile`.

What is compiled takes its weights as arguments, so one compiled layer serves every layer of its kind, every stage and
every generation: compiling ONE layer takes seconds, a model of them unrolled takes minutes. Whatever cannot be compiled
is an error (`NotCompiled`), never run otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.func import functional_call

from loading.target_config import LINEAR
from pipeline_model import KVMemory, LinearMemory, Place, Target
from script_utils import first_line


class NotCompiled(ValueError):
    """The target's layers cannot be compiled: there is no other way to run them then."""


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Around a first run: NotCompiled, which names `what`, where something cannot be compiled."""
    try:
        yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        raise NotCompiled(f"{what} cannot be compiled here ({first_line(error)}): leave --compile out") from None


def layers_of(target: Target) -> str:
    """What `compiling` names when a target does not compile."""
    return f"the layers of model type {target.config.model_type!r}"


MOST_SHAPES = 1024  # of one compiled function in one process


def allow_shapes() -> None:
    """Let a function be compiled for so many shapes: behind torch's own limits it would run uncompiled, or fail."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_SHAPES


# What has been compiled for a target lives as long as the target does: by kind of layer, and its lm_head.
_LAYERS: WeakKeyDictionary[Target, dict[tuple, Callable[..., Tensor]]] = WeakKeyDictionary()
_LOGITS: WeakKeyDictionary[Target, Callable[[Tensor], Tensor]] = WeakKeyDictionary()


def compiled_layer(target: Target, index: int) -> Callable[..., Tensor]:
    """The forward of a decoder layer (0-based), compiled with its weights as arguments: one for all of its kind.

    (weights, hidden [W, 1, H], rope, mask, the layer's two memory tensors, nodes, parents, slots, [W] each) -> the
    layer's output. It is compiled anew for other shapes only.
    """
    layer, compiled = target.layers[index], _LAYERS.setdefault(target, {})
    shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
    kind = target.layer_types[index], shapes
    if kind not in compiled:
        memory_class = LinearMemory if target.layer_types[index] == LINEAR else KVMemory
        allow_shapes()
        compiled[kind] = torch.compile(partial(_run_layer, _empty(layer), memory_class), dynamic=False, fullgraph=True)
    return compiled[kind]


def _run_layer(template, memory_class, weights, hidden, rope, mask, first, second, nodes, parents, slots):
    """A decoder layer with the weights of any layer of its kind: see `compiled_layer`."""
    memory = memory_class(first, second)
    memory.place = Place(0, first.shape[2], slots, parents, nodes)
    settings = {"attention_mask": mask, "position_embeddings": rope, "cache": memory}
    return functional_call(template, weights, (hidden,), settings, strict=True)


def compiled_logits(target: Target) -> Callable[[Tensor], Tensor]:
    """`Target.logits` of one h_L [H], compiled. NotCompiled where that is impossible."""
    if target not in _LOGITS:
        last = nn.Sequential(target.norm, target.lm_head)
        run = torch.compile(partial(functional_call, _empty(last)), dynamic=False, fullgraph=True)
        weights = dict(last.named_parameters())
        with compiling(layers_of(target)):
            run(weights, (target.norm.weight.new_zeros(target.config.hidden_size),))
        _LOGITS[target] = lambda hidden: run(weights, (hidden,))
    return _LOGITS[target]


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
