#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# install.sh common    installs what both services' locks name into /opt/app, with byte code. Run in /src.
# install.sh SERVICE   adds one service and the rest of its lock, and leaves in /own what is only its own
set -eu
service=$1
export SOURCE_DATE_EPOCH=315532800 # 1980: no file can be older in a wheel, which is a ZIP archive
lock=$service
[ "$service" != common ] || lock=nri-backend
pip --python /opt/app/bin/python3 install --require-hashes --only-binary :all: -r "locks/$lock.txt"
if [ "$service" != common ]; then
  pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /tmp/wheels ./shared "./services/$service"
  pip --python /opt/app/bin/python3 install --no-deps --no-index /tmp/wheels/*.whl
fi
# Of the Kubernetes client, the largest package by far, no API and no model is imported (docs/adr/0001).
for part in api models; do rm -rf /opt/app/lib/python3*/site-packages/kubernetes_asyncio/client/$part; done
# It also requires these, for what is not imported of it (tests/integration/test_release.py).
unused="certifi python-dateutil urllib3"
# shellcheck disable=SC2086 # words
pip --python /opt/app/bin/python3 uninstall -q -y $unused
python3 -m compileall -q --invalidation-mode unchecked-hash /opt/app/lib
if [ "$service" = common ]; then
  find /opt/app/bin -type f -delete
  find /opt/app ! -type d | sort >/common.txt
  exit
fi
find /opt/app/bin -type f ! -name "$service" -delete
mkdir /own
find /opt/app ! -type d | sort | comm -13 /common.txt - | tar -c -T - | tar -x -C /own
