package main

import "github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"

// What this server makes of the format in package nbdwire. docs/extend/protocol/nbd.md
// lists the supported parts.

const (
	maxHeader     = nbdwire.DataChunkSize // longest header in front of payload
	preferredSize = 4096                  // advertised preferred block size
	maxOption     = 64 << 10              // bytes of an option's data

	allocationID = 1       // of base:allocation in replies, if it was selected
	baseContexts = "base:" // all of the namespace of base:allocation, in LIST_META_CONTEXT
)
