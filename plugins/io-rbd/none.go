//go:build !librbd

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "io-rbd: this program was built without librbd; install librbd-dev and librados-dev, and build it by `make io-rbd`")
	os.Exit(1)
}
