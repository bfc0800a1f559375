# Two images from one file:
#   docker build --target cpu  -t logitd:cpu .
#   docker build --target cuda -t logitd:cuda .
# The build stages make the relocatable dist/ of scripts/bundle; a runtime stage is a base image plus that. Each runtime
# base must be the same distribution as its build base, since libc and libstdc++ come from there.
ARG BASE=debian:12-slim
ARG CUDA_BUILD_BASE=nvidia/cuda:13.0.0-devel-ubuntu24.04
ARG CUDA_BASE=nvidia/cuda:13.0.0-base-ubuntu24.04

FROM ${BASE} AS build-cpu
WORKDIR /src
COPY scripts/setup scripts/setup
RUN scripts/setup
COPY . .
ARG JOBS
RUN cmake --preset release -DLOGITD_CUDA=OFF -DLOGITD_TESTS=OFF -DLOGITD_CCACHE=OFF \
    && cmake --build --preset release --parallel ${JOBS} --target logitd logitctl \
    && scripts/bundle --build build/release --out /dist logitd logitctl

FROM ${CUDA_BUILD_BASE} AS build-cuda
WORKDIR /src
COPY scripts/setup scripts/setup
RUN scripts/setup
COPY . .
ARG JOBS
RUN cmake --preset release -DLOGITD_CUDA=ON -DLOGITD_TESTS=OFF -DLOGITD_CCACHE=OFF \
    && cmake --build --preset release --parallel ${JOBS} --target logitd logitctl \
    && scripts/bundle --build build/release --out /dist logitd logitctl

FROM ${CUDA_BASE} AS cuda
COPY --from=build-cuda /dist /opt/logitd
ENV PATH=/opt/logitd/bin:${PATH}
USER 65532:65532
EXPOSE 7450 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["logitctl", "health"]
ENTRYPOINT ["logitd"]
CMD ["--listen", "0.0.0.0:7450", "--metrics-listen", "0.0.0.0:9464", "--backend", "cuda"]

FROM ${BASE} AS cpu
COPY --from=build-cpu /dist /opt/logitd
ENV PATH=/opt/logitd/bin:${PATH}
USER 65532:65532
EXPOSE 7450 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["logitctl", "health"]
ENTRYPOINT ["logitd"]
CMD ["--listen", "0.0.0.0:7450", "--metrics-listen", "0.0.0.0:9464", "--backend", "cpu"]
