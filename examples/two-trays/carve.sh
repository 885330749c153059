#!/bin/sh
# A tenant's first partition: two machines whose GPUs share memory, and then everything given back.
#
#   API=http://127.0.0.1:8080/v2/org/demo/nico TOKEN=... examples/two-trays/carve.sh
#
# The README says how a site of `rackloom up` gives both. Needs curl and python3.
set -eu
: "${API:?is the address of the organisation, as the README sets it}"
: "${TOKEN:?is what rackloom token printed}"

ask() { # METHOD PATH [BODY [EXPRESSION]]: prints the expression of Python over the answer, which is `it`
  answer=$(curl --silent --show-error --fail-with-body --request "$1" --header "Authorization: Bearer $TOKEN" \
    ${3:+--header "Content-Type: application/json" --data "$3"} "$API/$2") ||
    { echo "$1 $2: $answer" >&2; return 1; }
  [ -z "${4:-}" ] || printf '%s' "$answer" | python3 -c "import json, sys; it = json.load(sys.stdin); print($4)"
}
wait_until() { # EXPRESSION PATH: at most a quarter of an hour, as machines may start meanwhile
  for _ in $(seq 900); do
    holds=$(ask GET "$2" "" "$1") || return
    [ "$holds" = True ] && return
    sleep 1
  done
  echo "not within a quarter of an hour: $1" >&2
  return 1
}

partition= vpc=
give_back() { # what was made, as far as it came
  [ -z "$vpc" ] || give_back_vpc || return
  [ -z "$partition" ] || give_back_partition
}
give_back_vpc() {
  instances=$(ask GET "instance?vpcId=$vpc" "" '" ".join(one["id"] for one in it)') || return
  for instance in $instances; do ask DELETE "instance/$instance" || return; done
  wait_until 'not it' "instance?vpcId=$vpc" && ask DELETE "vpc/$vpc"
}
give_back_partition() {
  ask DELETE "nvlink-logical-partition/$partition" &&
    wait_until "all(one['id'] != '$partition' for one in it)" nvlink-logical-partition &&
    echo "given back: no GPU is in a partition any more"
}
end() { # the status is that of what went wrong first
  status=$?
  trap '' INT TERM
  give_back && exit "$status"
  echo "not all is given back: look for VPC ${vpc:-none} and logical partition ${partition:-none}" >&2
  [ "$status" != 0 ] && exit "$status"
  exit 1
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

site=$(ask GET site "" 'it[0]["id"]')
kind=$(ask GET instance/type "" 'it[0]["id"]')

partition=$(ask POST nvlink-logical-partition "{\"name\": \"training\", \"siteId\": \"$site\"}" 'it["id"]')
echo "logical partition $partition: a record, no GPU is in it yet"
vpc=$(ask POST vpc "{\"name\": \"net\", \"siteId\": \"$site\", \"nvLinkLogicalPartitionId\": \"$partition\"}" 'it["id"]')

instances=$(ask POST instance/batch "{\"namePrefix\": \"job\", \"count\": 2, \"vpcId\": \"$vpc\",
  \"instanceTypeId\": \"$kind\", \"topologyOptimized\": true}" '" ".join(one["id"] for one in it)')
wait_until 'all(one["status"] == "Ready" for one in it)' "instance?vpcId=$vpc"
for instance in $instances; do
  ask GET "instance/$instance/nvlink-interface" "" \
    '"instance %s: %d GPUs in domain %s" % (it[0]["instanceId"], len(it), it[0]["nvLinkDomainId"])'
done
