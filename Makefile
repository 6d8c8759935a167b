# Every target has a line of help behind ##. `make` alone prints them.

MODULES  := modules/rtrs modules/rnbd-sdk modules/rnbd-server modules/rnbd-client modules/ipoib modules/bond
PLUGINS  := plugins/io-blockio plugins/io-fileio plugins/frontend-nbd plugins/frontend-ublk
PROGRAMS := cmd/rnbd cmd/rnbd-net $(PLUGINS) examples/io-memory
ALL      := $(MODULES) $(PROGRAMS) test tools
PACKAGES := libnbd-bin qemu-utils qemu-system-common nbdkit nbd-server nbd-client fio e2fsprogs tshark iperf3 stress-ng iproute2 strace groff-base fuse3 busybox rpm
PACKAGES_LONG := lintian podman crun
BIN      := $(CURDIR)/bin
RESULTS  := $(CURDIR)/.cache/test-results

# Another apt may be at work: for the lock of the index apt does not wait.
APT_UPDATE  := for i in 1 2 3 4 5 6 7 8 9 10; do apt-get update -qq && break; [ $$i -lt 10 ] && sleep 6; done
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o DPkg::Lock::Timeout=600

export CGO_ENABLED ?= 0
.DEFAULT_GOAL := help

# The fabric ibverbs is built in where there is a C compiler and the headers of rdma-core.
# (Some versions of make want a # escaped in $(shell), others pass the escape on.)
HASH := \#
RDMA_HEADERS := $(shell printf '%s\n' '$(HASH)include <infiniband/verbs.h>' '$(HASH)include <rdma/rdma_cma.h>' | $(or $(CC),gcc) -E - >/dev/null 2>&1 && echo yes)
ifeq ($(RDMA_HEADERS),yes)
export GOFLAGS += -tags=ibverbs
CGO_RNBD := 1
else
CGO_RNBD := $(CGO_ENABLED)
endif

help: ## this help
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## every program and plugin, into bin/
	@mkdir -p $(BIN)
	@for p in $(PROGRAMS); do echo "build $$p"; \
		cgo=$(CGO_ENABLED); [ $$p != cmd/rnbd ] || cgo=$(CGO_RNBD); (cd $$p && CGO_ENABLED=$$cgo go build -o $(BIN)/ .) || exit 1; done
	@$(BIN)/rnbd version | grep fabrics:

demo: build ## export, map, copy, kill a plugin, verify: under a minute
	@cd test && RNBD_BIN=$(BIN) go run ./demo

test: tools-for-test build test-modules test-e2e conformance ## everything but the long forms

tools-for-test:
	@missing=; for t in nbdinfo qemu-io qemu-storage-daemon nbdkit nbd-server nbd-client fio mke2fs tshark iperf3 stress-ng tc strace groff fusermount3 busybox rpm; do \
		command -v $$t >/dev/null || [ -x /usr/sbin/$$t ] || missing="$$missing $$t"; done; \
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing the clients and peers of the tests:$$missing"; \
			{ $(APT_UPDATE); } && $(APT_INSTALL) $(PACKAGES) >/dev/null; \
		else echo "not installed, so their tests are left out:$$missing"; fi; fi
	@command -v promtool >/dev/null || [ -x .cache/prometheus/usr/bin/promtool ] || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ $(APT_UPDATE); } && mkdir -p .cache/prometheus && cd .cache/prometheus && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb; \
	else echo "not installed, so their tests are left out: promtool prometheus"; fi
	@command -v chromium-headless-shell chromium >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ $(APT_UPDATE); } && $(APT_INSTALL) --no-install-recommends chromium-headless-shell >/dev/null; \
	else echo "not installed, so its tests are left out: chromium-headless-shell"; fi

