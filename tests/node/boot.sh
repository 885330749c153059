#!/usr/bin/env bash
# PID 1 of a real node: kubelet, kube-proxy, containerd and runc in namespaces of their own.
#
# It gives the node a root of its own (the machine's files, written to a copy), fresh /proc, /sys, /dev and /run, puts the
# node's hardware over them, and then keeps the node's services running, as an init system does. What must outlive a
# reboot lies in $STATE: the written files (disk), /var/lib/kubelet and /var/lib/containerd. Everything else ends with this process.
#
# Environment, from nodes.py: NAME, CLUSTER, STATE, HARDWARE, BINARIES, CONTAINERD, IMAGES, ADDRESS, GATEWAY, POD_NETWORK, ROUTES, CGROUP.
set -euo pipefail
root=$STATE/root

hostname "$NAME"
mount --make-rprivate /
mkdir -p "$STATE"/{root,containerd,kubelet,logs,sysctl} "$STATE"/disk/{written,work}
# The hardware's files lie over those of the machine: libraries and programs of a driver, where a driver installs them.
mount -t overlay overlay -o "lowerdir=$HARDWARE/root:/,upperdir=$STATE/disk/written,workdir=$STATE/disk/work" "$root"

mount -t proc proc "$root/proc"
for file in devices driver; do mount --bind "$HARDWARE/proc/$file" "$root/proc/$file"; done
cat /proc/sys/kernel/random/uuid >"$STATE/boot_id"
mount --bind "$STATE/boot_id" "$root/proc/sys/kernel/random/boot_id"
# kubelet insists on six sysctls of the machine. It finds these, and the machine's stay as they are.
while read -r name value; do
  echo "$value" >"$STATE/sysctl/$name"
  mount --bind "$STATE/sysctl/$name" "$root/proc/sys/${name//.//}"
done <<'SYSCTLS'
vm.overcommit_memory 1
vm.panic_on_oom 0
kernel.panic 10
kernel.panic_on_oops 1
kernel.keys.root_maxkeys 1000000
kernel.keys.root_maxbytes 25000000
SYSCTLS

# The kernel's own sysfs of this network namespace, with the PCI functions and RDMA devices of the hardware beside it.
mkdir -p "$STATE/sysfs"
mount -t sysfs sysfs "$STATE/sysfs"
mount -t overlay overlay -o "lowerdir=$HARDWARE/sys:$STATE/sysfs" "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"

mount -t tmpfs -o mode=755 dev "$root/dev"
while read -r name major minor; do mknod -m 666 "$root/dev/$name" c "$major" "$minor"; done <<'DEVICES'
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
kmsg 1 11
DEVICES
while read -r name major minor; do
  mkdir -p "$(dirname "$root/dev/$name")"
  mknod -m 666 "$root/dev/$name" c "$major" "$minor"
done <"$HARDWARE/devices"
mkdir "$root"/dev/{pts,shm,mqueue}
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
mount -t tmpfs shm "$root/dev/shm"
mount -t mqueue mqueue "$root/dev/mqueue"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for number in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${number%:*}" "$root/dev/${number#*:}"; done

mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs tmp "$root/tmp"
mkdir -p "$root"/var/lib/{containerd,kubelet} "$root"/var/log/{pods,containers} "$root/etc/cni/net.d" "$root/etc/containerd" "$root/opt/node"
mount --bind "$STATE/containerd" "$root/var/lib/containerd"
mount --bind "$STATE/kubelet" "$root/var/lib/kubelet"
for folder in "$CLUSTER" "$BINARIES" "$CONTAINERD" "$IMAGES"; do mkdir -p "$root$folder" && mount --rbind "$folder" "$root$folder"; done

cd "$root"
mkdir -p .old
pivot_root . .old
cd /
umount -l /.old
mount --make-rshared /

# Controllers of version 1 each have a tree; a cpuset is empty until somebody fills it. Those of version 2 have one, and
# are handed down by name.
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  mkdir -p "/sys/fs/cgroup/$CGROUP"
  for tree in /sys/fs/cgroup "/sys/fs/cgroup/$CGROUP"; do
    for controller in cpuset cpu io memory hugetlb pids; do
      ! grep -qw "$controller" "$tree/cgroup.controllers" || echo "+$controller" >"$tree/cgroup.subtree_control"
    done
  done
else
  for tree in /sys/fs/cgroup/*/; do
    [ "$tree" = /sys/fs/cgroup/unified/ ] || mkdir -p "$tree$CGROUP"
  done
  for file in cpus mems; do
    cat "/sys/fs/cgroup/cpuset/cpuset.$file" >"/sys/fs/cgroup/cpuset/$CGROUP/cpuset.$file"
  done
fi

until [ -e /sys/class/net/eth0 ]; do sleep 0.02; done
ip link set lo up
ip addr add "$ADDRESS/24" dev eth0
ip link set eth0 up
ip route add default via "$GATEWAY"
for route in $ROUTES; do ip route add "${route%@*}" via "${route#*@}"; done
echo 1 >/proc/sys/net/ipv4/ip_forward
[ ! -x "$HARDWARE/network.sh" ] || "$HARDWARE/network.sh"

cat >/etc/cni/net.d/10-pods.conflist <<CNI
{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$POD_NETWORK"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
CNI
# Without CAP_SYS_RESOURCE nobody may lower an oom_score_adj.
cat >/etc/containerd/config.toml <<CONTAINERD
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
CONTAINERD

export PATH=$BINARIES:$CONTAINERD/usr/bin:$CONTAINERD/usr/sbin:/usr/sbin:/usr/bin:/sbin:/bin
logs=$STATE/logs

# A service that ends is started again after a second, as by systemd's Restart=always.
keep() {
  local name=$1
  shift
  while :; do
    "$@" >>"$logs/$name.log" 2>&1 || echo "$name ended with $?" >>"$logs/init.log"
    sleep 1
  done
}

keep containerd containerd &
until ctr version >/dev/null 2>&1; do sleep 0.05; done
# After a reboot they are there already.
for image in "$IMAGES"/*.tar; do
  grep -qsxF "$image $(stat -Lc %Y-%s "$image")" "$STATE/imported" && continue
  ctr -n k8s.io images import "$image" >>"$logs/images.log" 2>&1
  echo "$image $(stat -Lc %Y-%s "$image")" >>"$STATE/imported"
done
keep kubelet kubelet --config="$STATE/kubelet.json" --kubeconfig="$STATE/kubelet.kubeconfig" \
  --hostname-override="$NAME" --node-ip="$ADDRESS" --node-labels="$LABELS" --v=2 &
keep kube-proxy kube-proxy --config="$STATE/proxy.json" --v=1 &
wait
