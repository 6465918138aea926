# `make demo` and `make test` are all the set-up a fresh machine needs: Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CACHE := $(HOME)/.cache/carpool

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-compiled test-cluster cluster images test-images check format docs crds bench converge balanced autoscaling ablation worlds proof proof-quick demo-llm generation engine oracle peers neighbours soak fuzz clients triton record-engines clean

help: ## Show what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## Install everything into .venv

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Carpool needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	CARPOOL_COMPILE=never $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Serve real models and a stand-in accelerator, watch it tune itself (a few minutes)
	$(BIN)/python -m carpool_cli.demo

demo-llm: $(STAMP) ## Overload a real engine for language models, without the gate and with it (two minutes)
	$(BIN)/python -m carpool_cli.demo.generative

# One worker has the tests on a cluster, which mostly wait; the other uses the cores meanwhile (tests/conftest.py).
test: $(STAMP) ## Run every test; those on a cluster where its programs are at hand
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --machine-code

test-compiled: $(STAMP) ## Build the wheel with machine code and run the tests of what is compiled against it (minutes)
	$(BIN)/python -m pytest tests/packaging/check_compiled.py tests/packaging/test_*.py

# A cluster uses namespaces, which need root. Other users get a user namespace in which they are root.
AS_ROOT = $(if $(filter 0,$(shell id -u)),,unshare --user --map-root-user --net)

test-cluster: programs ## Run the tests on a cluster; first get or build its programs (minutes, once)
	CARPOOL_ALL_TESTS=1 $(AS_ROOT) $(BIN)/python -m pytest tests/cluster

cluster: programs ## Open a cluster with the chart and a model in it, and a shell inside
	@PYTHONPATH=tests/cluster $(AS_ROOT) $(BIN)/python -m minicluster $(RUN)

.PHONY: programs
programs: $(STAMP)
	@PYTHONPATH=tests/cluster $(BIN)/python -m minicluster.binaries --get
	@PYTHONPATH=tests/cluster $(BIN)/python -m minicluster.foreign

# With mmdebstrap, umoci and skopeo; root installs what is missing, others see how. IMAGE=sidecar, ARCHITECTURE=arm64
# for one; MIRROR=URL for another archive of Debian's, such as a snapshot.
images: $(STAMP) ## Build the sidecar's and the operator's OCI image, without a container engine (minutes)
	@$(BIN)/python images/programs.py mmdebstrap umoci skopeo
	$(BIN)/python images/build.py $(addprefix --image=,$(IMAGE)) $(addprefix --architecture=,$(ARCHITECTURE))

test-images: programs ## Run those images under runc, without any right, and README's commands on a cluster (root)
	@$(BIN)/python images/programs.py runc umoci skopeo docker-registry
	CARPOOL_ALL_TESTS=1 $(BIN)/python -m pytest -n 0 tests/packaging/check_images.py tests/packaging/check_readme_on_cluster.py

check: $(STAMP) ## Lint, types, layers, import cycles, sizes, words, generated files
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/import_cycles.py
	$(BIN)/python tools/words.py
	$(BIN)/python tools/sizes.py
	$(BIN)/python tools/reference.py --check
	$(BIN)/python -m carpool_operator.api.crd --check
	$(BIN)/python benchmarks/proof --check-report

format: $(STAMP) ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## Regenerate the tables in docs/reference
	$(BIN)/python tools/reference.py

crds: $(STAMP) ## Regenerate the CRD, in crds/ and in the chart
	$(BIN)/python -m carpool_operator.api.crd

bench: $(STAMP) ## Measure costs against their limits; results land in benchmarks/results
	$(BIN)/python benchmarks/run.py

converge: $(STAMP) ## How close the tuner comes to the best grid point, in the simulator
	$(BIN)/python benchmarks/convergence.py

balanced: $(STAMP) ## What the objective Balanced costs and keeps, against zero wait and a grid (eight minutes with a C compiler, else half an hour)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/balanced.py

autoscaling: $(STAMP) ## Days with autoscalers against the fewest replicas possible; capacity as forecast and as carried (minutes)
	$(BIN)/python benchmarks/autoscaling.py

