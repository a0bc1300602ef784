#!/bin/sh
# A machine in namespaces, in this network namespace, whose first process is systemd: it starts lm-admissiond.service as that is.
#
# FOLDER holds the unit, and what belongs into /etc/lm-admissiond and /usr/local/bin. Root, devices, control groups and bpffs are the machine's
# own; of the host it has /usr, which it cannot write.
set -eu
folder=$1
if [ -z "${2-}" ]; then
    # Control groups of its own: systemd takes the one that it starts in for the whole machine's.
    mkdir -p "$folder/groups" "$folder/root"
    mount --make-rprivate /
    mount -t cgroup2 lm-test "$folder/groups"
    mkdir "$folder/groups/${folder##*/}"
    echo $$ >"$folder/groups/${folder##*/}/cgroup.procs"
    umount "$folder/groups"
    exec unshare --cgroup --pid --uts --ipc --mount --fork --kill-child sh "$0" "$folder" inside
fi

root=$folder/root
mount -t tmpfs -o mode=755 lm-test "$root"
cd "$root"
mkdir -p dev etc/lm-admissiond etc/systemd/system home old proc root run sys tmp usr var/lib var/tmp
chmod 1777 tmp var/tmp
mount --rbind /usr usr
mount -o remount,bind,ro usr
for path in bin sbin lib lib64; do
    if [ -e "/$path" ]; then ln -s "usr/$path" "$path"; fi
done
mount -t tmpfs -o mode=755 lm-test usr/local/bin
cp "$folder/lm-admissiond" usr/local/bin
ln -s ../run var/run
cp /etc/passwd /etc/group /etc/ld.so.cache etc
# Without one this were the first start of a new system, which enables whatever the distribution has.
echo 0123456789abcdef0123456789abcdef >etc/machine-id
cp "$folder/config.toml" "$folder/key" etc/lm-admissiond
cp "$folder/lm-admissiond.service" etc/systemd/system
# What it says is kept, and nothing else of this distribution is started for it.
mkdir etc/systemd/system/lm-admissiond.service.d
printf '[Unit]\nDefaultDependencies=no\n[Service]\nStandardError=append:/run/said\n' \
    >etc/systemd/system/lm-admissiond.service.d/test.conf
printf '[Unit]\nDefaultDependencies=no\nWants=lm-admissiond.service\n' >etc/systemd/system/lm-test.target
mount -t proc lm-test proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs lm-test sys
mount -t cgroup2 lm-test sys/fs/cgroup
mount -t bpf lm-test sys/fs/bpf
mount -o remount,bind,ro sys
mount -t tmpfs lm-test run
mount -t tmpfs -o mode=755 lm-test dev
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 lm-test dev/pts
ln -s pts/ptmx dev/ptmx
for device in null zero full random urandom tty; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
pivot_root . old
umount -l /old
systemd-analyze verify --man=no lm-admissiond.service >/run/verified 2>&1
exec env -i container=lm-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=lm-test.target --log-target=console --show-status=no
