#!/bin/bash
# Makes what a release consists of, into dist/. Each step can be run alone; without a step, all that needs no engine of containers.
#
#   scripts/release.sh [STEP ...]
#
#   sdist     the source distribution
#   wheel     a wheel for this machine, compiled
#   wheels    wheels for Linux on amd64 and arm64, by cibuildwheel (needs Docker, and emulation or a machine of each kind)
#   sbom      what the wheel's installation consists of, as CycloneDX JSON
#   chart     the chart, packaged
#   sums      SHA256SUMS of what dist/ has of this version
#   image     the image for linux/amd64 and linux/arm64, pushed to $REGISTRY/warmroute (needs docker buildx)
#   push      the chart to oci://$REGISTRY/charts
#
# Environment: PYTHON (python3), HELM (.tools/bin/helm, else helm), REGISTRY, PUSH_FLAGS (of helm push, such as --plain-http),
# WARMROUTE_COMPILE (require; `no` for a quick trial).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
HELM=${HELM:-$([ -x .tools/bin/helm ] && echo .tools/bin/helm || echo helm)}
OUT=dist
PLATFORMS=linux/amd64,linux/arm64
# Pinned, so that a release can be made again.
BUILD="build==1.6.1"
CIBUILDWHEEL="cibuildwheel==4.3.5"
CYCLONEDX="cyclonedx-bom==7.5.0"
EXTRAS=auth,events,otel,postgres,store # as the image has them

say() { echo "release: $*"; }
die() { echo "release: $*" >&2; exit 1; }

# One version: pyproject.toml, the package and the chart agree, or nothing is made.
VERSION=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml | head -n 1)
grep -q "^version: $VERSION\$" helm/Chart.yaml && grep -q "^appVersion: \"$VERSION\"\$" helm/Chart.yaml ||
    die "helm/Chart.yaml has another version than pyproject.toml ($VERSION): CONTRIBUTING.md, 'A release'"
grep -q "__version__ = \"$VERSION\"" gateway/__init__.py || die "gateway/__init__.py has another version than pyproject.toml ($VERSION)"

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
mkdir -p "$OUT"

# venv NAME PACKAGE...: a virtual environment with these packages in it; prints its python
venv() {
    local where="$SCRATCH/$1"
    shift
    "$PYTHON" -m venv "$where"
    "$where/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2 || die "pip could not install $*"
    echo "$where/bin/python"
}

# quiet COMMAND...: its output is shown where it fails
quiet() { "$@" > "$SCRATCH/quiet.log" 2>&1 || { cat "$SCRATCH/quiet.log" >&2; die "$* failed"; }; }

needs_registry() { [ -n "${REGISTRY:-}" ] || die "$1: set REGISTRY, for example REGISTRY=ghcr.io/someone"; }

# What was made in this run. What else $OUT has may be of other sources.
SDIST="$OUT/warmroute-$VERSION.tar.gz" MADE_SDIST='' WHEEL='' MADE_CHART=''

make_sdist() {
    "$(venv build "$BUILD")" -m build --sdist --outdir "$OUT" . > "$SCRATCH/sdist.log" 2>&1 ||
        { cat "$SCRATCH/sdist.log" >&2; die "the source distribution could not be built"; }
    MADE_SDIST=yes
    say "$SDIST"
}

needs_sdist() { [ -n "$MADE_SDIST" ] || make_sdist; }

# From the source distribution, as whoever installs that would.
make_wheel() {
    needs_sdist
    WARMROUTE_COMPILE=${WARMROUTE_COMPILE:-require} "$PYTHON" -m pip wheel --quiet --disable-pip-version-check --no-deps \
        --no-cache-dir --wheel-dir "$SCRATCH/wheel" "$SDIST" || die "the wheel could not be built"
    WHEEL=$OUT/$(cd "$SCRATCH/wheel" && echo *.whl)
    mv "$SCRATCH"/wheel/*.whl "$OUT"
    say "$WHEEL"
}

make_wheels() {
    needs_sdist
    CIBW_ENVIRONMENT="WARMROUTE_COMPILE=require" CIBW_BUILD="cp311-manylinux_* cp312-manylinux_* cp313-manylinux_*" \
        CIBW_ARCHS_LINUX="x86_64 aarch64" CIBW_TEST_COMMAND="warmroute --version" \
        "$(venv cibuildwheel "$CIBUILDWHEEL")" -m cibuildwheel --platform linux --output-dir "$OUT" "$SDIST"
}

make_sbom() {
    [ -n "$WHEEL" ] || make_wheel # $OUT may have others, for another Python or machine
    local installed
    installed=$(venv installed "$WHEEL[$EXTRAS]")
    "$installed" -m pip uninstall --quiet --yes setuptools pip > /dev/null 2>&1
    "$(venv cyclonedx "$CYCLONEDX")" -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible \
        --output-format JSON --output-file "$OUT/warmroute-$VERSION.cdx.json" "$installed"
    say "$OUT/warmroute-$VERSION.cdx.json"
}

make_chart() {
    rm -rf "$SCRATCH/warmroute"
    cp -RL helm "$SCRATCH/warmroute" # its links are followed: helm has a line to say about each
    quiet "$HELM" lint --strict "$SCRATCH/warmroute"
    quiet "$HELM" package "$SCRATCH/warmroute" --destination "$OUT"
    MADE_CHART=yes
    say "$OUT/warmroute-$VERSION.tgz"
}

make_sums() {
    (cd "$OUT" && find . -maxdepth 1 -type f -regextype posix-extended \
        -regex "./warmroute-${VERSION//./\\.}(-.*\.whl|\.tar\.gz|\.tgz|\.cdx\.json)" -printf '%P\n' | sort | xargs sha256sum > SHA256SUMS)
    say "$OUT/SHA256SUMS"
}

make_image() {
    needs_registry image
    docker buildx version > /dev/null 2>&1 || die "image: docker buildx is missing"
    docker buildx build --platform "$PLATFORMS" --tag "$REGISTRY/warmroute:$VERSION" --provenance=true --sbom=true --push .
}

make_push() {
    needs_registry push
    [ -n "$MADE_CHART" ] || make_chart
    # shellcheck disable=SC2086 # flags
    "$HELM" push "$OUT/warmroute-$VERSION.tgz" "oci://$REGISTRY/charts" ${PUSH_FLAGS:-}
}

[ $# -gt 0 ] || set -- sdist wheel sbom chart sums
for step; do
    case $step in
        sdist | wheel | wheels | sbom | chart | sums | image | push) "make_$step" ;;
        *) die "unknown step '$step': see the top of scripts/release.sh" ;;
    esac
done
