#!/usr/bin/env bash
# Starts a simulated site that outlives this step, waits until all its trays are nodes, and writes the outputs.
set -euo pipefail
home="$(mktemp -d "${RUNNER_TEMP:?}/rackloom-site.XXXXXX")"
log="$home.log"
options=(--home "$home" --port 0 --racks "${RACKLOOM_RACKS:?}" --profile "${RACKLOOM_PROFILE:?}" --seed "${RACKLOOM_SEED:?}")
if [ -n "${RACKLOOM_KUBECONFIG:-}" ]; then
  options+=(--kubeconfig "$RACKLOOM_KUBECONFIG")
fi
# Of its own session, with no stream of this step: the runner ends what holds those.
setsid rackloom up "${options[@]}" < /dev/null > "$log" 2>&1 &
pid=$!

failed() {
  echo "::error::the simulated site did not start"
  cat "$log"
  kill "$pid" 2> /dev/null || true
  exit 1
}
deadline=$((SECONDS + ${RACKLOOM_WAIT:?}))
until status="$(rackloom twin status --home "$home" --wait 5 2> /dev/null)"; do
  kill -0 "$pid" 2> /dev/null && [ "$SECONDS" -lt "$deadline" ] || failed
done

value() {
  sed -n "s/^$1=//p" <<< "$status"
}
token="$(rackloom token --home "$home" --org demo --role TENANT_ADMIN)"
echo "::add-mask::$token"
{
  echo "address=$(value url)"
  echo "kubeconfig=$(value kubeconfig)"
  echo "token=$token"
  echo "home=$home"
  echo "pid=$pid"
} >> "${GITHUB_OUTPUT:?}"
{
  echo "RACKLOOM_ADDRESS=$(value url)"
  echo "RACKLOOM_HOME=$home"
} >> "${GITHUB_ENV:?}"
cat "$log"
if [ -n "${RACKLOOM_SCENARIO:-}" ]; then
  rackloom twin play "$RACKLOOM_SCENARIO" --on "$home"
fi
