# Kernels are compiled for a level of processors, when the image is built: AVX2 and later on amd64, every arm64. The names
# must be set at run time as well, because numba only loads what was compiled under the same ones.
FROM python:3.11-slim AS on-amd64
ENV NUMBA_CPU_NAME=x86-64-v3

FROM python:3.11-slim AS on-arm64
ENV NUMBA_CPU_NAME=generic

FROM python:3.11-slim AS source
WORKDIR /src
COPY . .
RUN mkdir /kernels && cp --parents --target-directory=/kernels kv_events/*.py */kernels/*.py */*/kernels/*.py

# Dependencies, kernels and the project are separate layers. Each changes more often than the one before.
FROM on-${TARGETARCH} AS needs
ENV NUMBA_CPU_FEATURES=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_QUIET=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/opt/kernels
RUN useradd --uid 10001 --create-home kvsight \
    && install --directory --owner=kvsight /opt/kernels /var/lib/kvsight/records
WORKDIR /needs
COPY pyproject.toml .
RUN touch LICENSE README.md \
    && pip install ".[serve,otel,envoy]" \
    # xds-protos overwrites modules of opentelemetry-proto with older ones
    && pip install --force-reinstall --no-deps \
    "opentelemetry-proto==$(python -c 'from importlib.metadata import version; print(version("opentelemetry-proto"))')"

FROM needs AS kernels
COPY --from=source /kernels .
RUN python -c "from kv_events.kernels import load; load.compile_missing()"

FROM needs
COPY --from=kernels --chown=kvsight /opt/kernels /opt/kernels
RUN --mount=type=bind,from=source,source=/src,target=/src,rw pip install --force-reinstall --no-deps /src
USER kvsight
WORKDIR /home/kvsight
RUN kvsight compile-kernels
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request; urllib.request.urlopen(os.environ.get('KVSIGHT_URL', 'http://127.0.0.1:8000').rstrip('/') + '/health', timeout=2, context=ssl._create_unverified_context())"]
CMD ["kvsight", "serve", "--host", "0.0.0.0", "--port", "8000"]
