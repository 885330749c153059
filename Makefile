# `make demo` and `make test` are the two commands to start with; both make .venv first, from the pins.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv and pip trust what the system trusts: a proxy or an index may have a private certificate authority. Of pip only
# 24.2 and later do so by themselves, and Python 3.11 comes with older ones.
SYSTEM_CERTIFICATES := $(wildcard /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem)
# Where this is set, each process would compile all its modules anew.
unexport PYTHONDONTWRITEBYTECODE
export UV_SYSTEM_CERTS ?= $(if $(SYSTEM_CERTIFICATES),true,false)
PIP_TRUST = $(if $(SYSTEM_CERTIFICATES),$(BIN)/python -m pip config list | grep -q '\.cert=' || export PIP_CERT=$(firstword $(SYSTEM_CERTIFICATES));)
PINS := requirements/uv.txt requirements/dev.txt requirements/build.txt requirements/nixl.txt pyproject.toml

.PHONY: help venv demo test test-slow test-all test-cluster test-node test-node-all test-kernel test-image test-install test-gpu image image-lock wheel release verify-release helm docs-site diagrams screens lint ceilings simulate mutate bench-quick format proto client pins long clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

venv: $(VENV)/.complete  ## .venv, from the pins

$(VENV)/.complete: $(PINS)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP_TRUST) $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements/dev.txt -r requirements/build.txt
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps --require-hashes -r requirements/nixl.txt \
	  || echo "venv: NIXL could not be installed (see above); the transfer step of the demo will say so"
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

demo: venv  ## the whole story on simulated racks
	$(BIN)/rackloom demo

# The quick tests of every area; properties with few examples. The last line is the CPU time (ceilings.toml).
test: venv  ## the quick tests of every area
	$(BIN)/python -m tools.cpu_seconds "make test" $(BIN)/python -m pytest -n auto -m "not slow" --hypothesis-profile quick

# Slow tests (PostgreSQL, containers, browsers, processes), and every property with all its examples.
test-slow: venv  ## the slow tests, and properties with all their examples
	$(BIN)/python -m pytest -n auto -m "slow or hypothesis"

test-all: test test-slow  ## all tests that need no cluster

# A real control plane (etcd, kube-apiserver, kube-scheduler, kube-controller-manager): built once, then cached.
# Three at a time, each with tests of its own: they wait for half of their time.
test-cluster: venv  ## tests on a real Kubernetes control plane
	$(BIN)/python tests/cluster/build.py
	RACKLOOM_TEST_CLUSTER=1 $(BIN)/python -m pytest -n 3 --dist loadfile tests/cluster

# Two real nodes (kubelet, containerd, runc) with the image and deploy/kubernetes on them; needs root on Linux.
test-node: venv  ## tests on two real kubelets; root on Linux
	$(BIN)/python tests/node/run.py $(WORDS)

# The same, and what takes longer than a change may wait for: deaths, reboots, an upgrade, other Kubernetes versions,
# and the core with the chart in place of kustomize, with three node plugins and with one.
# Then the core on cgroup v2, and links on Debian's kernel, in virtual machines; status 3: there is none here, and it says why.
test-node-all: venv  ## the same with deaths, an upgrade and other Kubernetes versions
	$(BIN)/python tests/node/run.py --all $(WORDS)
	for minor in 1.34 1.35 1.37; do \
	  RACKLOOM_KUBERNETES=$$minor $(BIN)/python tests/node/run.py $(WORDS) || exit; \
	done
	for chart in --chart --chart=one-process; do \
	  $(BIN)/python tests/node/run.py $$chart $(WORDS) || exit; \
	done
	$(BIN)/python tests/node/run.py --vm $(WORDS) || [ $$? = 3 ]
	$(BIN)/python tests/node/run.py --kernel || [ $$? = 3 ]

# What the kernel of this machine may lack (dummy, ipvlan, vlan, vrf, software RDMA), on Debian's kernel in QEMU.
test-kernel: venv  ## tests of links and RDMA on a kernel that has all kinds; root on Debian
	$(BIN)/python tests/node/run.py --kernel $(WORDS)

