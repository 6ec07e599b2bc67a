#!/usr/bin/env bash
# Process 1 of a host (tests/support/hosts.py): host.sh NAME REAPS HOSTS_FILE HIDDEN DIRECTORY...
# It has its own mounts, processes and name already. /tmp, /dev/shm and the home directory are its own. REAPS is `yes`, or `no`
# for a process 1 that leaves zombies, as in many containers. HIDDEN is a directory that is empty here, or nothing. The others are
# below /tmp and stay visible.
set -eu
name=$1 reaps=$2 hosts_file=$3 hidden=$4
shift 4
mount --make-rprivate /
hostname "$name"
mount --bind "$hosts_file" /etc/hosts
aside=$(mktemp -d /var/tmp/host-XXXXXX)
mount -t tmpfs -o mode=700 tmpfs "$aside"
number=0
for directory in "$@"; do # what lies below /tmp would be covered
    mkdir "$aside/$number"
    mount --rbind "$directory" "$aside/$number"
    number=$((number + 1))
done
mount -t tmpfs -o mode=1777,size=6g tmpfs /tmp
mount -t tmpfs -o mode=1777,size=6g tmpfs /dev/shm
number=0
for directory in "$@"; do
    mkdir -p "$directory"
    mount --rbind "$aside/$number" "$directory"
    number=$((number + 1))
done
umount -l "$aside"
rmdir "$aside" 2>/dev/null || true # another mount namespace may hold it for a moment
if [ -n "$hidden" ]; then
    mkdir -p "$hidden"
    mount -t tmpfs tmpfs "$hidden"
fi
mkdir -p "$HOME"
# records of processes are told apart by their numbers, which would be those of the boot before
echo $((1000 + RANDOM % 20000)) >/proc/sys/kernel/ns_last_pid
echo ready
if [ "$reaps" = no ]; then exec sleep infinity; fi
exec 3<> <(:) # a pipe that nobody writes to
while :; do read -r -u 3 || true; done # bash as process 1 reaps whatever is left to it
