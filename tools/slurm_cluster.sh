#!/usr/bin/env bash
# A real Slurm of several nodes on one machine, loopback only, for development and tests.
#
#   tools/slurm_cluster.sh start                 install what is missing, start what is down
#   tools/slurm_cluster.sh stop [--wipe]         stop all of it; --wipe removes its files too
#   tools/slurm_cluster.sh env                   print the line that a shell needs to use it
#   tools/slurm_cluster.sh status
#   tools/slurm_cluster.sh controller up|down|kill|hang|unhang
#   tools/slurm_cluster.sh node up|poweroff|kill-slurmd|hang|unhang NODE
#   tools/slurm_cluster.sh node exec NODE COMMAND…
#   tools/slurm_cluster.sh as USER COMMAND…      as an ordinary user, made if missing
#
# Needs root, and Debian 12 or Ubuntu (slurm-wlm and munge are installed from the distribution).
# Everything it writes lies in one directory: configuration, munge key and socket, state and logs;
# /etc is left alone. Two partitions: `low` (the default; jobs of `high` preempt and requeue it) and
# `high`. Each node is a UTS, PID and mount namespace of its own: `hostname` is right there, and
# killing its first process powers the whole node off.
#
# Variables, read by `start` and remembered until the directory is wiped:
#   SLURM_CLUSTER_DIR    where it lives, and what other commands act on (/tmp/slurm-cluster)
#   SLURM_CLUSTER_NODES  number of nodes: node1, node2, … (3)
#   SLURM_CLUSTER_CPUS   CPUs that a node claims to have (4)
#   SLURM_CLUSTER_GPUS   GPUs that a node claims to have; they are none (0)
#   SLURM_CLUSTER_PORT   first of the ports it listens on (16817)
#   SLURM_CLUSTER_GRACE  seconds from the SIGTERM of a preemption to the kill (5)
#   SLURM_CLUSTER_USER_SIGNAL  1: preempt_send_user_signal, a preemption sends a job's --signal (0)
#   SLURM_CLUSTER_PROCTRACK    linuxproc, or cgroup: setsid does not get away from that (linuxproc)
#   SLURM_CLUSTER_ACCOUNTING   1: sacct answers, from slurmdbd and a MariaDB of its own (0)
#   SLURM_CLUSTER_SUBMIT_FROM  login: on the nodes sbatch is refused (anywhere)
#   SLURM_CLUSTER_EXTRA  further lines of slurm.conf
# Kept short: a silent node is down after 10 s (default: 300), a requeued job waits 5 s (120).
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin # where Debian keeps the daemons
DIR=${SLURM_CLUSTER_DIR:-/tmp/slurm-cluster}
CONF=$DIR/etc
CALLERS_CONF=${SLURM_CONF:-}
export SLURM_CONF=$CONF/slurm.conf
REFUSAL='sbatch: error: Batch job submission failed: Access/permission denied'
PACKAGES=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge)

