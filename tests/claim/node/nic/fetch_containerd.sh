#!/usr/bin/env bash
# Unpacks containerd and runc into the directory $1, without installing anything: containerd from Debian's newest
# suite (the others are too old or lack CRI), runc from the machine's own, whose libraries it needs.
set -euo pipefail
to=$(realpath -m "$1")
mkdir -p "$to/sid/lists/partial" "$to/sid/cache/archives/partial" "$to/packages" "$to/root"
uri=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | head -n 1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri sid main" >"$to/sid/sources.list"
sid=(-o "Dir::Etc::SourceList=$to/sid/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o "Dir::State::Lists=$to/sid/lists" -o "Dir::Cache=$to/sid/cache" -o Dir::State::status=/dev/null
  -o APT::Sandbox::User=root -o APT::Update::Error-Mode=any)
cd "$to/packages"
apt-get "${sid[@]}" update -qq
apt-get "${sid[@]}" download -qq containerd
apt-get -o APT::Sandbox::User=root download -qq runc
for package in *.deb; do dpkg -x "$package" "$to/root"; done
