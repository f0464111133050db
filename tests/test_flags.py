"""The flags that several programs share, and the types of their values."""

import argparse
import importlib

import pytest

from loading.flags import COUNT, NATURAL, POSITIVE, bounded, integers

REFUSED = [
    (COUNT, "0 -1 1.5 x nan"),
    (NATURAL, "-1 0.5 x"),
    (POSITIVE, "0 -1 inf nan x"),
    (bounded(int, 2, 4), "1 5"),
    (bounded(float, 0, 0.5), "-0.1 0.6"),
    (integers, "2,x 2, 1.5"),
]
TAKEN = [(COUNT, "1", 1), (NATURAL, "0", 0), (POSITIVE, "1e-9", 1e-9), (bounded(int, 2, 4), "4", 4)]
TAKEN += [(bounded(float, 0, 0.5), "0", 0.0), (integers, "2,3,6", (2, 3, 6))]
COUNTS = {
    "eval": "prompts_per_dataset num_steps prompt_lookup_num_tokens",
    "train": "num_spec_layers batch_size max_steps",
    "training.generate_answers": "max_new_tokens max_prompt_tokens batch_size max_prompts",
    "draft_vocab.build_draft_vocab": "size num_proc",
    "eval_data.download": "prompts_per_dataset",
    "planning.plan_stages": "threads context rounds draft_vocab_size",
    "checkpoints.make_prompts": "count",
    "benchmarks.cycle_time": "threads cycles rounds num_stages",
    "benchmarks.colocated_speed": "rounds num_prompts",
    "benchmarks.cycle_overhead": "new_tokens",
}


def test_types_refuse_what_lies_outside():
    """Guards against a bound that holds by one too many, and numbers that compare with nothing."""
    for kind, texts in REFUSED:
        for text in texts.split():
            with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a"):
                kind(text)
    assert [kind(text) for kind, text, _ in TAKEN] == [value for *_, value in TAKEN]


@pytest.mark.parametrize("module", COUNTS)
def test_counts_of_nothing_are_refused(module, capsys):
    """Guards against a traceback, or a division by zero, after minutes of work."""
    parser = importlib.import_module(module).build_parser()
    for name in COUNTS[module].split():
        with pytest.raises(SystemExit) as end:
            parser.parse_args([f"--{name}", "0"])
        assert end.value.code == 2
        assert f"error: argument --{name}: '0' is not an integer at least 1\n" in capsys.readouterr().err
