"""--compile: static shapes decode the same, few things are compiled, and what cannot be compiled is refused.

Most tests replace `torch.compile`: what is compiled is tested, and compiling takes its time. Those marked `compiled`
compile.
"""

import random
import shutil
import sys
from functools import cache

import pytest
import torch
from torch._inductor import config as inductor
from transformers.models.llama.modeling_llama import LlamaMLP

import eval as evaluation
import pipeline_inference
from baselines.eagle3 import eagle3_decoder
from baselines.method import Run
from baselines.ppsd import ppsd_decoder
from baselines.registry import METHODS
from decoding import static_head
from decoding.compiled import NotCompiled, _empty
from decoding.nodes import SLOT_STEP
from decoding.sampling import Sampling
from decoding.stage import StaticForward
from evaluation.plan import Planner
from evaluation.workers import Evaluator, TargetOptions
from loading.target_files import check_compiled
from pipeline_inference import Decoder, LocalExecutor, SPDDrafter, logit_gap
from pipeline_model import Target, auto_shallow_layers, save_head
from script_utils import run_script
from tests.tiny import (
    FAMILIES,
    WINDOWED,
    ScriptedDrafter,
    hf_greedy,
    oracle,
    random_prompt,
    replayed,
    replayed_step,
    save_target,
    tiny_head,
    tiny_model,
    tiny_target,
)
from tests.tiny_baselines import shadow, tiny_eagle3, tiny_ppsd

SIZES, TOKENS, PROMPT = (1, 2, 1), 14, 9
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="--compile needs a C++ compiler on a CPU")


@pytest.fixture
def compilations(monkeypatch):
    """The set of (function, shapes of its tensors) that were asked for; nothing is compiled."""
    seen = set()

    def shapes(value):
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype, value.stride()
        if isinstance(value, dict):
            value = value.values()
        return None if value is None else tuple(map(shapes, value))

    def stand_in(function, *, dynamic, fullgraph):
        assert (dynamic, fullgraph) == (False, True)

        def run(*arguments):
            seen.add((function, shapes(arguments)))
            return function(*arguments)

        return run

    monkeypatch.setattr(torch, "compile", stand_in)
    return seen


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target's folder and a head's file."""
    folder = tmp_path_factory.mktemp("files")
    save_target(folder / "target")
    target = Target.load(str(folder / "target"))
    save_head(tiny_head(target, SIZES), folder / "head.pt")
    return folder


@cache
def reference(family, attention="sdpa"):
    """A prompt with the library's greedy continuation, longer than any window."""
    prompt = random_prompt(PROMPT, seed=1)
    return prompt, prompt + hf_greedy(tiny_model(family, attention=attention), prompt, TOKENS + 8)


def mixed(width):
    """Which of W candidates is right at a position: the first, another one, or none."""
    return lambda position: random.Random(position).choice([0, 0, 0, min(1, width - 1), 9])


# ---------------------------------------------------------------------------------------------------------------------
# The same tokens
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, "sdpa") for family in [*FAMILIES, *WINDOWED]), ("llama", "eager"), ("qwen3 window", "eager")],
)
@pytest.mark.parametrize("width", [1, 4])
def test_static_shapes_decode_the_same(family, width, attention, compilations):
    """Guards against W rows that see each other, rows that stand in for missing ones and leave a trace, slots that a
    mask shows too early, states of another parent, windows: a wrong token under --compile alone."""
    prompt, sequence = reference(family, attention)
    drafter = ScriptedDrafter(oracle(sequence, rank=mixed(width), width=width)).with_prompt(prompt)
    executor = LocalExecutor(tiny_target(family, attention=attention), SIZES, compiled=True)
    decoder = Decoder(executor, drafter, draft_top_k=width)
    left = iter(decoder.start(prompt, TOKENS))
    for _ in range(4):  # what a generation that was left has in memory means nothing to the next one
        next(left)
    result = decoder.generate(prompt, TOKENS)
    assert result.tokens == sequence[PROMPT : PROMPT + TOKENS]
    assert 0.3 < result.alpha < 1
    assert compilations


