# Built in two stages: the wheel and its locked dependencies, then an image without build tools.
# Give BASE by digest (python@sha256:...) and SOURCE_DATE_EPOCH (the commit's time), and whoever
# builds this commit again gets the same files; dependencies are pinned by hash either way.
ARG BASE=python:3.11-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG SOURCE_DATE_EPOCH=0
WORKDIR /src
# The dependencies change seldom, so that this layer is kept from build to build.
COPY requirements-run.lock requirements-build.lock ./
RUN python -m venv /opt/affidavit \
    && /opt/affidavit/bin/pip install --no-cache-dir --no-compile --require-hashes --requirement requirements-run.lock \
    && pip install --no-cache-dir --require-hashes --requirement requirements-build.lock
COPY pyproject.toml setup.py README.md LICENSE ./
# src/affidavit holds symlinks to the folders beside it, so they are copied together.
COPY src/ src/
COPY plan/ plan/
COPY mechanisms/ mechanisms/
COPY accountants/ accountants/
COPY checker/ checker/
COPY importers/ importers/
COPY trust/ trust/
COPY assessment/ assessment/
COPY certificate/ certificate/
COPY evidence/ evidence/
COPY guard/ guard/
COPY replay/ replay/
COPY gate/ gate/
COPY trainer/ trainer/
COPY worker/ worker/
COPY library/ library/
COPY client/ client/
COPY service/ service/
COPY migrations/ migrations/
# Bytecode that is found by the hash of its source: by time it would differ in every build.
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/affidavit/bin/pip install --no-cache-dir --no-compile --no-deps --no-index /dist/*.whl \
    && /opt/affidavit/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/affidavit/lib

# hadolint ignore=DL3006
FROM ${BASE}
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/affidavit affidavit \
    && install -d -m 0700 -o affidavit -g affidavit /var/lib/affidavit/home
COPY --from=build /opt/affidavit /opt/affidavit
ENV PATH=/opt/affidavit/bin:$PATH \
    AFFIDAVIT_HOME=/var/lib/affidavit/home \
    PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/affidavit
VOLUME /var/lib/affidavit/home
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/livez', timeout=2)"]
# The shell is replaced by the server, which then gets the stop signal itself.
CMD ["sh", "-c", "python -m affidavit.service migrate && exec python -m affidavit.service serve --host 0.0.0.0 --port 8000"]
