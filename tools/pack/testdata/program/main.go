// Command program stands for a program of a package: it is linked with a module
// of others.
package main

import (
	"os"

	"golang.org/x/mod/module"
)

func main() {
	if module.CheckPath("example.org/x") != nil {
		os.Exit(1)
	}
}