@pytest.mark.parametrize("family", ["llama", "qwen3 window", "qwen3_5"])
@pytest.mark.parametrize("method", ["eagle3", "ppsd"])
@pytest.mark.parametrize("width", [1, 3])
def test_baselines_in_static_shapes_decode_the_same(family, method, width, compilations, monkeypatch):
    """Guards against a chain whose rows run at one position, see what is ahead of them, or start from one state; and
    against chains that the end of a generation cuts short; and PPSD's stage 0, whose graph writes its outputs again
    before the next stage has read them. `width` is EAGLE-3's m, or the number of stages less one."""
    monkeypatch.setattr(StaticForward, "start", replayed(StaticForward.start))
    prompt, sequence = reference(family)
    target = tiny_target(family)
    if method == "eagle3":
        decoder = eagle3_decoder(target, tiny_eagle3(target), width, compiled=True)
    else:
        sizes = (4 - width, *[1] * width)
        decoder = ppsd_decoder(target, tiny_ppsd(target, sizes), sizes, compiled=True)
    shadow(decoder, prompt, oracle(sequence + [0] * 4, rank=mixed(1)))
    result = decoder.generate(prompt, TOKENS)
    assert result.tokens == sequence[PROMPT : PROMPT + TOKENS]
    assert 0.3 < result.alpha < 1
    assert compilations


@pytest.mark.parametrize("width", [1, 4])
def test_the_head_sees_the_same_anchors(width, compilations, monkeypatch):
    """Guards against anchors of other rows, or, where a graph's outputs are written again, of the next cycle: drafts
    would be worse, and no token wrong."""
    monkeypatch.setattr(StaticForward, "start", replayed(StaticForward.start))
    results = []
    for compiled in (False, True):
        target = tiny_target("llama")
        head = tiny_head(target, SIZES)
        executor = LocalExecutor(target, SIZES, head.config.anchors, compiled=compiled)
        drafter = SPDDrafter(head, target, SIZES, compiled=compiled)
        drafts, draft = [], drafter.draft
        drafter.draft = lambda tree, draft=draft, drafts=drafts: drafts.append(draft(tree)) or drafts[-1]
        decoder = Decoder(executor, drafter, draft_top_k=width, sampling=Sampling(1.0), seed=3)
        results.append((decoder.generate(random_prompt(PROMPT), TOKENS).tokens, drafts))
    (tokens, drafts), (same_tokens, same_drafts) = results
    assert tokens == same_tokens
    torch.testing.assert_close(drafts, same_drafts, atol=1e-4, rtol=1e-4)


HEADS = {  # a split, and what else the head has
    "v11, n = 2": ((2, 2), {}),
    "v11, n = 4": ((1, 1, 1, 1), {"num_spec_layers": 1}),
    "v12": (SIZES, {}),
    "two types": ((1, 1, 1, 1), {"aggr_feature_bound": (0, 1)}),
    "v10, n = 2": ((2, 2), {"shallow_hidden_layer_indices": auto_shallow_layers(4, 2)}),
    "v10, n = 4": ((1, 1, 1, 1), {"shallow_hidden_layer_indices": auto_shallow_layers(4, 4)}),
}


def recorded(compiled, sizes, fields, width, lag, use_deepest):
    """Tokens, accepted flags and draft logits of two generations: the second one in the memory of the first."""
    target = tiny_target("llama", vocab_size=7)  # a vocabulary so small that some drafts are right
    head = tiny_head(target, sizes, draft_vocab=6, **fields)
    executor = LocalExecutor(target, sizes, head.config.anchors)
    drafter = SPDDrafter(head, target, sizes, use_deepest, compiled=compiled)
    drafts, draft = [], drafter.draft
    drafter.draft = lambda tree: drafts.append(draft(tree).clone()) or drafts[-1]
    decoder = Decoder(executor, drafter, draft_top_k=width, verify_lag=lag)
    results = [decoder.generate(random_prompt(length, vocab=7), TOKENS) for length in (PROMPT, 1)]
    return [result.tokens for result in results], [result.accepted for result in results], drafts


