// Package extents encodes lists of the ranges of a device that hold data.
//
// A list begins at a place of the device and covers what is behind it, range by
// range, up to the end of the range in question or less far. A range that holds data
// may read as zeroes; a hole always does, and takes no space. So the list of a
// device of unknown content is one range with data.
//
// The same bytes travel in answers of an RNBD server (docs/extend/protocol/rnbd.md,
// "Extents") and in the payload of a front end's request (docs/extend/abi/ring-v1.md).
package extents