worlds: $(STAMP) ## Carpool and the rules of the proof in worlds that the proof does not have (half an hour)
	$(BIN)/python benchmarks/worlds.py

ablation: $(STAMP) ## What is lost without each rule of the tuner, in virtual time (an hour)
	$(BIN)/python benchmarks/ablation.py

proof: $(STAMP) ## How close to the oracle, how far ahead of other rules (half an hour on two cores, with a C compiler; less when only the tuner changed); SEED=7 for another seed
	$(BIN)/python benchmarks/proof --write $(if $(SEED),--seed $(SEED))

proof-quick: $(STAMP) ## The same for a few scenarios and rules, with limits of their own (a minute)
	$(BIN)/python benchmarks/proof --quick

generation: $(STAMP) ## The gate for token streams against fixed caps and other rules, in virtual time (an hour; goes on where it was interrupted)
	$(BIN)/python benchmarks/generation --write

engine: $(STAMP) ## The gate before a real engine (OpenVINO on a CPU), against fixed caps and none (five minutes)
	$(BIN)/python benchmarks/engine.py --write

oracle: $(STAMP) ## Search the whole grid again for what the proof compares with (an hour); SCENARIO=tiles-32 for one
	PYTHONPATH=benchmarks $(BIN)/python -m proof.oracle $(if $(SCENARIO),--only $(SCENARIO),--anew)

peers: $(STAMP) ## Real engines before the same model, Carpool among them (an hour); ENGINE=mosec for one
	$(BIN)/python benchmarks/peers $(or $(ENGINE),--all)

neighbours: $(STAMP) ## Measure the cost of misbehaving callers for healthy ones, one kind at a time (10 minutes); NEIGHBOUR=flood for one
	$(BIN)/python benchmarks/neighbours $(if $(NEIGHBOUR),--only $(NEIGHBOUR))

soak: $(STAMP) ## A million random steps through the Batcher
	$(BIN)/python tests/carpool/soak.py --steps 1000000

fuzz: $(STAMP) ## Throw broken bytes at the parsers
	$(BIN)/python tests/fuzz.py

clients: $(STAMP) ## Real clients against a sidecar: kserve, openai, litellm, LangChain, OpenAI's for Node (900 MB, in ~/.cache/carpool)
	$(call cached,kserve,kserve==0.21.0,$(PYTHON))
	$(call cached,openai,openai==3.57.0,$(PYTHON))
	$(call cached,litellm,litellm==1.110.2,$(PYTHON))
	$(call cached,langchain,langchain-openai==1.7.4,$(PYTHON))
	@command -v npm > /dev/null || { echo "Debian: apt-get install npm"; exit 1; }
	@test -e $(CACHE)/node/.installed || { mkdir -p $(CACHE)/node && cd $(CACHE)/node && \
		npm install --silent --no-audit --no-fund openai@7.57.0 && touch .installed; }
	$(BIN)/python -m pytest tests/clients/check_kserve.py tests/clients/check_openai.py tests/clients/test_*.py

# nvidia-pytriton runs on the system's own Python only: Triton's Python backend is linked against it.
triton: $(STAMP) ## A sidecar in front of a real Triton (400 MB, in ~/.cache/carpool)
	$(call cached,pytriton,nvidia-pytriton==0.7.0 tritonclient==2.73.0,/usr/bin/python3)
	$(BIN)/python -m pytest tests/clients/check_triton.py

record-engines: $(STAMP) ## Ask a real llama-server (built once, 12 minutes) and keep its answers for the tests; ENGINE=vllm for vLLM (3.5 GB)
	$(BIN)/python tests/engines/record.py $(or $(ENGINE),llama-server)

# An environment of its own, kept outside the tree: $(call cached,NAME,PACKAGES,PYTHON)
define cached
	@test -e $(CACHE)/$(1)/.installed || { \
		echo "Installing $(2) in $(CACHE)/$(1) (this may take minutes) ..."; \
		$(3) -m venv $(CACHE)/$(1) || { echo "Debian: apt-get install python3-venv"; exit 1; }; \
		$(CACHE)/$(1)/bin/pip install --quiet --disable-pip-version-check $(2) && touch $(CACHE)/$(1)/.installed; }
endef

clean: ## Remove what was made
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache .demo
