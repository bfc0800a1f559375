# Two images from one file:
#   docker build --target cpu  -t logitd:cpu .
#   docker build --target cuda -t logitd:cuda .      for one kind of GPU in less time: --build-arg CUDA_ARCHITECTURES=90a
# Without arguments the server listens on the container's loopback only. To let others in, give it --listen 0.0.0.0:7450
# with --tls-cert, --tls-key and --tokens or --tls-client-ca; or with --insecure, where the container's network is trusted.
# A build stage compiles the two programs. An image holds them, the shared libraries they use and nothing else: no shell,
# no package manager (deploy/rootfs). logitd serves by nghttp2 and OpenSSL; gRPC's library is there for logitctl. The
# CUDA image also has cuBLASLt, which logitd loads at run time for heads. The driver's libraries come from the machine:
# NVIDIA's container runtime adds them. Both run as a user without privileges, and with a read-only root file system. The
# SBOM (SPDX) is in /usr/share/doc/logitd/sbom.spdx.json.
ARG VERSION=0.1.0
ARG BASE=debian:12-slim
# Any Debian 12 or Ubuntu 24.04 with a CUDA toolkit of version 13 in /usr/local/cuda.
ARG CUDA_BUILD_BASE=nvidia/cuda:13.0.0-devel-ubuntu24.04

FROM ${BASE} AS build-cpu
WORKDIR /src
COPY scripts/setup scripts/progress scripts/
RUN scripts/setup
COPY . .
ARG JOBS
ARG VERSION
ARG CCACHE=OFF
RUN export LANG=C.UTF-8 CCACHE_DIR=/ccache CCACHE_BASEDIR=/src CCACHE_NOHASHDIR=true \
    && cmake --preset release -DLOGITD_CUDA=OFF -DLOGITD_TESTS=OFF -DLOGITD_CCACHE=${CCACHE} \
    && cmake --build --preset release --parallel ${JOBS} --target logitd logitctl \
    && deploy/rootfs /dist "${VERSION}" build/release/logitd build/release/logitctl

FROM ${CUDA_BUILD_BASE} AS build-cuda
WORKDIR /src
COPY scripts/setup scripts/progress scripts/
RUN scripts/setup
COPY . .
ARG JOBS
ARG VERSION
ARG CCACHE=OFF
ARG CUDA_ARCHITECTURES="80;89;90a;100"
RUN export LANG=C.UTF-8 CCACHE_DIR=/ccache CCACHE_BASEDIR=/src CCACHE_NOHASHDIR=true \
    && cmake --preset release -DLOGITD_CUDA=ON "-DLOGITD_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}" -DLOGITD_TESTS=OFF \
       -DLOGITD_CCACHE=${CCACHE} \
    && cmake --build --preset release --parallel ${JOBS} --target logitd logitctl \
    && deploy/rootfs --cuda /usr/local/cuda /dist "${VERSION}" build/release/logitd build/release/logitctl

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

FROM scratch AS cuda
COPY --from=build-cuda /dist /
# For NVIDIA's container runtime: which devices, and which of the driver's libraries. Where those are differs: on most
# machines in the folder of the other libraries, but also in NVIDIA's own (GKE) or in /usr/lib64.
ENV PATH=/usr/local/bin \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/lib64
ARG VERSION
LABEL org.opencontainers.image.title="logitd" \
      org.opencontainers.image.description="Top-K, sampling, scoring and attention softmax over logits, behind gRPC (cuda)" \
      org.opencontainers.image.licenses="Apache-2.0 AND LicenseRef-NVIDIA-CUDA" \
      org.opencontainers.image.version="${VERSION}"
USER 65532:65532
EXPOSE 7450 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["logitctl", "health"]
ENTRYPOINT ["logitd"]
CMD ["--listen", "127.0.0.1:7450", "--metrics-listen", "0.0.0.0:9464", "--backend", "cuda"]
