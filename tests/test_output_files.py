"""Output files: refused before anything is loaded, never half there, never in the place of a device, never shared."""

import argparse
import os
import resource
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

import eval as evaluation
import pipeline_inference
import train
from baselines import train_baseline
from benchmarks import compare_methods, gpu_check
from checkpoints import collect_results, make_prompts
from distributed_inference import eval_mp_pipeline_dataset, example_mp_pipeline_generate, launch
from draft_vocab import build_draft_vocab
from eval_data import download
from evaluation.files import RowLog
from evaluation.plan import Planner
from pipeline_model import Target, save_head
from planning import plan_stages
from script_utils import (
    Parser,
    Switch,
    append_text,
    atomic_open,
    check_output_file,
    check_output_folder,
    lock_file,
    lock_folder,
    run_script,
    shown,
)
from tests.tiny import save_target, tiny_head
from training import generate_answers

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="making a device needs root")


@contextmanager
def small_files(most):
    """No file of this process grows beyond so many bytes: a full disk without the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@as_root
def test_a_device_stays_a_device(tmp_path):
    """Guards a whole machine: --trace /dev/null as root made /dev/null a regular file for everyone."""
    device = tmp_path / "null"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    check_output_file("--trace", device)
    with atomic_open(device) as file:
        file.write("text")
    assert stat.S_ISCHR(device.stat().st_mode)
    assert list(tmp_path.iterdir()) == [device]


def test_a_named_pipe_gets_the_text(tmp_path):
    """Guards `--trace PIPE`: the reader waited for ever, as a file had taken the pipe's place."""
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    check_output_file("--trace", pipe)
    with atomic_open(pipe) as file:
        file.write("text")
    reader.join(10)
    assert found == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "link"])
