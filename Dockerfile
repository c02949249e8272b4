# The image of a broker. docs/security.md says how it is run: not as root, with a read-only root, data in /data.
#
#   docker build -t tailrace .
#   docker run --read-only --cap-drop ALL --security-opt no-new-privileges \
#     -v tailrace-data:/data -v ./tls:/tls:ro -p 7400:7400 tailrace
FROM python:3.11-slim AS build
WORKDIR /build
COPY requirements/base.lock requirements/base.lock
RUN python -m venv /opt/tailrace \
    && /opt/tailrace/bin/pip install --no-cache-dir --only-binary :all: -r requirements/base.lock
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /opt/tailrace/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/tailrace/bin/pip uninstall --yes pip

FROM python:3.11-slim
RUN groupadd --system --gid 10001 tailrace \
    && useradd --system --uid 10001 --gid tailrace --no-create-home --home-dir /data --shell /usr/sbin/nologin tailrace \
    && install --directory --owner tailrace --group tailrace --mode 0700 /data
COPY --from=build /opt/tailrace /opt/tailrace
# Nothing is written outside of /data. The Unix socket is for the health check, and for administrators inside.
ENV PATH=/opt/tailrace/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TAILRACE_DATA=/data \
    TAILRACE_LISTEN=0.0.0.0:7400,unix:/data/tailrace.sock \
    TAILRACE_HTTP_LISTEN=0.0.0.0:7480 \
    TAILRACE_TLS_CERTIFICATE=/tls/tls.crt \
    TAILRACE_TLS_KEY=/tls/tls.key \
    TAILRACE_URL=unix:/data/tailrace.sock
USER 10001:10001
WORKDIR /data
VOLUME ["/data"]
EXPOSE 7400 7480
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 CMD ["tailrace", "whoami"]
ENTRYPOINT ["tailrace"]
CMD ["serve"]
