#!/usr/bin/env bash
# Unpacks slurmctld and its clients into the directory $1, without installing anything: from Debian's newest suite
# (the others have no topology.yaml), with the libraries they need and their loader, as this machine's may be older.
# $1/bin has a script for each program, $1/plugins their plugins. Ends with 3 where the suite has another Slurm than
# the one that was tried: fetching it again changes nothing, and a new release of it fails nobody's change.
set -euo pipefail
tried=26.05
to=$(realpath -m "$1")
rm -rf "$to"
mkdir -p "$to/sid/lists/partial" "$to/sid/cache/archives/partial" "$to/root" "$to/bin"
: >"$to/sid/status"
uri=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | head -n 1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri sid main" >"$to/sid/sources.list"
sid=(-o "Dir::Etc::SourceList=$to/sid/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o "Dir::State::Lists=$to/sid/lists" -o "Dir::Cache=$to/sid/cache" -o "Dir::State::status=$to/sid/status"
  -o APT::Sandbox::User=root -o Acquire::Retries=3 -o APT::Update::Error-Mode=any)
apt-get "${sid[@]}" update -qq
found=$(apt-cache "${sid[@]}" show --no-all-versions slurmctld | sed -n 's/^Version: //p')
[[ $found == "$tried".* ]] || { echo "fetch_slurm: Slurm $found is there; the test was tried with $tried" >&2; exit 3; }
apt-get "${sid[@]}" install -y -qq --download-only --no-install-recommends slurmctld slurm-client
for package in "$to"/sid/cache/archives/*.deb; do dpkg -x "$package" "$to/root"; done
libraries="$to/root/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")"
ln -s "$libraries/slurm-wlm" "$to/plugins"
loader=$(find "$libraries" -maxdepth 1 -name 'ld-linux*' | head -n 1)
for program in sbin/slurmctld-wlm bin/sbatch bin/squeue bin/scontrol; do
  name=$(basename "${program%-wlm}")
  # slurmctld starts itself again by the name that it was called: the script's.
  printf '#!/bin/sh\nexec "%s" --argv0 "$0" --library-path "%s:%s" "%s" "$@"\n' \
    "$loader" "$libraries" "$to/plugins" "$to/root/usr/$program" >"$to/bin/$name"
  chmod +x "$to/bin/$name"
done
rm -rf "$to/sid"
"$to/bin/slurmctld" -V || { rm -rf "$to/bin"; exit 1; }