@pytest.mark.parametrize(
    ("name", "width", "lag", "use_deepest"),
    [
        *((name, *case) for name in HEADS if name != "two types" for case in ((1, 0, True), (3, 1, False))),
        *(("v12", 4, 0, True), ("two types", 1, 1, False)),
    ],
)
def test_a_head_in_static_shapes_drafts_the_same(name, width, lag, use_deepest, compilations, monkeypatch):
    """Guards against rows that stand in for missing ones and are seen, rows of a rejected token that stay, a row of the
    wrong type where many change at once, cached rows that a mask shows too early, an earlier generation's memory, and,
    where a graph's output is written again, drafts of another cycle: fewer accepted drafts, under --compile alone."""
    monkeypatch.setattr(static_head, "prepared", replayed_step)
    case = *HEADS[name], width, lag, use_deepest
    (tokens, flags, drafts), (same_tokens, same_flags, same_drafts) = (recorded(c, *case) for c in (False, True))
    assert tokens == same_tokens
    assert flags == same_flags
    assert 0 < sum(flags[0]) < len(flags[0])
    torch.testing.assert_close(drafts, same_drafts, atol=1e-4, rtol=1e-4)
    assert compilations


# ---------------------------------------------------------------------------------------------------------------------
# How much is compiled
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("mistral", 1), ("qwen3 window", 2), ("qwen3_5", 2)])
def test_a_kind_of_layer_is_compiled_once_a_capacity(family, kinds, compilations):
    """Guards against minutes of compiling: for each layer, each stage, each generation, a logit gap, the baseline
    beside the pipeline, or each longer prompt."""
    target = tiny_target(family, max_position_embeddings=2 * SLOT_STEP)
    executors = [LocalExecutor(target, sizes, compiled=True) for sizes in ((4,), SIZES)]
    for executor in executors:
        for length in (1, 9, 40):
            Decoder(executor).generate(random_prompt(length), 3)
            logit_gap(executor, random_prompt(length + 2), 1, 2)
    assert len(compilations) == kinds + 1
    logit_gap(executors[0], random_prompt(SLOT_STEP + 9), 1, 2)
    assert len(compilations) == kinds + 1
    for executor in executors:
        for length in (SLOT_STEP, SLOT_STEP + 30, 9):
            Decoder(executor).generate(random_prompt(length), 3)
    assert len(compilations) <= 2 * kinds + 1


@needs_compiler
@pytest.mark.compiled
def test_a_compiled_target_and_pipeline_decode_the_same():
    """Guards against code that only the compiler makes wrong, and against a layer of the same kind that compiles again:
    its weights, its stage, the next generation. Real compilation, so one family alone."""
    prompt, sequence = reference("llama")
    target, head = tiny_target("llama"), tiny_head(tiny_target("llama"), SIZES, num_spec_layers=3, draft_vocab=20)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    alone = Decoder(LocalExecutor(target, (4,), compiled=True))
    executor = LocalExecutor(target, SIZES, head.config.anchors, compiled=True)
    pipeline = Decoder(executor, SPDDrafter(head, target, SIZES, compiled=True))
    for decoder, graphs in ((alone, 2), (pipeline, 2 + 4), (alone, 2 + 4), (pipeline, 2 + 4)):
        assert decoder.generate(prompt, TOKENS).tokens == sequence[PROMPT : PROMPT + TOKENS]
        # A layer; norm and lm_head. Of the head: projections, a layer of all rows and one of the newest, lm_head.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == graphs