# The container image as an OCI archive below build/image: ARCH=amd64 or arm64 (this machine's), TARGET=site or transfer.
image: venv  ## the container image as an OCI archive
	$(BIN)/python -m deploy.image.build $(if $(ARCH),--arch $(ARCH)) $(if $(TARGET),--target $(TARGET))

# Whole images: built, started, compared with what a builder makes. Downloads what is not cached.
test-image: venv  ## tests of whole images
	RACKLOOM_TEST_IMAGE=1 $(BIN)/python -m pytest tests/deploy/image

# Builds in isolation, then the wheel alone in empty environments on each Python that is here. Packages come from the
# configured index. One worker takes all tests of a file, so that the program of the lessons is installed once.
test-install: venv  ## the wheel alone, on each Python that is here
	RACKLOOM_TEST_INSTALL=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/install

# A site of the pages and of what is generated from the code, below build/site; VERSION=1.2.0 names its folder. Other
# versions there stay. Nothing of it asks another host.
docs-site: venv  ## the documentation as a site, in build/site
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements/docs.txt
	$(BIN)/python -m docs.site.build $(if $(VERSION),--version $(VERSION))

# Drawings of the diagrams in the pages; only when one changed. Needs npm and Chromium.
diagrams: venv  ## drawings of the diagrams, where one changed
	$(BIN)/python -m docs.site.diagrams

# Ten states of the rack map in a browser, kept below build/screens: each compared with its reference, and looked through
# by axe-core. UPDATE=yes: the present looks become the references.
screens: venv  ## ten states of the rack map look as they did
	RACKLOOM_SCREENS=$(if $(UPDATE),update,all) RACKLOOM_SCREENSHOTS=build/screens $(BIN)/python -m pytest tests/browser/test_screens.py

wheel: venv  ## dist/rackloom-*.whl
	$(BIN)/python -m hatchling build -t wheel -d dist

# Built once from the Go module proxy, then cached; without it the tests that render the chart are skipped.
helm: venv  ## Helm, which the tests of the chart run
	$(BIN)/python tests/cluster/build.py helm

# Everything that a release publishes, into dist/VERSION (docs/testing.md): of the tag vVERSION, or of REF; signed
# with the SSH key KEY; IMAGES=no leaves the images out.
release: venv  ## all that a release publishes: VERSION=, KEY=
	$(BIN)/python -m deploy.release.build --version $(VERSION) $(if $(REF),--ref $(REF)) $(if $(KEY),--key $(KEY)) \
	  $(if $(BUILDER),--builder $(BUILDER)) $(if $(filter no,$(IMAGES)),--no-images)

# A downloaded release in DIST, by the keys in SIGNERS; needs no .venv.
verify-release:  ## a downloaded release: DIST=, SIGNERS=
	$(PYTHON) -m deploy.release.verify $(DIST) $(if $(SIGNERS),--signers $(SIGNERS),--unsigned)

# When an archive no longer has a package of deploy/image/packages.lock: what it has now.
image-lock: venv  ## new pins of the image's packages
	$(BIN)/python -m deploy.image.build --lock
	$(BIN)/python -m deploy.release.copyrights

# What one machine with an NVIDIA GPU can show; elsewhere each check is skipped and says why. With WHEELS=DIR all
# packages come from that directory and nothing is fetched (tests/gpu/run.py says how to fill it).
GPU_VENV := build/gpu-venv
ifdef WHEELS
GPU_PYTHON := $(GPU_VENV)/bin/python
GPU_NEEDS := $(GPU_VENV)/.complete
else
GPU_PYTHON := $(BIN)/python
GPU_NEEDS := venv
endif
test-gpu: $(GPU_NEEDS)  ## what only a machine with an NVIDIA GPU shows
	$(GPU_PYTHON) tests/gpu/run.py --report build/gpu-report.json

