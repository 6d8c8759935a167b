// Package pluginkit runs `rnbd plugin test`: on our own plugins, which must pass, on wrong
// ones, each of which must fail the check that names its fault, and on what is no plugin.
package pluginkit
