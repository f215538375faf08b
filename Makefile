# make lab: open the course; make test: everything that must pass. Both set up .venv when needed.
ARGS ?=
BIN := .venv/bin
CELL_SECONDS := 600

OUT ?=
CLASS ?=
# A folder that "make wheels" has made: install from there, without a network.
WHEELS ?=

# They would send Python to modules outside .venv, or switch assertions off.
ASIDE := PYTHONHOME PYTHONPATH PYTHONSAFEPATH PYTHONOPTIMIZE
unexport $(ASIDE)
# In the C locale, Python 3.12 and older cannot start from a path such as Größe/.venv.
ifneq ($(filter C POSIX,$(LC_ALL)),)
export LC_ALL := C.UTF-8
endif
# Jupyter and the lessons keep their files in the home folder; one here serves if it takes none.
ifneq ($(shell test -d "$$HOME" && x=$$(mktemp "$$HOME/.XXXXXX" 2>&1) && rm "$$x" && echo yes),yes)
NEW_HOME := $(shell mkdir -p .home 2>/dev/null && test -w .home && cd .home && pwd || mktemp -d)
export HOME := $(NEW_HOME)
endif
# Some shells leave the ~ of OUT=~/folder to the command, where quotes would keep it.
at_home = $(if $(filter ~/%,$(firstword $(1))),$(patsubst ~/%,$(HOME)/%,$(1)),$(1))
override OUT := $(call at_home,$(OUT))
override CLASS := $(call at_home,$(CLASS))
override WHEELS := $(call at_home,$(WHEELS))

.PHONY: help venv lab wheels test test-browser test-gpu check format bench student solved exam class \
  slides book lesson clean
help:
	@echo "make lab      set up and open JupyterLab at lesson 00 (ARGS=\"--no-browser --port 9999\")"
	@echo "make test     set up, then run the tests and every lesson (ARGS=\"tests/vgpu/launch -k hang\")"
# An edition has the lessons alone.
ifneq ($(wildcard teaching),)
	@echo "make test-browser   open and run every lesson in JupyterLab, in Chromium"
	@echo "make test-gpu       compare virtual with real GPUs, and run ranks and lessons on real ones"
	@echo "make check    the quick checks: style, types, structure"
	@echo "make format   format the code and empty the notebooks of outputs"
	@echo "make bench    measure, and write benchmarks/RESULTS.md (ARGS=\"launch\")"
	@echo "make student  an edition without solutions, to hand out (OUT=folder or file.zip)"
	@echo "make solved   the same, solved"
	@echo "make exam     the exam's sheet, without solutions and checks (OUT=file.ipynb)"
	@echo "make class CLASS=folder   check the exercises that a class handed in"
	@echo "make slides   slides of each lesson in build/slides"
	@echo "make lesson TITLE=\"...\"   the skeleton of the next lesson"
	@echo "make book     the course as a site to read, in build/book"
endif
	@echo "make clean    remove .venv, caches and what was built"
	@echo "PYTHON=python3.13   with any of them: the Python to make .venv with"
	@echo "CPU=1 or CUDA=1   with any of them, on Linux: PyTorch without or with CUDA, by hand"
	@echo "make wheels   all packages into build/wheels (OUT=folder), for machines without a network:"
	@echo "make lab WHEELS=folder   sets up from there"

venv:
	@$(foreach name,$(ASIDE),$(if $($(name)),echo "setup: $(name) is set; it is left aside here";))
	@$(if $(NEW_HOME),echo "setup: the home folder takes no files; $(NEW_HOME) stands in for it")
	@python=$$(sh find_python.sh "$(PYTHON)") && \
	  "$$python" setup_venv.py $(if $(CPU),--cpu) $(if $(CUDA),--cuda) \
	  $(if $(WHEELS),--wheels "$(WHEELS)") $(if $(PYTHON),--this-python) $(EXTRA)

lab: venv
	@"$(BIN)/python" open_lab.py $(ARGS)

wheels: EXTRA := --save-wheels "$(or $(OUT),build/wheels)"
wheels: venv

# Two at a time, a file in one process, in the order of tests/conftest.py: the longest first. One
# thread a process keeps two cores for two tests.
test: export OMP_NUM_THREADS := 1
# Hundreds of processes import the course: one compiles it, where images for containers say never.
test: export PYTHONDONTWRITEBYTECODE :=
test: venv
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 --nbmake \
	  --nbmake-timeout=$(CELL_SECONDS) $(or $(ARGS),$(wildcard tests) notebooks)

test-browser: EXTRA := --extra browser
test-browser: venv
	$(BIN)/pytest tests/browser

# Without a GPU it says what it would do, and what is missing.
test-gpu: venv
	PYTHONPATH=tests $(BIN)/python -m real_gpus

# Without the tests that set up environments, a minute's work: make test has them.
check: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -q tests/house tests/lessons --ignore=tests/house/test_first_steps.py

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/jupyter nbconvert --clear-output --inplace --log-level=WARN notebooks/*.ipynb

# accelerate is measured beside launch.run, and stays out of the course's own environment.
bench: venv
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps \
	  --target build/peers accelerate huggingface_hub safetensors
	PYTHONPATH=build/peers $(BIN)/python -m benchmarks $(ARGS)

student: venv
	$(BIN)/python -m teaching.editions student "$(or $(OUT),build/student.zip)"

solved: venv
	$(BIN)/python -m teaching.editions solved "$(or $(OUT),build/solved.zip)"

exam: venv
	$(BIN)/python -m teaching.exam "$(or $(OUT),build/99_exam.ipynb)"

class: venv
	$(BIN)/python -m teaching.class_check $(if $(CLASS),"$(CLASS)") $(ARGS)

slides: EXTRA := --extra slides
slides: venv
	$(BIN)/python -m teaching.slides "$(or $(OUT),build/slides)"

book: EXTRA := --extra book
book: venv
	$(BIN)/python -m teaching.book "$(or $(OUT),build/book)"

lesson: venv
	$(BIN)/python -m teaching.new_lesson "$(TITLE)"

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
