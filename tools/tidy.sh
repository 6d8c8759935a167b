#!/bin/sh
# go mod tidy for every module. Siblings are not published yet and go mod tidy
# ignores go.work, so a copy of each go.mod with replaces is tidied, and the
# replaces are dropped again.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd)
prefix=github.com/rnbd-go/rnbd
siblings=$(sed -n 's/^\t\.\/\(modules\/.*\)/\1/p' go.work)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
for mod in "${@:-}" $([ $# -gt 0 ] || sed -n 's/^\t\.\///p' go.work); do
	[ -n "$mod" ] || continue
	cp "$mod/go.mod" "$tmp/go.mod"
	cp "$mod/go.sum" "$tmp/go.sum" 2>/dev/null || : >"$tmp/go.sum"
	for sib in $siblings; do
		[ "$sib" = "$mod" ] || go mod edit -replace="$prefix/$sib=$root/$sib" "$tmp/go.mod"
	done
	(cd "$mod" && GOWORK=off go mod tidy -modfile="$tmp/go.mod")
	for sib in $siblings; do
		go mod edit -dropreplace="$prefix/$sib" "$tmp/go.mod"
	done
	cp "$tmp/go.mod" "$mod/go.mod"
	if [ -s "$tmp/go.sum" ]; then cp "$tmp/go.sum" "$mod/go.sum"; else rm -f "$mod/go.sum"; fi
	echo "tidied $mod"
done
