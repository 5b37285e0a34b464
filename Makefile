# Two commands, each does all its own set-up in .venv:
#   make bench   a table of Tilewise beside torch on this machine
#   make test    linters, types, the direction of imports, the whole test-suite on both cores, which builds the site too
# The documentation, as a site in docs/_build/html; a warning is an error:
#   make docs
# For the inner loop:
#   make check   the linters and the quick tests, under 90 s; make check TESTS=tests/gpu/test_forward.py for one's own
#   make coverage   what of the source the test-suite runs
#   make wheel   the package as people install it, in dist/
PYTHON ?= python3
BIN := .venv/bin

.PHONY: bench test check lint coverage wheel setup clean
TESTS ?= tests/plan tests/api tests/kvcache tests/house/test_rooms.py $(addprefix tests/gpu/test_,sources.py abi.py calls.py forward_edges.py decode_edges.py)
setup: .venv/.installed

# --no-compile: modules are compiled when they are imported, which most never are, and set-up takes a third less time.
.venv/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@

bench: setup
	$(BIN)/tilewise bench

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: lint
	$(BIN)/pytest -n 2 --dist worksteal

.PHONY: docs
docs: setup
	$(BIN)/sphinx-build -W --keep-going -n -q -j 2 -d docs/_build/doctrees -b html docs docs/_build/html

check: lint
	$(BIN)/pytest -n 2 --dist worksteal $(TESTS)

coverage: setup
	$(BIN)/pytest -n 2 --dist worksteal --cov --cov-report=term

wheel: setup
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist .

clean:
	rm -rf .venv build dist docs/_build src/*.egg-info
