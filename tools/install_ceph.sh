#!/bin/bash
# Installs from Debian's or Ubuntu's own packages what tools/ceph_cluster.sh runs. Needs root.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends ceph-mon ceph-osd radosgw ceph-common
ceph --version
