# Two images from one file:
#   docker build --target cpu  -t logitd:cpu .
#   docker build --target cuda -t logitd:cuda .
# Without arguments the server listens on the container's loopback only. To let others in, give it --listen 0.0.0.0:7450
# with --tls-cert, --tls-key and --tokens or --tls-client-ca; or with --insecure, where the container's network is trusted.
# A build stage compiles the two programs and lists the packages of the shared libraries they use. A runtime stage is a
# base image plus those packages and programs, so each runtime base must be the same distribution as its build base. The
# CUDA runtime base has cuBLASLt, which logitd loads at run time for heads.
ARG BASE=debian:12-slim
ARG CUDA_BUILD_BASE=nvidia/cuda:13.0.0-devel-ubuntu24.04
ARG CUDA_BASE=nvidia/cuda:13.0.0-runtime-ubuntu24.04

FROM ${BASE} AS build-cpu
WORKDIR /src
COPY scripts/setup scripts/setup
RUN scripts/setup
COPY . .
ARG JOBS
RUN cmake --preset release -DLOGITD_CUDA=OFF -DLOGITD_TESTS=OFF -DLOGITD_CCACHE=OFF \
    && cmake --build --preset release --parallel ${JOBS} --target logitd logitctl \
    && install -D --strip --target-directory=/dist/bin build/release/logitd build/release/logitctl \
    && deploy/runtime-packages /dist/bin/logitd /dist/bin/logitctl > /dist/packages

FROM ${CUDA_BUILD_BASE} AS build-cuda
WORKDIR /src
COPY scripts/setup scripts/setup
RUN scripts/setup
COPY . .
ARG JOBS
RUN cmake --preset release -DLOGITD_CUDA=ON -DLOGITD_TESTS=OFF -DLOGITD_CCACHE=OFF \
    && cmake --build --preset release --parallel ${JOBS} --target logitd logitctl \
    && install -D --strip --target-directory=/dist/bin build/release/logitd build/release/logitctl \
    && deploy/runtime-packages /dist/bin/logitd /dist/bin/logitctl > /dist/packages

FROM ${CUDA_BASE} AS cuda
COPY --from=build-cuda /dist/packages /tmp/packages
RUN apt-get update -qq \
    && xargs -a /tmp/packages apt-get install -y -qq --no-install-recommends \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /tmp/packages
COPY --from=build-cuda /dist/bin /usr/local/bin
USER 65532:65532
EXPOSE 7450 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["logitctl", "health"]
ENTRYPOINT ["logitd"]
CMD ["--listen", "127.0.0.1:7450", "--metrics-listen", "0.0.0.0:9464", "--backend", "cuda"]

FROM ${BASE} AS cpu
COPY --from=build-cpu /dist/packages /tmp/packages
RUN apt-get update -qq \
    && xargs -a /tmp/packages apt-get install -y -qq --no-install-recommends \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /tmp/packages
COPY --from=build-cpu /dist/bin /usr/local/bin
USER 65532:65532
EXPOSE 7450 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["logitctl", "health"]
ENTRYPOINT ["logitd"]
CMD ["--listen", "127.0.0.1:7450", "--metrics-listen", "0.0.0.0:9464", "--backend", "cpu"]