test-modules: ## unit and in-process tests of every module, with the race detector
	@mkdir -p $(RESULTS)
	@CGO_ENABLED=1 go run ./tools/gotest -out $(RESULTS) -race $(MODULES) $(PLUGINS) examples/io-memory cmd/rnbd cmd/rnbd-net tools
	@echo "allocation tests, which the race detector would spoil:"
	@go run ./tools/gotest -out $(RESULTS)/alloc -run Alloc $(MODULES) $(PLUGINS)
	@echo "pumps that check who touches what:"
	@GOFLAGS=-tags=pumpdebug go run ./tools/gotest -out $(RESULTS)/pumpdebug -run 'Drive|Caller|Combiner|TestIO_' modules/rnbd-sdk modules/rnbd-client
	@echo "the trace of the data path, which other builds do not have:"
	@GOFLAGS=-tags=ipoib_debug_data go run ./tools/gotest -out $(RESULTS)/datatrace -run IP30 modules/ipoib/dev cmd/rnbd-net

test-e2e: build ## real processes and real clients
	@mkdir -p $(RESULTS)
	@RNBD_BIN=$(BIN) go run ./tools/gotest -out $(RESULTS) -p 1 test

test-versions: build ## the last release with this version: daemons, plugins, commands, files (needs the history of git)
	@mkdir -p $(RESULTS)
	@RNBD_LONG=1 RNBD_BIN=$(BIN) go run ./tools/gotest -out $(RESULTS)/versions -p 1 -timeout 45m $(if $(RUN),-run '$(RUN)') test/versions

# After test-kernel, run conformance again: the numbers proven with the kernel count then.
test-kernel: build ## with the Linux kernel as the peer, in a virtual machine (root, about 20 minutes)
	@mkdir -p $(RESULTS)
	@RNBD_KERNEL=1 RNBD_BIN=$(BIN) go run ./tools/gotest -out $(RESULTS) -p 1 -timeout 40m test/kernelvm

# A guest keeps one CPU busy at most times, so two run side by side, the longest first.
test-devices: build tools-for-packages ## front ends as block devices, and a host that boots with the packages, in virtual machines (root, about 15 minutes); RUN=REGEX: the first only
ifeq ($(RUN),)
	@$(MAKE) --no-print-directory --keep-going -j2 --output-sync=target -o build -o tools-for-packages test-disks-ublk test-disks-nbd test-boot
else
	@$(MAKE) --no-print-directory -o build test-disks
endif

test-disks-ublk: build
	@$(MAKE) --no-print-directory -o build test-disks SKIP=TestInGuest/nbd PART=-ublk

test-disks-nbd: build
	@$(MAKE) --no-print-directory -o build test-disks RUN=TestInGuest/nbd PART=-nbd

test-disks: build ## front ends as block devices, in a virtual machine (root)
	@mkdir -p $(RESULTS)
	@RNBD_KERNEL=1 RNBD_BIN=$(BIN) go run ./tools/gotest -out $(RESULTS)/devices$(PART) -p 1 -timeout 75m $(if $(RUN),-run '$(RUN)') $(if $(SKIP),-skip '$(SKIP)') test/devices

test-boot: tools-for-packages ## a Debian host that boots with the packages, in a virtual machine (root)
	@mkdir -p $(RESULTS)
	@RNBD_KERNEL=1 RNBD_PACKAGES=1 go run ./tools/gotest -out $(RESULTS)/boot -p 1 -timeout 75m -run TestBoot test/packages

soak: build tools-for-soak tools-for-packages ## the long form of it, hours on a slow machine; a part: RUN=TestInGuest/ublk/power, RUN=TestBoot
	@mkdir -p $(RESULTS)
	@RNBD_KERNEL=1 RNBD_LONG=1 RNBD_BIN=$(BIN) go run ./tools/gotest -out $(RESULTS)/devices -p 1 -timeout 250m $(if $(RUN),-run '$(RUN)') test/devices
	@RNBD_KERNEL=1 RNBD_PACKAGES=1 RNBD_LONG=1 go run ./tools/gotest -out $(RESULTS)/boot -p 1 -timeout 120m -run '$(or $(RUN),TestBoot)' test/packages

test-packages: tools-for-packages ## packages, installed, used, upgraded and purged in a clean root (root, about two minutes)
	@mkdir -p $(RESULTS)
	@RNBD_PACKAGES=1 go run ./tools/gotest -out $(RESULTS)/packages -p 1 $(if $(RUN),-run '$(RUN)') test/packages

