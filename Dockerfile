# SPDX-License-Identifier: Apache-2.0
# Builds both images of the driver, and the image with the fakes for docker-compose.yaml:
#
#   docker build --target dra-frontend --build-arg VERSION=... -t dra-frontend .
#
# The final stages contain only Debian's Python, the libraries that it requires, and one virtual environment: no shell,
# no package manager, no pip and no compiler. "make images" builds the same images without a container engine. See
# docs/release.md.
#
# For a release, set BASE to an image with its digest, and APT_SOURCES to a line for sources.list with a dated snapshot
# of Debian's archive. Every build then installs the same packages. The SBOM lists their versions in any case.
ARG BASE=docker.io/library/debian:trixie-slim

FROM ${BASE} AS python
ARG APT_SOURCES=""
RUN if [ -n "$APT_SOURCES" ]; then rm -f /etc/apt/sources.list.d/* && echo "$APT_SOURCES" >/etc/apt/sources.list; fi && \
  apt-get -q update && apt-get -q -y install --no-install-recommends python3 libstdc++6 && rm -rf /var/lib/apt/lists/*

# The root file system. Both images share it as a layer, so a node stores it and maps its files into memory only once.
FROM python AS rootfs
# gcc-14-base contains the licences of libgcc-s1 and libstdc++6.
ARG PACKAGES="base-files libc6 gcc-14-base libgcc-s1 libstdc++6 zlib1g libbz2-1.0 liblzma5 libexpat1 libffi8 libuuid1 \
  libzstd1 python3-minimal python3.13-minimal libpython3.13-minimal libpython3.13-stdlib"
COPY hack/image/rootfs.sh hack/image/compile.py /
RUN sh /rootfs.sh /rootfs ${PACKAGES} && ldconfig -r /rootfs && rm -r /rootfs/var/cache/ldconfig && cp /etc/passwd /etc/group /etc/nsswitch.conf /rootfs/etc/ && \
  python3 -X no_debug_ranges /compile.py /rootfs /rootfs/usr/lib/python3*

# OpenSSL, which the backend's image does not contain because the backend does not use TLS.
FROM rootfs AS tls
RUN mkdir -p /tls/var/lib/dpkg && cp /rootfs/var/lib/dpkg/status /tls/var/lib/dpkg/ && sh /rootfs.sh /tls libssl3t64

FROM python AS build
RUN apt-get -q update && apt-get -q -y install --no-install-recommends python3-pip && \
  python3 -m venv --without-pip /opt/app && rm /opt/app/bin/[Aa]ctivate*
ENV PIP_NO_COMPILE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY locks/build.txt locks/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
  pip install --break-system-packages --require-hashes --only-binary :all: -r locks/build.txt
COPY hack/image/install.sh hack/image/compile.py /

# The third-party packages that both services import, in a layer that both images share. These are the packages in the
# backend's lock, all of which the frontend's lock contains as well.
FROM build AS common
COPY locks/nri-backend.txt locks/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf sh /install.sh common

# The third-party packages that only the frontend imports. The layers above contain only our own code, so a new release
# is a small download.
FROM common AS libraries-dra-frontend
COPY locks/dra-frontend.txt locks/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf sh /install.sh libraries dra-frontend

FROM libraries-dra-frontend AS build-dra-frontend
COPY shared shared
COPY services/dra-frontend services/dra-frontend
RUN --mount=type=secret,id=pip,target=/etc/pip.conf sh /install.sh dra-frontend

FROM common AS build-nri-backend
COPY shared shared
COPY services/nri-backend services/nri-backend
RUN --mount=type=secret,id=pip,target=/etc/pip.conf sh /install.sh nri-backend

FROM scratch AS runtime
COPY --from=rootfs /rootfs /
COPY --from=common /opt/app /opt/app
# The processes run as root, because root owns the sockets of the kubelet and the runtime, and the cgroup files. The
# chart drops all capabilities of root except two for the backend (docs/security.md).
USER 0:0
ENV PATH=/opt/app/bin:/usr/bin LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
# Settings that save memory (docs/benchmarks.md): freed memory is returned to the kernel, all threads allocate from one
# heap, and zoneinfo, which pydantic imports, does not load Python's build configuration to look up a path.
ENV MALLOC_TRIM_THRESHOLD_=131072 MALLOC_ARENA_MAX=1 PYTHONTZPATH=""
ARG VERSION=0.0.0
LABEL org.opencontainers.image.version=${VERSION} org.opencontainers.image.licenses=Apache-2.0 \
  org.opencontainers.image.vendor=dra-driver-numa

FROM runtime AS dra-frontend
LABEL org.opencontainers.image.title=dra-frontend \
  org.opencontainers.image.description="DRA drivers for CPUs, NUMA-local memory and hugepages: allocates claims"
COPY --from=tls /tls /
COPY --from=libraries-dra-frontend /libraries /
COPY --from=build-dra-frontend /own /
ENTRYPOINT ["/opt/app/bin/dra-frontend"]

FROM runtime AS nri-backend
LABEL org.opencontainers.image.title=nri-backend \
  org.opencontainers.image.description="NRI plugin for CPUs, NUMA-local memory and hugepages: enforces claims"
COPY --from=build-nri-backend /own /
ENTRYPOINT ["/opt/app/bin/nri-backend"]

# Only for docker-compose.yaml, never deployed: fakes of the API server, the kubelet and the runtime, and the demo that
# controls them.
FROM runtime AS stand-ins
LABEL org.opencontainers.image.title=stand-ins
COPY --from=tls /tls /
COPY --from=libraries-dra-frontend /libraries /
COPY --from=build-dra-frontend /own /
COPY services/nri-backend/src /opt/stand-ins
COPY tests/fakes /opt/stand-ins/tests/fakes
COPY tests/stage /opt/stand-ins/tests/stage
COPY tests/demo /opt/stand-ins/tests/demo
ENV PYTHONPATH=/opt/stand-ins
ENTRYPOINT ["/opt/app/bin/python", "-m", "tests.demo.compose"]
