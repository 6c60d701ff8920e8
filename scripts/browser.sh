#!/usr/bin/env bash
# Make sure that Chromium and its driver are there, for test/ui: Debian's packages, installed where we are root.
set -euo pipefail
command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit
if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    echo "error: test/ui needs chromium and chromedriver on the path (Debian: apt-get install chromium chromium-driver)" >&2
    exit 1
fi
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null
