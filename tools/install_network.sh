#!/bin/bash
# Installs from Debian's or Ubuntu's own packages what testkit.network runs. Needs root.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends iproute2 util-linux mount
ip -V