say() { printf 'slurm_cluster: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

wait_until() { # SECONDS COMMAND…
  local tries=$(($1 * 10))
  shift
  while ! "$@" >/dev/null 2>&1; do
    ((tries-- > 0)) || return 1
    sleep 0.1
  done
}

# A recorded process is `PID START`: the start time tells it from a later one with the same id.
# A zombie has ended: where the machine's first process reaps nobody, it stays for ever.
start_time() { awk '{ sub(/.*\) /, ""); if ($1 !~ /[ZX]/) print $20 }' "/proc/$1/stat" 2>/dev/null || true; }
record() { echo "$2 $(start_time "$2")" >"$DIR/run/$1.proc"; }
recorded() { # NAME: prints the id of the recorded process if it is alive
  local pid start
  read -r pid start 2>/dev/null <"$DIR/run/$1.proc" || return 1
  [ -n "$start" ] && [ "$(start_time "$pid")" = "$start" ] && echo "$pid"
}
end() { # NAME SIGNAL: ends the recorded process and waits until it is gone
  local pid
  if pid=$(recorded "$1"); then
    kill "-$2" "$pid" 2>/dev/null || true
    wait_until 10 is_gone "$1" || kill -KILL "$pid" 2>/dev/null || true
    wait_until 5 is_gone "$1" || die "$1 (process $pid) does not end"
  fi
  rm -f "$DIR/run/$1.proc"
}
is_gone() { ! recorded "$1"; }

install_packages() {
  local missing=() package
  ((ACCOUNTING == 0)) || PACKAGES+=(slurmdbd slurm-wlm-mysql-plugin mariadb-server-core)
  for package in "${PACKAGES[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  local apt=(apt-get -o DPkg::Lock::Timeout=300 -qq) log=$DIR/log/apt.log
  # Packages must not start their own daemons.
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 ||
    die "$(tail -n 5 "$log") (all of it is in $log)"
}

settings() { # the variables as they were at the first start
  if [ ! -e "$CONF/settings" ]; then
    {
      echo "NODES=${SLURM_CLUSTER_NODES:-3}"
      echo "CPUS=${SLURM_CLUSTER_CPUS:-4}"
      echo "GPUS=${SLURM_CLUSTER_GPUS:-0}"
      echo "PORT=${SLURM_CLUSTER_PORT:-16817}"
      echo "GRACE=${SLURM_CLUSTER_GRACE:-5}"
      echo "USER_SIGNAL=${SLURM_CLUSTER_USER_SIGNAL:-0}"
      echo "PROCTRACK=${SLURM_CLUSTER_PROCTRACK:-linuxproc}"
      echo "SUBMIT_FROM=${SLURM_CLUSTER_SUBMIT_FROM:-anywhere}"
      echo "ACCOUNTING=${SLURM_CLUSTER_ACCOUNTING:-0}"
      printf 'EXTRA=%q\n' "${SLURM_CLUSTER_EXTRA:-}"
    } >"$CONF/settings"
  fi
  # shellcheck disable=SC1091
  . "$CONF/settings"
}

node_names() { for ((i = 1; i <= NODES; i++)); do echo "node$i"; done; }

write_config() {
  local gpus="" signals="" accounting=accounting_storage/none
  local files=(/dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty)
  ((GPUS <= ${#files[@]})) || die "SLURM_CLUSTER_GPUS = $GPUS: at most ${#files[@]} can be pretended"
  ((GPUS == 0)) || gpus=" Gres=gpu:$GPUS"
  ((USER_SIGNAL == 0)) || signals=SlurmctldParameters=preempt_send_user_signal
  ((ACCOUNTING == 0)) || accounting="accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT + 90))
AccountingStoragePass=$DIR/munge/socket" # not a password: where munge listens
  cat >"$CONF/slurm.conf" <<CFG
ClusterName=dev
SlurmctldHost=${HOSTNAME%%.*}(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits.
AuthInfo=socket=$DIR/munge/socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd-%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd-%n.log
ProctrackType=proctrack/$PROCTRACK
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=10
BatchStartTimeout=10
KillWait=5
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_interval=1
PriorityType=priority/basic
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=$accounting
$signals
JobCompType=jobcomp/none
GresTypes=gpu
$(for ((i = 1; i <= NODES; i++)); do
    echo "NodeName=node$i NodeHostname=node$i NodeAddr=127.0.0.1 Port=$((PORT + i)) CPUs=$CPUS RealMemory=4096$gpus State=UNKNOWN"
  done)
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=$GRACE DefaultTime=10 MaxTime=1-00 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF DefaultTime=10 MaxTime=1-00 State=UP
$EXTRA
CFG
  : >"$CONF/gres.conf"
  for ((g = 0; g < GPUS; g++)); do echo "Name=gpu File=${files[g]}" >>"$CONF/gres.conf"; done
  write_cgroup_config
  { # what the nodes see as /etc/hosts
    cat /etc/hosts
    node_names | sed 's/^/127.0.0.1 /'
  } >"$CONF/hosts"
  # AllocNodes cannot do it here: the controller tells submitting hosts apart by their address.
  printf '#!/bin/sh\necho "%s" >&2\nexit 1\n' "$REFUSAL" >"$CONF/refuse" && chmod 755 "$CONF/refuse"
}

write_cgroup_config() { # slurmd reads it even where it does not use it
  if [ "$PROCTRACK" = linuxproc ] || [ -d /sys/fs/cgroup/freezer ]; then
    echo 'CgroupPlugin=cgroup/v1' >"$CONF/cgroup.conf"
  elif [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    printf 'CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n' >"$CONF/cgroup.conf"
  else
    die "SLURM_CLUSTER_PROCTRACK=cgroup: no freezer (v1) and no cgroup.controllers (v2) in /sys/fs/cgroup"
  fi
}

munge_up() {
  local at=$DIR/munge
  recorded munged >/dev/null && return 0
  [ -s "$at/key" ] || (umask 077 && dd if=/dev/urandom of="$at/key" bs=128 count=1 status=none)
  rm -f "$at/socket" "$at/socket.lock"
  # --force: the default /tmp is writable for all, which munged would only warn of.
  munged --force --num-threads=2 --socket="$at/socket" --key-file="$at/key" --seed-file="$at/seed" \
    --pid-file="$DIR/run/munged.pid" --log-file="$DIR/log/munged.log" 2>>"$DIR/log/munged.log"
  wait_until 10 munge -S "$at/socket" -n || die "munged does not answer: see $DIR/log/munged.log"
  record munged "$(cat "$DIR/run/munged.pid")"
}

is_open() { (: <"/dev/tcp/127.0.0.1/$1"); }

database_up() {
  local at=$DIR/database
  local server=(mariadbd --no-defaults --user=root --datadir="$at" --innodb-log-file-size=8M)
  recorded mariadbd >/dev/null && return 0
  if [ ! -d "$at/slurm" ]; then
    rm -rf "$at" && mkdir -p "$at"
    { # what mariadb-install-db does, without the client's packages
      printf 'create database mysql;\nuse mysql;\n'
      cat /usr/share/mysql/*_system_tables.sql /usr/share/mysql/*_system_tables_data.sql
      printf "flush privileges;\ncreate user slurm@'127.0.0.1' identified by 'slurm';\n"
      printf "grant all on slurm.* to slurm@'127.0.0.1';\ncreate database slurm;\n"
    } | "${server[@]}" --bootstrap >>"$DIR/log/mariadbd.log" 2>&1 || die "see $DIR/log/mariadbd.log"
  fi
  setsid "${server[@]}" --socket="$at/socket" --bind-address=127.0.0.1 --port=$((PORT + 91)) \
    --innodb-buffer-pool-size=32M --innodb-flush-log-at-trx-commit=0 --skip-name-resolve \
    </dev/null >>"$DIR/log/mariadbd.log" 2>&1 &
  record mariadbd $!
  wait_until 30 is_open $((PORT + 91)) || die "mariadbd does not answer: see $DIR/log/mariadbd.log"
}

accounting_up() {
  ((ACCOUNTING)) || return 0
  database_up
  if ! recorded slurmdbd >/dev/null; then
    (umask 077 && cat >"$CONF/slurmdbd.conf") <<CFG
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((PORT + 90))
SlurmUser=root
LogFile=$DIR/log/slurmdbd.log
PidFile=$DIR/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((PORT + 91))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
CFG
    rm -f "$DIR/run/slurmdbd.pid"
    slurmdbd >>"$DIR/log/slurmdbd.log" 2>&1 || die "slurmdbd: $(tail -n 1 "$DIR/log/slurmdbd.log")"
    wait_until 10 test -s "$DIR/run/slurmdbd.pid" || die "slurmdbd wrote no pid"
    record slurmdbd "$(cat "$DIR/run/slurmdbd.pid")"
  fi
  wait_until 30 timeout 5 sacctmgr -n show cluster || die "slurmdbd does not answer: see $DIR/log/slurmdbd.log"
  sacctmgr -n show cluster format=cluster | grep -qw dev || sacctmgr -i -Q add cluster dev >/dev/null
}

controller() {
  case ${1:-} in
  up)
    if ! recorded controller >/dev/null; then
      rm -f "$DIR/run/slurmctld.pid" # of one that was killed
      slurmctld >>"$DIR/log/slurmctld.out" 2>&1 || die "slurmctld: $(tail -n 1 "$DIR/log/slurmctld.out")"
      wait_until 10 test -s "$DIR/run/slurmctld.pid" || die "slurmctld wrote no pid"
      record controller "$(cat "$DIR/run/slurmctld.pid")"
    fi
    wait_until 20 scontrol ping || die "slurmctld does not answer: see $DIR/log/slurmctld.log"
    ;;
  down) end controller TERM ;;
  kill) end controller KILL ;;
  hang) kill -STOP "$(recorded controller)" ;;
  unhang) kill -CONT "$(recorded controller)" ;;
  *) die "usage: controller up|down|kill|hang|unhang" ;;
  esac
}

slurmd_of() { # NODE: id, out here, of the slurmd in the node's PID namespace
  local namespace process
  namespace=$(readlink "/proc/$(recorded "$1")/ns/pid") || return 1
  for process in /proc/[0-9]*; do
    [ "$(readlink "$process/ns/pid" 2>/dev/null)" = "$namespace" ] || continue
    # slurmstepd shares the name's beginning; a Debian build may be called slurmd-wlm.
    case $(cat "$process/comm" 2>/dev/null) in
    slurmd | slurmd-wlm) echo "${process#/proc/}" && return 0 ;;
    esac
  done
  return 1
}

# A node's first process: it sets the scene and then only reaps orphans.
NODE_INIT='hostname "$1" && mount --bind "$2" /etc/hosts || exit 1
[ "$4" != login ] || mount --bind "${2%/*}/refuse" "$(command -v sbatch)" || exit 1
echo up >"$3"; trap : TERM HUP INT; while :; do sleep 3600 & wait $!; done'

node_up() {
  local node=$1 ready=$DIR/run/$1.ready outer
  if ! recorded "$node" >/dev/null; then
    rm -f "$ready"
    setsid unshare --uts --pid --mount --fork --mount-proc --kill-child=KILL \
      bash -c "$NODE_INIT" init "$node" "$CONF/hosts" "$ready" "$SUBMIT_FROM" </dev/null >>"$DIR/log/$node.out" 2>&1 &
    outer=$!
    wait_until 10 test -s "$ready" || die "$node does not start: $(tail -n 1 "$DIR/log/$node.out")"
    record "$node" "$(tr -d ' ' <"/proc/$outer/task/$outer/children")"
  fi
  if ! slurmd_of "$node" >/dev/null; then
    inside "$node" slurmd -N "$node" </dev/null >>"$DIR/log/$node.out" 2>&1 ||
      die "slurmd of $node: $(tail -n 1 "$DIR/log/$node.out")"
  fi
}

inside() { # NODE COMMAND…
  local pid
  pid=$(recorded "$1") || die "$1 is not up"
  shift
  nsenter --target "$pid" --uts --pid --mount "$@"
}

signal_slurmd() { # NODE SIGNAL
  local pid
  pid=$(slurmd_of "$1") || die "slurmd of $1 does not run"
  kill "-$2" "$pid"
}

node() {
  local action=${1:-} node=${2:-}
  [[ $node =~ ^node[0-9]+$ ]] || die "usage: node up|poweroff|kill-slurmd|hang|unhang|exec NODE"
  case $action in
  up) settings && node_up "$node" ;;
  poweroff) end "$node" KILL ;; # with slurmd and every process of a job
  kill-slurmd) signal_slurmd "$node" KILL ;; # jobs live on: the controller's view and the truth part
  hang) signal_slurmd "$node" STOP ;;
  unhang) signal_slurmd "$node" CONT ;;
  exec) inside "$node" "${@:3}" ;;
  *) die "unknown: node $action" ;;
  esac
}

all_idle() { [ "$(sinfo -h -N -p low -t idle,mixed,alloc -o %N | sort -u | wc -l)" = "$NODES" ]; }

start() {
  [ "$(id -u)" = 0 ] || die "start needs root: it makes namespaces and installs packages"
  mkdir -p "$DIR"/{etc,run,log,state,spool,munge}
  chmod 755 "$DIR" "$DIR"/*
  settings
  install_packages
  write_config
  munge_up
  accounting_up
  controller up
  local node
  for node in $(node_names); do
    mkdir -p "$DIR/spool/$node"
    node_up "$node"
  done
  for node in $(sinfo -h -N -p low -t drain,down -o %N | sort -u); do
    scontrol update "nodename=$node" state=resume 2>/dev/null || true
  done
  wait_until 40 all_idle || die "the nodes do not all come up: $(sinfo -h -N -p low -o '%N %T' | xargs)"
  say "up: $NODES nodes, $(slurmctld -V), files in $DIR"
  env_line
}

stop() {
  local file
  for file in "$DIR"/run/node*.proc; do
    [ ! -e "$file" ] || end "$(basename "$file" .proc)" KILL
  done
  end controller TERM
  end slurmdbd TERM
  end mariadbd TERM
  end munged TERM
  # A daemon's child may write a moment longer.
  [ "${1:-}" != --wipe ] || wait_until 5 rm -rf "$DIR" || die "$DIR cannot be removed"
  say "stopped"
}

as_user() { # USER COMMAND…
  id "$1" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$1"
  SLURM_CONF=${CALLERS_CONF:-$SLURM_CONF} HOME=$(getent passwd "$1" | cut -d: -f6) USER=$1 LOGNAME=$1 \
    exec setpriv --reuid "$1" --regid "$(id -g "$1")" --init-groups "${@:2}"
}

env_line() { printf 'export SLURM_CONF=%q\n' "$SLURM_CONF"; }

case ${1:-} in
start) start ;;
stop) stop "${2:-}" ;;
env) env_line ;;
status) sinfo -N -o '%N %P %T %c %G' ;;
controller) controller "${2:-}" ;;
node) node "${@:2}" ;;
as) as_user "${@:2}" ;;
*)
  sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "$0"
  exit 2
  ;;
esac