@needs_compiler
@pytest.mark.compiled
@pytest.mark.parametrize("name", ["v12", "v10, n = 2"])
def test_a_compiled_head_drafts_the_same(name):
    """Guards against a head that only the compiler makes wrong: drafts would be worse, and no token wrong."""
    (_, flags, drafts), (_, same_flags, same_drafts) = (recorded(c, *HEADS[name], 1, 0, True) for c in (False, True))
    assert flags == same_flags
    torch.testing.assert_close(drafts, same_drafts, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_row_is_multiplied_as_by_the_library(dtype):
    """Guards against a single row's product without its bias, or summed in the weights' own precision."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(2000, 5).to(dtype)
    weights = dict(linear.named_parameters())
    for shape in ((2000,), (1, 1, 2000), (3, 1, 2000)):
        rows = torch.randn(shape).to(dtype)
        product = torch.func.functional_call(_empty(linear), weights, (rows,))
        exact = rows.double() @ linear.weight.double().T + linear.bias.double()
        assert product.dtype == dtype
        torch.testing.assert_close(product.double(), exact, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)


@needs_compiler
def test_compiled_rows_have_settings_and_files_of_their_own(files):
    """Guards against compiled rows that go on in an eager run's file, and an eager baseline beside them."""
    flags = ["--base_model_path", str(files / "target"), "--spec_head_ckpt", str(files / "head.pt"), "--gpus", "cpu"]
    plans = [
        Planner(evaluation.build_parser().parse_args([*flags, "--max_new_tokens", "8", *more])).plan()
        for more in ([], ["--compile"])
    ]
    (eager,), (compiled,) = (plan.runs for plan in plans)
    assert compiled.run.compiled
    assert compiled.baseline.compiled
    assert (eager.settings["compile"], compiled.settings["compile"]) == (False, True)
    assert eager.files.rows.path != compiled.files.rows.path
    assert eager.baseline_rows.path != compiled.baseline_rows.path
    assert "compiled" in compiled.settings["label"]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------


def refusal(capsys, monkeypatch, program, *flags):
    """The one line of a refused command."""
    monkeypatch.setattr(sys, "argv", ["program", *map(str, flags)])
    with pytest.raises(SystemExit) as exit_info:
        run_script(program.main, program.build_parser())
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_quantised_weights_are_refused():
    """Guards against minutes of loading before an error of the compiler, for a checkpoint and for --quantization."""
    config = FAMILIES["llama"]()
    with pytest.raises(ValueError, match=r"--compile cannot compile quantised weights \(bnb_8bit\)"):
        check_compiled(True, config, "bnb_8bit", torch.device("cpu"))
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"quantised weights \(fp8\)"):
        check_compiled(True, config, None, torch.device("cuda"))
    check_compiled(False, config, None, torch.device("cpu"))


def test_a_machine_without_a_compiler_is_told_so():
    """Guards against the compiler's traceback, or an eager run that takes the compiled one's name."""
    config, cpu = FAMILIES["llama"](), torch.device("cpu")
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(ValueError, match=r"--compile needs a C\+\+ compiler on a CPU.*: install g\+\+"):
            check_compiled(True, config, None, cpu)
        check_compiled(False, config, None, cpu)
        check_compiled(True, config, None, torch.device("cuda"))  # kernels there are not C++


def breaking(mlp, hidden):
    """Stands for a layer that the compiler cannot take as a whole."""
    torch._dynamo.graph_break()
    return hidden


@needs_compiler
def test_layers_that_do_not_compile_end_the_run(files, monkeypatch, capsys):
    """Guards against layers that run uncompiled under a compiled run's name; one line, exit code 2, no failed rows."""
    torch._dynamo.reset()  # what other tests have compiled is not asked for again
    monkeypatch.setattr(LlamaMLP, "forward", breaking)
    flags = ["--base_model_path", str(files / "target"), "--compile", "--max_new_tokens", "3"]
    line = refusal(capsys, monkeypatch, pipeline_inference, *flags, "--prompt", "w1 w2")
    assert "model type 'llama' cannot be compiled here" in line
    assert line.endswith("leave --compile out")
    evaluator = Evaluator(TargetOptions(str(files / "target"), torch.float32), "cpu")
    run = Run(METHODS["autoregressive"], Sampling(), 3, 0, (4,), compiled=True)
    sample = type("Sample", (), {"prompt_ids": [1, 2], "dataset": "x", "question_id": 1})()
    with pytest.raises(NotCompiled):
        evaluator.evaluate(type("Task", (), {"run": run, "sample": sample, "baseline": None})())


def test_prompt_lookup_does_not_take_the_flag(files, capsys, monkeypatch):
    """Guards against a floor that is measured eager beside a compiled baseline without a word."""
    flags = ["--base_model_path", str(files / "target"), "--compile", "--method", "prompt_lookup"]
    assert "--method prompt_lookup runs the library's loop" in refusal(capsys, monkeypatch, evaluation, *flags)


def test_flash_attention_is_refused(files, capsys, monkeypatch):
    """Guards against masks that flash attention takes for padding."""
    flags = ["--base_model_path", str(files / "target"), "--compile", "--attn_implementation", "flash_attention_2"]
    for program, more in ((pipeline_inference, []), (evaluation, ["--method", "autoregressive"])):
        line = refusal(capsys, monkeypatch, program, *flags, *more)
        assert "--compile needs masks that flash attention lacks" in line
