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

git clone -q --no-hardlinks . "$tmp/repo"
git -C "$tmp/repo" checkout -q HEAD
for mod in modules/rtrs modules/rnbd-sdk modules/rnbd-server modules/rnbd-client \
	plugins/io-blockio plugins/io-fileio plugins/frontend-nbd cmd/rnbd; do
	git -C "$tmp/repo" tag -f "$mod/$version" >/dev/null
done

export GOWORK=off GOFLAGS=-mod=mod GOPRIVATE="$prefix" GONOSUMDB="$prefix" GONOSUMCHECK=1
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0="url.file://$tmp/repo.insteadOf" GIT_CONFIG_VALUE_0="https://$prefix"
export GOBIN="$tmp/bin" CGO_ENABLED=0
for mod in plugins/io-blockio plugins/io-fileio plugins/frontend-nbd cmd/rnbd; do
	(cd "$tmp" && go install "$prefix/$mod@$version")
	echo "go install $prefix/$mod@$version: ok"
done
for mod in modules/rtrs modules/rnbd-sdk modules/rnbd-server modules/rnbd-client; do
	if grep -q '^replace' "$mod/go.mod"; then echo "$mod/go.mod has a replace" >&2; exit 1; fi
	(cd "$tmp/repo/$mod" && go build ./...)
	echo "$mod builds without the workspace: ok"
done
"$tmp/bin/rnbd" version | head -n 1
go clean -modcache -n >/dev/null 2>&1 || :
for mod in modules/rtrs modules/rnbd-sdk modules/rnbd-server modules/rnbd-client; do
	cache=$(go env GOMODCACHE)/$prefix
	[ ! -d "$cache" ] || { chmod -R u+w "$cache"; rm -rf "$cache"; }
	[ ! -d "$(go env GOMODCACHE)/cache/download/$prefix" ] || rm -rf "$(go env GOMODCACHE)/cache/download/$prefix"
done
