# Everything a user or developer of Impresario does, by name. `make help` lists it.

CARGO      ?= cargo
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
BIN        := $(TARGET_DIR)/release/impresario
PREFIX     ?= /usr/local
# How long `make soak` and `make fuzz` run, in seconds.
SOAK_S     ?= 600
FUZZ_S     ?= 60

.DEFAULT_GOAL := help
.PHONY: help setup build demo test check bench soak fuzz install uninstall clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## Install the Debian packages that are missing, check the Rust toolchain
	@scripts/setup.sh

build: setup ## Build the program: target/release/impresario
	$(CARGO) build --release --locked -p impresario-cli

demo: build ## Show what it is for: a cluster on modelled disks, four applications, every policy (about 2 minutes)
	$(BIN) demo $(DEMO_ARGS)

test: setup ## Lint, build the documentation and run every test
	@scripts/test.sh

check: ## Format, lint, documentation, licences: what every commit passes
	@scripts/check.sh

bench: build ## Print the benchmarks that the documentation quotes
	@scripts/bench.sh $(BIN)

soak: setup ## Kill servers under load for SOAK_S seconds and verify every byte
	IMPRESARIO_SOAK_S=$(SOAK_S) $(CARGO) test --release --locked -p impresario-cli --test soak -- --ignored --nocapture

fuzz: ## Fuzz the frame decoder for FUZZ_S seconds
	@scripts/fuzz.sh $(FUZZ_S)

# Not after `build`: with sudo, root may have no cargo. What is there is installed.
install: ## Install below PREFIX (default /usr/local); DESTDIR is honoured
	@test -x $(BIN) || $(MAKE) build
	install -D -m 755 $(BIN) $(DESTDIR)$(PREFIX)/bin/impresario
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions
	$(BIN) completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/impresario

uninstall: ## Remove what `make install` put there
	rm -f $(DESTDIR)$(PREFIX)/bin/impresario $(DESTDIR)$(PREFIX)/share/bash-completion/completions/impresario

clean: ## Remove what was built
	$(CARGO) clean
	rm -f demo-report.html demo.json
