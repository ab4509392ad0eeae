# Built in two stages: the wheel and its dependencies, then an image without build tools.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
# src/affidavit holds symlinks to the folders beside it, so they are copied together.
COPY src/ src/
COPY plan/ plan/
COPY mechanisms/ mechanisms/
COPY accountants/ accountants/
COPY certificate/ certificate/
COPY service/ service/
COPY gate/ gate/
COPY trainer/ trainer/
COPY worker/ worker/
COPY migrations/ migrations/
RUN python -m venv /opt/affidavit \
    && /opt/affidavit/bin/pip install --no-cache-dir '.[postgresql]'

FROM python:3.11-slim-bookworm
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
