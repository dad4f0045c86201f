# Everything runs in .venv; the first target that needs it makes it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help setup quickstart reproduce bench test lint types docs site page plots clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## make .venv with the exact versions that were tested

# torch first and alone: the pinned release has a CPU build, a looser request pulls gigabytes of CUDA.
# timm's torchvision asks for a newer torch: tests use it without its operators.
$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "scalesteer needs Python 3.11 or newer; set PYTHON=...")'
	@echo "Making .venv: some minutes, most of them for torch (200 MB) and the other packages of constraints.txt."
	$(PYTHON) -m venv .venv
	@echo "1 of 3: torch, for the CPU"
	$(BIN)/pip install --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@echo "2 of 3: scalesteer and what its tests need"
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --disable-pip-version-check --editable '.[dev]'
	@echo "3 of 3: timm and torchvision, for tests"
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --disable-pip-version-check --no-deps timm torchvision
	touch $@

quickstart: $(READY)  ## train four small networks on a CPU, test them at sizes they never saw: three minutes; ALL=1: three seeds each
	$(BIN)/python -m paper.quickstart $(if $(filter-out 0,$(ALL)),--all)

reproduce: $(READY)  ## the paper's tables and numbers from results/, as make docs; FRESH=1 makes all runs first (about two hours of training on an H200)
	$(BIN)/python -m paper report $(if $(filter-out 0,$(FRESH)),--fresh)

bench: $(READY)  ## speed and memory beside plain convolutions, some minutes; writes bench.json
	$(BIN)/python -m speed bench

lint: $(READY)  ## style: ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## types: mypy, strict
	$(BIN)/mypy

test: lint types  ## lint, types, then the everyday tests (the rest: pytest -m slow)
	$(BIN)/pytest -n 2

docs: $(READY)  ## fill in the tables and numbers of README.md and docs/ from results/; edit everything else by hand
	$(BIN)/python -m paper report

page: $(READY)  ## the page of `scalesteer demo` as plain files for the web, in build/page; needs npm
	$(BIN)/python -m docs.page.build

site: $(READY) page  ## the pages, a reference, a gallery and that page as a site with search, in build/site; needs npm
	$(BIN)/python -m docs.site

plots: $(READY)  ## draw the plots of results/ again; SS=RUN LSI=RUN: also those of trained networks
	$(BIN)/python -m paper plots $(if $(SS),--ss $(SS)) $(if $(LSI),--lsi $(LSI))

clean:  ## remove .venv and caches
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis
