#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh common               installs the packages that both services' locks contain into /opt/app, with bytecode
# install.sh libraries SERVICE    adds the other packages of a service's lock, and copies the new files to /libraries
# install.sh SERVICE              adds the service itself, and copies the new files to /own
# Must be run in /src.
set -eu
service=$1 lock=nri-backend
export SOURCE_DATE_EPOCH=315532800 # 1980, the earliest time that a wheel can store, because it is a ZIP archive
case $service in
common | libraries)
  [ "$service" = common ] || lock=$2
  pip --python /opt/app/bin/python3 install --require-hashes --only-binary :all: -r "locks/$lock.txt"
  # The Kubernetes client is by far the largest package, and its APIs and models are not imported (docs/adr/0027).
  for part in api models; do
    find /opt/app/lib -path "*/kubernetes_asyncio/client/$part/*" -type f ! -name __init__.py -delete
  done
  # The client also requires these packages, but no module that the driver imports uses them
  # (tests/integration/test_release.py).
  unused="certifi"
  # shellcheck disable=SC2086 # a list of words
  pip --python /opt/app/bin/python3 uninstall -q -y $unused
  python3 -X no_debug_ranges /compile.py / /opt/app/lib
  ;;
*)
  pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /tmp/wheels ./shared "./services/$service"
  pip --python /opt/app/bin/python3 install --no-deps --no-index /tmp/wheels/*.whl
  python3 -m compileall -q --invalidation-mode unchecked-hash /opt/app/lib
  ;;
esac
find /opt/app/bin -type f ! -name "$service" -delete
if [ "$service" != common ]; then
  new=/own
  [ "$service" != libraries ] || new=/libraries
  mkdir "$new"
  find /opt/app ! -type d | sort | comm -13 /known.txt - | tar -c -T - | tar -x -C "$new"
fi
find /opt/app ! -type d | sort >/known.txt
