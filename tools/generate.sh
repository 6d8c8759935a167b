#!/bin/sh
# Regenerates the protobuf code. Needs protoc; the Go plugins are pinned in
# tools/go.mod. Generated files are committed.
set -eu
cd "$(dirname "$0")/.."
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
(cd tools && GOWORK=off go build -o "$bin/" \
	google.golang.org/protobuf/cmd/protoc-gen-go \
	google.golang.org/grpc/cmd/protoc-gen-go-grpc)
for proto in $(git ls-files --cached --others --exclude-standard '*.proto'); do
	dir=$(dirname "$proto")
	PATH="$bin:$PATH" protoc -I"$dir" \
		--go_out="$dir" --go_opt=paths=source_relative \
		--go-grpc_out="$dir" --go-grpc_opt=paths=source_relative "$(basename "$proto")"
done
