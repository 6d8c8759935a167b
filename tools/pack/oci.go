package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// imageFolders are those that mounts and daemons want.
var imageFolders = []string{"etc/rnbd/client.d", "etc/rnbd/server.d", "run/rnbd", "srv/rnbd"}

// imageTar returns the programs, their configuration and their licences as an OCI
// image in a tar archive: docker load, podman load and skopeo read it.
func (b *packageBuild) imageTar(files []fileEntry) ([]byte, error) {
	used := []fileEntry{{path: "tmp", mode: 0o1777, dir: true}}
	for _, f := range files {
		if !onHostsOnly(f.path) {
			used = append(used, f)
		}
	}
	layer, err := tarOf(withFolders(used, imageFolders...), "", b.date)
	if err != nil {
		return nil, err
	}
	packed, err := gzipBytes(layer, bulk)
	if err != nil {
		return nil, err
	}
	var blobs []fileEntry
	add := func(kind string, body []byte) map[string]any {
		sum := fmt.Sprintf("%x", sha256.Sum256(body))
		blobs = append(blobs, regularFile("blobs/sha256/"+sum, body))
		return map[string]any{"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + sum, "size": len(body)}
	}
	layerRef := add("layer.v1.tar+gzip", packed)
	created := b.date.UTC().Format(time.RFC3339)
	config := add("config.v1+json", encodeJSON(map[string]any{
		"created": created, "architecture": b.arch, "os": "linux",
		"config": map[string]any{"Entrypoint": []string{"/usr/bin/rnbd"}, "Cmd": []string{"--help"}, "Env": []string{"PATH=/usr/bin"},
			"Labels": map[string]string{"org.opencontainers.image.version": b.version, "org.opencontainers.image.licenses": "Apache-2.0"}},
		"rootfs":  map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
		"history": []map[string]string{{"created": created, "created_by": "make packages"}},
	}))
	manifest := add("manifest.v1+json", encodeJSON(map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": []any{layerRef}}))
	manifest["annotations"] = map[string]string{"org.opencontainers.image.ref.name": "rnbd:" + b.version}
	blobs = append(blobs,
		regularFile("oci-layout", encodeJSON(map[string]string{"imageLayoutVersion": "1.0.0"})),
		regularFile("index.json", encodeJSON(map[string]any{"schemaVersion": 2, "manifests": []any{manifest}})))
	return tarOf(withFolders(blobs), "", b.date)
}

// encodeJSON encodes maps, strings and numbers only: that cannot fail.
func encodeJSON(v any) []byte { out, _ := json.Marshal(v); return out }

// onHostsOnly reports whether a container has no use for the file.
func onHostsOnly(name string) bool {
	return strings.HasPrefix(name, "usr/lib/") || strings.HasPrefix(name, "usr/share/") && !strings.HasPrefix(name, "usr/share/doc/")
}
