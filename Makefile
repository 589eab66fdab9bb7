# make demo | test | lint | bench: each is the only command that is needed; it makes its own virtual environment.
# make test is the gate, in minutes; make test-nightly is everything, in hours; .ci/run is the gate on a clean checkout, with the rest
# of what must hold before a change lands.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# make demo ONCE=1: exit after the table, with status 0 only if every later turn hit the cache
ONCE ?=
# Processes that share the tests. make test JOBS=0: in one process, for a debugger; ARGS: anything else for pytest.
# Two more than there are cores: many tests wait for processes and timers.
JOBS ?= $(shell expr $$(nproc) + 2)
ARGS ?=
# Tests start hundreds of processes: without bytecode files each of them compiles the program again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-image test-clients test-cluster test-engines test-nightly test-compiled compiled compiled-quick soak lint bench peers mutants fmt tools clean

install: $(VENV)/.dev

# --no-compile: bytecode of what is imported is written then; of all packages it takes a minute.
PIP_QUICK := --quiet --disable-pip-version-check --no-compile

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The demo needs the real engine and a client, the tests need everything.
$(VENV)/.demo: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install $(PIP_QUICK) -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install $(PIP_QUICK) -e '.[dev]'
	touch $(VENV)/.demo $@

demo: $(VENV)/.demo
	$(BIN)/warmroute demo $(if $(ONCE),--once)

# Each process begins with a part of the tests in their order, so that module fixtures are made once, and takes from the others
# when it has none left.
PYTEST := python -m pytest -n $(JOBS) --dist worksteal
# What needs more than the packages and `make tools`: each has a command of its own.
OTHERS := image or clients or cluster or engines

# The gate: at least one case of each behaviour. SLOWEST: how many of the slowest tests are printed in the end.
# PROCESSES=no leaves out what starts whole gateways under load: `make test-compiled` has them too.
SLOWEST ?= 50
PROCESSES ?=
test: $(VENV)/.dev
	$(BIN)/$(PYTEST) -m "not ($(OTHERS) or nightly$(if $(filter no,$(PROCESSES)), or processes))" --durations=$(SLOWEST) $(ARGS)

# The Dockerfile's build steps, which compile the hot modules: on a busy machine that takes longer than a test may.
test-image: $(VENV)/.dev
	$(BIN)/python -m pytest -m image -o faulthandler_timeout=1900 $(ARGS)

# Claude Code, Codex and OpenCode themselves through a gateway; the first time they are installed from npm (1.1 GB).
test-clients: $(VENV)/.dev
	[ -d .clients/node_modules/.bin ] || scripts/clients.sh
	$(BIN)/python -m pytest -m clients tests/clients $(ARGS)

# Discovery against a real API server of Kubernetes; the first time it is built from Debian's sources (5 minutes, 2.5 GB). In the end
# pods come, go and flap under load for FLAP_MINUTES: 10 before a release.
FLAP_MINUTES ?= 1
test-cluster: $(VENV)/.dev
	[ -x .tools/bin/kube-apiserver ] || scripts/kube-apiserver.sh
	WARMROUTE_FLAP_MINUTES=$(FLAP_MINUTES) $(BIN)/python -m pytest -m cluster tests/deploy/test_cluster.py $(ARGS)

# Real engines behind a gateway: two llama.cpp servers, vLLM's CPU build, and a stand-in of Distributed-Llama's API; prints a table of
# what works (build/engines.md). The first time they are installed (vLLM: 3.4 GB).
test-engines: $(VENV)/.dev
	scripts/peers.sh .peers engines
	$(BIN)/python -m pytest -m engines -s tests/engines $(ARGS)

# The router and the gateway as wheels have them: what mypyc makes of the same files has to pass the same tests. For tests it is
# compiled with -O0, in a folder of its own: a third of the time.
COMPILED := build/compiled
QUICK := build/compiled-O0
SOURCES := $(shell find router gateway replica -name '*.py')
$(COMPILED)/.made $(QUICK)/.made: $(VENV)/.dev hatch_build.py $(SOURCES)
	mkdir -p build && touch $(@D).begun
	$(if $(filter $(QUICK)/%,$@),WARMROUTE_OPT_LEVEL=0) $(BIN)/python hatch_build.py $(@D)
	mv $(@D).begun $@  # as old as the sources that were read: what changed meanwhile is compiled next time

compiled: $(COMPILED)/.made

compiled-quick: $(QUICK)/.made

