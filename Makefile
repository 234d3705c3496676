# make quickstart   set up, then reinforcement learning of a small MoE on two CPU cores
# make check        set up, then lint, types and all tests but the deep ones
# make check-fast   of these, what starts neither engines nor ranks
# make check-deep   the deep tests, and every property with more examples; SLICE=K/N runs a part
# make check-cluster   two hosts and a Slurm cluster as namespaces of this machine, where root allows
# make bench        the benchmarks; results under docs/results/
# make gpu-check    what only a GPU shows, where requirements/gpu.txt is installed; results under runs/gpu/
# make measure      how large the project is: lines, files, settings, words
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(shell cat requirements/cpu.txt setup.py | cksum | cut -d ' ' -f 1)
# The CPU build; where the package index offers only the CUDA build, name a wheel or a URL of the CPU build here.
TORCH ?= torch==2.13.0
export OMP_NUM_THREADS ?= 1
# DeepSpeed is built at setup; nothing of it is compiled.
export DS_BUILD_OPS = 0
# Every process imports the project; one in a hundred is the first to compile it.
export PYTHONDONTWRITEBYTECODE =

# One for each core of a small machine; most tests start processes of their own.
WORKERS ?= 2
# Where a worker dies, the tests end: a second one would leave them waiting for what the first had.
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
SLICE ?= 0/1

.PHONY: setup quickstart check check-fast check-deep check-cluster lint test bench gpu-check faults measure clean

setup: $(STAMP)

$(STAMP):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile $(TORCH) uv  # uv compiles, on all cores
	$(BIN)/uv pip install --quiet --compile-bytecode --system-certs --python $(BIN)/python --no-deps -r requirements/cpu.txt \
		|| $(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt  # slower, but knows pip's configuration
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	rm -f $(VENV)/.ready-*
	touch $@

quickstart: setup
	$(BIN)/torchrun --standalone --nproc-per-node 2 launch/train_moe.py quickstart \
		--name quickstart-$(shell date +%Y%m%d-%H%M%S) $(ARGS)

check: setup  # mypy beside the tests: it uses one core
	$(MAKE) --no-print-directory -j 2 lint test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup
	$(PYTEST) -m "not deep and not cluster" --durations=50

check-fast: lint
	$(PYTEST) -m "not deep and not processes and not cluster"

check-deep: setup
	$(PYTEST) -m "(deep or hypothesis) and not cluster" --hypothesis-profile=deep --slice=$(SLICE) --durations=20

check-cluster: setup
	$(BIN)/python -m pytest -q -n 0 -m "cluster $(WHICH)" --durations=10 tests/cluster

bench: setup
	$(BIN)/python -m benchmarks.run $(ARGS)

gpu-check:
	python -m benchmarks.gpu $(ARGS)

faults: setup
	$(BIN)/python -m benchmarks.faults $(ARGS)

measure: setup
	$(BIN)/python -m benchmarks.measure $(ARGS)

clean:
	rm -rf $(VENV) .cache runs .pytest_cache .mypy_cache .ruff_cache
