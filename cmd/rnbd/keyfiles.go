package main

import (
	"crypto/sha256"
	"os"
	"reflect"
	"slices"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// fileKeys are the keys of the configuration that name files of keys and certificates. A
// daemon reads their contents again while it runs.
var fileKeys = []string{
	"tls-ca", "tls-cert", "tls-key", "tls-crl", "tls-psk",
	"nbd-tls-ca", "nbd-tls-cert", "nbd-tls-key", "nbd-tls-crl",
	"metrics-cert", "metrics-key", "metrics-client-ca", "metrics-token-file",
}

// keyFiles has the checksums of such files by the keys that name them.
type keyFiles map[string][sha256.Size]byte

// readKeyFiles reads the files that the options name. One that cannot be read counts as
// empty. options points to the options of a daemon.
func readKeyFiles(options any) keyFiles {
	files, v := keyFiles{}, reflect.ValueOf(options).Elem()
	eachKey(v, v, func(key string, value, _ any) {
		if name, ok := value.(string); ok && name != "" && slices.Contains(fileKeys, key) {
			b, _ := os.ReadFile(name)
			files[key] = sha256.Sum256(b)
		}
	})
	return files
}

// changes lists the files with other contents in next.
func (files keyFiles) changes(next keyFiles) (all []*controlpb.ConfigChange) {
	for _, key := range fileKeys {
		if sum, there := files[key]; there && sum != next[key] {
			all = append(all, &controlpb.ConfigChange{Subject: key, Action: actionSet, Detail: "the file has other contents"})
		}
	}
	return all
}
