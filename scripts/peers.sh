#!/bin/bash
# Installs what `python -m bench.gateway` compares with into DEST (default .peers): sglang-router, smg, vllm-router and litellm from
# PyPI, each in a virtual environment of its own (sglang-router brings a command `smg`, too, and litellm pins most of what it needs),
# and nginx and haproxy from Debian where they are missing (apt-get, as root). Which versions: those that were measured.
# One that cannot be had is named and left out; the benchmark then leaves it out, too. Linux on amd64 or arm64.
#
#   scripts/peers.sh [DEST]
set -euo pipefail

DEST=${1:-.peers}
PYTHON=${PYTHON:-python3}
PACKAGES=(sglang-router==0.3.2 smg==1.13.0 vllm-router==0.1.17 "litellm[proxy]==1.106.2")

say() { echo "peers: $*"; }

# is_there ENVIRONMENT PACKAGE VERSION
is_there() {
    [ -x "$1/bin/$2" ] &&
        "$1/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('$2') != '$3')" 2> /dev/null
}

install_package() {
    local package=${1%%==*} version=${1##*==}
    local name=${package%%\[*}
    if is_there "$DEST/$name" "$name" "$version"; then say "$name $version: present"; return; fi
    rm -rf "${DEST:?}/$name"
    if "$PYTHON" -m venv "$DEST/$name" && "$DEST/$name/bin/pip" install --quiet --disable-pip-version-check "$1"; then
        say "$name $version: installed"
    else
        rm -rf "${DEST:?}/$name"
        say "$name $version: left out, pip could not install it"
    fi
}

# Their services are not wanted, only the programs: RUNLEVEL=1 keeps Debian's scripts from starting them.
install_program() {
    if PATH=$PATH:/usr/sbin command -v "$1" > /dev/null; then say "$1: present"; return; fi
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null &&
        RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" > /dev/null; then
        say "$1: installed"
    else
        say "$1: left out; as root: apt-get update && apt-get install $1"
    fi
}

mkdir -p "$DEST"
for package in "${PACKAGES[@]}"; do install_package "$package"; done
for program in nginx haproxy; do install_program "$program"; done
