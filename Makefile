# All that a newcomer needs: `make demo`, `make test`; `make setup` is the set-up alone, CUDA=1 for a GPU.
export UV_PYTHON_DOWNLOADS := never
# Some containers ask Python to keep no bytecode: then each process compiles all that it imports, 6 s.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
  && command -v $$p && break; done)
# uv of this machine, else one of our own: a private .uv leaves the system's Python alone.
UV := $(shell command -v uv || echo .uv/bin/uv)
MODEL_DIR ?= runs/demo
FLAGS := $(if $(FRESH),--fresh)

.PHONY: demo results test test-thorough chaos setup lint lock pod pod-gpu langid beam plan-paper docs docs-setup
demo: setup
	.venv/bin/m4 demo --gin_file=gin_configs/demo.gin --model_dir="$(MODEL_DIR)" $(FLAGS)
# Figures and tables of results/ again, from what is kept there: no corpus, no training.
results: setup
	.venv/bin/python -m scripts.results draw
PYTEST = .venv/bin/python -m pytest --numprocesses=auto --maxprocesses=4 --durations=25 \
  --dist=loadfile --no-loadscope-reorder
test: setup
	$(PYTEST) -m "not thorough"
# What CI runs in addition: more of the same, several processes, programs for pods (`make pod pod-gpu`);
# PART=0/3, 1/3, 2/3: a third of the files.
test-thorough: setup
	$(PYTEST) -m thorough $(if $(PART),--part=$(PART))
# A run killed, damaged and starved of disk (docs/robustness.md): SEED=2, MINUTES=40, and
# CHAOS="--kills=10 --damages=0" for other numbers of trials.
chaos: setup
	.venv/bin/python -m tests.chaos --seed=$(or $(SEED),1) --minutes=$(or $(MINUTES),40) $(CHAOS)
lint: setup
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/basedpyright && .venv/bin/lint-imports
# The TPU compiler, which needs no TPU: for `m4 plan` and its tests. Its lock is the others' and libtpu.
pod: setup
	$(UV) pip install --quiet --python .venv --no-deps --require-hashes -r requirements-tpu.lock
# The same for GPUs, in a separate folder: without a GPU it would complain at every start of JAX.
pod-gpu: setup
	$(UV) pip install --quiet --python .venv --target .venv/share/m4/cuda_compiler --no-deps \
	  --require-hashes -r requirements-cuda-compiler.lock
# The optional language identifier of cleaning and reports, where `make setup` does not remove it.
langid: setup
	$(UV) pip install --quiet --python .venv --target .venv/share/m4/langid --no-deps \
	  --require-hashes -r requirements-langid.lock
# Apache Beam, for corpora of many machines (docs/data_at_scale.md), in an environment of its own: it needs older
# pyarrow, Pillow and dateutil than requirements.lock has, and neither JAX nor TensorFlow. What makes ids is as
# there, and so is protobuf, whatever Beam asks for: SentencePiece's classes are of its version.
beam: setup
	$(UV) venv --quiet --allow-existing --python .venv/bin/python .venv/share/m4/beam
	$(UV) pip sync --quiet --python .venv/share/m4/beam --require-hashes requirements-beam.lock
# The site, in build/site (NOTEBOOKS=0: without what notebooks print and draw), and what builds it.
docs: docs-setup
	PYTHONPATH=.venv/share/m4/docs NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build
docs-setup: setup
	$(UV) pip install --quiet --python .venv --target .venv/share/m4/docs --no-deps \
	  --require-hashes -r requirements-docs.lock
plan-paper: pod
	.venv/bin/python -m scripts.plan_paper
# CUDA=1: for an NVIDIA GPU (docs/gpu.md). It stays so, for `make demo` and all else, until CUDA=0: the
# stamp's name says what is installed.
CUDA ?= $(if $(wildcard .venv/.locked-cuda),1)
ON_GPU := $(filter-out 0,$(CUDA))
LOCKS := requirements.lock $(if $(ON_GPU),requirements-cuda.lock)
STAMP := .venv/.locked$(if $(ON_GPU),-cuda)
setup: $(STAMP)
$(STAMP): $(LOCKS) pyproject.toml | $(UV)
	@rm -f .venv/.locked .venv/.locked-cuda
	$(UV) venv --quiet --allow-existing --python "$(PYTHON)" .venv
	$(UV) pip sync --quiet --python .venv --require-hashes $(LOCKS)
	$(UV) pip install --quiet --python .venv --no-deps --no-build-isolation --editable .
	@touch $@
.uv/bin/uv:
	@test -n "$(PYTHON)" || { echo "m4 needs Python 3.11, 3.12 or 3.13 on the PATH" >&2; exit 2; }
	$(PYTHON) -m venv .uv && .uv/bin/pip install --quiet --disable-pip-version-check uv
lock: | $(UV)
	$(UV) pip compile pyproject.toml --extra dev --universal --generate-hashes --no-header \
	  --no-emit-index-url --quiet -o requirements.lock
	$(UV) pip compile pyproject.toml --extra tpu --constraint requirements.lock --universal \
	  --generate-hashes --no-header --no-emit-index-url --quiet -o requirements-tpu.lock
	$(UV) pip compile pyproject.toml --extra cuda --constraint requirements.lock --universal \
	  --generate-hashes --no-header --no-emit-index-url --quiet -o requirements-cuda.lock
	sed -n 's/^jax\(==[^\\]*\).*/jax-cuda12-plugin\1\njax-cuda12-pjrt\1/p' requirements.lock \
	  | $(UV) pip compile - --no-deps --universal --generate-hashes --no-header --no-emit-index-url \
	  --quiet -o requirements-cuda-compiler.lock
	$(UV) pip compile --group docs --constraint requirements.lock --universal --generate-hashes \
	  --no-header --no-emit-index-url --quiet -o requirements-docs.lock
	echo 'py3langid>=0.4' | $(UV) pip compile - --no-deps --universal --generate-hashes \
	  --no-header --no-emit-index-url --quiet -o requirements-langid.lock
	sed -nE 's/^((babel|etils|filelock|fonttools|numba|obstore|protobuf|regex|sentencepiece)==[^\\]*).*/\1/p' \
	  requirements.lock > .uv-beam.txt
	echo 'apache-beam>=2.77' | cat - .uv-beam.txt | $(UV) pip compile - --override .uv-beam.txt \
	  --python-version 3.11 --universal --generate-hashes --no-header --no-emit-index-url --quiet \
	  -o requirements-beam.lock
	@rm .uv-beam.txt
