"""Shared by all tests: one thread (tiny models are slower on two), no hub, quiet libraries."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers.utils import logging

# A job in the background of a shell ignores Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
