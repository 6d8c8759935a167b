# Every target has a line of help behind ##. `make` alone prints them.
#
# Recipes run in the top folder and name files below it by relative paths, and the
# variables that a user may set reach the shell by its environment, in quotes: the
# names of folders may have spaces and quotes.

MODULES  := modules/rtrs modules/rnbd-sdk modules/rnbd-server modules/rnbd-client modules/ipoib modules/bond
PLUGINS  := plugins/io-blockio plugins/io-fileio plugins/io-nbd plugins/frontend-nbd plugins/frontend-ublk plugins/frontend-fuse
PROGRAMS := cmd/rnbd cmd/rnbd-net $(PLUGINS) examples/io-memory
ALL      := $(MODULES) $(PROGRAMS) plugins/io-rbd test tools
DEBIAN_PACKAGES := libnbd-bin qemu-utils qemu-system-common nbdkit nbd-server nbd-client fio e2fsprogs tshark iperf3 stress-ng iproute2 strace xfsprogs groff-base fuse3 busybox rpm
DEBIAN_PACKAGES_LONG := lintian podman crun
RESULTS  := .cache/test-results

# Go packages: of modules and programs, of the core of test/, and the instruments there,
# which measure and are no part of the product.
MODULE_PACKAGES := $(patsubst %,./%/...,$(MODULES) $(PLUGINS) examples/io-memory cmd/rnbd cmd/rnbd-net tools)
CORE_PACKAGES   := $(addprefix ./test/,e2e pluginkit faults sim cli tree lab deps docs blockhistory nbdclient slowdisk)
INSTRUMENTS     := bench timeline syscalls netpeer browser
E2E_PACKAGES    := $(patsubst %,./test/%/...,$(filter-out $(INSTRUMENTS),$(patsubst test/%/,%,$(wildcard test/*/))))

export BIN     := bin
export DESTDIR ?=
export RNBD_BIN := $(CURDIR)/bin

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

# The go command stamps programs with their commit, and fails where git refuses the checkout, as root is refused
# that of another user. Such programs have no commit.
ifneq ($(shell git rev-parse HEAD >/dev/null 2>&1 && echo yes),yes)
export GOFLAGS += -buildvcs=false
endif

help: ## this help
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' Makefile

# A first build compiles about 600 packages, and this filter shows how far it is: it
# counts the names that go build -v prints, and lets messages pass.
SHOW_BUILD := awk '/^BUILD FAILED$$/ {bad = 1; next} /^[a-zA-Z0-9_.~\/-]+$$/ {if (++n % 50 == 0) print "      " n " packages compiled"; fflush(); next} {print; fflush()} END {exit bad}'

build: ## every program and plugin, into bin/
	@mkdir -p "$$BIN"
	@for p in $(PROGRAMS); do echo "build $$p"; \
		cgo=$(CGO_ENABLED); [ $$p != cmd/rnbd ] || cgo=$(CGO_RNBD); \
		{ CGO_ENABLED=$$cgo go build -v -o "$$BIN/" ./$$p 2>&1 || echo "BUILD FAILED"; } | $(SHOW_BUILD) || exit 1; done
	@"$$BIN/rnbd" version | grep fabrics:

# The storage plugin for Ceph needs cgo and librbd, and is in no package. Without the tag it is a
# program that says so, which all modules are checked with.
io-rbd: ## the storage plugin for Ceph, into bin/ (a C compiler, librbd-dev, librados-dev)
	@mkdir -p "$$BIN" && CGO_ENABLED=1 go build -tags librbd,pacific -o "$$BIN/" ./plugins/io-rbd

demo: build ## export, map, copy, kill a plugin, verify: ten seconds; before the first one minutes to compile
	@echo "build test/demo"
	@{ go build -v -o "$$BIN/" ./test/demo 2>&1 || echo "BUILD FAILED"; } | $(SHOW_BUILD)
	@"$$BIN/demo"

# Programs without which tests of make test are left out.
TEST_NEEDS := fio nbdinfo nbdcopy qemu-io qemu-img fusermount3 openssl

# Most of these tests wait, so four packages share two CPUs.
test: build ## what a newcomer runs, within 6 minutes on two CPUs: modules, the core of end-to-end and fault tests, the simulator. PACKAGES=./modules/rtrs/...: these only
	@go run ./tools/gotest -short -isolate -p 4 -budget $(or $(BUDGET),6m) -needs '$(TEST_NEEDS)' -out .cache/test.json $(or $(PACKAGES),$(CORE_PACKAGES) $(MODULE_PACKAGES))
	@echo "make check adds: the race detector, all tests of test/, 1,000 schedules of the simulator, and the conformance table"

check: c-compiler tools-for-test build check-suites test-changed-instruments conformance ## what must pass before a merge: all but the long forms, with the race detector (a C compiler; as root it installs programs)

# The modules keep CPUs busy and the suites of test/ wait, so they run side by side.
check-suites: build
	@$(MAKE) --no-print-directory --keep-going -j2 -o build -o c-compiler test-modules test-e2e

c-compiler:
	@command -v $(or $(CC),gcc) >/dev/null || { echo "make check needs a C compiler for the race detector, and there is no $(or $(CC),gcc); make test needs none"; exit 1; }

tools-for-test:
	@missing=; for t in nbdinfo qemu-io qemu-storage-daemon nbdkit nbd-server nbd-client fio mke2fs tshark iperf3 stress-ng tc strace groff fusermount3 busybox rpm mkfs.xfs; do \
		command -v $$t >/dev/null || [ -x /usr/sbin/$$t ] || missing="$$missing $$t"; done; \
	if [ -n "$$missing" ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing the clients and peers of the tests:$$missing"; \
			{ $(APT_UPDATE); } && $(APT_INSTALL) $(DEBIAN_PACKAGES) >/dev/null; \
		else echo "not installed, so their tests are left out:$$missing"; fi; fi
	@command -v promtool >/dev/null || [ -x .cache/prometheus/usr/bin/promtool ] || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ $(APT_UPDATE); } && mkdir -p .cache/prometheus && cd .cache/prometheus && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb; \
	else echo "not installed, so their tests are left out: promtool prometheus"; fi
	@command -v chromium-headless-shell chromium >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ $(APT_UPDATE); } && $(APT_INSTALL) --no-install-recommends chromium-headless-shell >/dev/null; \
	else echo "not installed, so its tests are left out: chromium-headless-shell"; fi

test-modules: c-compiler ## a part of make check: unit and in-process tests of every module, with the race detector
	@CGO_ENABLED=1 go run ./tools/gotest -race -out $(RESULTS)/modules.json $(MODULE_PACKAGES)
	@echo "allocation tests, which the race detector would spoil:"
	@go run ./tools/gotest -run Alloc -out $(RESULTS)/alloc.json $(patsubst %,./%/...,$(MODULES) $(PLUGINS))
	@echo "pumps that check who touches what:"
	@GOFLAGS=-tags=pumpdebug go run ./tools/gotest -run 'Drive|Caller|Combiner|TestIO_' -out $(RESULTS)/pumpdebug.json ./modules/rnbd-sdk/... ./modules/rnbd-client/...
	@echo "the trace of the data path, which other builds do not have:"
	@GOFLAGS=-tags=ipoib_debug_data go run ./tools/gotest -run IP30 -out $(RESULTS)/datatrace.json ./modules/ipoib/dev/... ./cmd/rnbd-net/...

test-e2e: build ## a part of make check: real processes and real clients
	@go run ./tools/gotest -isolate -p 3 -timeout 30m -out $(RESULTS)/e2e.json $(E2E_PACKAGES)

test-instruments: build ## the tests of the programs that measure: benchmark, timeline, system calls
	@go run ./tools/gotest -p 1 -timeout 30m -out $(RESULTS)/instruments.json $(INSTRUMENTS:%=./test/%/...)

# The instruments are tested when they differ from the default branch; on that branch,
# from the commit before.
test-changed-instruments:
	@base=$$(git merge-base HEAD origin/HEAD 2>/dev/null || git merge-base HEAD main 2>/dev/null) || exit 0; \
	[ "$$base" != "$$(git rev-parse HEAD)" ] || base=HEAD~1; \
	if git diff --quiet $$base -- $(INSTRUMENTS:%=test/%) 2>/dev/null; then echo "the instruments have not changed: make test-instruments tests them"; \
	else $(MAKE) --no-print-directory -o build test-instruments; fi

test-versions: build ## the last release with this version: daemons, plugins, commands, files (needs the history of git)
	@RNBD_LONG=1 go run ./tools/gotest -out $(RESULTS)/versions.json -timeout 45m $(if $(RUN),-run '$(RUN)') ./test/versions

# Debian's packages are unpacked, not installed: the libraries and headers too.
export CEPH_ROOT := $(CURDIR)/.cache/ceph/root
CEPH_PACKAGES := ceph-mon ceph-osd ceph-common librbd-dev librados-dev

$(CEPH_ROOT)/usr/bin/ceph-osd:
	@mkdir -p .cache/ceph/debs && { $(APT_UPDATE); } && cd .cache/ceph/debs && \
		apt-get download -qq $$(apt-get install --no-install-recommends -s $(CEPH_PACKAGES) | sed -n 's/^Inst \([^ ]*\).*/\1/p') librbd1 librados2 && \
		for d in *.deb; do dpkg -x "$$d" ../root || exit 1; done && rm *.deb

test-ceph: build c-compiler $(CEPH_ROOT)/usr/bin/ceph-osd ## the storage plugin for Ceph, with a cluster of one OSD (Debian on amd64; about three minutes)
	@CGO_CFLAGS="-I$$CEPH_ROOT/usr/include" CGO_LDFLAGS="-L$$CEPH_ROOT/usr/lib/x86_64-linux-gnu -Wl,-rpath,$$CEPH_ROOT/usr/lib/x86_64-linux-gnu" \
		$(MAKE) --no-print-directory io-rbd
	@RNBD_CEPH="$$CEPH_ROOT" go run ./tools/gotest -isolate -out $(RESULTS)/ceph.json -timeout 20m ./test/ceph

# After test-kernel, run conformance again: the numbers proven with the kernel count then.
test-kernel: build ## with the Linux kernel as the peer, in a virtual machine (root, about 20 minutes)
	@RNBD_KERNEL=1 go run ./tools/gotest -p 1 -out $(RESULTS)/kernel.json -timeout 40m ./test/kernelvm/...

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
	@RNBD_KERNEL=1 go run ./tools/gotest -p 1 -out $(RESULTS)/devices$(PART).json -timeout 75m $(if $(RUN),-run '$(RUN)') $(if $(SKIP),-skip '$(SKIP)') ./test/devices/...

test-boot: tools-for-packages ## a Debian host that boots with the packages, in a virtual machine (root)
	@RNBD_KERNEL=1 RNBD_PACKAGES=1 go run ./tools/gotest -out $(RESULTS)/boot.json -timeout 75m -run TestBoot ./test/packages

soak: build tools-for-soak tools-for-packages ## the long form of it, hours on a slow machine; a part: RUN=TestInGuest/ublk/power, RUN=TestBoot
	@RNBD_KERNEL=1 RNBD_LONG=1 go run ./tools/gotest -p 1 -out $(RESULTS)/devices.json -timeout 250m $(if $(RUN),-run '$(RUN)') ./test/devices/...
	@RNBD_KERNEL=1 RNBD_PACKAGES=1 RNBD_LONG=1 go run ./tools/gotest -out $(RESULTS)/boot.json -timeout 120m -run '$(or $(RUN),TestBoot)' ./test/packages

test-packages: tools-for-packages ## packages, installed, used, upgraded and purged in a clean root (root, about two minutes)
	@RNBD_PACKAGES=1 go run ./tools/gotest -out $(RESULTS)/packages.json $(if $(RUN),-run '$(RUN)') ./test/packages

test-packages-full: tools-for-packages ## the long form of it: the image in podman, lintian, two builds compared
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then { $(APT_UPDATE); } && $(APT_INSTALL) --no-install-recommends $(DEBIAN_PACKAGES_LONG) >/dev/null; fi
	@RNBD_PACKAGES=1 RNBD_LONG=1 go run ./tools/gotest -out $(RESULTS)/packages.json -timeout 120m $(if $(RUN),-run '$(RUN)') ./test/packages

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
	@RNBD_KERNEL=1 RNBD_LONG=1 go run ./tools/gotest -p 1 -out $(RESULTS)/kernel.json -timeout 90m ./test/kernelvm/...

conformance: ## requirement -> test -> verdict, from the last results; STRICT=1: none may be open
	@go run ./tools/conformance $(if $(STRICT),-strict) -results $(RESULTS) $(wildcard docs/extend/protocol/*.md)

fuzz: ## every fuzz target, FUZZTIME each (default 5m)
	@go run ./tools/fuzzall -time $(or $(FUZZTIME),5m) $(MODULES) $(PLUGINS) cmd/rnbd

faults: build ## the long form of the fault tests; SCHEDULES=300: so many random schedules of 20 s; SEED=7 or SCHEDULE=FILE: one of them again
ifeq ($(SCHEDULES)$(SEED)$(SCHEDULE),)
	@cd test && RNBD_LONG=1 go test -count=1 -timeout 180m -v ./faults
endif
	@s="$${SCHEDULE:+$$(realpath -- "$$SCHEDULE")}" && cd test && RNBD_LONG=1 RNBD_SCHEDULES=$(or $(SCHEDULES),$(if $(SEED)$(SCHEDULE),1,20)) RNBD_SEED=$(SEED) \
		RNBD_SCHEDULE="$$s" RNBD_MINIMISE=$(MINIMISE) RNBD_KINDS='$(KINDS)' go test -count=1 -timeout 24h -v $(if $(SEED)$(SCHEDULE)$(SCHEDULES),-run 'TestSchedules$$') ./nemesis

simulate: ## faults that meet, in virtual time: N schedules (default 1000) from seed FROM on; SEED=7 shows one
	@cd test && $(if $(SEED),SIM_SEED=$(SEED) go test -count=1 -v -run TestSeed ./sim,\
		SIM_N=$(or $(N),1000) SIM_FROM=$(or $(FROM),1) go test -count=1 -v -timeout 0 -run TestSchedules ./sim)

mutants: ## break the tree in many places, one at a time: a test must notice
	@go run ./tools/mutants

mutants-sim: ## break the tree in ways that only faults that meet show, and count the schedules until make simulate finds each (hours): SCHEDULES=1000 at most, ONLY=NAME
	@go run ./tools/mutants -list tools/mutants/simulator.txt -schedules $(or $(SCHEDULES),1000) -only '$(ONLY)' -v

bench: build tools-for-test ## against other NBD servers, on this machine (root; a quarter of an hour and more); BENCH='-only P1,P5': a part of it
	@cd test && go run ./bench $(BENCH)

bench-report: build tools-for-test ## the same, with tables and plots into docs/results
	@cd test && go run ./bench -rounds 7 -floor-sums -markdown ../docs/results/README.md $(BENCH)

timeline: build ## where the time of one request through the NBD front end goes, hand-over by hand-over (root, perf); TIMELINE='-calls'
	@cd test && go run ./timeline $(TIMELINE)

bench-net: build tools-for-test ## IP over InfiniBand against wireguard-go and veth, tables into docs/results/net.md (root; five minutes)
	@cd test && go run ./bench -net -rounds 9 -cell 2s -json ../bench-results-net.json -markdown ../docs/results/net.md $(BENCH)

bench-kernel: build tools-for-test ## against the kernel's modules, in a virtual machine: ratios in bench-results-kernel.json (root)
	@cd test/kernelvm && RNBD_KERNEL=1 RNBD_BENCH=1 go test -count=1 -v -timeout 40m -run TestBench_Peers .

bench-kernel-report: ## the same, with tables into docs/results/kernel.md
	@RNBD_BENCH_REPORT="$$PWD/docs/results/kernel.md" $(MAKE) bench-kernel

lint: ## gofmt, go vet and staticcheck, and the types for arm64
	@bad=$$(gofmt -l $(ALL)); [ -z "$$bad" ] || { echo "gofmt would change: $$bad" >&2; exit 1; }
	@for m in $(ALL); do (cd $$m && go vet ./...) || exit 1; done
	@CGO_ENABLED=$(CGO_RNBD) $$(cd tools && go tool -n staticcheck) $(ALL:%=./%/...)
	@cd tools && go run ./arch arm64

vuln: build ## weaknesses that are known of the modules in the programs, by govulncheck; GOVULNDB=URL: another database
	@check=$$(cd tools && go tool -n govulncheck) || exit 1; db="$${GOVULNDB:-https://vuln.go.dev}"; affected=; \
	left_out() { echo "vuln: left out, the database cannot be reached: $$1"; exit 0; }; \
	case "$$db" in file://*) [ -e "$${db#file://}/index/db.json" ] || left_out "$$db has no index/db.json" ;; esac; \
	for p in $(notdir $(PROGRAMS)); do \
		code=0; report=$$("$$check" -mode=binary -db="$$db" "$$RNBD_BIN/$$p" 2>&1) || code=$$?; \
		case "$$code $$report" in \
		"0 "*) echo "vuln: $$p: nothing is known" ;; \
		"3 "*) printf 'vuln: %s:\n%s\n' "$$p" "$$report"; affected="$$affected $$p" ;; \
		*"creating client: "* | *"fetching vulnerabilities: "*) left_out "$$(echo $$report)" ;; \
		*) printf 'vuln: %s: %s\n' "$$p" "$$report" >&2; exit 1 ;; \
		esac; \
	done; \
	[ -z "$$affected" ] || { echo "vuln: affected:$$affected; take newer versions of these modules" >&2; exit 1; }

man: build ## man pages of commands and configuration files, into bin/man
	@rm -rf "$$BIN/man" && "$$BIN/rnbd" man "$$BIN/man" && "$$BIN/rnbd-net" man "$$BIN/man"

export PREFIX  ?= /usr/local
export RUN_BIN := $(BIN)
INSTALL := install -D -m
UNITS   := rnbd-client.service rnbd-client.socket rnbd-client-nbd.socket rnbd-server.service rnbd-server.socket

install: build ## programs, plugins, units, man pages, completion and what plugins in C and other languages include; DESTDIR=FOLDER, PREFIX=/usr/local
	@for p in rnbd rnbd-net $(notdir $(PLUGINS)); do $(INSTALL) 755 "$$BIN/$$p" "$$DESTDIR$$PREFIX/bin/$$p" || exit 1; done
	@for u in $(UNITS); do sed "s|/usr/bin/|$$PREFIX/bin/|" docs/use/examples/$$u | \
		$(INSTALL) 644 /dev/stdin "$$DESTDIR$$PREFIX/lib/systemd/system/$$u" || exit 1; done
	@for k in client server; do mkdir -p "$$DESTDIR/etc/rnbd/$$k.d"; [ -e "$$DESTDIR/etc/rnbd/$$k.yaml" ] || \
		$(INSTALL) 644 docs/use/examples/$$k.yaml "$$DESTDIR/etc/rnbd/$$k.yaml" || exit 1; done
	@for f in modules/rnbd-sdk/plugin/pluginpb/plugin.proto examples/io-c/rnbd-plugin.h; do \
		$(INSTALL) 644 $$f "$$DESTDIR$$PREFIX/share/rnbd/$$(basename $$f)" || exit 1; done
	@sed "s|/usr/bin/|$$PREFIX/bin/|" docs/use/examples/65-rnbd.rules | $(INSTALL) 644 /dev/stdin "$$DESTDIR$$PREFIX/lib/udev/rules.d/65-rnbd.rules"
	@t=$$(mktemp -d) && trap 'rm -rf "$$t"' EXIT && for p in rnbd rnbd-net; do "$$RUN_BIN/$$p" man "$$t" || exit 1; done && for f in "$$t"/*; do \
		$(INSTALL) 644 "$$f" "$$DESTDIR$$PREFIX/share/man/man$${f##*.}/$${f##*/}" || exit 1; done
	@for p in rnbd rnbd-net; do \
		"$$RUN_BIN/$$p" completion bash | $(INSTALL) 644 /dev/stdin "$$DESTDIR$$PREFIX/share/bash-completion/completions/$$p" && \
		"$$RUN_BIN/$$p" completion zsh | $(INSTALL) 644 /dev/stdin "$$DESTDIR$$PREFIX/share/zsh/site-functions/_$$p" && \
		"$$RUN_BIN/$$p" completion fish | $(INSTALL) 644 /dev/stdin "$$DESTDIR$$PREFIX/share/fish/vendor_completions.d/$$p.fish" || exit 1; done

VERSION    ?= 0.1.0
ARCH       ?= $(shell go env GOARCH)
export DIST ?= bin/packages
BUILD_DATE  = $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null),0)

# The programs are built without cgo, without paths of this machine, and without what its environment
# says about processors and experiments. Man pages and completion come from programs for this machine.
RELEASE_ENV = GOFLAGS= GOOS=linux GOAMD64=v1 GOARM64=v8.0 GOEXPERIMENT= GOFIPS140=off CGO_ENABLED=0
RELEASE_LD  = -s -w -buildid= -X main.version=$(VERSION)
HOST_ARCH  := $(shell go env GOHOSTARCH)

# $(call release_programs,ARCH,PROGRAMS,FOLDER); the folder in the quotes of the shell
release_programs = for p in $(2); do $(RELEASE_ENV) GOARCH=$(1) go build -trimpath -buildvcs=false -ldflags '$(RELEASE_LD)' -o $(3)/ ./$$p || exit 1; done

# $(call pack,ARCH,FLAGS): programs for ARCH, and packages of them into DIST
pack = s=$$(mktemp -d) && trap 'rm -rf "$$s"' EXIT && mkdir "$$s/bin" "$$s/run" "$$s/root" && \
	$(call release_programs,$(1),cmd/rnbd cmd/rnbd-net $(PLUGINS),"$$s/bin") && \
	if [ $(1) = $(HOST_ARCH) ]; then run=$$s/bin; else run=$$s/run; $(call release_programs,$(HOST_ARCH),cmd/rnbd cmd/rnbd-net,"$$s/run"); fi && \
	$(MAKE) --no-print-directory -o build install BIN="$$s/bin" RUN_BIN="$$run" DESTDIR="$$s/root" PREFIX=/usr && mkdir -p "$$DIST" && \
	GOFLAGS=-buildvcs=false GOARCH= GOOS= go run ./tools/pack -stage "$$s/root" -source "$$PWD" -out "$$DIST" -version $(VERSION) -arch $(1) -date $(BUILD_DATE) $(2)

packages: ## Debian and RPM packages and an OCI image, static and reproducible, into bin/packages; VERSION=0.1.0
	@rm -f "$$DIST"/rnbd*.deb "$$DIST"/rnbd*.rpm "$$DIST"/rnbd*.oci.tar
	@$(call pack,$(ARCH),)
	@cd "$$DIST" && sha256sum *.deb *.rpm *.tar | tee SHA256SUMS

RELEASE_ARCHS ?= amd64 arm64

release: DIST = dist
release: ## all files of a release, reproducible, into dist: programs with their SBOMs, packages, images, SHA256SUMS; VERSION=0.1.0
	@rm -rf "$$DIST"/linux-* "$$DIST"/rnbd* "$$DIST/SHA256SUMS" && mkdir -p "$$DIST"
	@$(foreach a,$(RELEASE_ARCHS),($(call pack,$(a),-programs "$$DIST/linux-$(a)")) || exit 1;)
	@cd "$$DIST" && find * -type f ! -name SHA256SUMS | LC_ALL=C sort | xargs sha256sum | tee SHA256SUMS

release-programs: ## the programs of a release alone, as make release builds them: ARCH=, PROGRAMS=, DIST=FOLDER
	@mkdir -p "$$DIST" && $(call release_programs,$(ARCH),$(PROGRAMS),"$$DIST")

generate: ## protobuf code (needs protoc)
	@tools/generate.sh

tidy: ## go.mod and go.sum of every module
	@tools/tidy.sh

release-check: ## build every module as a user would, without the workspace
	@tools/release-check.sh

clean: ## remove what was built and measured: bin, dist, .cache, bench-results*
	@rm -rf bin dist .cache bench-results*

.PHONY: help build io-rbd test-ceph demo test check check-suites c-compiler test-versions tools-for-test test-modules test-e2e test-instruments test-changed-instruments test-kernel test-devices test-disks test-disks-ublk test-disks-nbd test-boot test-packages test-packages-full tools-for-packages soak tools-for-soak test-kernel-full conformance fuzz simulate mutants mutants-sim faults bench bench-report timeline bench-net bench-kernel bench-kernel-report lint vuln man install packages release release-programs generate tidy release-check clean
