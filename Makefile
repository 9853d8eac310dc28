PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check docs clean

$(VENV)/installed: pyproject.toml constraints.txt hatch_build.py $(wildcard paceline/kernels/cpu/csrc/*)
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(VENV)/installed
	$(BIN)/paceline compare --drafter ngram:max_match=4,min_match=2 --drafter suffix --max-tokens 128 --rounds 3 --output demo

test: $(VENV)/installed
	$(BIN)/pytest -n 2

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built: site/index.html"

clean:
	rm -rf $(VENV) demo site build dist .pytest_cache .mypy_cache .ruff_cache
