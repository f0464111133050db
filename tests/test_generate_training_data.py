"""Text in the target's own words: greedy answers are the target's, a killed run goes on to the same file."""

import json
import shutil
import sys

import pytest

from script_utils import lock_file
from tests.test_train import make_tokenizer, write_language
from tests.tiny import hf_greedy, tiny_model
from training import generate_answers as gen
from training.conversations import load_conversations


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    model = tiny_model("llama")
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    write_language(folder / "data.jsonl", [3, 5])
    with (folder / "data.jsonl").open("a") as file:
        turns = [{"role": "user", "content": "s1 " + "3 " * 40}, {"role": "assistant", "content": "4"}]
        file.write(json.dumps({"messages": turns}) + "\n")
        file.write(json.dumps({"messages": [{"role": "system", "content": "s2"}]}) + "\n")
    return folder


def run(work, output, *more):
    base = ["--model_name", work / "target", "--data_path", work / "data.jsonl", "--output", output]
    base += ["--max_new_tokens", 12, "--max_prompt_tokens", 20, "--batch_size", 7, "--device", "cpu"]
    base += ["--dtype", "float32"]
    gen.main(gen.build_parser().parse_args([str(item) for item in [*base, *more]]))
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_greedy_answers_are_the_targets(work, tmp_path, capsys):
    """Guards padding on the left, the cut at the end token, prompts left out, and that training can read the file."""
    lines = run(work, tmp_path / "own.jsonl")
    assert len(lines) == len({line["id"] for line in lines}) == 60
    assert "60 prompts of 62 records; left out: 1 prompt too long, 1 no user turn" in capsys.readouterr().out
    tokenizer, model = make_tokenizer(), tiny_model("llama")
    for line in lines[::6]:
        prompt = tokenizer(f"user {line['messages'][0]['content']} assistant ")["input_ids"]
        ids = hf_greedy(model, prompt, 12, eos=1)
        assert line["finish"] == ("eos" if ids[-1] == 1 else "length")
        written = tokenizer.decode(ids[:-1] if ids[-1] == 1 else ids)  # words, without the blank before the first
        assert line["messages"][1]["content"] == (f" {written}" if written else "")
    data = load_conversations(tmp_path / "own.jsonl", tokenizer, cache_dir=tmp_path / "cache", verbose=False)
    assert len(data.train) > 50  # answers that begin with the end token are empty


@pytest.mark.parametrize("kept", [0, 3, 14, 16.5, 60])
def test_killed_run_goes_on_to_the_same_file(work, tmp_path, kept):
    """Guards resuming: cut anywhere, in a batch or a line, the finished file is that of a run that was not stopped."""
    settings = ["--temperature", 1, "--seed", 3]
    output = tmp_path / "own.jsonl"
    run(work, output, *settings)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    half = lines[int(kept)][:10] if kept % 1 else b""
    output.write_bytes(b"".join(lines[: int(kept)]) + half)
    run(work, output, *settings)
    assert output.read_bytes() == whole


def test_temperature_draws(work, tmp_path):
    """Guards --temperature and --seed: other draws with another seed, and others than the greedy answers."""
    files = [run(work, tmp_path / f"{seed}{t}.jsonl", "--seed", seed, "--temperature", t) for seed, t in SEEDED]
    texts = [{line["id"]: line["messages"][1]["content"] for line in lines} for lines in files]
    assert texts[0] == texts[1]  # greedy: the seed only shuffles
    assert texts[2] != texts[0]
    assert texts[2] != texts[3]


