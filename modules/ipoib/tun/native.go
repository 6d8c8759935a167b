package tun

import "encoding/binary"

var native = binary.NativeEndian
