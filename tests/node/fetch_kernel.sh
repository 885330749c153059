#!/usr/bin/env bash
# Unpacks the kernel of the machine's own Debian release into the directory $1 for vm.py, without installing it and
# without running a script of its packages: vmlinuz, lib/modules with those modules that need no hardware, and their index.
set -euo pipefail
to=$(realpath -m "$1")
mkdir -p "$(dirname "$to")"
scratch=$(mktemp -d "$to.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch"/{lists/partial,packages,root,kept/lib/modules}
apt=(-qq -o "Dir::State::Lists=$scratch/lists" -o "Dir::Cache=$scratch" -o APT::Sandbox::User=root
  -o Acquire::Retries=3 -o APT::Update::Error-Mode=any)
cd "$scratch/packages"
apt-get "${apt[@]}" update
# The name without a version depends on the newest; later releases split it into several packages.
mapfile -t names < <(apt-cache "${apt[@]}" depends --recurse --important linux-image-amd64 \
  | grep -E '^linux-(image|binary|modules)-[0-9]' | sort -u)
[ ${#names[@]} -gt 0 ] || { echo "fetch_kernel: the package lists have no linux-image-amd64" >&2; exit 1; }
apt-get "${apt[@]}" download "${names[@]}"
for package in *.deb; do dpkg -x "$package" "$scratch/root"; done

mv "$scratch"/root/boot/vmlinuz-* "$scratch/kept/vmlinuz"
found=$(find "$scratch/root" -path '*/lib/modules/*/kernel' -prune | head -n 1)
release=$(basename "$(dirname "$found")")
(
  cd "$found"
  find drivers -mindepth 1 -maxdepth 1 ! -name block ! -name char ! -name infiniband ! -name net ! -name vfio \
    ! -name virtio -exec rm -rf {} +
  find drivers/net -mindepth 1 -maxdepth 1 -type d ! -name bonding ! -name ipvlan ! -name vxlan -exec rm -rf {} +
  find drivers/infiniband -mindepth 1 -maxdepth 1 ! -name core ! -name sw -exec rm -rf {} +
  rm -rf sound
)
mv "$(dirname "$found")" "$scratch/kept/lib/modules/"
busybox depmod -b "$scratch/kept" "$release"
chmod 755 "$scratch/kept"
rm -rf "$to"
mv "$scratch/kept" "$to"
