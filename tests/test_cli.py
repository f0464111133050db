"""The command line, its output, its trace and its errors; and the timeline that both stand on."""

import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import GPT2Config

import eval as eval_script
import pipeline_inference
import timeline
from benchmarks import colocated_speed
from decoding.sampling import Verdict
from distributed_inference import eval_mp_pipeline_dataset, example_mp_pipeline_generate
from loading.checkpoint_files import CHECKPOINT_NAME
from loading.tokenizer import encode_prompt, unused_settings
from pipeline_inference import PROMPTS, Decoder, Demo, build_parser, main
from pipeline_model import Target, load_head, save_head
from planning import plan_stages
from script_utils import Parser, atomic_open, first_line, quiet_libraries, run_script
from tests.tiny import CHAT_TEMPLATE, hf_greedy, save_target, spd_decoder, tiny_head, tiny_target
from timeline import DRAFT, VERIFY, Span, Timeline, stage_row, write_trace
from training import generate_answers

SCRIPTS_WITH_DTYPE = {
    pipeline_inference: ["--base_model_path", "m", "--prompt", "p"],
    eval_script: ["--base_model_path", "m"],
    generate_answers: ["--model_name", "m", "--data_path", "d", "--output", "o"],
    example_mp_pipeline_generate: ["--base_model_path", "m", "--spec_head_ckpt", "h", "--prompt", "p"],
    eval_mp_pipeline_dataset: ["--base_model_path", "m", "--spec_head_ckpt", "h"],
    plan_stages: ["--num_devices", "2"],
    colocated_speed: [],
}
PROMPT = "w5 w17 w3"
IDS = [5, 17, 3]
STANDARD = re.compile(r"^\[standard\] (\d+) tokens \((\w+)\), [\d.]+ tokens/s, (\d+) cycles$", re.M)
PIPELINE = re.compile(
    r"^\[pipeline\] (\d+) tokens \((\w+)\), [\d.]+ tokens/s, (\d+) cycles, n = (\d+), "
    r"alpha ([\d.]+) \((\d+)/(\d+)\), L_acc ([\d.]+), theoretical speed-up ([\d.]+)x$",
    re.M,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a target, a head for it, and checkpoints that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("files")
    save_target(folder / "target")
    target = Target.load(str(folder / "target"))
    save_head(tiny_head(target, (1, 3)), folder / "head" / CHECKPOINT_NAME)
    payload = torch.load(folder / "head" / CHECKPOINT_NAME, weights_only=True)

    def changed(name, **fields):
        torch.save(payload | {"config": payload["config"] | fields}, folder / name)

    changed("version.pt", version=9)
    changed("hidden.pt", hidden_size=64)
    changed("stages.pt", num_stages=5, stage_layers=[1, 1, 1, 1, 1])
    changed("family.pt", model_type="qwen3")
    save_head(tiny_head(tiny_target("llama", vocab_size=67), (2, 2)), folder / "vocabulary.pt")
    whole = (folder / "head" / CHECKPOINT_NAME).read_bytes()
    (folder / "truncated.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "gpt2").mkdir()
    GPT2Config(n_layer=1, n_head=1, n_embd=8, bos_token_id=0, eos_token_id=0).save_pretrained(folder / "gpt2")
    save_target(folder / "no_tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "no_tokenizer" / name).unlink()
    return folder


def arguments(files, *flags, head=True, prompts=(PROMPT,)):
    base = ["--base_model_path", str(files / "target"), "--max_new_tokens", "12", "--device", "cpu"]
    return [*base, *(["--spec_head_ckpt", str(files / "head")] if head else []), *flags, "--prompt", *prompts]


def run(capsys, *args, **kwargs):
    """Exit code and standard output of a run that must not complain."""
    code = main(build_parser().parse_args(arguments(*args, **kwargs)))
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


# ---------------------------------------------------------------------------------------------------------------------
# Output
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--draft_top_k", "4", "--verify_lag", "1"], ["--no-use_deepest"]], ids=str)
def test_both_generations_are_shown(files, capsys, flags):
    """Guards against numbers that are not those of the run: text, tokens, cycles, alpha, L_acc, speed-up, equality."""
    code, out = run(capsys, files, *flags)
    assert code == 0
    target = Target.load(str(files / "target"))
    settings = {"draft_top_k": 4, "verify_lag": 1} if "4" in flags else {}
    decoder = spd_decoder(target, load_head(files / "head", target), use_deepest=not flags or "4" in flags, **settings)
    result = decoder.generate(IDS, 12)
    text = " ".join(f"w{token}" for token in hf_greedy(target.model, IDS, 12))

    assert f"Prompt 1/1: {PROMPT}" in out
    assert STANDARD.search(out).groups() == ("12", "length", "11")
    tokens, reason, cycles, stages, alpha, accepted, verified, length, speedup = PIPELINE.search(out).groups()
    assert (tokens, reason, cycles, stages) == ("12", "length", str(result.cycles), "2")
    assert (accepted, verified) == (str(result.n_accepted), "11")
    assert alpha == f"{result.n_accepted / 11:.2f}"
    assert length == f"{4 / 3 * 11 / result.cycles:.2f}"
    assert speedup == length  # two speculation layers hide behind a stage of three
    assert out.count(text) == 2
    assert "[compare] ids are equal (12 tokens)" in out
    assert "\033" not in out


def test_the_ideal_speedup_comes_first_and_is_that_of_the_timers(files, capsys, monkeypatch):
    """Guards against a first figure that only says that one process is slow, and an ideal that is not of this run."""
    shown = {}
    print_speeds = Demo.print_speeds
    monkeypatch.setattr(
        Demo, "print_speeds", lambda demo, results: (shown.update(results), print_speeds(demo, results))
    )
    _, out = run(capsys, files)
    standard, pipeline = (shown[name].timings for name in ("standard", "pipeline"))
    assert shown["standard"].new_tokens == shown["pipeline"].new_tokens  # so that the ratio is one of seconds
    ideal, measured = standard.decode / pipeline.ideal_decode, standard.decode / pipeline.decode
    line = f"[speed-up] {ideal:.2f}x ideal, with a device per stage; {measured:.2f}x measured, in this one process"
    assert out.index("[note] All 2 stages run in this one process") < out.index("Prompt 1/1") < out.index(line)
    assert out.index(line) < out.index("[standard]")
    assert pipeline.ideal_decode < pipeline.decode


def test_both_generations_are_warmed_up(files, capsys, monkeypatch):
    """Guards against a baseline that pays for the first allocations, and a speed-up that it flatters."""
    begun = []
    start = Decoder.start
    monkeypatch.setattr(Decoder, "start", lambda self, *args: (begun.append((self, args[1])), start(self, *args))[1])
    run(capsys, files)
    decoders = [decoder for decoder, _ in begun]
    assert len(set(map(id, decoders))) == 2
    assert decoders[:2] == decoders[2:]
    assert [limit for _, limit in begun] == [12, 12, 12, 12]


@pytest.mark.parametrize(("flags", "expected"), [([], True), (["--no-use_deepest"], False), (["--use_deepest"], True)])
def test_use_deepest_is_as_trained_unless_set(files, flags, expected):
    """Guards against a flag that does not reach the drafter, and a default other than the checkpoint's."""
    assert (
        Demo(build_parser().parse_args(arguments(files, *flags))).decoders["pipeline"].drafter.use_deepest is expected
    )


def test_profile_has_a_line_a_stage(files, capsys):
    """Guards against a profile of other seconds than the run's, and one that nobody asked for."""
    code, out = run(capsys, files, "--profile_timing")
    assert code == 0
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    names = [name for name, *_ in cells]
    assert names[:6] == ["part", "---", "draft", "stage 0", "stage 1", "verify"]
    assert re.fullmatch(r"[1-9]\d* rollbacks", names[6])
    cycles = PIPELINE.search(out)[3]
    assert names[7:] == [f"all {cycles} cycles", "ideal"]
    *parts, whole, _ = (float(seconds) for _, seconds, _ in cells[2:])
    assert 0 < sum(parts) <= whole + 0.01
    assert "| stage 0" not in run(capsys, files, "--no-profile_timing")[1]


@pytest.mark.parametrize("first", [False, True])
def test_the_pipeline_can_run_first(files, capsys, first):
    """Guards the order that a user asked for, and the comparison in either."""
    code, out = run(capsys, files, *["--pipeline_first"] * first)
    assert code == 0
    assert (out.index("[pipeline]") < out.index("[standard]")) == first
    assert "[compare] ids are equal (12 tokens)" in out


def test_target_and_prompts_have_defaults(tmp_path, monkeypatch, capsys):
    """Guards the command line of the paper's repository: a head, a length, a temperature, and nothing else."""
    monkeypatch.chdir(tmp_path)
    save_target("models/target", vocab_size=97)
    head = tiny_head(Target.load("models/target"), (1, 3), base_model_path="models/target")
    save_head(head, "head.pt")
    monkeypatch.setattr(pipeline_inference, "PROMPTS", ("w1 w2", "w3", "w4 w5 w6"))
    args = ["--spec_head_ckpt", "head.pt", "--max_new_tokens", "7", "--temperature", "0.0"]
    assert main(build_parser().parse_args(args)) == 0
    out = capsys.readouterr().out
    assert re.findall(r"Prompt (\d/3): (.*)", out) == [("1/3", "w1 w2"), ("2/3", "w3"), ("3/3", "w4 w5 w6")]
    assert out.count("[compare] ids are equal (7 tokens)") == 3
    assert len(PROMPTS) == 3
    assert all(prompt.strip() for prompt in PROMPTS)


@pytest.mark.parametrize("stored", ["", "models/gone", "/gone", "~/gone", "../gone"])
def test_a_head_whose_target_is_not_here(files, tmp_path, capsys, monkeypatch, stored):
    """Guards against a message that names neither the checkpoint nor the way out, for a path of another machine."""
    head = tmp_path / "head.pt"
    save_head(tiny_head(Target.load(str(files / "target")), (1, 3), base_model_path=stored), head)
    message = refusal(["--spec_head_ckpt", str(head), "--prompt", PROMPT], capsys, monkeypatch)
    assert f"--base_model_path is missing, and {str(head)!r} does not help" in message
    assert not stored or repr(stored) in message


def test_neither_target_nor_head(capsys, monkeypatch):
    """Guards against a traceback where nothing at all was given."""
    message = refusal([], capsys, monkeypatch)
    assert message == (
        "pipeline_inference.py: error: --base_model_path is missing: without --spec_head_ckpt, "
        "nothing else names the target\n"
    )


@pytest.mark.parametrize(
    ("fields", "unused"),
    [
        ({}, []),
        ({"eos_token_id": [60], "pad_token_id": 3, "bos_token_id": 4}, []),
        ({"repetition_penalty": 1.8, "min_p": 0.3}, ["min_p", "repetition_penalty"]),
        ({"do_sample": True, "temperature": 0.6}, ["do_sample", "temperature"]),
    ],
    ids=str,
)
def test_settings_of_the_target_that_are_not_used_are_named(tmp_path, fields, unused):
    """Guards against a user who compares with `generate` and does not know that it applies a penalty."""
    save_target(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(written | fields))
    assert sorted(unused_settings(str(tmp_path))) == unused


def test_the_note_about_settings_is_printed_once(tmp_path, capsys):
    """Guards against a note that nobody sees, or sees with every prompt."""
    save_target(tmp_path, generation_fields={"repetition_penalty": 1.8})
    args = ["--base_model_path", str(tmp_path), "--max_new_tokens", "1", "--prompt", "w1", "w2"]
    main(build_parser().parse_args(args))
    assert (
        capsys.readouterr().out.count("[note] of the target's generation_config.json the end ids alone are used") == 1
    )


def test_works_without_a_head(files, capsys):
    """Guards against a demo that needs what the user does not have yet."""
    code, out = run(capsys, files, head=False)
    assert code == 0
    assert STANDARD.search(out)
    assert "[pipeline]" not in out
    assert "[compare]" not in out


def test_several_prompts(files, capsys):
    """Guards against prompts after the first that are lost or run into each other's state."""
    code, out = run(capsys, files, "--prompt", "w9", prompts=["w5 w17 w3", "w5 w17 w3"])
    assert code == 0
    assert re.findall(r"Prompt (\d/3): (.*)", out) == [("1/3", "w9"), ("2/3", PROMPT), ("3/3", PROMPT)]
    found = [match[:3] + match[4:] for match in PIPELINE.findall(out)]
    assert len(found) == 3
    assert found[1] == found[2]
    assert out.count("[compare] ids are equal") == 3


def test_a_sampled_chain_is_not_compared(files, capsys):
    """Guards against calling two samples different, and against settings that reach only one of the two."""
    flags = ["--temperature", "1.0", "--top_k", "20", "--top_p", "0.9"]
    outputs = [run(capsys, files, *flags, "--seed", seed) for seed in ("0", "0", "1")]
    texts = [re.findall(r"^(?:w\d+ ?)+$", out, re.M) for _, out in outputs]
    assert all(
        code == 0 and "[compare] not compared (a sampled chain differs by chance)" in out for code, out in outputs
    )
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[2][0]  # the baseline samples
    assert texts[0][1] != texts[2][1]  # and the pipeline
    greedy_text = " ".join(f"w{token}" for token in hf_greedy(tiny_target("llama").model, IDS, 12))
    assert greedy_text not in texts[0]


@pytest.mark.parametrize("flags", [[], ["--verify_lag", "1"], ["--top_k", "9", "--top_p", "0.8"]], ids=str)
def test_a_sampled_tree_is_compared(files, capsys, flags):
    """Guards a proof of losslessness: sampled with a tree, a seed's tokens are those of the target alone."""
    settings = ["--temperature", "0.8", "--seed", "7", "--draft_top_k", "4", *flags]
    code, out = run(capsys, files, *settings)
    assert code == 0
    assert "[compare] ids are equal (12 tokens, drawn with the same seed)" in out


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 1), ("bfloat16", 0)])
def test_a_sampled_tree_that_differs_is_reported(files, capsys, monkeypatch, dtype, expected):
    """Guards against exit code 0 for a pipeline that draws from another distribution than the target's."""
    monkeypatch.setattr(pipeline_inference, "verify", accept_first)
    code, out = run(capsys, files, "--temperature", "0.8", "--draft_top_k", "4", "--dtype", dtype)
    assert code == expected
    assert "[compare] ids DIFFER from token" in out


