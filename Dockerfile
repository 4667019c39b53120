# syntax=docker/dockerfile:1
FROM python:3.11-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kv_events kv_events
COPY engine_cache engine_cache
COPY publisher publisher
COPY bridge bridge
COPY indexer indexer
COPY selection selection
COPY analysis analysis
COPY api api
COPY simulation simulation
COPY kvsight kvsight
RUN pip wheel --quiet --no-cache-dir --no-deps --wheel-dir /wheels .

# Kernels are compiled for a level of processors, when the image is built: AVX2 and later on amd64, every arm64. The names
# must be set at run time as well, because numba only loads what was compiled under the same ones.
FROM python:3.11-slim AS on-amd64
ENV NUMBA_CPU_NAME=x86-64-v3

FROM python:3.11-slim AS on-arm64
ENV NUMBA_CPU_NAME=generic

FROM on-${TARGETARCH}
ENV NUMBA_CPU_FEATURES=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/opt/kernels
RUN useradd --system --uid 10001 --create-home kvsight \
    && install --directory --owner=kvsight /opt/kernels /var/lib/kvsight/records
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    wheel=$(echo /wheels/*.whl) \
    && pip install --quiet --no-cache-dir --root-user-action=ignore "${wheel}[serve,otel,envoy]" \
    # xds-protos overwrites modules of opentelemetry-proto with older ones
    && pip install --quiet --no-cache-dir --root-user-action=ignore --force-reinstall --no-deps \
    "opentelemetry-proto==$(python -c 'from importlib.metadata import version; print(version("opentelemetry-proto"))')"
USER kvsight
WORKDIR /home/kvsight
RUN kvsight compile-kernels
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
CMD ["kvsight", "serve", "--host", "0.0.0.0", "--port", "8000"]
