"""The baselines together: closed forms against simulations, prompt lookup, training and evaluation as they are run."""

import json
import random
import sys
from collections import deque
from functools import partial

import pytest
import torch

import eval
import train
from baselines import train_baseline
from baselines.dflash import BlockTerms, DFlashConfig, dflash_decoder
from baselines.dflash_method import DFlashLoss
from baselines.eagle3 import Eagle3Config, Eagle3Loss, eagle3_decoder
from baselines.method import Run
from baselines.ppsd import PPSDConfig, PPSDLoss, ppsd_decoder
from baselines.prompt_lookup import PromptLookup, check_prompt_lookup
from baselines.registry import METHODS
from decoding.metrics import (
    chain_costs,
    closed_form,
    iid_accept_length,
    iid_chain_length,
    ppsd_costs,
    spd_costs,
)
from decoding.sampling import Sampling
from loading.checkpoint_files import CHECKPOINT_NAME
from pipeline_inference import Completed, Decoder, Logits, PromptOutput
from pipeline_model import Target, save_head
from script_utils import run_script
from tests.test_eval import TEMPLATE, read_rows, rows_of, summary_of
from tests.test_train import make_tokenizer, reply, train_tiny_target, write_language
from tests.test_verification import NEUTRAL, exact_pairs, excesses, sampled_pairs
from tests.tiny import VOCAB, hf_greedy, random_prompt, save_target, tiny_head, tiny_model, tiny_target
from tests.tiny_baselines import tiny_dflash, tiny_eagle3, tiny_ppsd
from timeline import DRAFT, VERIFY, Span, Timeline, stage_row
from training.conversations import load_conversations
from training.forward import teacher_features
from training.loss import KL
from training.run_state import list_checkpoints, read_log
from training.trainer import Trainer

CPU = torch.device("cpu")

# ---------------------------------------------------------------------------------------------------------------------
# Closed forms (method.md section 7)
# ---------------------------------------------------------------------------------------------------------------------


class CountingExecutor:
    """A pipeline that computes nothing: its target always says token 0."""

    device, anchors, vocab_size = CPU, (0,), 2

    def __init__(self, num_stages):
        self.stage_sizes = (1,) * num_stages

    def start(self, prompt, root, plan, timeline):
        self._behind = deque([()] * (len(self.stage_sizes) - 1))  # what each stage after the first runs next
        self._entered = []
        return PromptOutput(torch.tensor([1.0, 0.0]), torch.zeros(len(prompt), 1, 1))

    def begin_cycle(self, position, entering):
        self._entered += entering
        return torch.zeros(len(entering), 1)

    def finish_cycle(self):
        self._behind.appendleft(tuple(node.id for node in self._entered))
        self._entered = []
        done = self._behind.pop()
        return (), Completed(done, Logits(lambda row: torch.tensor([1.0, 0.0]))) if done else None

    def roll_back(self, dead):
        self._behind = deque(tuple(node for node in ids if node not in dead) for ids in self._behind)

    def finish(self):
        pass


class CoinDrafter:
    """Right with probability alpha."""

    draft_token_ids = None

    def __init__(self, alpha):
        self._random, self._alpha = random.Random(0), alpha

    def start(self, plan, features, path):
        pass

    enter = observe = lambda self, *_: None

    def draft(self, tree):
        right = self._random.random() < self._alpha
        return torch.tensor([[1.0, 0.0] if right else [0.0, 1.0]])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("num_stages", "chain"), [(4, 0), (8, 0), (1, 3), (1, 7)])
def test_closed_forms_against_simulated_drafters(alpha, num_stages, chain):
    """Guards the formulas and the loop against each other, for known alpha: a few standard errors apart at most."""
    decoder = Decoder(CountingExecutor(num_stages), CoinDrafter(alpha), draft_chain=chain)
    result = decoder.generate([0], 1200 if alpha else 121)
    assert result.alpha == pytest.approx(alpha, abs=0.05)
    costs = chain_costs(num_stages, 1, chain) if chain else spd_costs(result.stage_sizes, 1)
    expected = closed_form(result.alpha, num_stages, costs)
    assert result.equivalent_accept_length == pytest.approx(expected, rel=0.04)
    if chain:
        assert expected == pytest.approx(sum(result.alpha**k for k in range(chain + 1)))
    if alpha == 1:
        assert expected == (chain + 1 if chain else num_stages)
    if alpha == 0:
        assert expected == 1


