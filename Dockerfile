# Two images from one file:
#   docker build --target cpu  -t logitd:cpu .
#   docker build --target cuda -t logitd:cuda .
# Without arguments the server listens on the container's loopback only. To let others in, give it --listen 0.0.0.0:7450
# with --tls-cert, --tls-key and --tokens or --tls-client-ca; or with --insecure, where the container's network is trusted.
# A build stage compiles the two programs. The CPU image holds them, the shared libraries they use and nothing else: no
# shell, no package manager (deploy/rootfs). The CUDA image is NVIDIA's runtime base, which has cuBLASLt that logitd loads
# at run time for heads, plus the packages of the shared libraries; its base must be the same distribution as its build
# base. Both run as a user without privileges, and with a read-only root file system. The SBOM (SPDX) of what these
# stages add to a base is in /usr/share/doc/logitd/sbom.spdx.json.
ARG VERSION=0.1.0
ARG BASE=debian:12-slim
ARG CUDA_BUILD_BASE=nvidia/cuda:13.0.0-devel-ubuntu24.04
ARG CUDA_BASE=nvidia/cuda:13.0.0-runtime-ubuntu24.04

FROM ${BASE} AS build-cpu
WORKDIR /src
COPY scripts/setup scripts/setup
RUN scripts/setup
COPY . .
ARG JOBS
ARG VERSION
RUN cmake --preset release -DLOGITD_CUDA=OFF -DLOGITD_TESTS=OFF -DLOGITD_CCACHE=OFF \
    && cmake --build --preset release --parallel ${JOBS} --target logitd logitctl \
    && deploy/rootfs /dist "${VERSION}" build/release/logitd build/release/logitctl

FROM ${CUDA_BUILD_BASE} AS build-cuda
WORKDIR /src
COPY scripts/setup scripts/setup
RUN scripts/setup
COPY . .
ARG JOBS
ARG VERSION
RUN cmake --preset release -DLOGITD_CUDA=ON -DLOGITD_TESTS=OFF -DLOGITD_CCACHE=OFF \
    && cmake --build --preset release --parallel ${JOBS} --target logitd logitctl \
    && install -D --strip --target-directory=/dist/bin build/release/logitd build/release/logitctl \
    && deploy/runtime-packages /dist/bin/logitd /dist/bin/logitctl > /dist/packages \
    && deploy/sbom "${VERSION}" $(cat /dist/packages) > /dist/sbom.spdx.json

FROM ${CUDA_BASE} AS cuda
COPY --from=build-cuda /dist/packages /tmp/packages
RUN apt-get update -qq \
    && xargs -a /tmp/packages apt-get install -y -qq --no-install-recommends \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /tmp/packages
COPY --from=build-cuda /dist/sbom.spdx.json /usr/share/doc/logitd/
COPY --from=build-cuda /dist/bin /usr/local/bin
ARG VERSION
LABEL org.opencontainers.image.title="logitd" \
      org.opencontainers.image.description="Top-K, sampling, scoring and attention softmax over logits, behind gRPC (cuda)" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
USER 65532:65532
EXPOSE 7450 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["logitctl", "health"]
ENTRYPOINT ["logitd"]
CMD ["--listen", "127.0.0.1:7450", "--metrics-listen", "0.0.0.0:9464", "--backend", "cuda"]

FROM scratch AS cpu
COPY --from=build-cpu /dist /
ENV PATH=/usr/local/bin
ARG VERSION
LABEL org.opencontainers.image.title="logitd" \
      org.opencontainers.image.description="Top-K, sampling, scoring and attention softmax over logits, behind gRPC (cpu)" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
USER 65532:65532
EXPOSE 7450 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["logitctl", "health"]
ENTRYPOINT ["logitd"]
CMD ["--listen", "127.0.0.1:7450", "--metrics-listen", "0.0.0.0:9464", "--backend", "cpu"]
