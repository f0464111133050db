# make demo         fetch a small target, compare speculative pipeline decoding with plain generation, write demo.html
# make demo_ranks   the target alone on one emulated device, then the pipeline on seven: real text and messages
# make test         run the tests (CPU, no downloads)
# make lint         check style and formatting
# make clean        remove .venv, caches and demo.html; checkpoints and results stay
#
# Each makes .venv and installs requirements.txt if needed. PYTHON is the interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/requirements.stamp

DEMO_TARGET := checkpoints/SmolLM2-135M-Instruct
DEMO_HEAD := checkpoints/SmolLM2-135M-Instruct_s6_l2.pt

.PHONY: help demo demo_ranks demo_target test lint clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make/make/p' Makefile

demo: demo_target
	@$(RUN) pipeline_inference.py --base_model_path $(DEMO_TARGET) --spec_head_ckpt $(DEMO_HEAD) --max_new_tokens 80 \
		--html demo.html \
		--prompt "What is the capital of France?" "Write a short poem about the sea." "Explain what a prime number is."

# Each rank sleeps out the time of a device that takes 150 ms for a stage: two cores do all the work within it.
demo_ranks: demo_target
	@OMP_NUM_THREADS=1 $(RUN) distributed_inference/example_mp_pipeline_generate.py --base_model_path $(DEMO_TARGET) \
		--spec_head_ckpt $(DEMO_HEAD) --rank_gpus cpu --emulate_stage_ms 150 --emulate_head_ms 100 \
		--emulate_verify_ms 40 --draft_top_k 4 --baseline --max_new_tokens 40 \
		--prompt "What is the capital of France?" "Explain what a prime number is."

# Two processes, each with whole files, in alphabetical order: sorted by their number of tests, a file with few long
# ones would come last. OMP_NUM_THREADS keeps what they start from fighting over the cores. Then, one after the other,
# the tests that compare times.
test: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not alone"
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q -m alone

lint: $(INSTALLED)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache demo.html
	find . -name __pycache__ -prune -exec rm -rf {} +

# The script itself knows whether the folder is there and intact.
demo_target: $(INSTALLED)
	@$(RUN) checkpoints/fetch_demo_target.py --output_dir $(DEMO_TARGET)

# transformers and numpy, as pinned, need Python 3.11.
$(INSTALLED): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "error: Python 3.11 or newer" \
		"is needed, $(PYTHON) is '$$($(PYTHON) -V 2>&1)': pass another, make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing requirements.txt into $(VENV), a minute or two"
	@$(RUN) -m pip install -q --disable-pip-version-check -r requirements.txt
	@touch $@