def test_published_examples_of_the_closed_form():
    """Guards the numbers that method.md section 7 states."""
    for num_stages, length in ((4, 2.50), (8, 10 / 3), (16, 4.00)):
        assert iid_accept_length(0.8, num_stages) == pytest.approx(length)
    assert iid_chain_length(0.5, 2) == 1.75


def test_comparable_speedups():
    """Guards the formulas of method.md section 7 that put methods side by side, and the devices that each takes.

    L = 30, 70 tokens in 50 cycles.
    """

    def speedup(method, **fields):
        run = Run(METHODS[method], Sampling(), 71, 0, **fields)
        return 70 / (50 * run.costs.cycle), run.num_devices, run.costs

    layers, tau, even = 30, 70 / 50, (5,) * 6
    for num_spec_layers in (1, 8):
        theory, devices, costs = speedup("spd", stage_sizes=even, num_spec_layers=num_spec_layers)
        assert theory == pytest.approx(6 * tau * 5 / max(5, num_spec_layers))
        assert (devices, costs.factor) == (7, 6)
        theory, devices, costs = speedup("ppsd", stage_sizes=even, num_spec_layers=num_spec_layers)
        assert theory == pytest.approx(6 * tau * layers / (layers + 6 * num_spec_layers))
        assert (devices, costs.factor) == (6, 6)
    for steps in (3, 15):
        theory, devices, costs = speedup("eagle3", stage_sizes=(30,), num_spec_layers=1, draft_chain=steps)
        assert theory == pytest.approx(tau * layers / (layers + steps))
        assert (devices, costs.factor, costs.chain) == (1, 1, steps)
    for method in ("autoregressive", "prompt_lookup"):
        theory, devices, _ = speedup(method, stage_sizes=(30,))
        assert (theory, devices) == (tau, 1)
    assert ppsd_costs((4, 3, 6), 1).cycle == 6 / 13  # the drafter hides behind a larger stage
    assert closed_form(0.5, 10, METHODS["prompt_lookup"].costs(None)) is None


def test_a_draft_in_line_lengthens_the_cycle():
    """Guards the ideal time of PPSD and EAGLE-3, whose drafts no other device can take over."""
    line = Timeline(CPU)
    for cycle, seconds in enumerate([{stage_row(0): 3, stage_row(1): 4, DRAFT: 2, VERIFY: 1}, {stage_row(1): 4}]):
        for row, value in seconds.items():
            line.add(Span(row, cycle, 0.0, value))
    settings = {"prefill": 0.0, "decode": 0.0, "num_stages": 2, "verify_lag": 0}
    assert line.finish(**settings).ideal_decode == 4 + 1 + 4
    assert line.finish(**settings, draft_in_line=True).ideal_decode == 3 + 2 + 1 + 4
    assert Decoder(CountingExecutor(1), draft_chain=2).draft_in_line
    assert not Decoder(CountingExecutor(1)).draft_in_line


# ---------------------------------------------------------------------------------------------------------------------
# Prompt lookup
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prompt_lookup_counts_what_it_does(family):
    """Guards its output, and cycles, drafts and acceptance against a replay of the text with plain greedy decoding."""
    target, prompt = tiny_target(family), random_prompt(6) * 3
    sequence = prompt + hf_greedy(tiny_model(family), prompt, 60)
    prompt, expected = sequence[:-40], sequence[-40:]  # a prompt that ends in the target's own words, which repeat
    decoder = PromptLookup(target, 4, sampling=Sampling())
    widths = []
    target.layers[0].register_forward_hook(lambda _, __, output: widths.append(output.shape[1]))
    result = decoder.generate(prompt, 40)
    assert result.tokens == expected
    assert result.cycles == len(widths) - 1
    assert result.new_tokens == 40 - result.prefill_tokens
    ended_on_a_draft = result.accepted[-1]  # else every cycle adds the target's own token
    assert result.new_tokens == result.cycles + result.n_accepted - ended_on_a_draft
    assert 0 < result.n_accepted <= result.n_verified <= sum(width - 1 for width in widths[1:])
    assert sum(result.accepted) == result.n_accepted + result.prefill_tokens
    assert result.stage_sizes == (4,)
    assert result.timings.decode > 0 < result.timings.prefill

    eos = expected[20]
    stopped = PromptLookup(target, 4, sampling=Sampling(), eos_token_ids=[eos, 999]).generate(prompt, 40)
    assert stopped.tokens == expected[: expected.index(eos) + 1]
    assert stopped.stop_reason == "eos"


