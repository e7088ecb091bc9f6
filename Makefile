# Front door: every target brings the machine to where it can run (tools/setup.sh), then does the
# rest.

JOBS ?= $(shell nproc 2>/dev/null || echo 2)

# Not under sanitizers: the build that people run, and the Python package beside it. WERROR=ON turns
# its warnings into errors, as make check always does. CUDA=ON builds the CUDA executor also where
# no device is.
RELEASE := build/release
WARNINGS = $(if $(WERROR),-DCROSSDOCK_WERROR=$(WERROR))
RELEASE_OPTIONS = -DCROSSDOCK_PYTHON_OUTPUT=$(CURDIR)/build/python \
  -DCROSSDOCK_CUDA=$(or $(CUDA),AUTO) $(WARNINGS)

# The wheel, built elsewhere from the same sources, finds its objects in the compiler's cache, and
# so does another clone.
export CCACHE_NOHASHDIR := 1
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_SLOPPINESS := pch_defines,time_macros

.DEFAULT_GOAL := help
.PHONY: help demo demo-elastic test bench bench-net docs wheel gpu-test gpu-bench gpu-package \
  format check sanitize sanitize-quick clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Notes how long a command takes, for .ci/run.
PART := tools/part.sh

# $(call build,<folder>,<CMake options>,<targets, or nothing for all>)
define build
	@mkdir -p $(1)
	@cmake -S . -B $(1) -G Ninja $(2) >$(1)/configure.log 2>&1 || { cat $(1)/configure.log; exit 1; }
	@grep -E ' not found: | found: the CUDA |: not built ' $(1)/configure.log || true
	@$(PART) $(notdir $(1)) cmake --build $(1) -j $(JOBS) $(if $(3),--target $(3))
endef

demo:  ## train a language model with its experts on 4 ranks, beside one process; demo/loss.png
	@tools/setup.sh demo torch python
	$(call build,$(RELEASE),$(RELEASE_OPTIONS),_core)
	@PYTHONPATH=build/python .venv/bin/python examples/torch/train_moe_lm.py --demo --folder demo

# The ranks write into demo/elastic.
ELASTIC := examples/elastic_serving
demo-elastic:  ## kill one of 4 ranks that serve, go on, get it back; demo/elastic.png
	@tools/setup.sh demo python
	$(call build,$(RELEASE),$(RELEASE_OPTIONS),_core crossdock-run)
	@PYTHONPATH=build/python OMP_NUM_THREADS=1 $(RELEASE)/tools/run/crossdock-run -n 4 --respawn 3 \
	  --timeout 300 -- .venv/bin/python $(ELASTIC)/serve.py --folder demo/elastic
	@PYTHONPATH=build/python .venv/bin/python $(ELASTIC)/timeline.py demo/elastic \
	  --json demo/elastic.json
	@.venv/bin/python bench/plot.py demo/elastic.json --out demo --format png

# See cmake/Tests.cmake for the places of a test.
CTEST := ctest --no-tests=error --output-on-failure -j $(shell echo $$((2 * $(JOBS))))

test:  ## build everything, run the tests that need no GPU; FULL=1: also nearly equal launches
	@$(PART) setup tools/setup.sh test torch jax python net frameworks alone beside
	$(call build,$(RELEASE),$(RELEASE_OPTIONS))
	@$(PART) tests $(CTEST) --test-dir $(RELEASE) -O $(CURDIR)/$(RELEASE)/tests.log \
	  -LE 'gpu$(if $(FULL),,|full)'; code=$$?; \
	  tests/python/closing-lines.sh $(RELEASE); exit $$code
	@tests/gpu/left-out.sh $(RELEASE) $(FULL)

bench:  ## measure expert parallelism beside a memcpy floor and MPI_Alltoallv
	@tools/setup.sh bench
	$(call build,$(RELEASE),$(RELEASE_OPTIONS),bench/all crossdock-run)
	@bench/all.sh $(RELEASE)

# Its packages are in an environment of their own: only this target needs them.
docs:  ## the documentation as a site, with references of C and Python: build/site/index.html
	@VENV=build/docs-venv tools/setup.sh docs docs
	@NO_MKDOCS_2_WARNING=1 $(PART) docs build/docs-venv/bin/mkdocs build >build/docs.log 2>&1 || \
	  { grep -v '^INFO' build/docs.log; exit 1; }
	@python3 tools/site/check_site.py build/site
	@echo "docs: build/site/index.html"

bench-net:  ## measure between two network namespaces, beside MPI, gloo and TCP; as root
	@tools/setup.sh bench torch
	$(call build,$(RELEASE),$(RELEASE_OPTIONS),bench/all crossdock-run)
	@.venv/bin/python bench/net/run.py --build $(RELEASE) --json $(RELEASE)/bench/net.json

