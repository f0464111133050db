"""Shared by all tests: one thread (tiny models are slower on two), no hub, quiet libraries."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
