# m4 for TPU slices of a GKE cluster: docs/cloud_tpu.md. `scripts/gke.sh image` builds it.
FROM python:3.12-slim-bookworm
RUN pip install --no-cache-dir uv
WORKDIR /m4
# The environment before the code: a change of code does not install it anew.
COPY requirements-tpu.lock ./
RUN uv venv --python "$(command -v python3.12)" /opt/m4 \
 && uv pip sync --no-cache --python /opt/m4 --require-hashes requirements-tpu.lock
COPY pyproject.toml README.md ./
COPY m4 m4
COPY gin_configs gin_configs
RUN uv pip install --no-cache --python /opt/m4 --no-deps --no-build-isolation --editable .
# Listed platforms must be there: a TPU that cannot be used is an error, not a slow CPU.
ENV PATH=/opt/m4/bin:$PATH JAX_PLATFORMS=tpu,cpu PYTHONUNBUFFERED=1
ENTRYPOINT ["m4"]