def test_prompt_lookup_samples_from_the_target():
    """Guards against settings of the target's generation_config, and against one seed for all runs."""
    fields = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    target = tiny_target("llama", layers=2, num_attention_heads=2, num_key_value_heads=1, seed=2, **fields)
    target.model.generation_config.suppress_tokens = [0, 1, 2, 3]
    decoder = PromptLookup(target, 2, sampling=NEUTRAL)
    counts, _ = sampled_pairs(decoder, 150)
    assert target.model.generation_config.suppress_tokens == [0, 1, 2, 3]
    assert max(map(abs, excesses(counts, exact_pairs(target, NEUTRAL)))) < 3.5


def test_prompt_lookup_refuses_what_it_cannot_roll_back():
    """Guards against transformers' own error, in the middle of a run, for hybrid targets and long prompts."""
    with pytest.raises(ValueError, match="prompt lookup cannot run 'qwen3_5_text'"):
        check_prompt_lookup(tiny_model("qwen3_5").config)
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="pass the target's limit"):
        PromptLookup(target, 4, sampling=Sampling(), max_positions=256).generate([1] * 250, 10)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens is 0"):
        PromptLookup(target, 0, sampling=Sampling())


# ---------------------------------------------------------------------------------------------------------------------
# train_baseline.py
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A target that knows the language of test_train.py, its tokenizer, data, and a draft vocabulary of all it says."""
    folder = tmp_path_factory.mktemp("baselines")
    tokenizer = make_tokenizer()
    write_language(folder / "data.jsonl", [20], copies=3)
    rows = load_conversations(str(folder / "data.jsonl"), tokenizer, cache_dir=folder / "cache", verbose=False).train
    train_tiny_target(list(rows), steps=150).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "draft.json").write_text(json.dumps({"vocab_size": VOCAB, "token_ids": list(range(24))}))
    return folder


def command(work, output, method, *more):
    base = ["--method", method, "--model_name", work / "target", "--data_path", work / "data.jsonl"]
    base += ["--cache_dir", work / "cache", "--output_dir", output, "--draft_vocab_json", work / "draft.json"]
    base += ["--batch_size", 4, "--gradient_accumulation_steps", 2, "--warmup_steps", 2, "--val_fraction", 0.1]
    base += ["--max_length", 64, "--log_interval", 1]
    base += {"ppsd": ["--num_stages", 2], "dflash": ["--num_taps", 1, "--mask_token", 40]}.get(method, [])
    return [str(item) for item in [*base, *more]]


def train_it(work, output, method, *more):
    return train_baseline.main(train_baseline.build_parser().parse_args(command(work, output, method, *more)))


CONFIGS = {"eagle3": Eagle3Config, "ppsd": PPSDConfig, "dflash": DFlashConfig}


@pytest.mark.parametrize(
    ("method", "more", "least"),  # guessing: 0.08
    [
        ("eagle3", ["--unroll_steps", 3, "--max_steps", 100], 0.7),
        ("ppsd", ["--max_steps", 60], 0.8),
        ("dflash", ["--block_size", 4, "--max_steps", 60, "--lr", 2e-2], 0.7),
    ],
)
def test_drafters_learn_a_language_and_decode_it(work, tmp_path, method, more, least):
    """Guards each method as a whole: a drafter soon speaks most of the language that the target has learned, in
    training and in decoding, and everything that a run writes is there."""
    settings = ["--optimizer", "muon", "--lr", 5e-3, "--batch_size", 16, *more]
    assert train_it(work, tmp_path, method, *settings, "--gradient_accumulation_steps", 1) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {CHECKPOINT_NAME, "run.json", "log.jsonl", "training_curve.png"}
    assert read_log(tmp_path / "log.jsonl")[-1]["validation"][0]["agreement"] > least

    target = Target.load(str(work / "target"))
    head = CONFIGS[method].load_head(tmp_path, target)
    decoders = {
        "eagle3": lambda: eagle3_decoder(target, head, 3),
        "ppsd": lambda: ppsd_decoder(target, head, (2, 2)),
        "dflash": lambda: dflash_decoder(target, head),
    }
    decoder = decoders[method]()
    accepted = verified = 0
    for stride, start in ((1, 0), (2, 7), (5, 11)):
        turn = [{"role": "user", "content": f"s{stride} {start}"}]
        prompt = make_tokenizer().apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        result = decoder.generate(prompt, 20)
        assert make_tokenizer().decode(result.tokens) == reply(stride, start)
        accepted, verified = accepted + result.n_accepted, verified + result.n_verified
    assert accepted / verified > least


@pytest.mark.parametrize("method", CONFIGS)
def test_resume_is_exact_and_settings_are_checked(work, tmp_path, method, capsys):
    """Guards a continued run: the same weights as one that was never stopped, and no other unrolling half-way."""
    assert train_it(work, tmp_path / "whole", method, "--max_steps", 4) == 0
    assert train_it(work, tmp_path / "parts", method, "--max_steps", 4, "--save_interval", 2) == 0
    (tmp_path / "parts" / CHECKPOINT_NAME).unlink()
    kept = list_checkpoints(tmp_path / "parts")
    assert [path.name for path in kept] == ["checkpoint-2", "checkpoint-4"]
    for file in kept[1].iterdir():
        file.unlink()
    assert train_it(work, tmp_path / "parts", method, "--max_steps", 4, "--resume_from", "auto") == 0
    whole, parts = (
        torch.load(tmp_path / name / CHECKPOINT_NAME, weights_only=True)["state_dict"] for name in ("whole", "parts")
    )
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name
    changed = {"eagle3": ("--unroll_steps", 7, 3), "dflash": ("--num_anchors", 64, 3)}
    if method in changed:
        flag, ours, theirs = changed[method]
        with pytest.raises(ValueError, match=f"a run with {flag} {ours}, this one has {theirs}"):
            train_it(work, tmp_path / "other", method, flag, theirs, "--resume_from", kept[0])


def test_draft_opd_resumes_exactly(work, tmp_path):
    """Guards the run as a whole: texts are decoded in every step, validation stays on the held-out text, a run that was
    stopped goes on with the same texts, and not with other ones."""
    assert train_it(work, tmp_path / "sft", "dflash", "--block_size", 4, "--max_steps", 2) == 0
    settings = ["--opd", "--init_head", tmp_path / "sft", "--block_size", 4, "--max_steps", 2, "--opd_tokens", 8]
    settings += ["--opd_temperature", 1.0, "--save_interval", 1]
    assert train_it(work, tmp_path / "opd", "dflash", *settings) == 0
    record = json.loads((tmp_path / "opd" / "run.json").read_text())
    assert 2 * 8 <= record["supervised_tokens"] <= 2 * 8 * 8
    assert read_log(tmp_path / "opd" / "log.jsonl")[-1]["al_sim"] >= 1
    whole = torch.load(tmp_path / "opd" / CHECKPOINT_NAME, weights_only=True)["state_dict"]
    (tmp_path / "opd" / CHECKPOINT_NAME).unlink()
    for file in list_checkpoints(tmp_path / "opd")[1].iterdir():
        file.unlink()
    assert train_it(work, tmp_path / "opd", "dflash", *settings, "--resume_from", "auto") == 0
    again = torch.load(tmp_path / "opd" / CHECKPOINT_NAME, weights_only=True)["state_dict"]
    start = torch.load(tmp_path / "sft" / CHECKPOINT_NAME, weights_only=True)["state_dict"]
    for name, weight in whole.items():
        assert torch.equal(weight, again[name]), name
        assert not torch.equal(weight, start[name]), name
    with pytest.raises(ValueError, match="a run with --opd_tokens 8, this one has 9"):
        train_it(work, tmp_path / "opd", "dflash", *settings, "--opd_tokens", 9, "--resume_from", "auto")


def test_all_drafters_meet_the_same_tokens(work, tmp_path):
    """Guards the comparison: with the same seed and steps a speculation head and all baselines see the same text."""
    orders = {}
    original = Trainer.load

    def load(self, part, rows, number=None):
        if part == "train":
            orders.setdefault(type(self.head).__name__, []).append(rows.tolist())
        return original(self, part, rows, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "load", load)
        for method in CONFIGS:
            assert train_it(work, tmp_path / method, method, "--max_steps", 2) == 0
        flags = command(work, tmp_path / "spd", "ppsd", "--max_steps", 2)[2:]  # without --method ppsd
        assert train.main(train.build_parser().parse_args(flags)) == 0
    assert len(orders) == 4
    first, *others = orders.values()
    assert len(first) == 4
    assert all(other == first for other in others)
    tokens = [json.loads((tmp_path / name / "run.json").read_text())["supervised_tokens"] for name in (*CONFIGS, "spd")]
    assert len(set(tokens)) == 1


@pytest.mark.parametrize("method", CONFIGS)
def test_every_weight_gets_a_gradient(method):
    """Guards against a part of a drafter that never learns, or that several processes would wait for."""
    target = tiny_target("llama")
    heads = {
        "eagle3": tiny_eagle3,
        "ppsd": partial(tiny_ppsd, sizes=(2, 2)),
        "dflash": partial(tiny_dflash, taps=1, learned_mask=True, train_lm_head=True),
    }
    head = heads[method](target).train().requires_grad_(True)
    ids = torch.tensor([random_prompt(9)])
    features, hidden = teacher_features(target, ids, torch.ones_like(ids), head.config.anchors)
    teacher = {"features": features, "hidden": hidden, "labels": ids, "attention_mask": torch.ones_like(ids)}
    losses = {
        "eagle3": partial(Eagle3Loss, steps=3, decay=0.8),
        "ppsd": partial(PPSDLoss, terms=KL),
        "dflash": partial(DFlashLoss, terms=BlockTerms(), num_anchors=3, seed=0),
    }
    loss = losses[method](head, target)
    loss(teacher, head.config.split(4), 1).total.backward()
    assert [name for name, weight in head.named_parameters() if weight.grad is None or not weight.grad.any()] == []


LAYER = [
    f"spec_layers.0.self_attn.{name}.weight" for name in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")
]
LAYER += [f"spec_layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up")]
LAYER += ["spec_layers.0.post_attention_layernorm.weight"]
NORM = "spec_layers.0.input_layernorm"
SHARED = {"hidden_size": 32, "vocab_size": 61, "draft_vocab_size": 61, "trained_with_use_deepest": False}
SHARED |= {"spec_intermediate_size_fallback": 48, "base_model_path": "", "model_type": "llama", "num_spec_layers": 1}
STORED = {  # what files of each method have held from the start: the configuration, and the names of the weights
    "eagle3": (
        SHARED | {"version": "eagle3", "num_stages": 1, "aggr_feature_bound": [0, 1, 2], "num_aggr_types": 3},
        ["fc.weight", "lm_head.weight", f"{NORM}.embedding.weight", f"{NORM}.feature.weight", *LAYER],
    ),
    "ppsd": (
        SHARED
        | {"version": "ppsd", "num_stages": 3, "stage_layers": [1, 2, 1], "aggr_feature_bound": [0, 1]}
        | {"num_aggr_types": 2},
        ["lm_head.weight", f"{NORM}.weight", *LAYER],
    ),
    "dflash": (
        SHARED
        | {"version": "dflash", "num_stages": 1, "aggr_feature_bound": [0, 3], "num_aggr_types": 2, "block_size": 4}
        | {"mask_token_id": 3, "learned_mask": True, "train_lm_head": True},
        [
            "context_norm.weight",
            "context_proj.weight",
            "lm_head.weight",
            "mask",
            "norm.weight",
            f"{NORM}.weight",
            *LAYER,
        ],
    ),
}


@pytest.mark.parametrize("method", STORED)
def test_files_hold_what_they_always_did(method, tmp_path):
    """Guards checkpoints that exist: entries and weights keep their names, and an old file gives the same drafter."""
    target, (stored, names) = tiny_target("llama"), STORED[method]
    heads = {
        "eagle3": tiny_eagle3,
        "ppsd": partial(tiny_ppsd, sizes=(1, 2, 1)),
        "dflash": partial(tiny_dflash, taps=1, layers=1, learned_mask=True, train_lm_head=True),
    }
    head = heads[method](target)
    save_head(head, tmp_path / "head.pt")
    written = torch.load(tmp_path / "head.pt", weights_only=True)
    assert written["config"] == stored
    assert sorted(written["state_dict"]) == sorted(names)
    torch.save({"config": stored, "state_dict": written["state_dict"]}, tmp_path / "old.pt")
    assert METHODS[method].config_class.load_head(tmp_path / "old.pt", target).config == head.config


@pytest.mark.parametrize(
    ("method", "more", "complaint"),
    [
        ("eagle3", ["--num_stages", "2"], "--num_stages belongs to --method ppsd: leave it out with eagle3"),
        ("eagle3", ["--num_spec_layers", "1"], "--num_spec_layers belongs to --method ppsd"),
        ("ppsd", ["--unroll_steps", "3"], "--unroll_steps belongs to --method eagle3"),
        ("ppsd", ["--num_stages", "9"], "num_stages is 9, but the target has 4 layers"),
        ("ppsd", ["--num_stages", "1"], "num_stages is 1: PPSD drafts while"),
        ("ppsd", ["--stage_layers", "1;2"], "sums to 3"),
        ("eagle3", ["--attn_implementation", "flex_attention"], "invalid choice"),
        ("eagle3", ["--num_taps", "5"], "--num_taps belongs to --method dflash: leave it out with eagle3"),
        ("dflash", ["--num_taps", "5"], "--num_taps is 5: so many need a target of 8 layers, and this one has 4"),
        ("dflash", ["--mask_token", "assistant"], "--mask_token is 'assistant', which every reply has"),
        ("dflash", ["--mask_token", "61"], "--mask_token is '61': neither a token of the target's tokenizer nor an id"),
        ("dflash", ["--block_size", "1"], "'1' is not an integer at least 2"),
        ("dflash", ["--gamma", "5", "--slot_weights", "dpace"], "--gamma belongs to --slot_weights decay"),
        ("dflash", ["--opd_tokens", "9"], "--opd_tokens needs --opd"),
        ("dflash", ["--opd"], "--opd needs --init_head"),
        ("dflash", ["--opd", "--init_head", "x", "--feature_cache", "y"], "--feature_cache cannot go with --opd"),
        ("dflash", ["--opd", "--init_head", "x", "--loss", "ce"], "--loss does not belong to --opd"),
        ("medusa", [], "invalid choice"),
    ],
)
def test_bad_training_flags_are_one_line(work, tmp_path, capsys, monkeypatch, method, more, complaint):
    """Guards against a traceback, and against hours of training on settings that were not meant."""
    monkeypatch.setattr(sys, "argv", ["train_baseline.py", *command(work, tmp_path / "out", method, *more)])
    with pytest.raises(SystemExit) as stopped:
        run_script(train_baseline.main, train_baseline.build_parser())
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert complaint in line
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# eval.py --method
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, a head of each kind, and a data set."""
    folder = tmp_path_factory.mktemp("files")
    save_target(folder / "target", chat_template=TEMPLATE)
    target = Target.load(str(folder / "target"))
    save_head(tiny_eagle3(target), folder / "eagle3.pt")
    save_head(tiny_ppsd(target, (2, 2)), folder / "ppsd.pt")
    save_head(tiny_dflash(target, taps=1), folder / "dflash.pt")
    save_head(tiny_head(target, (2, 2)), folder / "spd.pt")
    (folder / "data" / "first").mkdir(parents=True)
    lines = [
        json.dumps({"question_id": index, "category": "chat", "turns": [prompt]})
        for index, prompt in enumerate(["w5 w17 w3 w5 w17", "w8 w2"])
    ]
    (folder / "data" / "first" / "question.jsonl").write_text("\n".join(lines))
    return folder