wheel:  ## wheels that carry what they need, and the sources: dist/cpu, dist/cuda13 if nvcc is there
	@tools/setup.sh wheel jax python wheel
	@tools/wheel.sh

# On a machine with GPUs. With BUILD=folder, that of a prebuilt package, nothing is installed, and
# nothing compiled but the Python extension. A build of its own: its programs may move.
GPU := build/gpu
GPU_PACKAGE ?= build/gpu-package
GPU_OPTIONS = -DCROSSDOCK_CUDA=ON -DCROSSDOCK_CUDA_EVERY_CHIP=ON $(WARNINGS) \
  -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON '-DCMAKE_BUILD_RPATH=$$ORIGIN/../lib;$$ORIGIN/../../lib'

gpu-test: $(if $(BUILD),,gpu-package)  ## build for CUDA, run what needs a GPU; BUILD=a package
	@$(or $(BUILD),$(GPU_PACKAGE))/run-tests $(TESTS)

gpu-bench: $(if $(BUILD),,gpu-package)  ## measure on this machine's GPUs; BUILD=folder likewise
	@$(or $(BUILD),$(GPU_PACKAGE))/bench/crossdock-bench ep --device cuda --preset budget

gpu-package:  ## stage what those two run in build/gpu-package, to be carried to a GPU
	@tools/setup.sh gpu torch jax python
	$(call build,$(GPU),$(GPU_OPTIONS),gpu-tests crossdock-bench crossdock-run)
	@tests/gpu/package.py $(GPU) $(GPU_PACKAGE)

FORMATTED = $(shell find include src python tests bench examples tools -name '*.h' -o -name '*.c' \
  -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

format:  ## format all C, C++ and Python files in place
	@tools/setup.sh check check
	@.venv/bin/clang-format -i $(FORMATTED)
	@.venv/bin/ruff check --quiet --fix-only .
	@.venv/bin/ruff format --quiet .

check: WERROR := ON
check:  ## format, lint, types, include directions, lengths, headers, exported symbols
	@$(PART) setup tools/setup.sh check check torch jax python
	@tools/check/subjects.sh
	@$(PART) format .venv/bin/clang-format --dry-run -Werror $(FORMATTED)
	@.venv/bin/ruff check --quiet .
	@.venv/bin/ruff format --check --quiet .
	@.venv/bin/shellcheck .ci/run $(shell find bench tools tests -name '*.sh')
	@$(PART) mypy .venv/bin/mypy
	$(call build,$(RELEASE),$(RELEASE_OPTIONS))
	@$(PART) tidy .venv/bin/python tools/check/tidy.py .venv/bin/clang-tidy $(RELEASE)
	@$(CTEST) --test-dir $(RELEASE) -L check --verbose >$(RELEASE)/check.log; code=$$?; \
	  grep -E '^[0-9]+: [a-z]|tests passed|Failed' $(RELEASE)/check.log; exit $$code

# ThreadSanitizer wants addresses that are not too random.
FIXED_ADDRESSES = $(shell setarch $(shell uname -m) -R true 2>/dev/null && echo setarch -R)

sanitize:  ## the full product of cases under ASan + UBSan, then under TSan with ranks as threads
	@tools/setup.sh sanitize net
	$(call build,build/asan,-DCROSSDOCK_SANITIZE=address $(WARNINGS))
	@XD_TEST_FULL=1 $(CTEST) --test-dir build/asan -LE check
	$(call build,build/tsan,-DCROSSDOCK_SANITIZE=thread)
	@XD_TEST_FULL=1 $(FIXED_ADDRESSES) $(CTEST) --test-dir build/tsan -LE check

QUICK := build/asan/quick-passed
sanitize-quick:  ## units, and the C API over 2 ranks as threads, under ASan + UBSan
	@tools/setup.sh check
	$(call build,build/asan,-DCROSSDOCK_SANITIZE=address $(WARNINGS),unit-tests conformance \
	  conformance-gemm conformance-ll crossdock-run)
	@if [ -e $(QUICK) ] && [ -z "$$(find build/asan -type f -perm -u+x -newer $(QUICK))" ]; then \
	  echo "sanitize-quick: no program has changed since it passed"; exit; fi; \
	rm -f $(QUICK); \
	$(PART) sanitized-units $(CTEST) --test-dir build/asan -L unit && \
	$(PART) sanitized-ranks $(CTEST) --test-dir build/asan \
	  -R '^conformance(-gemm|-ll)?\.threads\.2$$' && touch $(QUICK)

clean:  ## remove what was built; installed packages stay
	@rm -rf build .venv demo
