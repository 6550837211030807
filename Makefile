# Two commands from an empty checkout:  make train   make test
# Needs python3 (3.11 or later) and a package index; uses uv where it is installed, else pip.
PYTHON ?= python3
VENV   ?= .venv
PY      = $(VENV)/bin/python
UV      = $(shell command -v uv 2>/dev/null)
LOCKED  = uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
          --no-header --no-annotate
export UV_PYTHON_DOWNLOADS := never
export PYTHONDONTWRITEBYTECODE ?= 1

# a stamp's name carries a checksum of what it was made from, so that a change installs again
sum   = $(shell cat requirements/$(1).txt pyproject.toml 2>/dev/null | cksum | cut -d' ' -f1)
TRAIN = $(VENV)/.train-$(call sum,train)
TEST  = $(VENV)/.test-$(call sum,test)
AOT   = $(VENV)/.aot-$(call sum,aot)
DOCS  = $(VENV)/.docs-$(call sum,docs)
FUZZ  = $(VENV)/.fuzz-$(call sum,fuzz)

.PHONY: help train test lint docs pages setup setup-aot compilers fuzz fuzzed lock clean
help:
	@echo "make train   set up $(VENV), train experiments/shakespeare.py, show samples, write a report"
	@echo "make test    set up the same, run the tests          (ARGS='-m variant' for further cases, '-m slow' for the long ones)"
	@echo "make lint    format, lint, types, floors"
	@echo "make docs    build docs/ into docs/build, strictly: a broken link is an error"
	@echo "make setup   only set up $(VENV)"
	@echo "make setup-aot  $(VENV)-aot beside it, with the compilers of TPUs and GPUs that are not here (about 1 GB)"
	@echo "make fuzz    fuzz every reader of files, up to 10 minutes each (ARGS=--tiny for a look); sets up $(VENV)-fuzz, Linux alone"
	@echo "make lock    rewrite requirements/*.txt              (needs uv)"
	@echo "make clean   remove $(VENV), $(VENV)-aot, $(VENV)-docs and $(VENV)-fuzz"

train: $(TRAIN)
	$(PY) -m jaxscale train experiments/shakespeare.py $(ARGS)

# tests import hundreds of files in each process: their bytecode is kept; on two cores, the third process runs while
# another waits for processes that it has started
test: export PYTHONDONTWRITEBYTECODE =
test: $(TEST)
	$(PY) -m pytest -q -n 3 --dist worksteal $(ARGS)

lint: $(TEST)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/basedpyright --level error
	$(VENV)/bin/lint-imports

docs:
	$(MAKE) --no-print-directory VENV=$(VENV)-docs pages

pages: $(DOCS)
	$(VENV)/bin/zensical build --strict --clean --config-file docs/zensical.toml

setup: $(TRAIN)

setup-aot:
	$(MAKE) --no-print-directory VENV=$(VENV)-aot compilers

compilers: $(AOT)

fuzz:
	$(MAKE) --no-print-directory VENV=$(VENV)-fuzz fuzzed

fuzzed: $(FUZZ)
	$(PY) experiments/faults.py --part fuzz $(ARGS)

# the stamps of what was there before go: a checkout of old requirements installs them again
$(TRAIN):
	$(call install,train)
	rm -f $(VENV)/.train-* $(VENV)/.test-*
	touch $@

# what the tests need holds what training needs, in the same versions
$(TEST):
	$(call install,test)
	rm -f $(VENV)/.train-* $(VENV)/.test-*
	touch $(TRAIN) $@

$(AOT):
	$(call install,aot)
	rm -f $(VENV)/.aot-*
	touch $@

$(FUZZ):
	$(call install,fuzz)
	rm -f $(VENV)/.fuzz-*
	touch $@

$(DOCS):
	test -x $(PY) || $(if $(UV),$(UV) venv -q --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV),$(PYTHON) -m venv $(VENV))
	$(if $(UV),$(UV) pip install -q --python $(VENV),$(PY) -m pip install -q --disable-pip-version-check) --require-hashes -r requirements/docs.txt
	rm -f $(VENV)/.docs-*
	touch $@

define install
	test -x $(PY) || $(if $(UV),$(UV) venv -q --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV),$(PYTHON) -m venv $(VENV))
	$(if $(UV),$(UV) pip install -q --python $(VENV),$(PY) -m pip install -q --disable-pip-version-check) --require-hashes -r requirements/$(1).txt
	$(if $(UV),$(UV) pip install -q --python $(VENV),$(PY) -m pip install -q --disable-pip-version-check) --no-deps --no-build-isolation -e .
endef

# One set of versions, forked by Python version where packages ask for it; hashes, and no address of any index.
lock:
	$(LOCKED) --extra test -o requirements/test.txt pyproject.toml requirements/build.in
	$(LOCKED) -c requirements/test.txt -o requirements/train.txt pyproject.toml requirements/build.in
	$(LOCKED) -o requirements/docs.txt requirements/docs.in
	$(LOCKED) -c requirements/test.txt --extra aot-tpu --extra aot-gpu -o requirements/aot.txt pyproject.toml requirements/build.in
	$(LOCKED) -c requirements/test.txt --extra fuzz -o requirements/fuzz.txt pyproject.toml requirements/build.in
	! grep -n -i -E 'https?://|--index-url|--find-links|file:' requirements/*.txt

clean:
	rm -rf $(VENV) $(VENV)-aot $(VENV)-docs $(VENV)-fuzz
