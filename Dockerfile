# One image for all roles: `docker run kvindexd serve`, `... sidecar`, `... scorer`, and the commands.
# It needs no shell, no root and no writable root file system: only /var/lib/kvindexd (the embedded
# store of `serve`) and /tmp. docs/deploy.md says how to build, pin and run it.

# Both images must have the same Python in the same place. Pin them by digest for a build that can
# be repeated: --build-arg BUILDER_IMAGE=docker.io/library/python@sha256:...
ARG BUILDER_IMAGE=docker.io/library/python:3.11-bookworm
ARG RUNTIME_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${BUILDER_IMAGE} AS builder
# What is installed beside kvindexd itself: see [project.optional-dependencies] in pyproject.toml.
ARG EXTRAS=discovery,doctor,otel,tokenizers
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kvindexd kvindexd
# The venv has no pip: nothing that is served should be able to install anything.
RUN python -m venv --without-pip /opt/kvindexd \
    && pip wheel --no-deps --wheel-dir /wheels . \
    && pip --python /opt/kvindexd/bin/python install --constraint constraints.txt \
        "kvindexd[${EXTRAS}] @ file://$(echo /wheels/kvindexd-*.whl)"
# Without a compiler the wheel would lack them, and kvindexd would run, slowly.
RUN /opt/kvindexd/bin/python -I -c "import kvindexd._chain, kvindexd._dense"

FROM ${RUNTIME_IMAGE} AS runtime
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvindexd" \
      org.opencontainers.image.description="One index of a fleet's KV-cache events" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=builder /opt/kvindexd /opt/kvindexd
# A numeric user, so that runAsNonRoot can be checked without /etc/passwd.
RUN ["install", "-d", "-o", "65532", "-g", "65532", "-m", "0700", "/var/lib/kvindexd"]
# Administration stays inside the container: reach it by exec, or by a port-forward.
ENV PATH=/opt/kvindexd/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    TMPDIR=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONNOUSERSITE=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    KVINDEXD_SERVER=127.0.0.1:50052 \
    KVINDEXD_SERVER__LISTEN=0.0.0.0:50051 \
    KVINDEXD_SERVER__ADMIN_LISTEN=127.0.0.1:50052 \
    KVINDEXD_EXT_PROC__LISTEN=0.0.0.0:9002 \
    KVINDEXD_METRICS__LISTEN=0.0.0.0:9400 \
    KVINDEXD_INDEX__DATA_DIR=/var/lib/kvindexd
USER 65532:65532
WORKDIR /
VOLUME ["/var/lib/kvindexd"]
EXPOSE 50051/tcp 9002/tcp 9400/tcp
STOPSIGNAL SIGTERM
# Alive, not ready: a restart mends no replica that is still catching up. Orchestrators have probes
# of their own; with metrics.listen elsewhere, or with TLS on it, give your own --health-cmd.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["/opt/kvindexd/bin/python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 9400, timeout=2); c.request('GET', '/healthz'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["/opt/kvindexd/bin/kvindexd"]
CMD ["serve"]
