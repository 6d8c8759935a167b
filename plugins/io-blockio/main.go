// Io-blockio is the storage plugin for block devices: direct I/O on the
// device, nothing cached, nothing lost when it crashes. See README.md.
package main

import "github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"

func main() { plugin.ServeIO(&blockBackend{}) }
