# Two commands, each does all its own set-up in .venv:
#   make bench   a table of Tilewise beside torch on this machine
#   make test    linters, types, the direction of imports, the whole test-suite on both cores
# For the inner loop:
#   make check   the same linters, and the tests of what this checkout changed since main's last commit, within 90 s
#   make coverage   what of the source the test-suite runs
PYTHON ?= python3
BIN := .venv/bin

.PHONY: bench test coverage setup clean
setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

bench: setup
	$(BIN)/tilewise bench

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

coverage: setup
	$(BIN)/pytest -n 2 --dist worksteal --cov --cov-report=term

clean:
	rm -rf .venv build dist src/*.egg-info
