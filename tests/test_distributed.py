"""Decoding over ranks is decoding in one process: the same tokens, accepted flags and cycles.

Real processes, real messages, tiny targets. Each launch of ranks runs a list of cases, since starting costs most.
"""

import copy
import itertools
import random
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch

from decoding.compiled import compiled_logits
from decoding.nodes import CachePlan, Kept, NodeRow
from decoding.sampling import Sampling
from decoding.stage import Stage, StaticForward
from distributed_inference import stages
from distributed_inference.layout import DRAFT_RANK, Layout
from distributed_inference.messages import Batch, Start, header_size
from distributed_inference.remote import Pipeline, RemoteExecutor
from distributed_inference.stages import Setup, StageServer
from distributed_inference.startup import Group
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter
from pipeline_model import Target
from tests.ranks import ranks
from tests.tiny import (
    FAMILIES,
    VOCAB,
    ScriptedDrafter,
    hf_greedy,
    oracle,
    random_prompt,
    replayed,
    tiny_head,
    tiny_model,
)

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=60)
TOKENS = 12


# ---------------------------------------------------------------------------------------------------------------------
# The same decoding
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One way to decode, on as many ranks as it needs."""

    family: str
    sizes: tuple[int, ...]
    colocated: bool
    lm_head: str
    width: int
    lag: int
    temperature: float
    prompt_length: int
    static: bool  # stages with fixed shapes, as they are compiled
    drafter: str  # "head", "shallow head", "mixed" (right and wrong by a script), or "none" (the target alone)

    @property
    def layout(self):
        return Layout(self.sizes, self.colocated, self.lm_head)


LAYOUTS = [((1, 3), False), ((2, 1, 1), True), ((1, 2, 1), False)]  # 3, 3 and 4 ranks


# One family for each kind of layer memory; for ranks, the others differ from these in nothing.
KINDS = ["llama", "qwen3 window", "qwen3_5"]


def covering_sample(family):
    """Cases of a family, in which each value of each factor appears about as often as the others."""
    count = 6 if family in KINDS else 4
    rng = random.Random(family)
    widths_and_lags = [(1, 0), (4, 1), (1, 1), (4, 0)]
    drafters = ["head", "mixed", "shallow head", "none"]
    places = ["draft", "last", "split"]
    factors = [LAYOUTS, places, widths_and_lags, [0.0, 1.0], [1, 9], [False, True], drafters]
    columns = [list(itertools.islice(itertools.cycle(values), count)) for values in factors]
    for column in columns:
        rng.shuffle(column)
    return [
        Case(family, *layout, place, *width_and_lag, *rest)
        for layout, place, width_and_lag, *rest in zip(*columns, strict=True)
    ]


CASES = [case for family in [*FAMILIES, "qwen3 window"] for case in covering_sample(family)]


def cases(world_size):
    return [case for case in CASES if case.layout.world_size == world_size]


def part_of(model, layout, rank):
    """What a rank would load of a target, cut from a whole one."""
    part = layout.part(rank, VOCAB)
    model = copy.deepcopy(model)
    for index in range(len(model.model.layers)):
        if index not in part.layers:
            model.model.layers[index] = torch.nn.Identity()
    return Target(part.trim(model))


def decoder(case, executor, target, head, prompt):
    """A decoder of a case over any executor."""
    drafter = None
    if case.drafter == "mixed":
        sequence = random_prompt(200, seed=5)  # mostly wrong; where sampling follows it by chance, right
        sequence[: len(prompt)] = prompt
        continuation = hf_greedy(tiny_model(case.family), prompt, TOKENS + 8)
        sequence[len(prompt) : len(prompt) + len(continuation)] = continuation
        choose = oracle(sequence, rank=lambda position: random.Random(position).choice([0, 0, 0, 1, 9]), width=4)
        drafter = ScriptedDrafter(choose).with_prompt(prompt)
    elif case.drafter != "none":
        static = case.static and isinstance(executor, RemoteExecutor)
        drafter = SPDDrafter(head, target, case.sizes, case.drafter == "head", compiled=static)
    return Decoder(
        executor,
        drafter,
        sampling=Sampling(case.temperature),
        draft_top_k=case.width,
        verify_lag=case.lag,
        seed=len(prompt),
    )


def new_stage(case, target, stage):
    return Stage(target, case.layout.layers(stage), compiled=case.static)


def summary(result):
    return result.tokens, result.accepted, result.cycles, result.verified_by_fill, result.accepted_by_fill


def lm_head_widths(case, rank):
    """For how many rows the lm_head of a rank is compiled: there, in one place, only."""
    width = 1 if case.drafter == "none" else case.width
    if case.static and case.lm_head == "draft" and rank == DRAFT_RANK:
        return {width if case.lag else 1}
    return {width} if case.static and case.lm_head == "last" and rank == case.layout.last_rank else set()


def decode_cases(world_size):
    """On every rank: all cases; the draft rank compares with one process and prints what differs."""
    stages.PREFILL_CHUNK = 4  # so that a short prompt has several
    torch.compile = lambda function, **_: function  # what is compiled is tested; compiling takes half a minute
    StaticForward.start = replayed(StaticForward.start)  # and what a graph's outputs have to survive
    group = Group.of_process(TIMEOUT)
    rank = group.environment.rank
    widths = set()  # of the compiled lm_heads
    stages.compiled_logits = lambda target, width: widths.add(width) or compiled_logits(target, width=width)
    for case in cases(world_size):
        widths.clear()
        model = tiny_model(case.family)
        whole = Target(copy.deepcopy(model))
        head = tiny_head(whole, case.sizes)
        target = part_of(model, case.layout, rank)
        anchors = head.config.anchors
        wires = group.wires(case.layout, CPU, torch.float32, "gloo")
        setup = Setup(case.layout, rank, wires, case.width, anchors, *[TIMEOUT] * 3, compiled=case.static)
        stage = case.layout.stage_of(rank)
        stage = None if stage is None else new_stage(case, target, stage)
        if rank != DRAFT_RANK:
            StageServer(setup, target, stage).serve()
            assert widths == lm_head_widths(case, rank), case
            continue
        pipeline = Pipeline(setup, target, stage)
        used = (0,) if case.drafter == "none" else anchors
        prompt = random_prompt(case.prompt_length, seed=1)
        ours = decoder(case, RemoteExecutor(pipeline, used, verify_lag=case.lag), target, head, prompt)
        left = iter(ours.start(prompt, TOKENS))
        for _ in range(3):  # a generation that is left, with tokens in flight: the next one starts clean
            next(left)
        theirs = decoder(case, LocalExecutor(whole, case.sizes, used), whole, head, prompt).generate(prompt, TOKENS)
        ours = ours.generate(prompt, TOKENS)
        if summary(ours) != summary(theirs):
            print(f"DIFFERS: {case}:\n{summary(ours)}\n{summary(theirs)}")
        if widths != lm_head_widths(case, rank):
            print(f"OTHER LM_HEAD: {case}: {widths}")
        converse(case, pipeline, target, whole, head, prompt)
        if len(ours.timings.stages) != len(case.sizes) or not min(ours.timings.stages) > 0:
            print(f"NO TIMES: {case}: {ours.timings}")
        pipeline.stop()
    print("finished", flush=True)
    group.barrier()


def converse(case, pipeline, target, whole, head, prompt):
    """Two turns, the first one cut short: the second begins with it, and ranks keep what one process keeps."""
    if case.drafter == "mixed":  # a drafter by a script keeps nothing
        return
    used = (0,) if case.drafter == "none" else head.config.anchors
    executors = RemoteExecutor(pipeline, used, verify_lag=case.lag), LocalExecutor(whole, case.sizes, used)
    found = []
    for executor, its_target in zip(executors, (target, whole), strict=True):
        ours = decoder(case, executor, its_target, head, prompt)
        first = ours.start(prompt, TOKENS)
        for event in first:
            if event.position == len(prompt) + TOKENS // 2:
                first.stop()
        longer = prompt + first.result.tokens + random_prompt(9, seed=3)
        second = ours.start(longer, TOKENS, after=first)
        found.append((summary(first.result), summary(second.finish()), second.result.kept_tokens))
        if second.result.kept_tokens < len(prompt) + TOKENS // 2:
            print(f"RUNS AGAIN: {case}: {second.result.kept_tokens} of {len(prompt)} + {TOKENS // 2} + 9 were kept")
    if found[0] != found[1]:
        print(f"CONVERSATION DIFFERS: {case}:\n{found[0]}\n{found[1]}")


@pytest.mark.parametrize("world_size", [3, 4])
def test_ranks_decode_as_one_process_does(world_size, tmp_path):
    """Guards against any family, split, width, lag, sampling, draft and place of the lm_head in which ranks differ."""
    with ranks(world_size, tmp_path, decode_cases, world_size) as running:
        assert running.join(timeout=500) == [0] * world_size, running.err(0)
        assert running.out(0) == "finished\n"


def test_the_cases_cover_every_value():
    """Guards against a sample that leaves a value out for some family."""
    for family in FAMILIES:
        mine = [case for case in CASES if case.family == family]
        assert {(case.sizes, case.colocated) for case in mine} == set(LAYOUTS)
        assert {case.lm_head for case in mine} == {"draft", "last", "split"}
        assert {case.drafter for case in mine} == {"head", "shallow head", "mixed", "none"}
        assert {(case.width, case.lag) for case in mine} == {(1, 0), (1, 1), (4, 0), (4, 1)}
        assert {case.temperature for case in mine} == {0.0, 1.0}
        assert {case.static for case in mine} == {False, True}


# ---------------------------------------------------------------------------------------------------------------------
# Pieces
# ---------------------------------------------------------------------------------------------------------------------


def test_headers_are_read_as_they_were_written():
    """Guards against fields that change places between two ranks, and buffers that are too small."""
    kept = Kept(50, 7, (60, 61), 65)
    start = Start(70, 3, CachePlan(200, 40, tree=True, kept=kept), (0, 2, 4), layer_us=12_000)
    batch = Batch(9, 75, [NodeRow(11, 4, 3, 75), NodeRow(12, 5, 3, 76)])
    zeros = [0] * 9  # a header arrives with zeros after it
    received = start._replace(plan=start.plan._replace(kept=kept._replace(slots=())), moved_slots=2)  # slots follow
    assert Start.parse(start.header() + zeros) == received
    assert Batch.parse(batch.header() + zeros) == batch
    assert Batch.parse(Batch(9, -1, []).header() + zeros) == Batch(9, -1, [])
    assert header_size(3, 2) == max(len(start.header()), len(batch.header()))


@pytest.mark.parametrize("lm_head", ["draft", "last", "split"])
@pytest.mark.parametrize("colocated", [False, True])
def test_ranks_share_the_target_without_overlap(lm_head, colocated):
    """Guards against layers or vocabulary rows that two ranks have, or none."""
    layout = Layout((2, 1, 3), colocated, lm_head)
    parts = [layout.part(rank, VOCAB) for rank in range(layout.world_size)]
    assert [layer for part in parts for layer in part.layers] == list(range(6))
    assert sorted(row for part in parts for row in part.lm_head) == list(range(VOCAB))
    assert [part.embedding for part in parts] == [True] + [False] * (layout.world_size - 1)
    assert layout.world_size == 3 + (not colocated)
    assert [layout.stage_of(layout.rank_of(stage)) for stage in range(3)] == [0, 1, 2]
    assert layout.describe(0) == ("rank 0 (draft, stage 0)" if colocated else "rank 0 (draft)")


@pytest.mark.parametrize(("kept", "checkpoint"), [(0, 0), (3, 0), (0, 5), (3, 5), (3, 12), (5, 5), (6, 4)])
@pytest.mark.parametrize("length", [8, 9, 24])
def test_chunks_cover_the_prompt(length, kept, checkpoint):
    """Guards against prompt tokens that no chunk has, or two, and a chunk that passes the checkpoint."""
    checkpoint = min(checkpoint, length)
    chunks = list(Kept(kept, checkpoint=checkpoint).chunks(length, 8))
    assert [position for chunk in chunks for position in chunk] == list(range(kept, length))
    assert max(map(len, chunks)) <= 8
    assert checkpoint <= kept or checkpoint in {chunk.stop for chunk in chunks}
