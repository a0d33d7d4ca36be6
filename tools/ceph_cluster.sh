#!/bin/bash
# A small Ceph cluster with an S3 gateway, for tests: one monitor, some OSDs that keep their objects
# in memory, one gateway. Everything listens on 127.0.0.1 and lives in one folder.
#
#   ceph_cluster.sh start FOLDER NUM_OSDS MON_PORT GATEWAY_PORT ACCESS_KEY SECRET_KEY
#   ceph_cluster.sh stop  FOLDER        ends exactly the processes that start wrote down
#
# It installs nothing; see install_ceph.sh.
set -euo pipefail

verb=$1
folder=$2
conf=$folder/ceph.conf

stop() {
  # Gateway first, monitor last: the others would wait for a monitor that is gone.
  local file pid
  for file in "$folder"/pids/{gateway,osd.*,mon}; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    kill -KILL "$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
    rm -f "$file"
  done
}

spawn() { # NAME COMMAND... : run a daemon and write down its process id
  local name=$1
  shift
  "$@" >"$folder/logs/$name.out" 2>&1 </dev/null &
  echo $! >"$folder/pids/$name"
}

until_true() { # SECONDS COMMAND... : ask ten times a second until the command succeeds
  local tries=$(($1 * 10))
  shift
  until "$@" >/dev/null 2>&1; do
    tries=$((tries - 1))
    if [ "$tries" -le 0 ]; then
      echo "gave up waiting for: $*"
      tail -n 20 "$folder"/logs/*.out
      return 1
    fi
    sleep 0.1
  done
}

write_conf() {
  cat >"$conf" <<END
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:$mon_port]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = $folder/keyring
run dir = $folder/run
admin socket = $folder/run/\$name.asok
log file = $folder/logs/\$name.log
pid file =
# Without authentication the gateway never connects, so there is one keyring for all.
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
# A cluster of one machine: one copy, few placement groups, quick elections.
paxos propose interval = 0.05
paxos min wait = 0.02
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 2000
mon data avail crit = 1
osd objectstore = memstore
memstore device bytes = 4G
[mon]
mon data = $folder/mon
mon initial members = a
[osd]
osd data = $folder/osd.\$id
[client.gateway]
rgw data = $folder/gateway
rgw frontends = beast endpoint=127.0.0.1:$gateway_port
rgw thread pool size = 64
END
}

make_keys() {
  local ring=$folder/keyring id
  ceph-authtool --create-keyring "$ring" --gen-key -n mon. --cap mon 'allow *'
  ceph-authtool "$ring" --gen-key -n client.admin \
    --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
  ceph-authtool "$ring" --gen-key -n client.gateway --cap mon 'allow rw' --cap osd 'allow rwx'
  for id in $(seq 0 $((num_osds - 1))); do
    ceph-authtool "$ring" --gen-key -n "osd.$id" --cap mon 'allow profile osd' --cap osd 'allow *'
  done
}

start_monitor() {
  monmaptool --create --clobber --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon_port]" "$folder/monmap"
  ceph-mon -c "$conf" --mkfs -i a --monmap "$folder/monmap" --keyring "$folder/keyring"
  spawn mon ceph-mon -c "$conf" -i a -f
  ceph -c "$conf" --connect-timeout 20 mon stat
  ceph -c "$conf" auth import -i "$folder/keyring"
}

start_osds() {
  local id uuid
  for id in $(seq 0 $((num_osds - 1))); do
    mkdir -p "$folder/osd.$id"
    uuid=$(cat /proc/sys/kernel/random/uuid)
    ceph -c "$conf" osd new "$uuid" "$id"
    ceph-osd -c "$conf" -i "$id" --mkfs --osd-uuid "$uuid"
    spawn "osd.$id" ceph-osd -c "$conf" -i "$id" -f
  done
  until_true 60 all_osds_are_up
}

all_osds_are_up() { ceph -c "$conf" osd stat -f json | grep -q "\"num_up_osds\":$num_osds[,}]"; }

start_gateway() {
  spawn gateway radosgw -c "$conf" -n client.gateway -f
  radosgw-admin -c "$conf" -n client.gateway user create --uid=test --display-name=test \
    --access-key="$access_key" --secret-key="$secret_key"
  until_true 60 curl -s -o /dev/null "http://127.0.0.1:$gateway_port/"
}

case $verb in
start)
  num_osds=$3 mon_port=$4 gateway_port=$5 access_key=$6 secret_key=$7
  fsid=$(cat /proc/sys/kernel/random/uuid)
  mkdir -p "$folder"/{pids,logs,run,mon,gateway}
  write_conf
  make_keys
  start_monitor
  start_osds
  start_gateway
  ;;
stop) stop ;;
*)
  echo "ceph_cluster.sh start|stop FOLDER ..., got '$verb'"
  exit 2
  ;;
esac
