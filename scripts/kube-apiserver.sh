#!/bin/bash
# Builds a real Kubernetes API server for `make test-cluster`: kube-apiserver and kube-controller-manager 1.20 from Debian 12's source
# package (which has all that they need in it) with Debian's Go, and Debian's etcd, into DEST (default .tools/bin).
# Nothing is installed on the machine. Linux on amd64, Debian 12; about 5 minutes and 2.5 GB below WORK (default .tools/kubernetes).
#
#   scripts/kube-apiserver.sh [DEST] [WORK]
set -euo pipefail

DEST=$(realpath -m "${1:-.tools/bin}")
WORK=$(realpath -m "${2:-.tools/kubernetes}")

say() { echo "kube-apiserver: $*"; }
die() { echo "kube-apiserver: $*" >&2; exit 1; }

if "$DEST/kube-apiserver" --version > /dev/null 2>&1 && "$DEST/etcd" --version > /dev/null 2>&1; then
    say "present"; exit 0
fi
for needed in apt-get dpkg-deb dpkg-source make; do
    command -v "$needed" > /dev/null || die "$needed is missing (Debian: apt-get install dpkg-dev make)"
done
[ -f /etc/apt/sources.list.d/debian.sources ] || die "this is no Debian 12: /etc/apt/sources.list.d/debian.sources is missing"

mkdir -p "$DEST" "$WORK"
cd "$WORK"
mkdir -p lists/partial cache/archives/partial deb home

# Sources from the same mirror as the machine's packages, without touching its own lists.
sed 's/^Types: deb$/Types: deb-src/' /etc/apt/sources.list.d/debian.sources > src.sources
APT=(-o "Dir::Etc::sourcelist=$WORK/src.sources" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$WORK/lists" -o "Dir::Cache=$WORK/cache")
apt-get "${APT[@]}" -qq update
apt-get "${APT[@]}" -qq --download-only source kubernetes 2> /dev/null || die "apt-get could not download the source of kubernetes"
apt-get -qq download golang-1.19-go golang-1.19-src rsync libpopt0 golang-github-modern-go-reflect2-dev etcd-server 2> /dev/null ||
    die "apt-get could not download the compiler; run 'apt-get update' as root and try again"
for package in *.deb; do dpkg-deb -x "$package" deb; done

rm -rf source
dpkg-source --no-check -x kubernetes_*.dsc source > /dev/null 2>&1
# Its copy of reflect2 1.0.1 crashes at the first write when it is built with Go 1.18 or later; Debian's 1.0.2 does not.
REFLECT=source/vendor/github.com/modern-go/reflect2
rm -f "$REFLECT"/*.go
cp deb/usr/share/gocode/src/github.com/modern-go/reflect2/*.go "$REFLECT/"
rm -f "$REFLECT"/*_test.go
mkdir -p source/.go/src/k8s.io
ln -sfn ../../.. source/.go/src/k8s.io/kubernetes
printf 'KUBE_GIT_COMMIT=debian\nKUBE_GIT_TREE_STATE=clean\nKUBE_GIT_VERSION=v1.20.2\nKUBE_GIT_MAJOR=1\nKUBE_GIT_MINOR=20\n' > version

cd source
export GOROOT=$WORK/deb/usr/lib/go-1.19 GOPATH=$PWD/.go HOME=$WORK/home CGO_ENABLED=0 GOPROXY=off GOFLAGS='' GOTOOLCHAIN=local
export KUBE_GIT_VERSION_FILE=$WORK/version
export LD_LIBRARY_PATH=$WORK/deb/usr/lib/x86_64-linux-gnu # of rsync
PATH=$GOROOT/bin:$WORK/deb/usr/bin:$PATH make WHAT="cmd/kube-apiserver cmd/kube-controller-manager" > ../build.log 2>&1 ||
    die "the build has failed: $WORK/build.log"
install -m755 _output/local/bin/linux/amd64/kube-apiserver _output/local/bin/linux/amd64/kube-controller-manager "$DEST"
install -m755 "$WORK/deb/usr/bin/etcd" "$DEST"
say "built, $("$DEST/kube-apiserver" --version)"