# WHOLE=yes: everything that can run there. Otherwise the tests of the compiled modules, and whole gateways under load.
WHOLE ?=
test-compiled: $(QUICK)/.made
	rm -rf $(addprefix $(QUICK)/,tests scripts bench docs)
	cp -rp tests scripts bench docs README.md pyproject.toml $(QUICK)/  # with their times: bytecode of `make test` stays valid
	ln -sfn $(abspath .tools) $(QUICK)/.tools
	tests="$(if $(WHOLE),tests/gateway tests/router tests/chaos,$$($(BIN)/python -m scripts.compiled_tests))" && cd $(QUICK) && \
		HYPOTHESIS_PROFILE=compiled $(abspath $(BIN))/$(PYTEST) $$tests -m "not (tools$(if $(WHOLE),, or nightly))" \
		-p no:cacheprovider --durations=$(SLOWEST) $(ARGS)

# Everything that needs no more than the packages and the tools, in depth: before a release, hours. FUZZ_SECONDS: of each fuzzer.
# The reports of fuzzers and of the soak are in build/.
FUZZ_SECONDS ?= 60
test-nightly: $(VENV)/.dev
	scripts/tools.sh
	HYPOTHESIS_PROFILE=nightly WARMROUTE_REQUIRE_TOOLS=1 $(BIN)/$(PYTEST) -m "image or not ($(OTHERS))" \
		--timeout 3600 -o faulthandler_timeout=3900 --durations=$(SLOWEST) $(ARGS)
	$(MAKE) test-compiled WHOLE=yes
	PATH="$(abspath .tools/bin):$$PATH" $(BIN)/python -m scripts.fuzz all --seconds $(FUZZ_SECONDS) --out build/fuzz.md
	$(BIN)/python -m tests.replica.fuzz --engine sim --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m tests.replica.fuzz --engine transformers --seconds $(FUZZ_SECONDS)
	$(MAKE) soak MINUTES=5
	$(MAKE) soak MINUTES=5 WORKERS=2

# Load, kills, restarts and hostile clients for MINUTES, and a conservation law at the end. The report of 30 minutes or more is
# bench/reports/soak.md, that of a shorter run build/soak.md. WORKERS=2: with two workers, in soak-2-workers.md.
MINUTES ?= 30
WORKERS ?= 1
SOAK_REPORTS = $(shell awk 'BEGIN { print $(MINUTES) < 30 ? "build" : "bench/reports" }')
soak: $(COMPILED)/.made
	$(BIN)/python -m bench.soak --minutes $(MINUTES) --workers $(WORKERS) --program $(COMPILED) \
		--out $(SOAK_REPORTS)/soak$(if $(filter-out 1,$(WORKERS)),-$(WORKERS)-workers).md

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev $(COMPILED)/.made
	$(BIN)/python -m bench.router.routing
	$(BIN)/python -m bench.router.memory
	$(BIN)/python -m bench.gateway.parsing
	$(BIN)/python -m bench.gateway
	$(BIN)/python -m bench.gateway.saturation
	$(BIN)/python -m bench.gateway.streams
	$(BIN)/python -m bench.gateway.handshakes
	$(BIN)/python -m bench.gateway.workers
	$(BIN)/python -m bench.replica.prefix
	$(BIN)/python -m bench.replica.throughput
	$(BIN)/python -m bench.replica.engines
	$(BIN)/python -m bench.replica.evictions
	$(BIN)/python -m bench.replica.twin
	$(BIN)/python -m bench.router.ablation
	$(BIN)/python -m bench.router.retention
	$(BIN)/python -m bench.router.unequal
	$(BIN)/python -m bench.router.policies
	$(BIN)/python -m bench.router.recorded --report

# What bench.gateway compares with, into .peers: sglang-router, smg, vllm-router, litellm; nginx and haproxy from Debian.
# (`scripts/peers.sh .peers engines`: what bench.replica.engines compares with, 4 GB.) Without them `make bench` measures what is there.
peers:
	scripts/peers.sh

# Changes a module in many small ways (mutmut), one at a time, runs its tests on each, and prints the mutants that survived.
MODULE ?= router/learning/learned.py
TESTS ?= tests/$(dir $(MODULE))test_$(notdir $(MODULE))
comma := ,
space := $(subst ,, )
MUTANTS := build/mutants
mutants: $(VENV)/.dev
	rm -rf $(MUTANTS)
	mkdir -p $(MUTANTS)
	cp -r router gateway replica bench tests pyproject.toml $(MUTANTS)/
	sed -i 's#^only_mutate = .*#only_mutate = ["$(MODULE)"]#; s#^\(pytest_add_cli_args_test_selection\) = .*#\1 = ["$(subst $(space),"$(comma) ",$(TESTS))"]#' \
		$(MUTANTS)/pyproject.toml
	cd $(MUTANTS) && HYPOTHESIS_PROFILE=mutants $(abspath $(BIN))/mutmut run && $(abspath $(BIN))/mutmut results

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# helm 3 and 4, promtool, Prometheus, into .tools/bin: what the tests marked `tools` need
tools:
	scripts/tools.sh

clean:
	rm -rf $(VENV) .tools .peers build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
