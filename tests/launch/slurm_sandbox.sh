#!/bin/bash
# usage: slurm_sandbox.sh NODES COMMAND...
# Runs a command beside a Slurm cluster of its own, in network, mount and PID namespaces: nothing outside sees the cluster, and
# every daemon dies with the command. Needs root, and Debian's packages slurmctld, slurmd, slurm-client and munge.
set -euo pipefail
nodes=$1; shift
folder=$(mktemp -d); chmod 755 "$folder"
inside='
set -euo pipefail
nodes=$1; folder=$2; shift 2
ip link set lo up
# where loopback is the only address, the C library resolves no name; this address leads nowhere
ip link add v0 type veth peer name v1; ip addr add 192.0.2.10/32 dev v0; ip link set v0 up; ip link set v1 up
{ cat /etc/hosts; for i in $(seq "$nodes"); do echo "127.0.0.1 n$i"; done; } > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
mkdir -p "$folder"/{state/controller,log,run}; chmod 755 "$folder"/*
head -c 1024 /dev/urandom > "$folder/key"; chmod 600 "$folder/key"
munged --force --key-file="$folder/key" --socket="$folder/run/munge" --pid-file="$folder/run/munged.pid" \
  --log-file="$folder/log/munged" --seed-file="$folder/run/seed"
cat > "$folder/slurm.conf" <<EOF
ClusterName=sandbox
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=17600
SlurmdPort=17601
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge
CredType=cred/munge
SlurmUser=root
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd-%n.pid
SlurmdSpoolDir=$folder/state/%n
StateSaveLocation=$folder/state/controller
SlurmctldLogFile=$folder/log/slurmctld
SlurmdLogFile=$folder/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
KillWait=5
EOF
for i in $(seq "$nodes"); do
  echo "NodeName=n$i NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((17601 + i)) CPUs=1 State=UNKNOWN" >> "$folder/slurm.conf"
  mkdir -p "$folder/state/n$i"
done
echo "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP" >> "$folder/slurm.conf"
export SLURM_CONF="$folder/slurm.conf"
slurmctld -c -f "$SLURM_CONF"
for i in $(seq "$nodes"); do slurmd -N "n$i" -f "$SLURM_CONF"; done
for _ in $(seq 60); do
  [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" = "$nodes" ] && break; sleep 0.5
done
code=0; "$@" || code=$?
umount /etc/hosts
exit $code
'
code=0
unshare -n -m --pid --fork --mount-proc --kill-child bash -c "$inside" bash "$nodes" "$folder" "$@" || code=$?
rm -rf "$folder"
exit $code