def test_unverified_drafts_are_not_compared(files, capsys):
    """Guards against `--no-verify` that verifies, or reports the drafter's text as the target's."""
    code, out = run(capsys, files, "--no-verify")
    assert code == 0
    assert "[compare] not compared (drafts were not verified)" in out
    assert PIPELINE.search(out)[5] == "1.00"


def accept_first(logits, candidates, *_):
    """Stands for `verify`, and believes any draft."""
    return Verdict(candidates[0], 0) if candidates else Verdict(int(logits.argmax()), None)


def test_a_pipeline_that_differs_is_reported(files, capsys, monkeypatch):
    """Guards against a comparison that says equal, or an exit code that hides a difference in float32."""
    monkeypatch.setattr(pipeline_inference, "verify", accept_first)
    code, out = run(capsys, files)
    assert code == 1
    gap = re.search(r"\[compare\] ids DIFFER from token 1: logit gap ([\d.e+-]+) between the two, torch.float32", out)
    assert float(gap[1]) > 0
    code, _ = run(capsys, files, "--dtype", "bfloat16")
    assert code == 0  # rounding can do that in bfloat16


def test_terminal_shows_accepted_and_corrected_tokens(files, capsys, monkeypatch):
    """Guards against colours in pipes, and colours that do not follow the accepted flags."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out = run(capsys, files)
    runs = re.findall(r"\033\[(3[23])m([^\033]*)\033\[0m", out)
    target = Target.load(str(files / "target"))
    result = spd_decoder(target, load_head(files / "head", target)).generate(IDS, 12)
    colours = [
        (f"w{token}", "32" if flag else "33") for token, flag in zip(result.tokens, result.accepted, strict=True)
    ]
    assert [(word, colour) for colour, text in runs for word in text.split()] == colours
    assert {colour for colour, _ in runs} == {"32", "33"}
    monkeypatch.setenv("NO_COLOR", "1")
    _, out = run(capsys, files)
    assert "\033" not in out


def test_prompts_are_user_turns_where_there_is_a_template(tmp_path):
    """Guards against a chat model that gets bare text, and against `--no-chat_template` that is ignored."""
    save_target(tmp_path, chat_template=CHAT_TEMPLATE)
    for flags, expected in [([], [1, 5, 17, 3, 2]), (["--no-chat_template"], [5, 17, 3])]:
        demo = Demo(build_parser().parse_args(["--base_model_path", str(tmp_path), *flags, "--prompt", PROMPT]))
        assert demo.prompts == [(PROMPT, expected)]
    add_bos = processors.TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    demo.tokenizer.backend_tokenizer.post_processor = add_bos
    assert encode_prompt(demo.tokenizer, PROMPT, chat_template=False) == [1, *IDS]
    with pytest.raises(ValueError, match="the prompt ' ' is empty"):
        encode_prompt(demo.tokenizer, " ", chat_template=False)  # a token that the tokenizer adds is no prompt


def test_end_tokens_of_the_target_are_used(tmp_path, capsys):
    """Guards against a demo that knows only one end token, or runs on after it."""
    tokens = hf_greedy(tiny_target("llama").model, IDS, 12)
    save_target(tmp_path, generation_fields={"eos_token_id": [60, tokens[4]]})
    assert main(build_parser().parse_args(["--base_model_path", str(tmp_path), "--prompt", PROMPT])) == 0
    assert STANDARD.search(capsys.readouterr().out)[2] == "eos"


# ---------------------------------------------------------------------------------------------------------------------
# Trace
# ---------------------------------------------------------------------------------------------------------------------


def read_trace(path):
    """Slices of a trace by process, with the name of their row put in."""
    events = json.loads(path.read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[processes[event["pid"]]].append(event | {"row": rows[event["pid"], event["tid"]]})
    return slices


def test_trace_shows_every_stage_in_every_cycle(files, tmp_path, capsys):
    """Guards against slices on the wrong row or cycle, and outcomes that are not what became of the token."""
    path = tmp_path / "trace.json"
    code, out = run(capsys, files, "--trace", str(path), prompts=[PROMPT, "w8 w2"])
    assert code == 0
    assert str(path) in out
    traces = read_trace(path)
    assert list(traces) == ["prompt 1", "prompt 2"]
    target = Target.load(str(files / "target"))
    for slices, prompt in zip(traces.values(), (IDS, [8, 2]), strict=True):
        check_trace(slices, prompt, spd_decoder(target, load_head(files / "head", target)).generate(prompt, 12))


def check_trace(slices, prompt, result):
    by_row = Counter(event["row"] for event in slices)
    assert set(by_row) == {DRAFT, "stage 0", "stage 1", VERIFY}
    assert by_row[VERIFY] == result.n_verified
    assert len({(event["row"], event["args"]["cycle"]) for event in slices}) == len(slices)  # at most one per cycle
    assert {event["args"]["cycle"] for event in slices} == set(range(result.cycles))

    emitted = dict(enumerate(result.tokens, start=len(prompt)))
    flags = dict(enumerate(result.accepted, start=len(prompt)))
    for stage in (0, 1):
        ran = [event for event in slices if event["row"] == stage_row(stage)]
        stayed = [event for event in ran if event["args"]["outcome"] != "flushed"]
        # Every emitted token passes every stage once, but for the last ones, which nothing waits for.
        positions = [event["args"]["position"] for event in stayed]
        assert len(set(positions)) == len(positions)
        assert set(range(len(prompt), len(prompt) + len(result.tokens) - 1)) <= set(positions)
        for event in stayed:
            position = event["args"]["position"]
            assert event["name"] == f"w{emitted[position]}"
            assert event["args"]["outcome"] == ("accepted" if flags[position] else "corrected")
            assert event["args"]["candidates"] == 1
        # A wrong draft is in stage 0 when that shows; it never comes to stage 1.
        assert (len(ran) > len(stayed)) == (stage == 0)


def test_trace_counts_the_candidates_of_a_tree(files, tmp_path, capsys):
    """Guards against a trace that knows only chains."""
    path = tmp_path / "trace.json"
    run(capsys, files, "--trace", str(path), "--draft_top_k", "3")
    (slices,) = read_trace(path).values()
    assert {event["args"]["candidates"] for event in slices if event["row"] == DRAFT} == {3}
    assert {event["args"]["candidates"] for event in slices if event["row"] == "stage 0"} >= {1, 3}


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------

BAD_FLAGS = [
    (["--temperature", "-1"], "error: --temperature is -1.0"),
    (["--temperature", "nan"], "temperature is nan"),
    (["--temperature", "warm"], "invalid float value: 'warm'"),
    (["--top_p", "0"], "top_p is 0.0"),
    (["--top_p", "1.5"], "top_p is 1.5"),
    (["--top_p", "nan"], "top_p is nan"),
    (["--top_k", "-1"], "top_k is -1"),
    (["--draft_top_k", "0"], "error: --draft_top_k is 0"),
    (["--verify_lag", "2"], "verify_lag"),
    (["--max_new_tokens", "0"], "error: --max_new_tokens is 0"),
    (
        ["--max_new_tokens", "255"],
        "--max_new_tokens is 255: with a prompt of 3 tokens, that many pass the target's limit of 256",
    ),
    (["--device", "abacus"], "--device is 'abacus'"),
    (["--device", "cuda:99"], "--device is 'cuda:99'"),
    (["--dtype", "float8"], "float8"),
    (["--prompt", "", "--prompt", PROMPT], "the prompt '' is empty"),
    (["--prompt", " \t ", "--prompt", PROMPT], "is empty"),
    (["--attn_implementation", "flash_attention_2", "--draft_top_k", "2"], "use --attn_implementation sdpa"),
    (["--unknown_flag", "1"], "unknown_flag"),
]
BAD_FILES = [
    ("--spec_head_ckpt", "missing.pt", "no head checkpoint at"),
    ("--spec_head_ckpt", "truncated.pt", "no readable head checkpoint"),
    ("--spec_head_ckpt", "target", f"no head checkpoint at '{{files}}/target/{CHECKPOINT_NAME}'"),
    ("--spec_head_ckpt", "target/model.safetensors", "is not a head checkpoint"),
    ("--spec_head_ckpt", "version.pt", "version is 9"),
    ("--spec_head_ckpt", "hidden.pt", "hidden_size 64"),
    ("--spec_head_ckpt", "vocabulary.pt", "vocab_size 67"),
    ("--spec_head_ckpt", "family.pt", "model_type qwen3"),
    ("--spec_head_ckpt", "stages.pt", "num_stages is 5, but the target has 4 layers"),
    ("--base_model_path", "nothing/here", "no target model at"),
    ("--base_model_path", "gpt2", "model type 'gpt2' is not supported"),
    ("--base_model_path", "no_tokenizer", "no tokenizer at"),
]


def refusal(argv, capsys, monkeypatch):
    """The one line on standard error of a run that must end with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["pipeline_inference.py", *argv])
    with pytest.raises(SystemExit) as caught:
        run_script(main, build_parser())
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.endswith("\n")
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(("flags", "complaint"), BAD_FLAGS, ids=[" ".join(flags) for flags, _ in BAD_FLAGS])
def test_bad_flags_are_refused_in_one_line(files, tmp_path, capsys, monkeypatch, flags, complaint):
    """Guards against tracebacks, usage screens, exit code 0 or 1, and a trace of a run that did not happen."""
    trace = tmp_path / "trace.json"
    message = refusal(arguments(files, *flags, "--trace", str(trace)), capsys, monkeypatch)
    assert complaint in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("flag", "name", "complaint"), BAD_FILES, ids=[name for _, name, _ in BAD_FILES])