SEEDED = [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top_p", "0"], "top_p is 0.0"),
        (["--output", "own.json"], "name a .jsonl file"),
        (["--data_path", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--max_prompt_tokens", "2"], "no prompt of at most 2 tokens"),
    ],
)
def test_bad_input_is_one_line(work, tmp_path, capsys, monkeypatch, more, part):
    """Guards the promise of one line that names the value, exit code 2."""
    argv = [
        "gen",
        "--model_name",
        work / "target",
        "--data_path",
        work / "data.jsonl",
        "--output",
        tmp_path / "o.jsonl",
    ]
    monkeypatch.setattr(sys, "argv", [str(item) for item in [*argv, *more]])
    with pytest.raises(SystemExit) as stopped:
        gen.run_script(gen.main, gen.build_parser())
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2
    assert len(lines) == 1
    assert part in lines[0]
    assert not list(tmp_path.iterdir())


def test_other_settings_are_refused(work, tmp_path):
    """Guards against one file with answers of two kinds."""
    run(work, tmp_path / "own.jsonl")
    with pytest.raises(ValueError, match=r"begun with --temperature 0\.0, now it is 1\.0"):
        run(work, tmp_path / "own.jsonl", "--temperature", 1)
    (tmp_path / "own.run.json").unlink()
    with pytest.raises(ValueError, match=r"own\.run\.json does not"):
        run(work, tmp_path / "own.jsonl")


def changed_target(work, folder, generation):
    """The target again, with other entries in generation_config.json."""
    shutil.copytree(work / "target", folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    return folder


def test_answers_are_what_decoding_writes(work, tmp_path):
    """Guards text for targets whose generation_config.json has penalties, beams or sampling, as Qwen2.5's has: it was
    not what the same target writes when it decodes, and what the head has to foresee."""
    own = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "num_beams": 3, "temperature": 0.3, "top_k": 5}
    target = changed_target(work, tmp_path / "target", generation=own | {"do_sample": True, "min_new_tokens": 9})
    expected = run(work, tmp_path / "plain.jsonl", "--max_prompts", 9)
    assert run(work, tmp_path / "own.jsonl", "--max_prompts", 9, "--model_name", target) == expected


def test_a_target_without_end_or_pad_token(work, tmp_path):
    """Guards base models: without an end token the answers have max_new_tokens, and what pads does not matter (it was
    a traceback)."""
    target = changed_target(work, tmp_path / "target", generation={"eos_token_id": None})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"eos_token_id": None, "pad_token_id": None}))
    lines = run(work, tmp_path / "own.jsonl", "--max_prompts", 9, "--model_name", target)
    assert {line["finish"] for line in lines} == {"length"}
    tokenizer, model = make_tokenizer(), tiny_model("llama")
    for line in lines[::4]:
        prompt = tokenizer(f"user {line['messages'][0]['content']} assistant ")["input_ids"]
        ids = hf_greedy(model, prompt, 12)
        assert line["messages"][1]["content"].split() == tokenizer.decode(ids).split()


def test_cut_answers_are_left_out_on_demand(work, tmp_path):
    """Guards --leave_out_cut_answers: the other lines stay as they are, and a killed run goes on to the same file."""
    marked = run(work, tmp_path / "all.jsonl", "--temperature", 1)
    output = tmp_path / "own.jsonl"
    lines = run(work, output, "--temperature", 1, "--leave_out_cut_answers")
    assert lines == [line for line in marked if line["finish"] == "eos"]
    assert 0 < len(lines) < len(marked)
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[: len(lines) // 2]))
    run(work, output, "--temperature", 1, "--leave_out_cut_answers", True)
    assert output.read_bytes() == whole


@pytest.mark.parametrize("kept", [60, 16])
@pytest.mark.parametrize("added", ['{"messages": []}\n', '{"id": "mine"}', "mine\n"])
def test_lines_of_others_stay(work, tmp_path, kept, added):
    """Guards lines that somebody added to the file, finished or not: a second start cut them off, exit code 0."""
    output = tmp_path / "own.jsonl"
    run(work, output)
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:kept]) + added)
    with pytest.raises(ValueError, match=f"line {kept + 1} of it is not one of the 60 answers"):
        run(work, output)
    assert output.read_text() == "".join(lines[:kept]) + added


@pytest.mark.parametrize("prompts", [4, 61])
def test_a_source_that_has_changed_is_refused(work, tmp_path, prompts):
    """Guards answers whose prompts were downloaded anew or cut: 60 answers became 4, exit code 0."""
    data, output = tmp_path / "data.jsonl", tmp_path / "own.jsonl"
    data.write_text((work / "data.jsonl").read_text())
    run(work, output, "--data_path", data)
    before, lines = output.read_text(), data.read_text().splitlines(keepends=True)
    more = [json.dumps({"messages": [{"role": "user", "content": "s2 9"}]}) + "\n"]
    data.write_text("".join(lines[:prompts] if prompts < 60 else lines[:60] + more))
    with pytest.raises(ValueError, match="has other prompts now"):
        run(work, output, "--data_path", data)
    assert output.read_text() == before


def test_a_second_process_is_refused(work, tmp_path):
    """Guards one file that two commands write: 64 lines for 32 prompts."""
    output = tmp_path / "own.jsonl"
    with lock_file("--output", output), pytest.raises(ValueError, match=r"--output .* is in use"):
        run(work, output)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line(work, tmp_path, monkeypatch):
    """Guards hours of answers: a full disk is a line that says how to go on, what is there stays whole."""
    genuine, calls = gen.append_text, []

    def full(path, text):
        calls.append(None)
        if len(calls) == 3:
            raise OSError(28, "No space left on device", str(path))
        genuine(path, text)

    output = tmp_path / "own.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(gen, "append_text", full)
        with pytest.raises(ValueError, match=r"No space left on device.: the answers of 2 of 9 batches are in it"):
            run(work, output)
    part = output.read_text()
    assert len(part.splitlines()) == 14
    run(work, output)
    assert output.read_text().startswith(part)