def evaluate(files, output, *flags):
    base = ["--base_model_path", files / "target", "--data_dir", files / "data", "--datasets", "first"]
    base += ["--max_new_tokens", 12, "--gpus", "cpu", "--output_dir", output]
    return eval.main(eval.build_parser().parse_args([str(item) for item in [*base, *flags]]))


CASES = [  # method, flags, files' name, label, devices
    ("eagle3", ["--num_steps", 3], "eagle3__target__eagle3_m3_T0", "EAGLE-3 eagle3, m = 3, T = 0", 1),
    ("dflash", ["--block_size", 3], "dflash__target__dflash_B3_T0", "DFlash dflash, B = 3, T = 0", 1),
    ("ppsd", [], "ppsd__target__ppsd_n2_T0", "PPSD ppsd, n = 2, T = 0", 2),
    ("autoregressive", [], "target__autoregressive_T0", "autoregressive, T = 0", 1),
    ("prompt_lookup", [], "target__prompt_lookup_m10_T0", "prompt lookup, m = 10, T = 0", 1),
]


@pytest.mark.parametrize(("method", "flags", "name", "label", "devices"), CASES, ids=[case[0] for case in CASES])
def test_every_method_is_evaluated_alike(files, tmp_path, monkeypatch, method, flags, name, label, devices):
    """Guards against a method whose rows, summary or theory another script could not compare with SPD's."""
    monkeypatch.setattr(eval, "plot_summary", lambda summary, path: None)
    heads = ["--spec_head_ckpt", files / f"{method}.pt"] if METHODS[method].config_class else []
    assert evaluate(files, tmp_path, "--method", method, *heads, *flags) == 0
    assert (tmp_path / "raw" / f"pipeline_eval__{name}__per_sample.jsonl").is_file()
    rows, summary = rows_of(tmp_path), summary_of(tmp_path)
    assert len(rows) == 2
    assert all(row["equal_to_baseline"] for row in rows.values())
    assert all(len(row["output_ids"]) == 12 for row in rows.values())
    assert summary["settings"]["label"] == label
    assert summary["settings"]["method"] == method
    assert summary["devices_in_theory"] == devices
    part = summary["overall"]
    assert part["theoretical_speedup_pooled"] == pytest.approx(
        part["acceptance_rate_pooled"] / summary["costs"]["cycle"]
    )
    if method == "eagle3":
        assert len(part["alpha_by_fill"]) == 3
        assert part["totals"]["new_tokens"] == 22
        assert part["equivalent_accept_length_pooled"] == pytest.approx(22 / part["totals"]["decode_loop_steps"])
    if method == "autoregressive":
        assert (part["alpha_pooled"], part["theoretical_speedup_pooled"]) == (None, 1)
    shown = (tmp_path / "summary" / "pipeline_eval__table.md").read_text()
    assert f"| {label} |" in shown


