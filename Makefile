# Everything a newcomer needs. `make venv` is done by the targets that need it, and only when it is out of date.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
PYTEST := $(BIN)/python -m pytest
# Tests run in one process per core, then those that need the machine to themselves. A test process takes 1 to 2 GiB.
BESIDE := -n auto --maxprocesses 8 --dist worksteal
# Only a dozen files have tests that run alone: naming them saves collecting all tests, which takes half a minute.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)
# PyTorch goes first and alone, so that a CPU wheel that pip is configured to find wins over the CUDA one.
TORCH = $(shell sed -n 's/^ *\(torch==[^ ]*\)$$/\1/p' setup.cfg)
# how long `make demo` tunes
DEMO_SECONDS ?= 120
# how long `make shipped-logs` tunes each benchmark model for each x86 level
SECONDS ?= 60
# and `make bench` before it times
BENCH_SECONDS ?= 100

# candidates that the cost model learns from, timed on a machine of this x86 level
SAMPLED ?= x86-64-v4
SAMPLES ?= tuning_logs/samples/$(SAMPLED).db
SAMPLE_SECONDS ?= 600

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-machines lint bench samples cost-model shipped-logs
.PHONY: fuzz judges rules rules-beyond bench-kernels bench-tuner bench-ablation bench-models bench-transfer bench-unseen
.PHONY: bench-substitutions bench-dynamic bench-quantised bench-sixteen bench-decoder bench-torch bench-fleet
.PHONY: bench-executors bench-recurrent bench-written bench-avx2 bench-gpu test-gpu sanitize-gpu clean

help:
	@echo "make venv           install mlc with its development and benchmark extras into $(VENV)"
	@echo "make demo           tune SqueezeNet for this CPU for $(DEMO_SECONDS) s and compare it with onnxruntime and OpenVINO"
	@echo "make test           ruff, mypy, import-linter and the tests that take less than half a minute each; of parametrised tests a sixth of the cases (15 to 25 minutes on two cores)"
	@echo "make test-all       the slow tests and all cases too (hours)"
	@echo "make test-machines  doctor, demo and make test's tests on eleven emulated CPU models, by hiding features of this one (hours; resumes)"
	@echo "make rules          regenerate the library of substitutions and compare it with the shipped one (minutes)"
	@echo "make rules-beyond   search part of the operator table uniformly for rules that the library lacks (minutes)"
	@echo "make judges         check every shipped rule with Z3 and on 10,000 random instances (minutes; resumes)"
	@echo "make fuzz           feed thousands of damaged, crafted and random files: none may crash, hang or give a wrong result (hours)"
	@echo "make bench          the README's table: models tuned for BENCH_SECONDS=$(BENCH_SECONDS), into build/bench/ and results.md"
	@echo "make bench-kernels  every kernel's fraction of the machine's peak (a minute)"
	@echo "make bench-tuner    the tuner against MetaSchedule on seven kernels (hours; resumes)"
	@echo "make bench-ablation substitutions and tuned schedules: neither, each alone, both, on nine networks (an hour and a half)"
	@echo "make bench-written  with and without substitutions, on architectures as published by their authors (ten minutes)"
	@echo "make bench-substitutions  nodes saved and latency gained by substitutions: the networks of Tensat and PET, then all others (a quarter of an hour)"
	@echo "make bench-models   how quickly whole models reach their tuned latency, from an empty log and from other models' logs"
	@echo "make bench-transfer how many trials the records of other models save (half an hour)"
	@echo "make bench-fleet    a fleet of 1 to 1,000 simulated devices: utilisation, overhead of the session, and the plots (3 minutes)"
	@echo "make bench-executors  SqueezeNet tuned on this machine, by two Ray nodes, by two RPC workers (ten minutes)"
	@echo "make bench-quantised  8-bit models, untuned, against onnxruntime, OpenVINO and mlc's own float32 (10 minutes)"
	@echo "make bench-sixteen  every benchmark model in float16 and bfloat16, untuned, against the same (an hour)"
	@echo "make bench-decoder  tokens per second of GPT-2 and of a model of a billion parameters, in 4 bits and in float32 (half an hour, 20 GB)"
	@echo "make bench-unseen   architectures that nothing was tuned for, untuned, against onnxruntime and OpenVINO (20 minutes)"
	@echo "make bench-avx2     both tables for a CPU without AVX-512, hidden from every engine: untuned and from the shipped log (45 minutes)"
	@echo "make test-gpu       every CUDA kernel and two models on this machine's GPU"
	@echo "make sanitize-gpu   every CUDA kernel under compute-sanitizer: out-of-bounds accesses and races"
	@echo "make bench-gpu      kernels and models on this machine's GPU against PyTorch, into build/bench-gpu/results.json (ten minutes)"
	@echo "make bench-dynamic  one build for a range of batch, sequence or image sizes against onnxruntime and OpenVINO (half an hour)"
	@echo "make bench-recurrent  LSTM, GRU and RNN of 128 steps, untuned, against onnxruntime and OpenVINO (3 minutes)"
	@echo "make bench-torch    torch.compile(backend='mlc') against eager PyTorch and Inductor, untuned (an hour; resumes)"
	@echo "make shipped-logs   rebuild tuning_logs/: each benchmark model, also quantised, tuned for SECONDS=$(SECONDS) on each x86 level"
	@echo "make samples        time candidates of many tasks for SAMPLE_SECONDS=$(SAMPLE_SECONDS), as training data of the cost model"
	@echo "make cost-model     train the shipped cost model on the samples, and evaluate it on held-out tasks"
	@echo "make lint           ruff, mypy and import-linter only"
	@echo "make clean          remove build artefacts and caches (not $(VENV))"

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml
	@echo "installing into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install $(TORCH)
	@$(PIP) install --editable '.[dev,bench]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m mlc.cli.demo --seconds $(DEMO_SECONDS) --directory build/demo