test-packages-full: tools-for-packages ## the long form of it: the image in podman, lintian, two builds compared
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then { $(APT_UPDATE); } && $(APT_INSTALL) --no-install-recommends $(PACKAGES_LONG) >/dev/null; fi
	@RNBD_PACKAGES=1 RNBD_LONG=1 go run ./tools/gotest -out $(RESULTS)/packages -p 1 -timeout 120m $(if $(RUN),-run '$(RUN)') test/packages

tools-for-packages:
	@missing=; for t in mmdebstrap rpm; do command -v $$t >/dev/null || missing="$$missing $$t"; done; \
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then { $(APT_UPDATE); } && $(APT_INSTALL) --no-install-recommends $$missing >/dev/null; \
		else echo "not installed, so their tests are left out:$$missing"; fi; fi

tools-for-soak:
	@command -v stress-ng >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ $(APT_UPDATE); } && $(APT_INSTALL) --no-install-recommends stress-ng >/dev/null; \
	else echo "not installed, so its test is left out: stress-ng"; fi

test-kernel-full: build ## the long form of it
	@mkdir -p $(RESULTS)
	@RNBD_KERNEL=1 RNBD_LONG=1 RNBD_BIN=$(BIN) go run ./tools/gotest -out $(RESULTS) -p 1 -timeout 90m test/kernelvm

