# Front door: each target brings the machine to where it can run (tools/setup.sh) and does the rest.

BUILD := build
JOBS  ?= $(shell nproc 2>/dev/null || echo 2)
LOAD  := --output-on-failure --no-tests=error -j $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help build test bench check sanitize install clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# $(call configure,<folder>,<options>): quiet unless it fails.
define configure
	@mkdir -p $(BUILD)/$(1)
	@cmake -S . -B $(BUILD)/$(1) -G Ninja $(2) >$(BUILD)/$(1)/configure.log 2>&1 \
	  || { cat $(BUILD)/$(1)/configure.log; exit 1; }
endef

test:  ## build everything and run the test suite
	@tools/setup.sh test
	$(call configure,release,-DCROSSDOCK_BUILD_TESTS=ON)
	@cmake --build $(BUILD)/release -j $(JOBS)
	@ctest --test-dir $(BUILD)/release $(LOAD)

clean:  ## remove what was built; installed packages stay
	@rm -rf $(BUILD) .venv
