# Two commands: `make test` and `make demo`; `make check` is for every edit, `make test-all` for a
# release. All set up what they need in .venv first.
SGLANG ?= 0.5.23
# Python compiles the sources once, whatever the caller has set: many processes import them.
export PYTHONDONTWRITEBYTECODE :=
VENV := $(if $(filter 0.5.23,$(SGLANG)),.venv,.venv-$(SGLANG))
# -P keeps the project's folder off sys.path: `kernels/` would shadow a package of that name.
PYTHON := $(VENV)/bin/python -P
# A file in one process, and no more of them than cores: servers and scenarios are processes of their
# own. PROCESSES=8 where there are as many; PYTEST_ARGS= takes one, as for a debugger.
PYTEST_ARGS ?= -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
CHECKED := $(addprefix tests/,dsl conformance commands run executions golden kernels)
# Linting takes one core for a minute: tests begin beside it.
TOGETHER := @$(MAKE) --no-print-directory --jobs=2 pytest lint
PROCESSES ?= 2

.PHONY: setup test test-all check pytest demo demo-experiment lint docs fuzz train gpu-report bench-kernels tune-kernels clean

setup:
	@SGLANG=$(SGLANG) VENV=$(VENV) bash tests/environment/setup.sh

# Without tests marked `thorough` (tests/brief.py).
test: setup
	$(TOGETHER) SELECTED=--brief

test-all: setup
	$(TOGETHER)

# Language, policies and kernels without SGLang and slow tests, in four minutes.
check: setup
	$(TOGETHER) SELECTED='--brief -m "not server and not slow" $(CHECKED)'

pytest: setup
	$(PYTHON) -m pytest $(PYTEST_ARGS) $(SELECTED)

demo: setup
	@$(VENV)/bin/python examples/demo.py

demo-experiment: setup
	@$(VENV)/bin/python examples/demo_experiment.py

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: setup
	$(VENV)/bin/kvpolicy docs --out docs/reference.md

# Random policy files against the check and every execution; docs/results/fuzz.md has a long run.
fuzz: setup
	$(PYTHON) tests/fuzz/fuzz.py $(ARGS)

train: setup
	$(VENV)/bin/python examples/train/train.py $(ARGS)

# Every figure of a GPU within an hour, and verdicts (docs/performance/README.md). Where SGLang and
# torch are already there, PYTHON=python3 takes them instead of an environment of its own.
gpu-report: $(if $(filter command,$(firstword $(origin PYTHON))),,setup)
	$(firstword $(PYTHON)) benchmarks/gpu_report.py $(ARGS)

# Every figure of a kernel, beside its reference (docs/performance/README.md).
bench-kernels: $(if $(filter command,$(firstword $(origin PYTHON))),,setup)
	$(firstword $(PYTHON)) benchmarks/kernels.py $(ARGS)

# The fastest tiles, splits and readers on this kind of GPU, into kernels/tuned/.
tune-kernels: $(if $(filter command,$(firstword $(origin PYTHON))),,setup)
	$(firstword $(PYTHON)) benchmarks/kernels.py --topics tuning --write $(ARGS)

clean:
	rm -rf .venv .venv-* .cache build *.egg-info