def test_several_chains_are_several_runs_and_resume(files, tmp_path, monkeypatch):
    """Guards against chain lengths that share a file, and against resuming after the drafter's code has changed."""
    monkeypatch.setattr(eval, "plot_summary", lambda summary, path: None)
    flags = ["--method", "eagle3", "--spec_head_ckpt", files / "eagle3.pt", "--num_steps", 1, 4, "--no-baseline"]
    assert evaluate(files, tmp_path, *flags) == 0
    names = sorted(path.name for path in (tmp_path / "raw").glob("*.jsonl"))
    assert ["_m1_" in names[0], "_m4_" in names[1], len(names)] == [True, True, 2]
    before = [read_rows(tmp_path / "raw" / name) for name in names]
    assert evaluate(files, tmp_path, *flags, "--resume") == 0
    assert [read_rows(tmp_path / "raw" / name) for name in names] == before
    monkeypatch.setattr(type(METHODS["eagle3"]), "code", ("baselines/ppsd.py",))
    with pytest.raises(ValueError, match="method_fingerprint"):
        evaluate(files, tmp_path, *flags, "--resume")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--method", "eagle3"], "--method eagle3 needs --spec_head_ckpt"),
        ([], "--method spd needs --spec_head_ckpt"),
        (["--method", "autoregressive", "--spec_head_ckpt", "spd.pt"], "--method autoregressive has no checkpoint"),
        (["--method", "eagle3", "--spec_head_ckpt", "ppsd.pt"], "checkpoint version is 'ppsd', not 'eagle3'"),
        (["--method", "ppsd", "--spec_head_ckpt", "spd.pt"], "checkpoint version is 12, not 'ppsd'|11, not 'ppsd'"),
        (["--spec_head_ckpt", "eagle3.pt"], "checkpoint version is 'eagle3': this program reads"),
        (
            ["--method", "ppsd", "--spec_head_ckpt", "ppsd.pt", "--draft_top_k", 4],
            "--draft_top_k belongs to",
        ),
        (["--method", "prompt_lookup", "--num_steps", 3], "--num_steps belongs to --method eagle3"),
        (
            ["--method", "eagle3", "--spec_head_ckpt", "eagle3.pt", "--block_size", 4],
            "--block_size belongs to --method",
        ),
        (["--method", "dflash", "--spec_head_ckpt", "dflash.pt", "--block_size", 5], "was trained for 1 to 4"),
        (["--method", "dflash", "--spec_head_ckpt", "dflash.pt", "--block_size", 1], "--block_size is 1: a block has"),
    ],
)
def test_bad_method_flags_are_refused(files, tmp_path, monkeypatch, flags, complaint):
    """Guards against a run of another method than the one that was meant."""
    flags = [files / flag if str(flag).endswith(".pt") else flag for flag in flags]
    with pytest.raises(ValueError, match=complaint):
        evaluate(files, tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()
