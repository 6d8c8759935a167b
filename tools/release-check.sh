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

# Nothing of an earlier rehearsal may stay in the module cache.
forget() {
	for dir in "$(go env GOMODCACHE)/$prefix" "$(go env GOMODCACHE)/cache/download/$prefix"; do
		[ ! -d "$dir" ] || { chmod -R u+w "$dir"; rm -rf "$dir"; }
	done
}
forget

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
forget