def test_bad_files_are_refused_in_one_line(files, tmp_path, capsys, monkeypatch, flag, name, complaint):
    """Guards against the same for files that are missing, broken or made for another target."""
    argv = arguments(files, flag, str(files / name), "--trace", str(tmp_path / "trace.json"))
    assert complaint.format(files=files) in refusal(argv, capsys, monkeypatch)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--temperature", "-1"], ["--max_new_tokens", "0"], ["--draft_top_k", "0"]], ids=str)
def test_flags_are_checked_before_anything_is_loaded(files, capsys, monkeypatch, flags):
    """Guards against minutes of loading before a mistyped flag is noticed."""
    message = refusal(arguments(files, *flags, "--base_model_path", str(files / "nothing")), capsys, monkeypatch)
    assert f"error: {flags[0]} is " in message


@pytest.mark.parametrize("flag", ["--profile_timing", "--pipeline_first"])
def test_flags_about_the_pipeline_need_one(files, capsys, monkeypatch, flag):
    """Guards against a flag that does nothing, and a user who waits for what it would print."""
    message = refusal(arguments(files, flag, head=False), capsys, monkeypatch)
    assert f"{flag} is about the pipeline: it needs --spec_head_ckpt" in message


@pytest.mark.parametrize("head", [True, False])
def test_trace_that_cannot_be_written_is_refused(files, tmp_path, capsys, monkeypatch, head):
    """Guards against a trace that fails after all the work, or is asked for where there is no pipeline to trace."""
    path = tmp_path if head else tmp_path / "trace.json"
    assert "--trace" in refusal(arguments(files, "--trace", str(path), head=head), capsys, monkeypatch)


