"""Long work shows how much is left: on a terminal, and not in a pipe."""

import gzip
import json
import os
import pty
import random
import re
import sys
import termios

import datasets
import pytest
from transformers.utils import logging

from pipeline_inference import LocalExecutor
from pipeline_model import Target
from script_utils import no_loading_bar, quiet_libraries
from tests.tiny import random_prompt, save_target, spd_decoder, tiny_head, tiny_target
from training.sources import Counters, find_sources, read_all, read_conversations

BAR = r"{}: +100%\|[^\r]*\[\d\d:\d\d<\d\d:\d\d"  # a finished bar, with the time that is left


class Terminal:
    """A terminal in the place of standard error, as long as the block lasts."""

    def __enter__(self):
        self._own, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 100))
        self._stderr, self._active = sys.stderr, logging._tqdm_active
        sys.stderr = os.fdopen(theirs, "w")
        logging._tqdm_active = True  # as in a new process
        quiet_libraries()
        return self

    def __exit__(self, *_):
        sys.stderr.close()
        os.close(self._own)
        sys.stderr, logging._tqdm_active = self._stderr, self._active

    def text(self):
        """What it shows since it was asked last."""
        print(end="END", file=sys.stderr, flush=True)
        text = b""
        while not text.endswith(b"END"):
            text += os.read(self._own, 65536)
        return text.decode()


@pytest.fixture
def target(tmp_path):
    save_target(tmp_path / "target")
    return str(tmp_path / "target")


def test_loading_a_target_shows_one_bar_with_the_time_that_is_left(target):
    """Guards against minutes of silence before the first token, and a bar for a check that reads no weight."""
    with Terminal() as terminal:
        Target.load(target)
        text = terminal.text()
    assert re.search(BAR.format("Loading weights"), text)
    assert text.count(" 0%|") == 1


def test_a_process_whose_sisters_show_the_loading_is_silent(target):
    """Guards against a bar for each rank and worker, one over the other; and a silence that outlives the loading."""
    with Terminal() as terminal:
        with no_loading_bar():
            Target.load(target)
        assert "Loading" not in terminal.text()
        with no_loading_bar(hidden=False):
            Target.load(target)
        assert "Loading" in terminal.text()


def test_a_long_prompt_shows_its_way_through_the_stages(monkeypatch):
    """Guards against a silent minute before the first token, a bar over the text, and one for a prompt of no time."""
    monkeypatch.setattr(LocalExecutor, "PREFILL_CHUNK", 8)
    target = tiny_target("llama")
    decoder = spd_decoder(target, tiny_head(target, (2, 2)))
    with Terminal() as terminal:
        decoder.generate(random_prompt(20), 3)
        assert "prompt" not in terminal.text()
        monkeypatch.setattr("script_utils.PATIENCE", 0.0)
        monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
        decoder.generate(random_prompt(20), 3)
        text = terminal.text()
    assert re.search(r"prompt of 20 tokens: +0%\|", text)
    assert text.rstrip("END").endswith("\r")  # the bar is gone before the answer


def test_a_pipe_gets_no_loading_bar(target, capfd, monkeypatch):
    """Guards against hundreds of lines in a log file."""
    monkeypatch.setattr(logging, "_tqdm_active", True)
    quiet_libraries()
    Target.load(target)
    assert "Loading" not in capfd.readouterr().err


def write_records(path, count=3000):
    """Records of about 200 bytes, which can hardly be compressed, in the form that a file's name says."""
    generator = random.Random(5)
    records = [{"conversations": [{"from": "human", "value": generator.randbytes(80).hex()}]} for _ in range(count)]
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(records).to_parquet(path)
    elif path.suffix == "":
        datasets.Dataset.from_list(records).save_to_disk(path)
    else:
        text = json.dumps(records) if path.suffix == ".json" else "\n".join(map(json.dumps, records))
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz", "x.parquet", "saved"])
def test_reading_says_how_far_it_is(tmp_path, name):
    """Guards against a remaining time that has nothing to do with what is left to read."""
    write_records(tmp_path / name)
    [source] = find_sources([str(tmp_path / name)])
    places = []
    assert len(list(read_conversations(source, Counters(), places.append))) == len(places) == 3000
    assert places == sorted(places)
    assert places[0] < 0.2 * source.nbytes < places[1500] < 0.8 * source.nbytes
    assert places[-1] == pytest.approx(source.nbytes, rel=1e-3)


def test_reading_shows_the_time_that_is_left(tmp_path):
    """Guards against an hour of tokenising without an end in sight."""
    for name in ("a.jsonl", "b.parquet"):
        write_records(tmp_path / name, 30)
    sources = find_sources([str(tmp_path)])
    with Terminal() as terminal:
        assert len(list(read_all(sources, Counters(), show_progress=True))) == 60
        assert re.search(BAR.format("conversations"), terminal.text())