OFFLINE = $(GPU_PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --find-links $(WHEELS) --require-hashes
$(GPU_VENV)/.complete: requirements/runtime.txt requirements/nixl.txt
	$(PYTHON) -m venv --clear $(GPU_VENV)
	$(OFFLINE) -r requirements/runtime.txt
	@$(OFFLINE) --no-deps -r requirements/nixl.txt || echo "test-gpu: NO NIXL among $(WHEELS): the transfer is skipped"
	@touch $@

# A docstring of the service is a line of the generated client, and a change of prose is tested by nothing else.
lint: venv  ## ruff, mypy, import contracts, the generated client and the ceilings of ceilings.toml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -n 0 tests/client/test_generated.py
	$(BIN)/python -m tools.ratchets

# After a change that lowers a figure of ceilings.toml. Nothing raises one but an edit of the file.
ceilings: venv  ## lower the ceilings to the present figures
	$(BIN)/python -m tools.ratchets --lower

# In virtual time, one line each at the end: the carve plane under seeded faults, and a ComputeDomain's whole life
# with every program of it dying at every EVERYth step.
simulate: venv  ## seeded faults in virtual time
	$(BIN)/python tests/simulation/run.py --seeds $(or $(SEEDS),1000) --deaths
	PYTHONHASHSEED=0 $(BIN)/python tests/simulation/run_claims.py --every $(or $(EVERY),1)

# Changes what decides over partitions and membership, one expression at a time, and runs the tests on each change:
# which changes does no test notice (benchmarks/mutation.py)? Goes on where it stopped. MODULE=core.partitions.planner: that
# module alone; JOBS=1: one test run at a time. The same examples are drawn each time.
mutate: venv  ## which changes does no test notice?
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements/mutate.txt
	CI=1 $(BIN)/python -m mutmut run --max-children $(or $(JOBS),2) $(if $(MODULE),"rackloom.$(MODULE).*")
	$(BIN)/python benchmarks/mutation.py

# Every benchmark in its short form, and the ratios of benchmarks/goals.toml that a busy machine does not move.
bench-quick: venv  ## every benchmark in its short form
	$(BIN)/python benchmarks/quick.py $(WORDS)

format: venv  ## fix what a program can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The generated code is checked in, so that nobody needs protoc to run; a test compares it with the proto.
proto: venv  ## generate code from .proto files
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc --proto_path=src \
	  --python_out=src --grpc_python_out=src --mypy_out=src --mypy_grpc_out=src \
	  $$(cd src && find rackloom -name '*.proto' | sed 's,^,src/,')

# The typed client of the REST service; also checked in, and a test compares it with the document that is served.
client: venv  ## generate the Python client from the OpenAPI document
	$(BIN)/python -m tests.client.generate

# Pins name no index and no host: the installer's own configuration says where packages come from.
UV_COMPILE := $(BIN)/uv pip compile --universal --generate-hashes --no-header --no-annotate --python-version 3.11 --quiet
pins: venv  ## resolve requirements/ again
	$(UV_COMPILE) pyproject.toml -o requirements/runtime.txt
	$(UV_COMPILE) --group pyproject.toml:dev -c requirements/runtime.txt pyproject.toml -o requirements/dev.txt
	$(UV_COMPILE) --extra otel -c requirements/dev.txt pyproject.toml -o requirements/otel.txt
	$(UV_COMPILE) --group pyproject.toml:docs -c requirements/dev.txt -o requirements/docs.txt
	$(UV_COMPILE) -c requirements/dev.txt requirements/build.in -o requirements/build.txt
	$(UV_COMPILE) -c requirements/dev.txt requirements/mutate.in -o requirements/mutate.txt
	$(UV_COMPILE) requirements/uv.in -o requirements/uv.txt
	$(UV_COMPILE) --no-deps requirements/nixl.in -o requirements/nixl.txt

# Hours, in parts of MINUTES=60 at most that go on where they stopped (tools/long.py). SAMPLE=yes: one small unit.
long: venv  ## a check that takes hours: NAME=hunt
	$(BIN)/python -m tools.long $(NAME) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SAMPLE),--sample)

clean:  ## remove what was made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist mutants