conformance: ## requirement -> test -> verdict, from the last results; STRICT=1: none may be open
	@go run ./tools/conformance $(if $(STRICT),-strict) -results $(RESULTS) $(wildcard docs/protocol/*.md)

fuzz: ## every fuzz target, FUZZTIME each (default 5m)
	@go run ./tools/fuzzall -time $(or $(FUZZTIME),5m) $(MODULES) $(PLUGINS) cmd/rnbd

faults: build ## the long form of the fault tests; SCHEDULES=300: so many random schedules of 20 s; SEED=7 or SCHEDULE=FILE: one of them again
ifeq ($(SCHEDULES)$(SEED)$(SCHEDULE),)
	@cd test && RNBD_BIN=$(BIN) RNBD_LONG=1 go test -count=1 -timeout 180m -v ./faults
endif
	@cd test && RNBD_BIN=$(BIN) RNBD_LONG=1 RNBD_SCHEDULES=$(or $(SCHEDULES),$(if $(SEED)$(SCHEDULE),1,20)) RNBD_SEED=$(SEED) \
		RNBD_SCHEDULE=$(abspath $(SCHEDULE)) RNBD_MINIMISE=$(MINIMISE) RNBD_KINDS='$(KINDS)' go test -count=1 -timeout 24h -v $(if $(SEED)$(SCHEDULE)$(SCHEDULES),-run 'TestSchedules$$') ./nemesis

simulate: ## faults that meet, in virtual time: N schedules (default 1000) from seed FROM on; SEED=7 shows one
	@cd test && $(if $(SEED),SIM_SEED=$(SEED) go test -count=1 -v -run TestSeed ./sim,\
		SIM_N=$(or $(N),1000) SIM_FROM=$(or $(FROM),1) go test -count=1 -v -timeout 0 -run TestSchedules ./sim)

mutants: ## break the tree in many places, one at a time: a test must notice
	@go run ./tools/mutants

mutants-sim: ## break the tree in ways that only faults that meet show, and count the schedules until make simulate finds each (hours): SCHEDULES=1000 at most, ONLY=NAME
	@go run ./tools/mutants -list tools/mutants/simulator.txt -schedules $(or $(SCHEDULES),1000) -only '$(ONLY)' -v

bench: build tools-for-test ## against other NBD servers, on this machine (root; a quarter of an hour and more); BENCH='-only P1,P5': a part of it
	@cd test && RNBD_BIN=$(BIN) go run ./bench $(BENCH)

bench-report: build tools-for-test ## the same, with tables and plots into docs/benchmarks
	@cd test && RNBD_BIN=$(BIN) go run ./bench -rounds 7 -floor-sums -markdown $(CURDIR)/docs/benchmarks/README.md $(BENCH)

timeline: build ## where the time of one request through the NBD front end goes, hand-over by hand-over (root, perf); TIMELINE='-calls'
	@cd test && RNBD_BIN=$(BIN) go run ./timeline $(TIMELINE)

bench-net: build tools-for-test ## IP over InfiniBand against wireguard-go and veth, tables into docs/benchmarks/net.md (root; five minutes)
	@cd test && RNBD_BIN=$(BIN) go run ./bench -net -rounds 9 -cell 2s -json ../bench-results-net.json -markdown $(CURDIR)/docs/benchmarks/net.md $(BENCH)

bench-kernel: build tools-for-test ## against the kernel's modules, in a virtual machine: ratios in bench-results-kernel.json (root)
	@cd test/kernelvm && RNBD_KERNEL=1 RNBD_BENCH=1 RNBD_BIN=$(BIN) go test -count=1 -v -timeout 40m -run TestBench_Peers .

bench-kernel-report: ## the same, with tables into docs/benchmarks/kernel.md
	@RNBD_BENCH_REPORT=$(CURDIR)/docs/benchmarks/kernel.md $(MAKE) bench-kernel

lint: ## gofmt, go vet and staticcheck, and the types for arm64
	@test -z "$$(gofmt -l $(ALL) | tee /dev/stderr)"
	@for m in $(ALL); do (cd $$m && go vet ./...) || exit 1; done
	@CGO_ENABLED=$(CGO_RNBD) $$(cd tools && go tool -n staticcheck) $(ALL:%=./%/...)
	@cd tools && go run ./arch arm64

vuln: build ## weaknesses that are known of the modules in the programs, by govulncheck; GOVULNDB=URL: another database
	@cd tools && go run ./vuln $(foreach p,$(PROGRAMS),$(BIN)/$(notdir $(p)))

man: build ## man pages of commands and configuration files, into bin/man
	@rm -rf $(BIN)/man && $(BIN)/rnbd man $(BIN)/man && $(BIN)/rnbd-net man $(BIN)/man

PREFIX  ?= /usr/local
RUN_BIN ?= $(BIN)
INSTALL := install -D -m
UNITS   := rnbd-client.service rnbd-client.socket rnbd-client-nbd.socket rnbd-server.service rnbd-server.socket

install: build ## programs, plugins, units, man pages and completion; DESTDIR=FOLDER, PREFIX=/usr/local
	@for p in rnbd rnbd-net; do $(INSTALL) 755 $(BIN)/$$p $(DESTDIR)$(PREFIX)/bin/$$p || exit 1; done
	@for p in $(notdir $(PLUGINS)); do $(INSTALL) 755 $(BIN)/$$p $(DESTDIR)$(PREFIX)/bin/$$p || exit 1; done
	@for u in $(UNITS); do sed 's|/usr/bin/|$(PREFIX)/bin/|' docs/examples/$$u | \
		$(INSTALL) 644 /dev/stdin $(DESTDIR)$(PREFIX)/lib/systemd/system/$$u || exit 1; done
	@for k in client server; do mkdir -p $(DESTDIR)/etc/rnbd/$$k.d; [ -e $(DESTDIR)/etc/rnbd/$$k.yaml ] || \
		$(INSTALL) 644 docs/examples/$$k.yaml $(DESTDIR)/etc/rnbd/$$k.yaml || exit 1; done
	@sed 's|/usr/bin/|$(PREFIX)/bin/|' docs/examples/65-rnbd.rules | $(INSTALL) 644 /dev/stdin $(DESTDIR)$(PREFIX)/lib/udev/rules.d/65-rnbd.rules
	@t=$$(mktemp -d) && trap 'rm -rf "$$t"' EXIT && for p in rnbd rnbd-net; do $(RUN_BIN)/$$p man $$t || exit 1; done && for f in $$t/*; do \
		$(INSTALL) 644 $$f $(DESTDIR)$(PREFIX)/share/man/man$${f##*.}/$${f##*/} || exit 1; done
	@for p in rnbd rnbd-net; do \
		$(RUN_BIN)/$$p completion bash | $(INSTALL) 644 /dev/stdin $(DESTDIR)$(PREFIX)/share/bash-completion/completions/$$p && \
		$(RUN_BIN)/$$p completion zsh | $(INSTALL) 644 /dev/stdin $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_$$p && \
		$(RUN_BIN)/$$p completion fish | $(INSTALL) 644 /dev/stdin $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/$$p.fish || exit 1; done

