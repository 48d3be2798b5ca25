# Everything a user or developer of Impresario does, by name. `make help` lists it.

# cargo of the toolchain that scripts/toolchain.sh chooses.
CARGO      ?= scripts/cargo
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
BIN        := $(TARGET_DIR)/release/impresario
LAB        := $(TARGET_DIR)/release/impresario-lab
PREFIX     ?= /usr/local
LIBDIR     ?= $(PREFIX)/lib
UNITDIR    ?= $(PREFIX)/lib/systemd/system
UNITS       = impresario-assist.service impresario@.service impresario@meta.service
VERSION    := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# The C libraries.
LIBRARIES  := impresario agios agios1 agios3
# Scales of the map of policies in `make lab-reports`; ×10 takes some 6 minutes more.
MAP_SCALES ?= 1
# How long `make soak` and `make fuzz` run, in seconds.
SOAK_S     ?= 600
FUZZ_S     ?= 60

.DEFAULT_GOAL := help
.PHONY: help setup setup-build build demo test check lab lab-reports bench bench-capi soak fuzz install uninstall clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## Install the Debian packages that are missing, and Rust where there is none
	@scripts/setup.sh

# Without what only tests and measurements need.
setup-build:
	@scripts/setup.sh build

build: setup-build ## Build the program, target/release/impresario, and the C libraries
	$(CARGO) build --release --locked -p impresario-cli -p impresario-capi -p impresario-agios \
	  -p impresario-agios1 -p impresario-agios3 -p impresario-preload

demo: build ## Show what it is for: a cluster on modelled disks, four applications, every policy (about 3 minutes)
	$(BIN) demo $(DEMO_ARGS)

test: ## Install what is missing, lint, build the documentation and run every test
	@scripts/test.sh set-up

check: ## Format, lint, documentation, licences: what every commit passes
	@scripts/check.sh

lab: setup ## Build the laboratory, target/release/impresario-lab, and list its commands
	$(CARGO) build --release --locked -p impresario-lab -p impresario-cli
	@$(LAB) help

lab-reports: lab ## Write the reports on the papers and on policies to target/lab-reports (about 20 minutes on two cores)
	@mkdir -p $(TARGET_DIR)/lab-reports
	$(LAB) reproduce all --markdown $(TARGET_DIR)/lab-reports/REPRODUCTION.md --html $(TARGET_DIR)/lab-reports/reproduction.html \
	  --json $(TARGET_DIR)/lab-reports/reproduction.json >/dev/null
	$(LAB) reproduce why --markdown $(TARGET_DIR)/lab-reports/WHY.md >/dev/null
	$(LAB) reproduce --sweep --divide 4 --repetitions 3 --markdown $(TARGET_DIR)/lab-reports/SWEEP.md >/dev/null
	$(LAB) reproduce map --scale $(MAP_SCALES) --markdown $(TARGET_DIR)/lab-reports/WHICH-POLICY.md \
	  --json $(TARGET_DIR)/lab-reports/which-policy.json >/dev/null
	@echo "The reports are in $(TARGET_DIR)/lab-reports"

bench: lab ## Print the benchmarks that the documentation quotes
	@scripts/bench.sh $(TARGET_DIR)/release

soak: setup ## Kill servers and break links under load for SOAK_S seconds each and verify every byte; then suites for file systems, and as long random simulations
	IMPRESARIO_SOAK_S=$(SOAK_S) $(CARGO) test --release --locked -p impresario-cli --test cli -- --ignored --nocapture soak::
	IMPRESARIO_LINKS_S=$(SOAK_S) $(CARGO) test --release --locked -p impresario-cli --test cli -- --nocapture links::
	$(CARGO) test --release --locked -p impresario-server --test server -- --ignored --nocapture meta_stress::
	$(CARGO) test --release --locked -p impresario-cli --test assist -- --ignored --nocapture
	$(CARGO) test --release --locked -p impresario-fuse --test mounted -- --ignored --nocapture sqlite
	$(CARGO) install --locked --root $(TARGET_DIR)/suites pjdfstest@0.2.2 fsx@0.3.2
	PATH="$(abspath $(TARGET_DIR))/suites/bin:$$PATH" $(CARGO) test --release --locked -p impresario-fuse --test mounted -- \
	  --ignored --nocapture --test-threads 1 suites::
	PATH="$(abspath $(TARGET_DIR))/suites/bin:$$PATH" $(CARGO) test --release --locked -p impresario-glusterfs --test glusterfs -- \
	  --ignored --nocapture --exact content::suites_find_the_same_with_and_without_the_translator
	IMPRESARIO_SIM_FUZZ_S=$(SOAK_S) $(CARGO) test --release --locked -p impresario-sim --test sim -- --nocapture fuzz::
	IMPRESARIO_SIM_FUZZ_S=$(SOAK_S) $(CARGO) test --release --locked -p impresario-server --test names_simulated -- --nocapture
	IMPRESARIO_SIM_FUZZ_S=$(SOAK_S) $(CARGO) test --release --locked -p impresario-server --lib -- --nocapture data::simulated
	$(CARGO) run --release --locked -p impresario-lab -- reproduce --sweep