def test_devices_that_cannot_run_a_model_are_refused(files, capsys, monkeypatch):
    """Guards against a traceback for a device that torch knows by name, but cannot compute on."""
    assert "--device is 'meta'" in refusal(arguments(files, "--device", "meta"), capsys, monkeypatch)


def test_every_prompt_is_checked_before_the_first_runs(files, tmp_path, capsys, monkeypatch):
    """Guards against an hour of prompts that is lost at the last one."""
    for flags, bad in [(["--max_new_tokens", "253"], "w1 w2 w3 w4 w5"), ([], " ")]:
        argv = arguments(files, *flags, "--trace", str(tmp_path / "trace.json"), prompts=["w1", bad])
        monkeypatch.setattr(sys, "argv", ["pipeline_inference.py", *argv])
        with pytest.raises(SystemExit) as caught:
            run_script(main, build_parser())
        assert caught.value.code == 2
        assert capsys.readouterr().out == ""
        assert list(tmp_path.iterdir()) == []


def test_just_fitting_generation_runs(files, capsys):
    """Guards against a position limit that is one off."""
    code, out = run(capsys, files, "--max_new_tokens", "254", head=False)
    assert code == 0
    assert STANDARD.search(out)[1] == "254"


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda folder, file: (file / "below").mkdir(parents=True), "Not a directory"),
        (lambda folder, file: file.mkdir(exist_ok=True), "File exists"),
        (lambda folder, file: folder.open("w"), "Is a directory"),
    ],
    ids=["below a file", "over a file", "folder as file"],
)
def test_paths_of_no_use_are_refused_in_one_line(tmp_path, capsys, monkeypatch, use, reason):
    """Guards every script against a traceback for an output that cannot be made where it was asked for."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(SystemExit) as caught:
        run_script(lambda args: use(tmp_path, file), Parser(prog="script.py"))
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"{tmp_path}" in message
    assert reason in message


def test_operating_system_errors_that_are_no_path_stay_tracebacks(monkeypatch):
    """Guards against a defect that is shown as a mistake of the user."""

    def defect(args):
        raise PermissionError("not about a file")

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(PermissionError):
        run_script(defect, Parser(prog="script.py"))


MESSAGES = {
    "top_k is -1: it must be": "--top_k is -1: it must be",
    "seed is 5: it must fit": "--seed is 5: it must fit",
    "draft_top_k lists 3, but max_new_tokens is 2": "--draft_top_k lists 3, but --max_new_tokens is 2",
    "an entry of top_k is 0": "an entry of --top_k is 0",
    "top_k sums to 3": "--top_k sums to 3",
    "top_k is 'max_new_tokens', see a/top_k or top_k.pt": "--top_k is 'max_new_tokens', see a/top_k or top_k.pt",
    "--top_k is 3, but top_p": "--top_k is 3, but top_p",
    "'head.pt': top_k is 3": "'head.pt': top_k is 3",  # a field of the file
    "the seed of top_k": "the seed of top_k",
    "num_stages is 3": "num_stages is 3",  # no flag of this script
    "seed in\n two lines": "seed in two lines",
}


@pytest.mark.parametrize(("message", "expected"), MESSAGES.items(), ids=list(MESSAGES))
def test_messages_name_flags_as_typed(message, expected):
    """Guards against a name in an error that no flag has, and dashes before what is none."""
    assert build_parser().as_typed(message) == expected


@pytest.mark.parametrize(
    "write",
    [
        lambda args: print("text"),  # fails when the buffer is flushed at the end
        lambda args: print("text" * 10_000),  # fails here
        lambda args: print("text", flush=True),
    ],
    ids=["at the end", "in the middle", "flushed"],
)
def test_a_closed_pipe_ends_the_run_in_silence(capsys, monkeypatch, write):
    """Guards `script.py | head` against a traceback after the last line that was read."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["script.py"])
        with pytest.raises(SystemExit) as caught:
            run_script(write, Parser(prog="script.py"))
        assert caught.value.code == 128 + 13
    assert "Traceback" not in capsys.readouterr().err


