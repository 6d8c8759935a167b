// Package access decides by rules whether a client may open a device.
//
// The first rule that fits the client and the name decides. If there are rules
// and none fits, the client is refused. Without rules everything is allowed.
//
// The package reads no files and no network. Its input is the properties of a
// client.
package access
