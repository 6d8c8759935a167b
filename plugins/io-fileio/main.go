// Io-fileio is the storage plugin for regular files. It reads through the page
// cache and writes past it. See README.md.
package main

import "github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"

func main() { plugin.ServeIO(&fileBackend{}) }
