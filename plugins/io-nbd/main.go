// Io-nbd is the storage plugin for exports of NBD servers: remote ones, and servers that
// it starts itself. See README.md.
package main

import "github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"

func main() { plugin.ServeIO(newBackend()) }
