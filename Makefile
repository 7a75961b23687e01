# Everything that a newcomer needs: `make demo`, `make test`, `make setup`.
export UV_PYTHON_DOWNLOADS := never
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null \
  && command -v $$p && break; done)
UV := $(shell command -v uv || echo $(PYTHON) -m uv)
MODEL_DIR ?= runs/demo

.PHONY: demo test setup lint lock
.venv/.locked: requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "m4 needs Python 3.11 or 3.12 on the PATH" >&2; exit 2; }
	@$(UV) --version >/dev/null 2>&1 || $(PYTHON) -m pip install --quiet uv
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv
	$(UV) pip sync --quiet --python .venv --require-hashes requirements.lock
	$(UV) pip install --quiet --python .venv --no-deps --no-build-isolation --editable .
	@touch $@
setup: .venv/.locked
demo: setup
	.venv/bin/m4 demo --gin_file=gin_configs/demo.gin --gin.MODEL_DIR='"$(MODEL_DIR)"' $(if $(FRESH),--fresh)
test: setup
	.venv/bin/python -m pytest
lint: setup
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/basedpyright && .venv/bin/lint-imports
lock:
	$(UV) pip compile pyproject.toml --extra dev --universal --generate-hashes --no-header --no-emit-index-url -o requirements.lock
