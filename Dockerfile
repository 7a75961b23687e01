# m4 for TPU slices of a GKE cluster: docs/cloud_tpu.md. `scripts/gke.sh image` builds it. It runs the demo
# anywhere, on the CPU:
#   docker build --tag=m4 . && docker run --entrypoint=m4 --volume="$PWD/runs:/m4/runs" m4 \
#     demo --gin_file=gin_configs/demo.gin
FROM python:3.12-slim-bookworm
RUN pip install --no-cache-dir uv
WORKDIR /m4
# The environment before the code: a change of code does not install it again.
COPY requirements-tpu.lock ./
RUN uv venv --python "$(command -v python3.12)" /opt/m4 \
 && uv pip sync --no-cache --python /opt/m4 --require-hashes requirements-tpu.lock
COPY pyproject.toml README.md ./
COPY m4 m4
COPY gin_configs gin_configs
COPY scripts scripts
RUN uv pip install --no-cache --python /opt/m4 --no-deps --no-build-isolation --editable .
ENV PATH=/opt/m4/bin:$PATH M4_ENVIRONMENT=/opt/m4 PYTHONUNBUFFERED=1
# m4 with the container's arguments, and its log to MODEL_DIR.
ENTRYPOINT ["bash", "/m4/scripts/tpu_host.sh", "run"]
