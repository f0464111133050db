"""What goes between host and device in a cycle: a copy that the host waits for costs a GPU more than a small layer.

There is no GPU here: calls that would copy to one or from one are counted.
"""

from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from baselines.ppsd import ppsd_decoder
from decoding.nodes import HostCopies
from decoding.sampling import Sampling
from distributed_inference.remote import RemoteExecutor, _Arrival, _Flight
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter
from tests.tiny import hf_greedy, oracle, random_prompt, tiny_head, tiny_model, tiny_target
from tests.tiny_baselines import shadow, tiny_ppsd

SIZES, PROMPT, WARM, CYCLES = (1, 1, 2), 6, 8, 16
ROOM = 40  # new tokens: so many cycles never end a generation


class CopyCounter(TorchFunctionMode):
    """Counts calls that copy between host and device, if there is one: by kind.

    hidden   to the device, with a wait: a tensor made there from numbers, a list as an index, `.to(device)`
    read     to the host: numbers of a tensor
    """

    READS = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__int__, torch.Tensor.__float__)
    READS += (torch.Tensor.__bool__, torch.Tensor.__index__, torch.Tensor.cpu, torch.Tensor.nonzero)

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            self.counts["hidden"] += 1
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and has_list(args[1]):
            self.counts["hidden"] += 1
        if function is torch.Tensor.to and any(isinstance(value, torch.device) for value in (*args, *kwargs.values())):
            self.counts["hidden"] += 1
        if function in self.READS:
            self.counts["read"] += 1
        return function(*args, **kwargs)


def has_list(index):
    return any(isinstance(part, (list, range)) for part in (index if isinstance(index, tuple) else (index,)))


@pytest.fixture
def counted(monkeypatch):
    """Counts what it runs: a function of steps, each of which is counted alone."""
    copied = Counter()
    copy = HostCopies.copy

    def counting(copies, numbers, into=None):
        copied["copies"] += 1
        with torch._C.DisableTorchFunction():
            return copy(copies, numbers, into)

    monkeypatch.setattr(HostCopies, "copy", counting)

    def count(step):
        copied.clear()
        with CopyCounter() as mode:
            step()
        return dict(mode.counts | copied)

    return count


def test_copies_are_seen():
    """Guards against a counter that counts nothing."""
    device, counter = torch.device("cpu"), CopyCounter()
    with counter:
        numbers = torch.tensor([1, 2, 3], device=device)
        numbers[[0, 1]] = 5
        numbers[[0]].to(device)
        torch.arange(3, device=device)[numbers[:1] * 0]
    assert counter.counts == {"hidden": 4}
    with counter:
        assert int(numbers[2]) == 3
        assert float(numbers[2]) == numbers[2].item() == numbers.tolist()[2]
        assert numbers[2] > 0
    assert counter.counts["read"] == 5


def steady_cycles(decoder, counted):
    """What a generation's cycles copy, from when its pipeline is full."""
    generation = decoder.start(random_prompt(PROMPT), ROOM)
    next(iter(generation))
    for _ in range(WARM):
        generation._cycle()
    return [counted(generation._cycle) for _ in range(CYCLES)]


def follow(decoder, family):
    """Let a chain's drafts be right, but for some."""
    prompt = random_prompt(PROMPT)
    sequence = prompt + hf_greedy(tiny_model(family), prompt, ROOM)
    shadow(decoder, prompt, oracle(sequence, rank=lambda position: -(position % 5 == 0)))


@pytest.mark.parametrize(("family", "compiled"), [("llama", False), ("qwen3 window", False), ("qwen3_5", True)])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_steady_cycle_copies_once_a_stage_and_once_for_the_head(
    family, width, temperature, compiled, counted, monkeypatch
):
    """Guards against cycles on a GPU that wait for a dozen small copies: rollbacks and verdicts included."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    target = tiny_target(family)
    head = tiny_head(target, SIZES)
    executor = LocalExecutor(target, SIZES, head.config.anchors, compiled=compiled)
    drafter = SPDDrafter(head, target, SIZES, compiled=compiled)
    decoder = Decoder(executor, drafter, draft_top_k=width, sampling=Sampling(temperature), seed=1)
    if width == 1 and temperature == 0:
        follow(decoder, family)
    for cycle in steady_cycles(decoder, counted):
        assert "hidden" not in cycle
        assert 1 <= cycle["copies"] <= 2 + (width > 1)  # nodes that enter, the head's, rows that a rollback leaves
        assert cycle["read"] <= 2 + (temperature > 0 and width == 1)  # the draft, the verdict, a sampled correction


def test_a_steady_cycle_of_ppsd_copies_once(counted):
    """Guards against a drafter that waits for copies of its own."""
    target = tiny_target("llama")
    decoder = ppsd_decoder(target, tiny_ppsd(target, SIZES), SIZES)
    follow(decoder, "llama")
    assert {cycle.get("hidden", 0) for cycle in steady_cycles(decoder, counted)} == {0}
    assert max(cycle["copies"] for cycle in steady_cycles(decoder, counted)) == 1


def test_anchors_of_partly_dead_batches_are_picked_by_one_copy(counted):
    """Guards against a copy for each stage on the draft rank; and against rows of other nodes than those alive."""
    setup = SimpleNamespace(layout=SimpleNamespace(stage_sizes=SIZES), captured_by=lambda stage, _: (stage + 1,))
    target = SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(vocab_size=9))
    executor = RemoteExecutor(SimpleNamespace(setup=setup, target=target), (0, 1, 2, 3))
    arrivals = []
    for stage, alive in enumerate([[0, 1, 2], [1], [0, 2]]):
        flight = _Flight(0, (3, 4, 5), torch.tensor([3, 4, 5]))
        flight.alive = alive
        arrivals.append(_Arrival(stage, flight, [torch.arange(3.0)[:, None] + 10 * stage]))
    captured = deque()
    counts = counted(lambda: captured.extend(executor._captured(arrivals)))
    assert counts == {"copies": 1}
    assert [found.nodes.tolist() for found in captured] == [[3, 4, 5], [4], [3, 5]]
    assert [found.hidden[stage + 1].flatten().tolist() for stage, found in enumerate(captured)] == [
        [0, 1, 2],
        [11],
        [20, 22],
    ]
