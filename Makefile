PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# make demo TORCH=cpu: PyTorch without CUDA, a quarter of the size on Linux
FROM := $(if $(filter cpu,$(TORCH)),--extra-index-url https://download.pytorch.org/whl/cpu)

.PHONY: demo serve test test-gpu bench-gpu soak check docs clean

$(VENV)/installed: pyproject.toml constraints.txt hatch_build.py $(wildcard paceline/kernels/cpu/csrc/*)
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(FROM) --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(VENV)/installed
	$(BIN)/paceline compare --demo edit --rounds 5 --output demo

serve: $(VENV)/installed
	$(BIN)/paceline serve --drafter ngram

test: $(VENV)/installed
	$(BIN)/pytest -n 2 --dist worksteal

# What needs a GPU; one line where there is none
test-gpu: $(VENV)/installed
	$(BIN)/python -m tests.gpu

# make bench-gpu PARTS="exact head" OPTIONS="--data FOLDER --head FOLDER": see bench/gpu.py
bench-gpu: $(VENV)/installed
	$(BIN)/python bench/gpu.py $(PARTS) $(OPTIONS)

# make soak MINUTES=5: the server under load, fuzzed and compared with the engine alone
soak: $(VENV)/installed
	$(BIN)/python -m tests.server.soak $(if $(MINUTES),--minutes $(MINUTES))

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built: site/index.html"

clean:
	rm -rf $(VENV) demo demo-* site build dist .pytest_cache .mypy_cache .ruff_cache
