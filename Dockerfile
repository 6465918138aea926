# For those who have a container engine; `make images` makes the same without one. Both run images/inside.py, and
# images/contents.toml lists what goes in: no shell, no package manager, no compiler, no root.
#
#   docker build -t carpool-sidecar:0.1.0 .                        # in front of a model server, also injected
#   docker build -t carpool-operator:0.1.0 --target operator .     # carpool-operator and carpool-injector
#   docker build -t carpool-onnx:0.1.0 --target onnx .             # the sidecar that serves an ONNX file itself
ARG SUITE=bookworm

FROM debian:${SUITE} AS sources
RUN apt-get update \
 && apt-get install --yes --no-install-recommends binutils gcc libc6-dev python3-dev python3-pip python3-venv
WORKDIR /carpool/source
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY core core
COPY sidecar sidecar
COPY operator operator
COPY cli cli
COPY images images

FROM scratch AS bare
# A number, so that Kubernetes can tell that it is not root.
USER 65532:65532
# Nothing is written: the file system may be read-only.
ENV PYTHONDONTWRITEBYTECODE=1 PATH=/opt/carpool/bin:/usr/bin
WORKDIR /
# drains: docs/operations.md
STOPSIGNAL SIGTERM
# No HEALTHCHECK: probe /livez and /readyz on the admin port.

FROM sources AS operator-trees
RUN python3 images/inside.py operator --source=/carpool/source --out=/carpool/out

FROM bare AS operator
COPY --from=operator-trees /carpool/out/base /
COPY --from=operator-trees /carpool/out/operator /
EXPOSE 8080 8443
# The chart names the injector's command itself.
ENTRYPOINT ["carpool-operator"]

FROM sources AS onnx-trees
RUN python3 images/inside.py onnx --source=/carpool/source --out=/carpool/out

FROM bare AS onnx
COPY --from=onnx-trees /carpool/out/base /
COPY --from=onnx-trees /carpool/out/onnx /
EXPOSE 8080 9090
ENTRYPOINT ["carpool-sidecar"]
CMD ["--config", "/etc/carpool/sidecar.yaml"]

FROM sources AS sidecar-trees
RUN python3 images/inside.py sidecar --source=/carpool/source --out=/carpool/out

FROM bare AS sidecar
COPY --from=sidecar-trees /carpool/out/base /
COPY --from=sidecar-trees /carpool/out/sidecar /
# data, admin; as the configuration says
EXPOSE 8080 9090
ENTRYPOINT ["carpool-sidecar"]
CMD ["--config", "/etc/carpool/sidecar.yaml"]