lint: $(STAMP)
	@mkdir -p build
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-cache > build/import-linter.txt 2>&1 & imports=$$!; $(BIN)/mypy; types=$$?; \
		wait $$imports || { cat build/import-linter.txt; exit 1; }; exit $$types

test: lint
	@$(PYTEST) $(BESIDE) -m "not slow and not alone"
	@$(PYTEST) -m "not slow and alone" $(ALONE)

test-all: lint
	@$(PYTEST) $(BESIDE) -m "not alone"
	@$(PYTEST) -m "alone" $(ALONE)

test-machines: $(STAMP)
	@$(BIN)/python -m tests.machines

rules: $(STAMP)
	@$(BIN)/mlc rules generate -o build/rules --compare

rules-beyond: $(STAMP)
	@$(BIN)/mlc rules generate -o build/rules-beyond --beyond

judges: $(STAMP)
	@$(BIN)/python -m tests.fuzz.judges --state build/judges.jsonl

fuzz: $(STAMP)
	@failed=; for what in "artifacts 1000" "rules 200" "certificates 1000" "wrong_rules 3000" "logs 1000" "models 10000" \
			"random_models 1000"; do \
		set -- $$what; echo "$$2 $$1"; $(BIN)/python -m tests.fuzz.$$1 --count $$2 || failed="$$failed $$1"; \
	done; test -z "$$failed" || { echo "something ended badly of:$$failed"; exit 1; }

bench: $(STAMP)
	@$(BIN)/python -m tests.performance.table --seconds $(BENCH_SECONDS) --output build/bench --publish

bench-kernels: $(STAMP)
	@$(BIN)/python -m tests.performance.bench_kernels

bench-tuner: $(STAMP)
	@$(BIN)/python -m tests.performance.bench_tuner

bench-ablation: $(STAMP)
	@$(BIN)/python -m tests.performance.ablation

bench-written: $(STAMP)
	@$(BIN)/python -m tests.performance.written --publish

bench-substitutions: $(STAMP)
	@$(BIN)/python -m tests.performance.substitutions --publish

bench-models: $(STAMP)
	@$(BIN)/python -m tests.performance.bench_models

bench-transfer: $(STAMP)
	@$(BIN)/python -m tests.performance.bench_transfer

bench-fleet: $(STAMP)
	@$(BIN)/python -m tests.performance.fleet --publish

bench-executors: $(STAMP)
	@$(BIN)/python -m tests.performance.executors

bench-quantised: $(STAMP)
	@$(BIN)/python -m tests.performance.quantised --publish

bench-sixteen: $(STAMP)
	@$(BIN)/python -m tests.performance.quantised --sixteen --publish

bench-decoder: $(STAMP)
	@$(BIN)/python -m tests.performance.decoder --publish
	@$(BIN)/python -m tests.performance.decoder --model gpt2 --publish
	@$(BIN)/python -m tests.performance.decoder --model llama --publish

bench-unseen: $(STAMP)
	@$(BIN)/python -m tests.performance.unseen

bench-avx2: $(STAMP)
	@$(BIN)/python -m tests.performance.hidden_cpu -- $(abspath $(BIN))/python -m tests.performance.table \
		--seconds 0 --against onnxruntime,openvino --output build/bench-avx2 --publish models-avx2
	@$(BIN)/python -m tests.performance.hidden_cpu -- $(abspath $(BIN))/python -m tests.performance.unseen \
		--output build/bench-unseen-avx2 --publish unseen-avx2

test-gpu: $(STAMP)
	@$(PYTEST) -m gpu tests/gpu

sanitize-gpu: $(STAMP)
	@for tool in memcheck racecheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python -m pytest -n 0 -m gpu tests/gpu -k test_best_seed || exit 1; \
	done

bench-gpu: $(STAMP)
	@$(BIN)/python -m tests.performance.bench_gpu

bench-dynamic: $(STAMP)
	@$(BIN)/python -m tests.performance.bench_dynamic --publish

bench-recurrent: $(STAMP)
	@$(BIN)/python -m tests.performance.recurrent --publish

bench-torch: $(STAMP)
	@$(BIN)/python -m tests.performance.bench_torch_compile --publish

shipped-logs: $(STAMP)
	@$(BIN)/python -m tuning_logs.ship --seconds $(SECONDS)
	@$(BIN)/python -m tuning_logs.ship --quantised --seconds $(SECONDS)

samples: $(STAMP)
	@$(BIN)/python -m tuning_logs.samples prepare --log $(SAMPLES) --target $(SAMPLED)
	@$(BIN)/python -m tuning_logs.samples measure --log $(SAMPLES) --target $(SAMPLED) --seconds $(SAMPLE_SECONDS)

cost-model: $(STAMP)
	@$(BIN)/mlc log train $(SAMPLES) -o tuning_logs/$(SAMPLED)/cost_model.npz --evaluate --fewest 24

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
