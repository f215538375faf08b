# make lab: open the course; make test: everything that must pass. Both set up .venv when needed.
# make test TORCH=2.14.1 does the same with that release of PyTorch, in .venv-torch2.14.1.
VENV := .venv$(if $(TORCH),-torch$(TORCH))
BIN := $(VENV)/bin
CELL_SECONDS := 600
# These variables would make Python import modules from outside the environment, or disable assertions.
unexport PYTHONHOME PYTHONPATH PYTHONSAFEPATH PYTHONOPTIMIZE

.PHONY: help venv lab wheels test test-all test-browser test-gpu test-foreign check format bench student solved workshop exam class \
  slides book clean
help:
	@echo "make lab      set up and open JupyterLab at lesson 00 (ARGS=\"--no-browser --port 9999\")"
	@echo "make test     set up, then run the tests and every lesson (ARGS=\"tests/vgpu/launch -k hang\")"
# Editions have only the lessons.
ifneq ($(wildcard teaching),)
	@echo "make test-all   the same, with every case in every suite"
	@echo "make test-browser   open and run every lesson in JupyterLab, in Chromium"
	@echo "make test-gpu       compare virtual GPUs with real ones, and run ranks and lessons on them"
	@echo "make test-foreign   run third-party programs and suites (ARGS=\"accelerate\"), if installed"
	@echo "make check    quick checks: style, types, structure"
	@echo "make format   format the code and clear the notebooks' outputs"
	@echo "make bench    measure, and write benchmarks/RESULTS.md (ARGS=\"launch\")"
	@echo "make student  an edition without solutions, to hand out (OUT=folder or file.zip)"
	@echo "make solved   the same, with solutions"
	@echo "make workshop the cores of seven lessons, for half a day or a day, with a timetable"
	@echo "make exam     the exam sheet, without solutions or checks (OUT=file.ipynb)"
	@echo "make class CLASS=folder   check the exercises that a class handed in"
	@echo "make slides   slides for each lesson, in build/slides"
	@echo "make book     the course as a website, in build/book"
endif
	@echo "make wheels   save all packages in build/wheels (OUT=folder), for machines without a network:"
	@echo "make lab WHEELS=folder   install from there"
	@echo "make clean    remove the environments, caches and builds"
	@echo "Options for all of them: PYTHON=python3.13 selects the Python; TORCH=2.14.1, another"
	@echo "release of PyTorch; on Linux, CPU=1 or CUDA=1, PyTorch without or with CUDA"

venv:
	@python=$(if $(PYTHON),"$(PYTHON)",$$(sh find_python.sh $(BIN)/python)) && "$$python" setup_venv.py \
	  $(if $(CPU),--cpu) $(if $(CUDA),--cuda) $(if $(TORCH),--torch "$(TORCH)") \
	  $(if $(WHEELS),--wheels "$(WHEELS)") $(EXTRA)

lab: venv
	@"$(BIN)/python" open_lab.py $(ARGS)

wheels: EXTRA := --save-wheels "$(or $(OUT),build/wheels)"
wheels: venv

# Two tests run at a time, each with one thread, so each gets a core.
test: export OMP_NUM_THREADS := 1
# Hundreds of processes import the course. Cache its bytecode even if a container image disables that.
test: export PYTHONDONTWRITEBYTECODE :=
test: venv
	$(BIN)/pytest -n 2 --dist worksteal --durations=20 --nbmake \
	  --nbmake-timeout=$(CELL_SECONDS) $(or $(ARGS),$(wildcard tests) notebooks)

test-all: export TESTS := all
test-all: test

test-browser: EXTRA := --extra browser
test-browser: venv
	$(BIN)/pytest tests/browser

# Without a GPU, it prints what it would do and what's missing.
test-gpu: venv
	PYTHONPATH=tests $(BIN)/python -m real_gpus

# Runs the packages that are installed, for example by pip install accelerate transformers lightning.
test-foreign: venv
	PYTHONPATH=. $(BIN)/python tests/foreign $(ARGS)

# Leaves out the tests that set up environments, which take a minute; make test runs them.
check: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -q tests/house tests/lessons --ignore=tests/house/test_first_steps.py

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/jupyter nbconvert --clear-output --inplace --log-level=WARN notebooks/*.ipynb

# accelerate is compared with launch.run, but isn't installed into the course's own environment.
bench: venv
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps \
	  --target build/peers accelerate huggingface_hub safetensors
	PYTHONPATH=build/peers $(BIN)/python -m benchmarks $(ARGS)

student: venv
	$(BIN)/python -m teaching.editions student "$(or $(OUT),build/student.zip)"

solved: venv
	$(BIN)/python -m teaching.editions solved "$(or $(OUT),build/solved.zip)"

workshop: venv
	$(BIN)/python -m teaching.workshop "$(or $(OUT),build/workshop)"

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

clean:
	rm -rf .venv .venv-torch* .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
