# `make demo` and `make test` do all the set-up themselves: a virtual environment in .venv, then the package built and installed.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find src csrc -type f -not -name '*.pyc')

.PHONY: demo info test lint types pytest interpreter mutation architectures bench docs gpu-test gpu-bench gpu-sanitize sanitize sanitize-modules fuzz \
	fuzz-flow mutate-checkpoints aarch64 slow soak package build clean vllm compat

demo: .venv/demo  ## a first minute: a small model is trained, quantized four ways, verified and compared
	$(BIN)/baracuda demo

info: .venv/demo  ## what runs on this machine
	$(BIN)/baracuda info

test: lint types pytest interpreter docs  ## everything a change must pass

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

pytest: .venv/installed  ## all tests but those of the site, which `make docs` runs, and those that need time or a GPU
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu" --ignore tests/docs

slow: .venv/installed  ## the sweeps that take minutes: all 2**32 f32 inputs, more than 2**31 elements
	$(BIN)/python -m pytest -m slow --slow tests/backends/cpu/test_sweeps.py tests/contract

interpreter: .venv/installed  ## the Triton kernels on the CPU, in Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/backends/triton tests/backends/cpu/test_empty.py tests/contract/test_honest.py tests/contract/test_invariance.py -m "not gpu"

vllm: .venv/installed  ## our checkpoints in a real vLLM (its CPU build, in an environment of its own), with and without the plug-in
	$(BIN)/python tools/vllm_env.py

ROWS ?=
compat: .venv/installed  ## the tests over the version ranges, printed in docs/reference/versions.md; ROWS=--ends for the oldest alone
	$(BIN)/python tools/compat.py $(ROWS)

ONLY ?=
architectures: .venv/installed  ## small models of transformers' architectures through quantize, verify, load and save; ONLY="llama t5" for some
	$(BIN)/python tools/architectures.py $(ONLY)

SECONDS ?= 600
INVARIANCE ?=
soak: .venv/installed  ## endurance: random plans from many threads, every result checked, memory watched; INVARIANCE=1 hunts for rows that depend on the batch
	PYTHONPATH=tests/support $(BIN)/python tools/soak.py --seconds $(SECONDS) $(if $(INVARIANCE),--invariance)

bench: .venv/installed  ## the CPU kernels beside their peers, as ratios of one run
	$(BIN)/python -m bench cpu

# On a machine with an NVIDIA GPU and a CUDA build of torch: the interpreter of that environment; only this package is
# installed into it.
GPU_PYTHON ?= python3
gpu-test:
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-build-isolation --no-deps .
	$(GPU_PYTHON) -m pytest tests/gpu tests/backends/cpu/test_empty.py tests/contract/test_honest.py tests/contract/test_invariance.py -m "gpu and not alone" -p no:benchmark -n 8 --dist loadgroup
	$(GPU_PYTHON) -m pytest tests/gpu -m "gpu and alone" -p no:benchmark -n 0

gpu-bench:
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-build-isolation --no-deps .
	$(GPU_PYTHON) -m bench gpu --jobs 8 --json bench/results/gpu.json
	$(GPU_PYTHON) -m bench gpu --small --jobs 8 --json bench/results/gpu-small.json
	$(GPU_PYTHON) -m bench linear --json bench/results/linear.json
	$(GPU_PYTHON) -m bench model --schemes w8a8,w4a8,w4a16 --late --apart --seconds 500 --json bench/results/model.json

gpu-sanitize:  ## the GPU kernels under compute-sanitizer, memcheck and racecheck; logs in build/gpu-sanitize
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-build-isolation --no-deps .
	PYTHONPATH=tests/support $(GPU_PYTHON) tools/gpu_sanitize.py

docs: .venv/installed  ## the site in build/site: pages filled from the code, every link followed, every block run
	$(BIN)/python -m docs.site
	$(BIN)/python -m pytest -n 2 tests/docs

mutation: .venv/installed  ## break chosen lines of the reference, one at a time; every mutant must be caught
	$(BIN)/python tools/mutation.py

package: .venv/installed  ## the sdist, the wheel from it, no stray files in them, and the wheel used in a bare environment
	$(BIN)/pip install --quiet 'build>=1.2'
	$(BIN)/python tools/package.py

build: .venv/installed

.venv/requirements: constraints.txt pyproject.toml
	@echo "installing torch into .venv: some minutes, the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	touch $@

.venv/demo: .venv/requirements $(SOURCES)
	@echo "compiling baracuda and installing it into .venv: a minute or two"
	$(BIN)/pip install --quiet -c constraints.txt '.[flow]'
	touch $@

# The package is there, compiled; pip adds what its extras name.
.venv/installed: .venv/demo
	$(BIN)/pip install --quiet -c constraints.txt 'baracuda[test,lint,docs]'
	touch $@


sanitize:  ## the native kernels fuzzed over shapes, strides and bits, under the sanitizers of addresses, undefined behaviour and threads
	cmake -S tests/native -B build/native -DSANITIZE=address,undefined
	cmake --build build/native
	build/native/fuzz 1500
	cmake -S tests/native -B build/native-thread -DSANITIZE=thread
	cmake --build build/native-thread
	build/native-thread/fuzz 600

sanitize-modules: .venv/installed  ## the compiled modules under the same sanitizers, as Python loads them, with a driver that records in place of CUDA's
	$(BIN)/pip install --quiet 'nanobind>=2.4'
	$(BIN)/python tools/sanitize_modules.py

ROUNDS ?= 20000
SEED ?= 1
fuzz: sanitize
	build/native/fuzz $(ROUNDS) $(SEED)

FUZZ_SECONDS ?= 60
fuzz-flow: .venv/installed  ## hostile models, checkpoints, reports and texts, from SEED: no traceback, no hang, bounded memory
	PYTHONPATH=tests/support $(BIN)/python tools/fuzz_flow.py --seconds $(FUZZ_SECONDS) --seed $(SEED)

CHANGES ?= 500
mutate-checkpoints: .venv/installed  ## change single bytes of checkpoints of each scheme; says what `baracuda verify` lets pass
	PYTHONPATH=tests/support $(BIN)/python tools/mutate_checkpoints.py --changes $(CHANGES) --seed $(SEED)

# Debian's packages g++-aarch64-linux-gnu and qemu-user.
AARCH64_ROUNDS ?= 1000
aarch64:  ## the compiled kernels on an emulated 64-bit Arm: random problems give the bytes they give here
	cmake -S tests/native -B build/native-here -DSANITIZE= && cmake --build build/native-here --parallel
	cmake -S tests/native -B build/native-aarch64 -DSANITIZE= -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ && cmake --build build/native-aarch64 --parallel
	build/native-here/fuzz $(AARCH64_ROUNDS) $(SEED) | tail -1 | tee build/native-here/digest
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/native-aarch64/fuzz $(AARCH64_ROUNDS) $(SEED) | tail -1 | diff build/native-here/digest -

clean:
	rm -rf .venv .venv-* build dist