VERSION    ?= 0.1.0
ARCH       ?= $(shell go env GOARCH)
DIST       ?= $(BIN)/packages
BUILD_DATE  = $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null),0)

# The programs are built without cgo, without paths of this machine, and without what its environment
# says about processors and experiments. Man pages and completion come from programs for this machine.
RELEASE_ENV = GOFLAGS= GOOS=linux GOAMD64=v1 GOARM64=v8.0 GOEXPERIMENT= GOFIPS140=off CGO_ENABLED=0
RELEASE_LD  = -s -w -buildid= -X main.version=$(VERSION)
HOST_ARCH  := $(shell go env GOHOSTARCH)

# $(call release_programs,ARCH,PROGRAMS,FOLDER)
release_programs = for p in $(2); do (cd $$p && $(RELEASE_ENV) GOARCH=$(1) go build -trimpath -buildvcs=false -ldflags '$(RELEASE_LD)' -o $(3)/ .) || exit 1; done

# $(call pack,ARCH,FLAGS): programs for ARCH, and packages of them into DIST
pack = s=$$(mktemp -d) && trap 'rm -rf "$$s"' EXIT && mkdir $$s/bin $$s/run $$s/root && \
	$(call release_programs,$(1),cmd/rnbd cmd/rnbd-net $(PLUGINS),$$s/bin) && \
	if [ $(1) = $(HOST_ARCH) ]; then run=$$s/bin; else run=$$s/run; $(call release_programs,$(HOST_ARCH),cmd/rnbd cmd/rnbd-net,$$s/run); fi && \
	$(MAKE) --no-print-directory -o build install BIN=$$s/bin RUN_BIN=$$run DESTDIR=$$s/root PREFIX=/usr && mkdir -p $(DIST) && \
	(cd tools && GOFLAGS= GOARCH= GOOS= go run ./pack -stage $$s/root -source $(CURDIR) -out $(abspath $(DIST)) -version $(VERSION) -arch $(1) -date $(BUILD_DATE) $(2))

packages: ## Debian and RPM packages and an OCI image, static and reproducible, into bin/packages; VERSION=0.1.0
	@rm -f $(DIST)/rnbd*.deb $(DIST)/rnbd*.rpm $(DIST)/rnbd*.oci.tar
	@$(call pack,$(ARCH),)
	@cd $(DIST) && sha256sum *.deb *.rpm *.tar | tee SHA256SUMS

RELEASE_ARCHS ?= amd64 arm64

release: DIST = $(CURDIR)/dist
release: ## all files of a release, reproducible, into dist: programs with their SBOMs, packages, images, SHA256SUMS; VERSION=0.1.0
	@rm -rf $(DIST)/linux-* $(DIST)/rnbd* $(DIST)/SHA256SUMS && mkdir -p $(DIST)
	@$(foreach a,$(RELEASE_ARCHS),($(call pack,$(a),-programs $(abspath $(DIST))/linux-$(a))) || exit 1;)
	@cd $(DIST) && find * -type f ! -name SHA256SUMS | LC_ALL=C sort | xargs sha256sum | tee SHA256SUMS

release-programs: ## the programs of a release alone, as make release builds them: ARCH=, PROGRAMS=, DIST=FOLDER
	@mkdir -p $(DIST) && $(call release_programs,$(ARCH),$(PROGRAMS),$(abspath $(DIST)))

generate: ## protobuf code (needs protoc)
	@tools/generate.sh

tidy: ## go.mod and go.sum of every module
	@tools/tidy.sh

release-check: ## build every module as a user would, without the workspace
	@tools/release-check.sh

clean: ## what was built
	@rm -rf $(BIN) .cache dist bench-results*

.PHONY: help build demo test test-versions tools-for-test test-modules test-e2e test-kernel test-devices test-disks test-disks-ublk test-disks-nbd test-boot test-packages test-packages-full tools-for-packages soak tools-for-soak test-kernel-full conformance fuzz simulate mutants mutants-sim faults bench bench-report timeline bench-net bench-kernel bench-kernel-report lint vuln man install packages release release-programs generate tidy release-check clean