def test_an_open_file_goes_on_where_it_is(tmp_path, name):
    """Guards `--trace /dev/stdout > file`: what had been printed was lost, and what followed went nowhere."""
    path, link = tmp_path / "out", tmp_path / "link"
    with path.open("w") as file:
        print("before", file=file, flush=True)
        link.symlink_to(f"/dev/fd/{file.fileno()}")
        output = link if name == "link" else name.format(file.fileno())
        check_output_file("--trace", output)
        with atomic_open(output) as trace:
            trace.write("trace\n")
        print("after", file=file)
    assert path.read_text() == "before\ntrace\nafter\n"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path, there):
    """Guards results that lie elsewhere by way of a link: the link became a file, its target stayed as it was."""
    link, target = tmp_path / "link", tmp_path / "other" / "target"
    target.parent.mkdir()
    link.symlink_to(target)
    if there:
        target.write_text("old")
    check_output_file("--trace", link)
    with atomic_open(link) as file:
        file.write("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_permissions_stay(tmp_path):
    """Guards private results: a file of mode 600 became readable for all when it was written again."""
    path = tmp_path / "file"
    path.touch(mode=0o600)
    with atomic_open(path) as file:
        file.write("new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_names_the_file(tmp_path):
    """Guards checkpoints on a full disk: torch's own error was "unexpected pos 110400 vs 110292", a traceback. The old
    file stays, and nothing is left beside it."""
    path = tmp_path / "state.pt"
    path.write_text("old")
    with small_files(20_000), pytest.raises(OSError, match="too large") as caught, atomic_open(path, "wb") as file:
        torch.save({"weights": torch.zeros(100_000)}, file)
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_lines_are_whole_or_not_there(tmp_path):
    """Guards rows and answers: half a line of a killed run, or of a full disk, made the next line unreadable."""
    path = tmp_path / "rows.jsonl"
    append_text(path, "one\n")
    with path.open("a") as file:
        file.write("half")
    append_text(path, "two\n")
    assert path.read_text() == "one\ntwo\n"
    with small_files(5000), pytest.raises(OSError, match="too large") as caught:
        append_text(path, "x" * 9000 + "\n")
    assert caught.value.filename == str(path)
    assert path.read_text() == "one\ntwo\n"


def test_disk_errors_are_one_line(tmp_path, capsys, monkeypatch):
    """Guards every script: a full disk or a read-only one is a line that names the path, exit code 2."""
    monkeypatch.setattr(sys, "argv", ["script.py"])

    def full(_):
        with small_files(100):
            append_text(tmp_path / "rows.jsonl", "x" * 200)

    with pytest.raises(SystemExit) as caught:
        run_script(full, Parser(prog="script.py"))
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "rows.jsonl: File too large; give another path" in message


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def unwritable(folder):
    """(path, reason) of files that cannot be written, for root neither."""
    file = folder / "file"
    file.touch()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "link").symlink_to(folder / "missing" / "file")
    return {
        folder: "it is a folder",
        folder / "missing" / "trace.json": f"there is no folder {str(folder / 'missing')!r}",
        folder / "link": f"there is no folder {str(folder / 'missing')!r}",
        file / "trace.json": "Not a directory",
        folder / "loop": "Too many levels of symbolic links",
        folder / ("x" * 300): "File name too long",
        "/proc/trace.json": "No such file or directory",
    }


def test_what_cannot_be_written_is_named(tmp_path):
    """Guards hours of decoding whose trace had no place to go; nothing stays of what is tried out."""
    cases = unwritable(tmp_path)
    there = sorted(tmp_path.iterdir())
    for path, reason in cases.items():
        with pytest.raises(ValueError, match="cannot be written") as caught:
            check_output_file("--trace", path)
        assert reason in str(caught.value)
        assert "--trace" in str(caught.value)
    check_output_file("--trace", tmp_path / "trace.json")
    check_output_file("--trace", None)
    assert sorted(tmp_path.iterdir()) == there


@as_root
def test_a_disk_is_never_written(tmp_path):
    """Guards root against `--trace /dev/sda`."""
    device = tmp_path / "disk"
    os.mknod(device, 0o666 | stat.S_IFBLK, os.makedev(7, 250))
    with pytest.raises(ValueError, match="a disk or a socket"):
        check_output_file("--trace", device)


def test_folders_that_cannot_be_written_are_named(tmp_path):
    """Guards runs that load a model before they see that their folder is a file, or is on a read-only disk."""
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "nowhere" / "out", "/proc/out"):
        with pytest.raises(ValueError, match=r"--output_dir '.*' cannot be written"):
            check_output_folder("--output_dir", folder)
    check_output_folder("--output_dir", tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def nothing_loads(*_, **__):
    pytest.fail("something was loaded")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    save_target(folder / "target")
    save_head(tiny_head(Target.load(str(folder / "target")), (2, 2)), folder / "head.pt")
    (folder / "data.jsonl").write_text("")
    return folder


SCRIPTS = [  # script, its other flags, the flag of an output file
    (pipeline_inference, "--base_model_path {0}/target --spec_head_ckpt {0}/head.pt --prompt w1", "--trace"),
    (plan_stages, "--num_devices 3", "--plot"),
    (plan_stages, "--num_devices 3", "--save_timings"),
    (gpu_check, "", "--output"),
    (compare_methods, "--work_dir {0}/compare --data_path {0}/data.jsonl", "--output"),
    (collect_results, "--eval_output {0}", "--output"),
    (make_prompts, "--count 1", "--output"),
    (build_draft_vocab, "--tokenizer {0}/target --data_path {0}/data.jsonl", "--output"),
    (generate_answers, "--model_name {0}/target --data_path {0}/data.jsonl", "--output"),
]


@pytest.mark.parametrize(("script", "flags", "flag"), SCRIPTS, ids=lambda value: getattr(value, "__name__", None))
def test_every_output_file_is_checked_first(files, tmp_path, monkeypatch, script, flags, flag):
    """Guards work that is lost at its end: each script refuses an output without a folder before it loads anything."""
    for name in ("load", "from_pretrained"):
        monkeypatch.setattr(Target, name, nothing_loads, raising=False)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", nothing_loads)
    # The answers' own folder is made; a mistyped path two folders deep is not.
    path = tmp_path / "missing" / ("deeper" if script is generate_answers else "") / "own.jsonl"
    args = script.build_parser().parse_args([*flags.format(files).split(), flag, str(path)])
    with pytest.raises(ValueError, match=f"{flag} .*cannot be written .there is no folder"):
        script.main(args)
    assert list(tmp_path.iterdir()) == []


TRAINING = "--model_name {0}/target --data_path {0}/data.jsonl"


@pytest.mark.parametrize(
    ("script", "flags", "flag"),
    [
        (train, f"{TRAINING} --num_stages 2 --output_dir {{0}}/out", "--output_dir"),
        (train, f"{TRAINING} --num_stages 2 --output_dir {{0}}/out", "--cache_dir"),
        (train, f"{TRAINING} --num_stages 2 --output_dir {{0}}/out", "--feature_cache"),
        (train_baseline, f"{TRAINING} --method eagle3 --output_dir {{0}}/out", "--output_dir"),
        (compare_methods, "--work_dir {0}/compare --data_path {0}/data.jsonl", "--work_dir"),
        (build_draft_vocab, "--tokenizer {0}/target --data_path {0}/data.jsonl --output {0}/list.json", "--cache_dir"),
        (download, "--set gsm8k", "--output_dir"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_output_folder_is_checked_first(files, tmp_path, monkeypatch, script, flags, flag):
    """Guards the same for folders; one on a read-only disk, which root's permissions hide, is like this one."""
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", nothing_loads)
    monkeypatch.setattr(download, "from_network", nothing_loads)
    args = script.build_parser().parse_args([*flags.format(files).split(), flag, "/proc/out"])
    with pytest.raises(ValueError, match=f"{flag} '/proc/out' cannot be written"):
        script.main(args)
    assert not (files / "out").exists()


@pytest.mark.parametrize("flag", ["--output_dir", "--baseline_cache_dir"])
def test_an_evaluation_checks_its_folders(files, tmp_path, flag):
    """Guards an evaluation whose rows, or whose baseline's, have no place."""
    (tmp_path / "data" / "questions").mkdir(parents=True)
    (tmp_path / "data" / "questions" / "question.jsonl").write_text('{"question_id": 1, "turns": ["w5"]}\n')
    flags = f"--base_model_path {files}/target --spec_head_ckpt {files}/head.pt --data_dir {tmp_path}/data"
    args = evaluation.build_parser().parse_args(f"{flags} --datasets questions --gpus cpu {flag} /proc/out".split())
    with pytest.raises(ValueError, match=f"{flag} '/proc/out' cannot be written"):
        Planner(args).plan()


@pytest.mark.parametrize("script", [example_mp_pipeline_generate, eval_mp_pipeline_dataset])
@pytest.mark.parametrize("flag", ["--trace", "--profile_timing"])
def test_ranks_check_their_files(files, script, flag):
    """Guards distributed decoding: the draft rank, which writes, refuses before the target is loaded."""
    prompt = ["--prompt", "w1"] if script is example_mp_pipeline_generate else []
    flags = ["--base_model_path", str(files / "target"), "--spec_head_ckpt", str(files / "head.pt"), *prompt]
    args = script.build_parser().parse_args([*flags, flag, "/proc/trace.json"])
    environment = argparse.Namespace(rank=launch.DRAFT_RANK, world_size=3, local_rank=0, local_world_size=3)
    with pytest.raises(ValueError, match=f"{flag} '/proc/trace.json' cannot be written"):
        launch.Checked(args, environment)


# ---------------------------------------------------------------------------------------------------------------------
# Locks


def test_one_process_at_a_time(tmp_path):
    """Guards a folder against two runs (a requeued job, a second terminal): they deleted each other's checkpoints. The
    lock is the system's: it survives no process, so a file that a killed run left locks nothing."""
    folder = tmp_path / "a" / "out"
    folder.mkdir(parents=True)
    (folder / ".lock").write_text("process 1 on a machine that was switched off")
    with lock_folder("--output_dir", folder):
        code = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        second = subprocess.run([sys.executable, "-c", code, folder / ".lock"], capture_output=True, text=True)
        assert "BlockingIOError" in second.stderr
        assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(ValueError, match="is in use"), lock_folder("--output_dir", folder):
            pass
    with lock_folder("--output_dir", folder):
        (folder / "result").touch()
    assert list(folder.iterdir()) == [folder / "result"]


def test_a_lock_leaves_no_empty_folder(tmp_path):
    """Guards "nothing written": a start that is refused after it has its lock takes the folders that it made along."""
    with pytest.raises(ValueError, match="refused"), lock_folder("--output_dir", tmp_path / "a" / "b"):
        raise ValueError("refused")
    assert list(tmp_path.iterdir()) == []


def test_one_file_by_two_names_has_one_lock(tmp_path):
    """Guards an output that two commands reach by different links."""
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "own.jsonl")
    with lock_file("--output", link):
        with lock_file("--output", tmp_path / "other.jsonl"):
            pass
        with pytest.raises(ValueError, match="is in use"), lock_file("--output", tmp_path / "own.jsonl"):
            pass
    assert list(tmp_path.iterdir()) == [link]


@pytest.fixture
def questions(tmp_path):
    (tmp_path / "data" / "questions").mkdir(parents=True)
    (tmp_path / "data" / "questions" / "question.jsonl").write_text('{"question_id": 1, "turns": ["w5"]}\n')
    return ["--data_dir", str(tmp_path / "data"), "--datasets", "questions", "--max_new_tokens", "4"]


def parsed(files, questions, flags):
    own = ["--base_model_path", str(files / "target"), "--spec_head_ckpt", str(files / "head.pt"), "--gpus", "cpu"]
    return evaluation.build_parser().parse_args([*own, *questions, *map(str, flags)])


def evaluate(files, questions, *flags):
    return evaluation.main(parsed(files, questions, flags))


def test_a_second_evaluation_is_refused(files, questions, tmp_path, monkeypatch):
    """Guards two evaluations in one folder: every prompt had two rows, timed while two jobs shared the machine."""
    output, cache = tmp_path / "out", tmp_path / "cache"
    flags = ["--output_dir", output, "--baseline_cache_dir", cache]
    with lock_folder("--output_dir", output), pytest.raises(ValueError, match=r"--output_dir .* is in use"):
        evaluate(files, questions, *flags)
    assert not output.exists()
    (rows,) = {planned.baseline_rows for planned in Planner(parsed(files, questions, flags)).plan().runs}
    with rows.lock("--baseline_cache_dir"), pytest.raises(ValueError, match=r"--baseline_cache_dir .* is in use"):
        evaluate(files, questions, *flags)
    assert not output.exists()
    assert not cache.exists()
    monkeypatch.setattr(evaluation, "plot_summary", lambda *_: None)
    assert evaluate(files, questions, *flags) == 0
    with rows.lock("--baseline_cache_dir"):  # nothing is written where all rows are there
        assert evaluate(files, questions, *flags, "--output_dir", tmp_path / "other") == 0
    assert not list(tmp_path.rglob(".*lock"))


def test_reading_rows_changes_nothing(tmp_path):
    """Guards a baseline cache that several evaluations read: one cut off the line that another was just writing."""
    log = RowLog(tmp_path / "rows.jsonl", tmp_path / "rows.json")
    row = {"dataset": "d", "question_id": 1, "prompt_sha256": "0", "error": "none"}
    log.append(row, {"settings": {}})
    with log.path.open("a") as file:
        file.write('{"dataset": "d", "que')
    before = log.path.read_text()
    assert list(log.read().values()) == [row]
    assert log.path.read_text() == before
    log.append(row | {"question_id": 2}, {"settings": {}})
    assert [found["question_id"] for found in log.read().values()] == [1, 2]


# ---------------------------------------------------------------------------------------------------------------------
# Flags and messages


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", None),
        ("--mask_it", True),
        ("--mask_it True", True),
        ("--mask_it false", False),
        ("--no-mask_it", False),
        ("--no_mask_it --other 1", False),
    ],
)
def test_switches(flags, expected):
    """Guards the paper's command lines: `--mask_assistant True` was an unrecognised argument."""
    parser = Parser(prog="script.py")
    parser.add_argument("--mask_it", action=Switch)
    parser.add_argument("--other")
    assert parser.parse_args(flags.split()).mask_it is expected


@pytest.mark.parametrize("flags", ["--mask_it perhaps", "--no-mask_it True"])
def test_switches_refuse_other_values(flags, capsys):
    """Guards against a typing error that is taken for True."""
    parser = Parser(prog="script.py")
    parser.add_argument("--mask_it", action=Switch)
    with pytest.raises(SystemExit):
        parser.parse_args(flags.split())
    assert f"{flags.split()[1]!r} is neither True nor False" in capsys.readouterr().err


def test_messages_stay_readable(capsys):
    """Guards against a refusal of 213,000 characters, both draft vocabularies in one line."""
    assert shown((1, 2, 3)) == "(1, 2, 3)"
    assert shown(list(range(16_000))) == "a list of 16000"
    assert len(shown("x" * 500)) == 80
    with pytest.raises(SystemExit):
        Parser(prog="script.py").error(f"--flag {'9' * 200_000}: leave it out")
    message = capsys.readouterr().err
    assert len(message) < 1300
    assert message.endswith(": leave it out\n")
