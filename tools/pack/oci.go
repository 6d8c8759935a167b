package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"time"
)

// image returns the programs and their configuration as an OCI image in a tar
// archive: docker load, podman load and skopeo read it.
func (b *build) image(files []entry) ([]byte, error) {
	var used []entry
	for _, p := range packages[:4] { // command, plugins, server, client
		for _, f := range files {
			if p.takes(f.path) && !inImageOnlyOnHosts(f.path) {
				used = append(used, f)
			}
		}
	}
	layer, err := tarOf(withFolders(used, []string{"tmp", "run/rnbd", "srv/rnbd", "etc/rnbd/client.d", "etc/rnbd/server.d"}), "", b.date)
	if err != nil {
		return nil, err
	}
	packed, err := zip(layer)
	if err != nil {
		return nil, err
	}
	var blobs []entry
	add := func(kind string, body []byte) map[string]any {
		sum := fmt.Sprintf("%x", sha256.Sum256(body))
		blobs = append(blobs, entry{path: "blobs/sha256/" + sum, mode: 0o644, body: body})
		return map[string]any{"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + sum, "size": len(body)}
	}
	text := func(v any) []byte { out, _ := json.Marshal(v); return out } // of maps and strings only
	layerRef := add("layer.v1.tar+gzip", packed)
	created := b.date.UTC().Format(time.RFC3339)
	config := add("config.v1+json", text(map[string]any{
		"created": created, "architecture": b.arch, "os": "linux",
		"config": map[string]any{"Entrypoint": []string{"/usr/bin/rnbd"}, "Cmd": []string{"--help"}, "Env": []string{"PATH=/usr/bin"},
			"Labels": map[string]string{"org.opencontainers.image.version": b.version, "org.opencontainers.image.licenses": "Apache-2.0"}},
		"rootfs":  map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
		"history": []map[string]string{{"created": created, "created_by": "make image"}},
	}))
	manifest := add("manifest.v1+json", text(map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": []any{layerRef}}))
	manifest["annotations"] = map[string]string{"org.opencontainers.image.ref.name": "rnbd:" + b.version}
	blobs = append(blobs,
		entry{path: "oci-layout", mode: 0o644, body: text(map[string]string{"imageLayoutVersion": "1.0.0"})},
		entry{path: "index.json", mode: 0o644, body: text(map[string]any{"schemaVersion": 2, "manifests": []any{manifest}})})
	return tarOf(withFolders(blobs, nil), "", b.date)
}

// inImageOnlyOnHosts reports whether a container has no use for the file.
func inImageOnlyOnHosts(name string) bool {
	for _, part := range []string{"usr/lib/", "usr/share/"} {
		if len(name) > len(part) && name[:len(part)] == part {
			return true
		}
	}
	return false
}
