# Every target does its own set-up: it needs Python 3.11 or later and make, nothing else.
# Use another interpreter with `make PYTHON=/path/to/python3.12 ...`, another environment with VENV=.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHONS := $(or $(PYTHON),python3 python3.11 python3.12 python3.13)
STAMP  := $(VENV)/.everstep-installed
PEERS  := $(VENV)/.everstep-peers-installed
BENCH  := $(VENV)/.everstep-bench-installed
EXTRA  := dev
# The oldest and the newest release that the tests pass with.
TORCHES := 2.11.0 2.15.0
# One compute thread per process: tests and the demo start several on few cores.
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED := 0
# Hundreds of processes import the packages: the first one compiles them for all.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pip compiles one file after the other, on one core; Python's own module takes all cores. Peers
# bring files that do not compile. A third of all is hardly ever imported: Python compiles that when
# it is.
INSTALL := $(BIN)/python -m pip install --quiet --progress-bar off --no-compile
RARE    := /(tests?|testing|databricks|pip|transformers/models|ray/(rllib|train|tune|data|serve|llm))/
COMPILE := { $(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib 2>/dev/null || true; }

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast test-py312 test-ray test-torch test-peerless test-gpu test-chaos \
  chaos-network simulate check check-form check-types rooms format docs site bench bench-quick \
  bench-peers clean

help:
	@echo "make demo        train twice, once with faults, and compare (under 5 minutes on 2 cores)"
	@echo "make test        every test but chaos and gpu"
	@echo "make check       format, lint, types, import contracts, architecture tests"
	@echo "make rooms       which room of the packages imports which"
	@echo "make test-fast   what needs no Ray: unit, property, simulation, golden, arch"
	@echo "make test-py312  the same with Python 3.12, in .venv-py312"
	@echo "make test-torch  all but interop, with the oldest and the newest torch"
	@echo "make test-ray    what starts a real local Ray"
	@echo "make test-gpu    what only a GPU can show, on one that ranks share (PARTS=\"kills groups\", PARTS=--full)"
	@echo "make test-chaos  long runs under random faults"
	@echo "make chaos-network  faults of networks and machines on a real cluster (root; half an hour)"
	@echo "make docs        the documentation as a site with search, in build/site (pages, API reference)"
	@echo "make simulate    2,000 seeded histories of the controller's decisions (HISTORIES=, SEED=)"
	@echo "make bench       every measurement, beside its peers (hours; tests/benchmarks/RESULTS.md)"
	@echo "make bench-quick every benchmark with its smallest setting: do they run?"
	@echo "make bench-peers torchrun, torchft, Ray Train, NVRx and everstep under the same faults (hours; ARGS=\"--runs 1\")"
	@echo "make format      let ruff format and fix"
	@echo "make clean       remove .venv, caches and builds (runs/ stays)"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	found=""; \
	for candidate in $(PYTHONS); do \
	  if [ -n "$$candidate" ] && command -v "$$candidate" >/dev/null 2>&1 \
	     && "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "make: no Python >= 3.11 found; tried $(PYTHONS)" >&2; \
	  echo "      Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	  exit 1; \
	fi; \
	if ! [ -x $(BIN)/python ]; then \
	  echo "venv: $$("$$found" --version) in $(VENV)"; \
	  "$$found" -m venv $(VENV) || { \
	    echo "make: $$found cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; \
	    exit 1; }; \
	fi; \
	echo "venv: installing everstep[$(EXTRA)] with constraints.txt (dev: some minutes, about 2 GB)"; \
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt; \
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[$(EXTRA)]'; \
	$(COMPILE)
	@touch $@

# DeepSpeed needs no compiler without its operators; where it cannot be had, its tests skip.
$(PEERS): $(STAMP)
	@echo "venv: installing the peers of tests/interop"
	@DS_BUILD_OPS=0 $(INSTALL) -c constraints.txt -e '.[interop]' && $(COMPILE) \
	  || echo "make: the peers could not be installed: tests/interop will skip what needs them" >&2
	@touch $@

demo: $(STAMP)
	$(BIN)/everstep demo

# Two processes: each begins with a folder of Ray clusters, which mostly wait, and helps with the
# rest. A third one starved tests that watch the time.
test: $(STAMP) $(PEERS)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test-fast: $(STAMP)
	$(BIN)/python -m pytest -m "not ray and not interop and not gpu and not chaos"

test-ray: $(STAMP)
	$(BIN)/python -m pytest -m ray

# The fast suite with a second interpreter, in an environment of its own.
test-py312:
	$(MAKE) VENV=.venv-py312 PYTHON="$(or $(PYTHON),python3.12)" test-fast

# With the oldest and the newest torch that everstep takes, each in an environment of its own. pip
# takes CPU builds where an index has them (PIP_EXTRA_INDEX_URL); else CUDA builds, 6 GB each.
test-torch:
	@set -e; for release in $(or $(TORCH),$(TORCHES)); do \
	  $(MAKE) VENV=.venv-torch-$$release TORCH=$$release test-peerless; \
	done

test-peerless: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
	  -m "not interop and not gpu and not chaos"

# It takes the Python of the environment, or any other one that has torch and sees a GPU.
test-gpu: $(STAMP)
	$(BIN)/python -m tests.gpu $(PARTS)

test-chaos: $(STAMP)
	$(BIN)/python -m pytest -m chaos

chaos-network: $(STAMP)
	$(BIN)/python -m tests.benchmarks network

HISTORIES := 2000
SEED      := 0

simulate: $(STAMP)
	$(BIN)/python -m tests.simulation --histories $(HISTORIES) --seed $(SEED)

# Types take as long as the rest: `make -j 2 check` looks at both at once.
check: check-form check-types

check-form: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q --durations=1 tests/arch

check-types: $(STAMP)
	$(BIN)/mypy

rooms: $(STAMP)
	@$(BIN)/python -m tests.arch.rooms

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# In an environment of its own, without torch and Ray: the reference is read from the sources.
docs:
	$(MAKE) VENV=.venv-docs EXTRA=docs site

site: $(STAMP)
	$(BIN)/mkdocs build --config-file dashboards/site/mkdocs.yml
	@echo "docs: python -m http.server --directory build/site, then open http://localhost:8000"

# A comparison without its peers says little, so here a failed installation fails.
$(BENCH): $(STAMP)
	@echo "venv: installing the peers of tests/benchmarks"
	@DS_BUILD_OPS=0 $(INSTALL) -c constraints.txt -e '.[interop]'
	@touch $@

# Each peer in an environment of its own: pip takes CPU builds of torch where an index has them.
PEER_STAMPS := $(patsubst tests/benchmarks/peers/%/requirements.txt,.venv-peers/%/.installed,\
  $(wildcard tests/benchmarks/peers/*/requirements.txt))

.venv-peers/%/.installed: tests/benchmarks/peers/%/requirements.txt $(STAMP)
	@echo "venv: installing $* in .venv-peers"
	@$(BIN)/python -m venv .venv-peers/$*
	@.venv-peers/$*/bin/python -m pip install --quiet --progress-bar off -r $<
	@touch $@

bench: $(BENCH) $(PEER_STAMPS)
	$(BIN)/python -m tests.benchmarks

bench-quick: $(BENCH)
	$(BIN)/python -m tests.benchmarks --quick

bench-peers: $(STAMP) $(PEER_STAMPS)
	$(BIN)/python -m tests.benchmarks peers $(ARGS)

clean:
	rm -rf $(VENV) .venv-peers .venv-docs .venv-py312 .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
