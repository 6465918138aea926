# Each image with nothing that it does not need at run time: no pip, no compiler, no shell scripts, no root.
#
#   docker build -t carpool-sidecar:0.1.0 .                               # in front of a model server, also injected
#   docker build -t carpool-sidecar:0.1.0-onnx --build-arg EXTRA=onnx .   # serves an ONNX file itself
#   docker build -t carpool-operator:0.1.0 --build-arg EXTRA=operator .   # carpool-operator and carpool-injector
#
# There was no container engine where this was written: the image was never built. Each command was run by hand in a
# scratch folder; what came of it (sizes, memory) stands in docs/operations.md.
ARG PYTHON=3.11

# Not slim: it has the C compiler for the machine code. Both are the same Debian.
FROM python:${PYTHON} AS build
# signing: the sidecar, and what it verifies an operator's changes with
ARG EXTRA=signing
WORKDIR /src
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY core core
COPY sidecar sidecar
COPY operator operator
COPY cli cli
# Fail rather than make an image that is half as fast.
ENV CARPOOL_COMPILE=always
# An environment without a pip of its own, filled by the image's.
RUN python -m venv --without-pip /opt/carpool \
 && pip --python /opt/carpool/bin/python install --no-cache-dir --disable-pip-version-check -c constraints.txt ".[${EXTRA}]"

FROM python:${PYTHON}-slim
RUN python -m pip uninstall --yes --quiet --root-user-action=ignore pip
COPY --from=build /opt/carpool /opt/carpool
# A number, so that Kubernetes can tell that it is not root.
USER 65532:65532
# Nothing is written: the file system may be read-only.
ENV PYTHONDONTWRITEBYTECODE=1 PATH=/opt/carpool/bin:$PATH
# data, admin; as the configuration says
EXPOSE 8080 9090
# drains: docs/operations.md
STOPSIGNAL SIGTERM
# No HEALTHCHECK: probe /livez and /readyz on the admin port.
# The chart names the operator's commands.
ENTRYPOINT ["carpool-sidecar"]
CMD ["--config", "/etc/carpool/sidecar.yaml"]