def test_pipes_that_are_not_the_output_stay_tracebacks(monkeypatch):
    """Guards against a lost worker or rank that is taken for a reader who has seen enough."""

    def defect(args):
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr(sys, "argv", ["script.py"])
    with pytest.raises(BrokenPipeError):
        run_script(defect, Parser(prog="script.py"))


def test_a_terminal_that_cannot_show_a_character_gets_a_question_mark(tmp_path, monkeypatch):
    """Guards against a run that ends in the middle of its output at the first é on an ASCII terminal."""
    with open(tmp_path / "terminal", "w", encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["script.py"])
        with pytest.raises(SystemExit) as caught:
            run_script(lambda args: print("Hé, 好!"), Parser(prog="script.py"))
    assert caught.value.code is None
    assert (tmp_path / "terminal").read_text() == "H?, ?!\n"


@pytest.mark.parametrize("flag", ["--prompt", "--base_model_path", "--trace"])
def test_arguments_that_are_not_utf_8_are_refused(files, capsys, monkeypatch, flag):
    """Guards against a tokenizer's TypeError after minutes of loading, and records that cannot be written."""
    argument = os.fsdecode(b"Hello\xff")
    message = refusal(arguments(files, flag, argument), capsys, monkeypatch)
    assert message == (
        "pipeline_inference.py: error: the argument 'Hello\\udcff' is not UTF-8: give it as text in UTF-8\n"
    )


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32")]
)
def test_data_types_have_short_names(name, dtype):
    """Guards command lines of the paper's repository, in every script that has --dtype."""
    for script, flags in SCRIPTS_WITH_DTYPE.items():
        args = script.build_parser().parse_args([*flags, "--dtype", name])
        assert args.dtype == dtype


