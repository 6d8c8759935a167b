#!/bin/sh
# Rehearses a release in a copy: commits the tree to a scratch repository, tags
# every module, and builds each without the workspace, as a user's go install
# does. Nothing outside the scratch folder is touched.
set -eu
cd "$(dirname "$0")/.."
tmp=$(mktemp -d)
trap 'chmod -R u+w "$tmp"; rm -rf "$tmp"' EXIT
prefix=github.com/rnbd-go/rnbd
version=v0.1.0

# A module cache of its own: nothing of an earlier rehearsal is in it, not even
# in the go command's clones of repositories. What others made is taken from the
# user's cache where that has it.
GOPROXY="file://$(go env GOMODCACHE)/cache/download,$(go env GOPROXY)"
GOMODCACHE="$tmp/mod"
export GOPROXY GOMODCACHE

git clone -q --no-hardlinks . "$tmp/repo"
git -C "$tmp/repo" checkout -q HEAD
for mod in modules/rtrs modules/rnbd-sdk modules/rnbd-server modules/rnbd-client modules/ipoib modules/bond \
	plugins/io-blockio plugins/io-fileio plugins/io-nbd plugins/frontend-nbd plugins/frontend-ublk plugins/frontend-fuse cmd/rnbd cmd/rnbd-net; do
	git -C "$tmp/repo" tag -f "$mod/$version" >/dev/null
done

export GOWORK=off GOFLAGS=-mod=mod GOPRIVATE="$prefix" GONOSUMDB="$prefix" GONOSUMCHECK=1
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="url.file://$tmp/repo.insteadOf" GIT_CONFIG_VALUE_0="https://$prefix"
export GOBIN="$tmp/bin" CGO_ENABLED=0
for mod in plugins/io-blockio plugins/io-fileio plugins/io-nbd plugins/frontend-nbd plugins/frontend-ublk plugins/frontend-fuse cmd/rnbd cmd/rnbd-net; do
	(cd "$tmp" && go install "$prefix/$mod@$version")
	echo "go install $prefix/$mod@$version: ok"
done
for mod in modules/rtrs modules/rnbd-sdk modules/rnbd-server modules/rnbd-client modules/ipoib modules/bond; do
	if grep -q '^replace' "$mod/go.mod"; then echo "$mod/go.mod has a replace" >&2; exit 1; fi
	(cd "$tmp/repo/$mod" && go build ./...)
	echo "$mod builds without the workspace: ok"
done
"$tmp/bin/rnbd" version | head -n 1
