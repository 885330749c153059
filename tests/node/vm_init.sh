#!/bin/busybox sh
# Process 1 of the virtual machine of vm.py, in its initramfs. It gives the machine a root (the host's files, read only,
# below a scratch disk that takes what is written), mounts what a machine that runs systemd has mounted, the cgroups of
# version 2 among it, and hands over to /job, which ends the machine with the status of the tests.
set -eu
# The scratch disk in the machine's root: /tmp may hold files of the host that the tests need.
scratch=/scratch
PATH=/bin:/sbin
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /host $scratch /new
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do insmod "$module"; done

mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=1048576,cache=loose host /host
mount -t ext4 -o noatime /dev/vda $scratch
mkdir $scratch/upper $scratch/work $scratch/tmp
mount -t overlay -o lowerdir=/host,upperdir=$scratch/upper,workdir=$scratch/work overlay /new

mkdir -p /new$scratch /new/lib/modules
mount --bind $scratch/tmp /new$scratch
# The kernel loads modules by itself, with the program of this name.
[ -e /new/sbin/modprobe ] || ln -s "$(chroot /new /bin/sh -c 'command -v busybox')" /new/sbin/modprobe
mount --bind "/new$(cat /modules.path)" /new/lib/modules
mount -t proc proc /new/proc
mount -t sysfs sysfs /new/sys
mount -t cgroup2 cgroup2 /new/sys/fs/cgroup
mount -t devtmpfs dev /new/dev
mkdir -p /new/dev/pts /new/dev/shm
mount -t devpts devpts /new/dev/pts
mount -t tmpfs shm /new/dev/shm
mount -t tmpfs -o mode=755 run /new/run
hostname vm
ip link set lo up
cp /job /new/run/job
stty -opost cols 150 </dev/console
exec switch_root /new /bin/bash /run/job