def test_the_hub_does_not_speak_of_its_retries():
    """Guards the one line about a model that cannot be found: the hub warns ten times before it gives up."""
    hub = logging.getLogger("huggingface_hub")
    hub.setLevel(logging.WARNING)
    quiet_libraries()
    assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)


def test_exit_code_of_the_real_process(files):
    """Guards against an exit code that only holds inside the test process."""
    script = Path(pipeline_inference.__file__)
    argv = arguments(files, "--temperature", "-1")
    done = subprocess.run([sys.executable, str(script), *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "pipeline_inference.py: error: --temperature is -1.0: it must be 0 (greedy) or a positive number"
    ]
    assert done.stdout == ""


# ---------------------------------------------------------------------------------------------------------------------
# Timeline
# ---------------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that moves only when told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(timeline.time, "perf_counter", lambda: self.now)

    def spend(self, line, row, seconds):
        with line.span(row):
            self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_ideal_time_has_a_device_for_each_stage_and_the_head(clock):
    """Guards against an ideal time other than the sum over cycles of max(stages, draft) + verify."""
    line = Timeline(torch.device("cpu"))
    cycles = [
        {DRAFT: 5, "stage 1": 2, "stage 0": 3, VERIFY: 2},  # the head is slowest
        {DRAFT: 1, "stage 1": 2, "stage 0": 7, VERIFY: 4},
        {"stage 0": 1},  # nothing drafted or verified while the pipeline fills
        {DRAFT: 1, "stage 0": 1, VERIFY: 9},  # verification is the longest
        {},
    ]
    for cycle in cycles:
        for row, seconds in cycle.items():
            clock.spend(line, row, seconds)
        line.end_cycle()
    timings = line.finish(prefill=1.5, decode=99.0, num_stages=2, verify_lag=0)
    assert timings.ideal_decode == (5 + 2) + (7 + 4) + 1 + (1 + 9)
    assert (timings.prefill, timings.decode) == (1.5, 99.0)
    assert timings.stages == [12, 4]
    assert (timings.draft, timings.verify) == (7, 15)
    lagged = line.finish(prefill=0.0, decode=0.0, num_stages=2, verify_lag=1)
    assert lagged.ideal_decode == 5 + 7 + 1 + 9
    assert line.spans == []


def test_a_row_entered_twice_counts_twice(clock):
    """Guards against the second part of a cycle's work replacing the first."""
    line = Timeline(torch.device("cpu"), keep_spans=True)
    clock.spend(line, "stage 0", 2)
    clock.spend(line, DRAFT, 3)
    clock.spend(line, "stage 0", 2)
    line.end_cycle()
    clock.spend(line, VERIFY, 1)
    line.end_cycle()
    assert line.finish(prefill=0, decode=0, num_stages=1, verify_lag=0).ideal_decode == 4 + 1
    assert line.spans == [
        Span("stage 0", 0, 0, 2),
        Span(DRAFT, 0, 2, 3),
        Span("stage 0", 0, 5, 2),
        Span(VERIFY, 1, 7, 1),
    ]


def test_timings_of_a_generation(files):
    """Guards against stages, head or verification that are not timed, or timed into each other."""
    target = Target.load(str(files / "target"))
    result = spd_decoder(target, load_head(files / "head", target)).generate(IDS, 20)
    timings = result.timings
    parts = [*timings.stages, timings.draft, timings.verify]
    assert len(timings.stages) == 2
    assert min(parts) > 0
    assert sum(parts) < timings.decode
    assert max(parts) <= timings.ideal_decode < sum(parts)
    assert result.tokens_per_second == 19 / timings.decode


def test_trace_rows_are_in_the_order_of_the_pipeline(tmp_path):
    """Guards against rows sorted as text, stage 10 before stage 2, and times in other units than microseconds."""
    rows = [VERIFY, *map(stage_row, (10, 2, 0)), DRAFT]
    spans = [(Span(row, cycle, 0.5, 0.25), {"name": "x", "position": 4}) for cycle, row in enumerate(rows)]
    write_trace(tmp_path / "trace.json", {"heading": spans})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = sorted((e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name")
    assert [name for _, name in names] == [DRAFT, "stage 0", "stage 2", "stage 10", VERIFY]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(e["ts"], e["dur"], e["args"]) for e in slices] == [
        (5e5, 2.5e5, {"cycle": cycle, "position": 4}) for cycle in range(5)
    ]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(), "OSError"),
        (ValueError(" \n"), "ValueError"),
        (OSError("\none\ntwo"), "one"),
        (OSError("x" * 999), "x" * 200),
    ],
)
def test_error_messages_become_one_line(error, line):
    """Guards against an IndexError in place of an error without a message, and a page of text in one line."""
    assert first_line(error) == line


def test_half_written_files_never_appear(tmp_path):
    """Guards against a trace or checkpoint that is half there, or half new, after an error."""
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), atomic_open(path) as file:
        print("new, but", file=file, end=0)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with atomic_open(path) as file:
        file.write("new")
    assert path.read_text() == "new"
