# Two commands: `make demo` trains a small model on real text, `make test` checks everything.
# Both make .venv first. Needs Python 3.11 or later: PYTHON=python3.12 make demo

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test lint types tests clean

demo: $(INSTALLED)
	$(BIN)/rpfunc train examples/kjv.toml

test: lint types tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Against an installed copy, where models/ really is rpfunc.models.
types: $(INSTALLED)
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/installed .
	cd build/installed && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p rpfunc

tests: $(INSTALLED)
	$(BIN)/pytest --numprocesses 2 --quiet

# torch first and pinned, so that nothing else pulls a build of its own choice.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rpfunc needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[plot,test]'
	touch $@

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .hypothesis
