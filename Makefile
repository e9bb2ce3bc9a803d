# make install | demo | rl-demo | test: each sets up .venv first, and again only when pyproject.toml changed.

PYTHON ?= python3.13 python3.12 python3.11 python3
INSTALLED := .venv/.installed

.PHONY: install demo rl-demo test

install: $(INSTALLED)

demo: $(INSTALLED)
	.venv/bin/minimax-jax generate --model tiny \
	  --chat "What is 47 + 38?" \
	  --chat "Eva has 52 eggs and gives 17 to Leo. How many eggs are left?" \
	  --chat "There are 6 boxes with 12 pens in each box. How many pens are there?" \
	  --chat "$$(cat notebooks/ledger.txt)"

# GRPO on the bundled model's arithmetic, and its curves; another seed: make rl-demo SEED=1, and
# other settings: make rl-demo RUN=build/short WITH="steps=20 temperature=0.8".
SEED ?= 0
RUN ?= build/rl-demo-$(SEED)

rl-demo: $(INSTALLED)
	.venv/bin/minimax-train grpo --config tiny_arith --out $(RUN) seed=$(SEED) $(WITH)
	.venv/bin/minimax-train plot $(RUN)

# Most of a test run is compiling, which takes a third less without LLVM's passes; the slow tests and
# the comparisons of .ci/run keep them.
test: $(INSTALLED)
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/pyright
	XLA_FLAGS=--xla_backend_optimization_level=0 .venv/bin/python -m pytest -n 2 --dist worksteal \
	  -m "not gpu and not parity and not slow"

# Twenty minutes of clients that come, hang up and abort; .ci/run has three of them.
soak: $(INSTALLED)
	SOAK_SECONDS=1200 .venv/bin/python -m pytest -s -m soak

# The first of the names in PYTHON that runs and is new enough makes the environment.
$(INSTALLED): pyproject.toml
	@test -x .venv/bin/pip && exit; \
	for python in $(PYTHON); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    exec $$python -m venv .venv; \
	  fi; \
	done; \
	echo "minimax-jax needs Python 3.11 or newer, and none of these is: $(PYTHON)" >&2; exit 1
	.venv/bin/pip install --quiet --editable '.[dev]'
	@touch $@
