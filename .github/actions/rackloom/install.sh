#!/usr/bin/env bash
# Installs Rackloom into a virtual environment of its own and puts it on the PATH of the job's later steps.
set -euo pipefail
place="${RUNNER_TEMP:?}/rackloom-venv"
: "${RACKLOOM_PACKAGE:?is the input package: a wheel of Rackloom}"
"${RACKLOOM_PYTHON:?}" -m venv "$place"
"$place/bin/python" -m pip install --quiet --disable-pip-version-check "$RACKLOOM_PACKAGE"
mkdir -p "$RUNNER_TEMP/rackloom-bin"
ln -sf "$place/bin/rackloom" "$RUNNER_TEMP/rackloom-bin/rackloom"
echo "$RUNNER_TEMP/rackloom-bin" >> "${GITHUB_PATH:?}"
"$place/bin/rackloom" --version