fuzz: ## Fuzz what decodes frames, traces and file formats for FUZZ_S seconds each
	@scripts/fuzz.sh $(FUZZ_S)

bench-capi: setup ## Measure the C library from C, every policy (about 3 minutes)
	$(CARGO) build --release --locked -p impresario-capi
	$(CC) -std=gnu11 -O2 -Wall -Wextra -pthread -I crates/faces/capi/include crates/faces/capi/bench/bench.c \
	  $(TARGET_DIR)/release/libimpresario.a -lm -ldl -o $(TARGET_DIR)/release/bench-capi
	$(TARGET_DIR)/release/bench-capi $(BENCH_CAPI_ARGS)

# Not after `build`: with sudo, root may have no cargo. What is there is installed.
install: ## Install below PREFIX (default /usr/local); DESTDIR is honoured
	@test -x $(BIN) -a -x $(BIN)-main -a -e $(TARGET_DIR)/release/libimpresario.so -a -e $(TARGET_DIR)/release/libagios.so \
	  -a -e $(TARGET_DIR)/release/libagios3.so || $(MAKE) build
	@# Without symbols: a program that is guided waits until the command has come from the disk, of which the kernel may read all.
	install -D -s -m 755 $(BIN) $(DESTDIR)$(PREFIX)/bin/impresario
	install -D -s -m 755 $(BIN)-main $(DESTDIR)$(PREFIX)/lib/impresario/impresario-main
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions
	$(BIN) completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/impresario
	install -D -m 755 $(TARGET_DIR)/release/libimpresario_assist.so $(DESTDIR)$(LIBDIR)/libimpresario_assist.so
	IMPRESARIO_ASSIST_LIBRARY=$(TARGET_DIR)/release/libimpresario_assist.so \
	  $(BIN) assist library $(DESTDIR)$(LIBDIR)/impresario/preload >/dev/null
	install -d $(DESTDIR)$(UNITDIR)
	for unit in $(UNITS); do sed 's|@PREFIX@|$(PREFIX)|' packaging/$$unit > $(DESTDIR)$(UNITDIR)/$$unit || exit 1; done
	install -d $(DESTDIR)$(PREFIX)/share/impresario
	cp -r packaging/slurm packaging/htcondor $(DESTDIR)$(PREFIX)/share/impresario/
	@VERSION=$(VERSION) scripts/install-libs.sh install $(TARGET_DIR)/release "$(DESTDIR)" $(PREFIX) $(LIBDIR) $(LIBRARIES)

uninstall: ## Remove what `make install` put there
	rm -f $(DESTDIR)$(PREFIX)/bin/impresario $(DESTDIR)$(PREFIX)/lib/impresario/impresario-main $(DESTDIR)$(PREFIX)/share/bash-completion/completions/impresario
	rm -rf $(DESTDIR)$(LIBDIR)/impresario/preload $(DESTDIR)$(PREFIX)/share/impresario
	rm -f $(DESTDIR)$(LIBDIR)/libimpresario_assist.so $(addprefix $(DESTDIR)$(UNITDIR)/,$(UNITS))
	@VERSION=$(VERSION) scripts/install-libs.sh uninstall $(TARGET_DIR)/release "$(DESTDIR)" $(PREFIX) $(LIBDIR) $(LIBRARIES)

clean: ## Remove what was built
	$(CARGO) clean
	rm -f demo-report.html demo.json
